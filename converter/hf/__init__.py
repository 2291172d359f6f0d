"""Reading Hugging Face repositories: local folders, the hub, safetensors files."""
