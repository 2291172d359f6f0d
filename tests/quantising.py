"""Quantised repositories with random codes and scales, and the same dequantised by the published formulas.

Written without the converter and without numpy's extension types for small floats, from the tables of the OCP
Microscaling Formats specification 1.0 (sections 5.3 and 5.4) and from what these do, in order:

* DeepSeek's inference/kernel.py, weight_dequant: the code in float32, times the block's scale, then the output's dtype;
* transformers' integrations/finegrained_fp8.py: the same, scales of any dtype widened to float32 first;
* transformers' integrations/mxfp4.py: a table of the 16 values, lower half of a byte first, times 2 ** (scale - 127);
* compressed-tensors' forward_helpers.py: the code in the scale's dtype, times the scale in that dtype.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import BFLOAT16, DATA, Tensors, write_folder, write_sparse
from reading import source_tensors

from converter.mapping import stored_shapes
from converter.models import MODELS

FLOAT32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
"""Only to name dtypes in files."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e4m3(code: int) -> float:
    """What a code of eight bits means: one of sign, four of exponent (bias 7), three of mantissa; no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16: to the nearest, of two to the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(BFLOAT16)


def widened(scales: np.ndarray) -> np.ndarray:
    """Scales of any dtype in float32."""
    if scales.dtype == E8M0:
        return np.array([2.0 ** (int(code) - 127) for code in scales.view(np.uint8).flat], np.float32).reshape(
            scales.shape
        )
    return scales.astype(np.float32)


def dequantised_eight_bits(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 products of codes [.., rows, columns] with scales [.., blocks, blocks], one by one."""
    values = np.array([e4m3(code) for code in range(256)], np.float32)
    found = np.empty(codes.shape, np.float32)
    wide = widened(scales)
    for *outer, row, column in np.ndindex(codes.shape):
        scale = wide[(*outer, row // block[0], column // block[1])]
        found[(*outer, row, column)] = values[codes[(*outer, row, column)]] * scale
    return found


def dequantised_four_bits(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """float32 numbers [.., rows, columns] of codes [.., rows, columns / 2], exponents [.., rows, columns / 32]."""
    found = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.float32)
    for *outer, at in np.ndindex(codes.shape):
        byte, scale = int(codes[(*outer, at)]), 2.0 ** (int(exponents[(*outer, at // 16)]) - 127)
        found[(*outer, 2 * at)] = E2M1[byte & 15] * scale
        found[(*outer, 2 * at + 1)] = E2M1[byte >> 4] * scale
    return found


Base = tuple[str, dict[str, Any], Tensors]
"""A model name with a repository's config.json and tensors."""


@dataclass(frozen=True)
class Quantised:
    """A repository's config.json and tensors, and what the tensors mean in float32 and rounded to bfloat16."""

    model_name: str
    config: dict[str, Any]
    tensors: Tensors
    wide: Tensors
    narrow: Tensors

    @property
    def plain_config(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key != "quantization_config"}

    def write(self, folder: Path, **changes: Any) -> Path:
        """The quantised folder; its scales lie in another file than their codes."""
        return write_folder(folder, {**self.config, **changes}, _scattered(self.tensors), shards=3)

    def write_plain(self, folder: Path, save_dtype: str) -> Path:
        """The folder that a dequantisation asked for that dtype leaves."""
        return write_folder(folder, self.plain_config, self.wide if save_dtype == "float32" else self.narrow)


def _scattered(tensors: Tensors) -> Tensors:
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: ("scale" not in name, name))}


def random_codes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of eight bits, all of them but those that are not numbers."""
    codes = generator.integers(0, 254, shape, np.uint8)
    return (codes + (codes >= 0x7F)).astype(np.uint8)


def random_scales(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As they are in repositories: about 1e-4 to 1e-2."""
    if dtype == E8M0:
        return generator.integers(105, 130, shape, np.uint8).view(E8M0)
    return (10.0 ** generator.uniform(-4, -2, shape)).astype(np.float32).astype(dtype)


def source(family: str) -> Base:
    """A family's tiny repository in bfloat16: its model name, config.json and tensors."""
    folder = DATA / family / "hf_bf16"
    name = json.loads((folder.parent / "oracle.json").read_bytes())["model_name"]
    return name, json.loads((folder / "config.json").read_bytes()), source_tensors(folder / "model.safetensors")


LINEAR = re.compile(r".*\.((\w+_proj|w[123]|kv_a_proj_with_mqa)\.weight|experts\.(gate_up|down)_proj)")
"""The matrices that repositories quantise; embeddings, norms and routers stay as they are."""


def eight_bits(
    base: Base,
    quantization: Mapping[str, Any],
    block: tuple[int, int],
    scale: str,
    dtype: np.dtype = FLOAT32,
    *,
    through: bool = False,
    chosen: Callable[[str], object] = LINEAR.fullmatch,
    scale_shape: tuple[int, ...] | None = None,
) -> Quantised:
    """A repository with its matrices in E4M3.

    Args:
      base: the unquantised one.
      block: rows and columns that share a scale; 0 for all.
      scale: name of a matrix's scales, given its own without ".weight".
      through: whether products are rounded to the scales' dtype first.
      scale_shape: of the scales, where it is not one for each block along each axis.
    """
    name, config, tensors = base
    generator = np.random.default_rng(5)
    stored, wide, narrow = dict(tensors), dict(tensors), dict(tensors)
    for tensor, values in tensors.items():
        if not chosen(tensor):
            continue
        *outer, rows, columns = values.shape
        size = (block[0] or rows, block[1] or columns)
        codes = random_codes(generator, values.shape)
        grid = (*outer, -(-rows // size[0]), -(-columns // size[1]))
        scales = random_scales(generator, grid, dtype)
        stored[tensor] = codes.view(E4M3)
        stored[scale.format(tensor.removesuffix(".weight"))] = (
            scales if scale_shape is None else scales.reshape(scale_shape)
        )
        products = dequantised_eight_bits(codes, scales, size)
        if through and dtype == BFLOAT16:
            products = to_bfloat16(products).astype(np.float32)
        elif through:
            products = products.astype(dtype).astype(np.float32)
        wide[tensor], narrow[tensor] = products, to_bfloat16(products)
    return Quantised(name, {**config, "quantization_config": dict(quantization)}, stored, wide, narrow)


def fused(base: Base) -> Base:
    """The same repository with the experts of a layer in one tensor, [experts, out, in]."""
    name, config, tensors = base
    found = {tensor: values for tensor, values in tensors.items() if ".experts." not in tensor}
    separate = sorted(set(tensors) - set(found))
    for layer, group in itertools.groupby(separate, lambda tensor: tensor.partition(".experts.")[0]):
        parts = {tensor.split(".experts.")[1]: tensors[tensor] for tensor in group}
        count = len({part.split(".")[0] for part in parts})
        gate, up, down = (
            np.stack([parts[f"{i}.{which}_proj.weight"] for i in range(count)]) for which in ("gate", "up", "down")
        )
        found[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"{layer}.experts.down_proj"] = down
    return name, config, found


def mxfp4() -> Quantised:
    """gpt-oss as OpenAI published it: experts in blocks, [experts, out, in / 32, 16], all else in bfloat16."""
    name, config, tensors = source("gpt-oss")
    hidden, inner, experts = config["hidden_size"], 64, config["num_local_experts"]
    config = {**config, "intermediate_size": inner, "quantization_config": {"quant_method": "mxfp4"}}
    generator = np.random.default_rng(6)
    stored, narrow = {}, {}
    for tensor, values in tensors.items():
        if tensor.endswith("gate_up_proj_bias"):
            values = np.resize(values, (experts, 2 * inner))
        if not tensor.endswith(("gate_up_proj", "down_proj")):
            stored[tensor] = narrow[tensor] = values
            continue
        rows, columns = (2 * inner, hidden) if tensor.endswith("gate_up_proj") else (hidden, inner)
        codes = generator.integers(0, 256, (experts, rows, columns // 2), np.uint8)
        # A few of every exponent, the smallest included; mostly about 1.
        exponents = generator.integers(110, 130, (experts, rows, columns // 32), np.uint8)
        exponents[0, :8, 0] = [0, 1, 2, 60, 127, 200, 253, 254]
        stored[f"{tensor}_blocks"] = codes.reshape(experts, rows, columns // 32, 16)
        stored[f"{tensor}_scales"] = exponents
        with np.errstate(over="ignore"):
            plain = dequantised_four_bits(codes, exponents)
        narrow[tensor] = np.ascontiguousarray(to_bfloat16(plain).swapaxes(1, 2))
    wide = {name: values.astype(np.float32) for name, values in narrow.items()}
    return Quantised(name, config, stored, wide, narrow)


def deepseek4() -> Quantised:
    """DeepSeek-V4 as published: routed experts in E2M1, two to a byte, other matrices in E4M3, exponents as scales."""
    name, config, tensors = source("deepseek4")
    # Rows must hold whole blocks of 32.
    inner = 64
    for tensor, values in tensors.items():
        if match := re.fullmatch(r".*experts\.(?:\d+\.)?w([123])\.weight", tensor):
            shape = (values.shape[0], inner) if match[1] == "2" else (inner, values.shape[1])
            tensors[tensor] = np.resize(values, shape)
    config = {**config, "moe_intermediate_size": inner, "expert_dtype": "fp4"}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 20], "scale_fmt": "ue8m0"}
    chosen = re.compile(r".*\.(wq_[ab]|wkv|wo_[ab]|shared_experts\.w[123])\.weight").fullmatch
    eight = eight_bits((name, config, tensors), quantization, (24, 20), "{}.scale", E8M0, chosen=chosen)
    generator = np.random.default_rng(7)
    for tensor in tensors:
        if not re.fullmatch(r".*\.experts\.\d+\.w[123]\.weight", tensor):
            continue
        rows, columns = tensors[tensor].shape
        codes = generator.integers(0, 256, (rows, columns // 2), np.uint8)
        exponents = generator.integers(110, 130, (rows, columns // 32), np.uint8)
        eight.tensors[tensor] = codes.view(np.int8)
        eight.tensors[tensor.replace(".weight", ".scale")] = exponents.view(E8M0)
        wide = dequantised_four_bits(codes, exponents)
        eight.wide[tensor], eight.narrow[tensor] = wide, to_bfloat16(wide)
    return eight


def write_hole(folder: Path, model_name: str, layers: int, quantization: Mapping[str, Any] | None = None) -> Path:
    """A repository of a published geometry, cut to some layers, whose data are a hole: any size, no disk.

    It is in bfloat16, or its matrices in E4M3 with a scale for blocks of 128 x 128, or its fused experts in MXFP4.
    """
    method = quantization and quantization["quant_method"]
    family = MODELS[model_name]
    config = {
        **family.models[model_name].config,
        "num_hidden_layers": layers,
        "architectures": list(family.architectures),
        "model_type": family.model_types[0],
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in stored_shapes(family, family.fill(config)).items():
        if method == "fp8" and LINEAR.fullmatch(name):
            tensors[name] = ("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = ("F32", (-(-shape[0] // 128), -(-shape[1] // 128)))
        elif method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = shape
            tensors[f"{name}_blocks"] = ("U8", (experts, rows, columns // 32, 16))
            tensors[f"{name}_scales"] = ("U8", (experts, rows, columns // 32))
        else:
            tensors[name] = ("BF16", shape)
    quantized = {} if quantization is None else {"quantization_config": dict(quantization)}
    return write_sparse(folder, {**config, **quantized}, tensors)
