"""Converter between Hugging Face safetensors and MaxText (Orbax) checkpoints."""

__version__ = "0.1.0"
