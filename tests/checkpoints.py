"""Tiny Hugging Face checkpoints of every family, made with the safetensors library."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INDEX = "model.safetensors.index.json"

_COMMON: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

CONFIGS: Mapping[str, Config] = {
    "llama2-7b": {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3.1-8b": {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral-7b": {**_COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "qwen2.5-7b": {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3-8b": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    "gemma2-2b": {
        **_COMMON,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 8,
    },
}
"""A tiny config.json under one model name of each kind."""


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers saves for a configuration, in its order."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    kind = config["model_type"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if kind == "qwen2":
            layer |= {
                "self_attn.q_proj.bias": (query,),
                "self_attn.k_proj.bias": (key,),
                "self_attn.v_proj.bias": (key,),
            }
        if kind == "qwen3":
            layer |= {
                "self_attn.q_norm.weight": (config["head_dim"],),
                "self_attn.k_norm.weight": (config["head_dim"],),
            }
        if kind == "gemma2":
            layer |= {
                "pre_feedforward_layernorm.weight": (hidden,),
                "post_feedforward_layernorm.weight": (hidden,),
            }
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def random_tensors(config: Mapping[str, Any], dtype: np.dtype = BFLOAT16, seed: int = 0) -> Tensors:
    """Random weights for a configuration."""
    generator = np.random.default_rng(seed)
    return {
        name: (generator.standard_normal(shape, np.float32) / 8).astype(dtype) for name, shape in shapes(config).items()
    }


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    """Write a repository's folder: one file of weights, or `shards` of them with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def write_tiny(folder: Path, model_name: str, *, shards: int = 1, seed: int = 0, **changes: Any) -> Path:
    """Write the tiny random-weight model of a name; `changes` go into its config.json."""
    config = {**CONFIGS[model_name], **changes}
    return write_folder(folder, config, random_tensors(config, seed=seed), shards)


SIZES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
"""Bytes of an element, by the names of dtypes in files."""


def write_sparse(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
) -> Path:
    """Write a repository's folder whose weights are a hole: any size, no disk.

    Args:
      tensors: dtype and shape of each, by default those of the configuration in bfloat16.
    """
    if tensors is None:
        tensors = {name: ("BF16", shape) for name, shape in shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)
    return folder


def planned_arrays(stdout: str) -> dict[str, dict[str, str]]:
    """The table that `--dry_run` prints, by array."""
    lines = stdout.splitlines()
    header = re.split(r"\s{2,}", lines[0])
    rows = [dict(zip(header, re.split(r"\s{2,}", line), strict=True)) for line in lines[2 : lines.index("")]]
    return {row["array"]: row for row in rows}
