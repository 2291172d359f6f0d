"""Quantised repositories: which tensors mean which, from names, dtypes and config.json's quantization_config.

What the rest of the converter sees is `Weights`: tensors as if they were stored unquantised, scales left out, and
how to decode those that are not. Known are

* fp8: X in E4M3 and X_scale_inv, a scale for every block of weight_block_size, as DeepSeek-V3, Kimi-K2 and Qwen's FP8
  repositories have them; or X.weight and X.scale as in DeepSeek-V4, whose experts are E2M1, two to a byte, with a scale
  for 32 elements of a row;
* compressed-tensors, float-quantized: X.weight in E4M3 and X.weight_scale for every row, block or tensor;
* mxfp4: X_blocks and X_scales as in gpt-oss. X_blocks is what the rules call the tensor, [.., rows, columns].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converter.errors import RequestError
from converter.hf import decoding
from converter.hf.decoding import FP4_BLOCK, Encoding
from converter.hf.repository import NUMPY_DTYPES, Repository
from converter.hf.safetensors import StoredTensor

_KEY = "quantization_config"
_EIGHT_BITS = "F8_E4M3"


@dataclass(frozen=True)
class Scheme:
    """What config.json says of how the repository is quantised.

    Attributes:
      method: quant_method.
      block: rows and columns that share a scale where codes have eight bits; 0 for all of them.
      four_bits: whether int8 tensors are E2M1, two to a byte.
    """

    method: str
    block: tuple[int, int] = (0, 0)
    four_bits: bool = False


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None for a repository that is not quantised.

    Raises:
      RequestError: it is one that is not known here.
    """
    nested = config.get("text_config")
    given = config.get(_KEY)
    if given is None and isinstance(nested, Mapping):
        given = nested.get(_KEY)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _unknown(f"unknown method {str(given)[:100]!r}")
    method = given.get("quant_method")
    if method is None and ("load_in_4bit" in given or "load_in_8bit" in given):
        method = "bitsandbytes"
    match method:
        case "mxfp4":
            return Scheme("mxfp4", (1, FP4_BLOCK))
        case "fp8":
            return _fp8(config, given)
        case "compressed-tensors":
            return _compressed_tensors(given)
    raise _unknown(str(method or "unknown method")[:100])


def _unknown(what: str) -> RequestError:
    return RequestError(
        f"the repository is quantised ({what}), which cannot be read; "
        "use one that is not, or that is in fp8, mxfp4 or compressed-tensors' float-quantized"
    )


def _fp8(config: Mapping[str, Any], given: Mapping[str, Any]) -> Scheme:
    if given.get("fmt", "e4m3") != "e4m3":
        raise _unknown(f"fp8 with fmt {given['fmt']!r}")
    block = given.get("weight_block_size", [128, 128])
    if not block:
        block = [0, 0]
    elif not _is_block(block):
        raise _unknown(f"fp8 with weight_block_size {block!r}")
    experts = given.get("expert_dtype", config.get("expert_dtype", "fp8"))
    if experts not in ("fp8", "fp4", None):
        raise _unknown(f"fp8 with expert_dtype {experts!r}")
    return Scheme("fp8", (block[0], block[1]), four_bits=experts == "fp4")


def _compressed_tensors(given: Mapping[str, Any]) -> Scheme:
    name = "compressed-tensors"
    if given.get("format") != "float-quantized":
        raise _unknown(f"{name}, {given.get('format')}")
    groups = given.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _unknown(f"{name} whose config_groups do not describe weights")
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
        if kind != ("float", 8, True):
            raise _unknown(f"{name} with {kind[1]}-bit {kind[0]} weights{'' if kind[2] else ', not symmetric'}")
        found.add(_strategy(weights))
    if len(found) != 1:
        raise _unknown(f"{name} with {len(found)} kinds of weights")
    return Scheme(name, found.pop())


def _strategy(weights: Mapping[str, Any]) -> tuple[int, int]:
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy == "channel":
        return 1, 0
    if strategy == "tensor":
        return 0, 0
    if strategy == "block" and _is_block(block):
        assert block is not None
        return block[0], block[1]
    raise _unknown(f"compressed-tensors with the strategy {strategy!r}")


def _is_block(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**31 for size in value)
    )


@dataclass(frozen=True)
class Weights:
    """A repository's tensors as they are meant.

    Attributes:
      repository: as it is stored.
      tensors: every tensor by name; encoded ones have the shape they mean and the dtype they are decoded to.
      encodings: how the encoded ones are stored.
      dtype: what those are decoded to, bfloat16 or float32.
    """

    repository: Repository
    tensors: Mapping[str, StoredTensor]
    encodings: Mapping[str, Encoding]
    dtype: np.dtype

    @property
    def scratch_bytes(self) -> int:
        """Memory that each thread needs while it decodes."""
        return decoding.SCRATCH_BYTES if self.encodings else 0

    def stored(self, name: str) -> list[StoredTensor]:
        """What a tensor is made of: itself, or codes and scales."""
        encoding = self.encodings.get(name)
        names = [name] if encoding is None else [encoding.codes, encoding.scale]
        return [self.repository.tensors[each] for each in names]

    def prefetch(self, name: str, first: int, end: int) -> None:
        """Read what elements `first` to `end` of a tensor are made of into the page cache, and no more."""
        encoding = self.encodings.get(name)
        if encoding is None:
            self.repository.prefetch(name, first, end)
        else:
            decoding.prefetch(self.repository, encoding, first, end)


def open_weights(repository: Repository, dtype: np.dtype) -> Weights:
    """Tell codes from scales and check that every one has its counterpart.

    Args:
      dtype: of the parameters; encoded tensors are decoded to bfloat16 for bfloat16 and to float32 for all others.

    Raises:
      RequestError: config.json names no known scheme, or the tensors are not of it.
    """
    scheme = read_scheme(repository.config)
    stored = repository.tensors
    decoded = "BF16" if dtype == NUMPY_DTYPES["BF16"] else "F32"
    dtype = NUMPY_DTYPES[decoded]
    if scheme is None:
        _check_plain(stored)
        return Weights(repository, stored, {}, dtype)
    encodings = {encoding.codes: encoding for encoding in _encodings(scheme, stored)}
    if not encodings:
        raise RequestError(
            f"config.json says that the repository is quantised ({scheme.method}), but none of its tensors is; "
            f"take {_KEY} out of config.json if the weights are meant to be plain"
        )
    used = {encoding.scale for encoding in encodings.values()}
    used |= {name for codes in encodings for name in _activation_scales(codes)}
    for name in sorted(set(stored) - used - set(encodings)):
        if _is_scale(scheme, name, stored[name]):
            raise RequestError(f"tensor {name[:200]} is a scale of quantised weights that are missing or not quantised")
    tensors = {
        name: replace(tensor, dtype=decoded, shape=encodings[name].shape) if name in encodings else tensor
        for name, tensor in stored.items()
        if name not in used
    }
    return Weights(repository, tensors, encodings, dtype)


def _check_plain(stored: Mapping[str, StoredTensor]) -> None:
    for name, tensor in stored.items():
        packed = name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in stored
        if packed or tensor.dtype.startswith("F8_"):
            raise RequestError(
                f"tensor {name[:200]} is quantised (dtype {tensor.dtype}), but config.json has no {_KEY} that says how"
            )


def _encodings(scheme: Scheme, stored: Mapping[str, StoredTensor]) -> Iterator[Encoding]:
    for name, tensor in stored.items():
        if scheme.method == "mxfp4":
            if name.endswith("_blocks"):
                yield _blocks(name, tensor, stored)
        elif tensor.dtype == _EIGHT_BITS:
            yield _eight_bits(scheme, name, tensor, stored)
        elif scheme.four_bits and tensor.dtype == "I8":
            scale = _scale(("F8_E8M0",), name, (_sibling(name), f"{name}_scale_inv"), stored)
            *outer, columns = tensor.shape
            yield _checked(Encoding(name, scale, (*outer, 2 * columns), (1, FP4_BLOCK), four_bits=True), tensor, stored)


def _blocks(name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> Encoding:
    plain = name.removesuffix("_blocks")
    if plain in stored:
        raise RequestError(f"tensor {plain[:200]} is there twice, quantised and not; take one out")
    scale = _scale(("U8", "F8_E8M0"), name, (f"{plain}_scales",), stored)
    if tensor.dtype != "U8" or tensor.shape[-1:] != (FP4_BLOCK // 2,):
        raise RequestError(
            f"tensor {name[:200]} has dtype {tensor.dtype} and shape {list(tensor.shape)}; "
            f"blocks of mxfp4 are U8 and end with an axis of {FP4_BLOCK // 2}"
        )
    shape = (*tensor.shape[:-2], math.prod(tensor.shape[-2:]) * 2)
    return _checked(Encoding(name, scale, shape, (1, FP4_BLOCK), four_bits=True), tensor, stored)


def _eight_bits(scheme: Scheme, name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> Encoding:
    compressed = scheme.method == "compressed-tensors"
    names = (f"{name}_scale",) if compressed else (f"{name}_scale_inv", f"{name}_scales_inv", _sibling(name))
    scale = _scale(("F32", "BF16", "F16", "F8_E8M0"), name, names, stored)
    rows, columns = tensor.shape[-2:] if len(tensor.shape) > 1 else (1, 1)
    block = (scheme.block[0] or max(1, rows), scheme.block[1] or max(1, columns))
    dtype = stored[scale].dtype
    through = NUMPY_DTYPES[dtype] if compressed and dtype in ("BF16", "F16") else None
    return _checked(Encoding(name, scale, tensor.shape, block, through=through), tensor, stored)


def _sibling(name: str) -> str:
    return re.sub(r"(^|\.)weight$", r"\1scale", name) if name.endswith("weight") else f"{name}.scale"


def _scale(dtypes: tuple[str, ...], codes: str, names: tuple[str, ...], stored: Mapping[str, StoredTensor]) -> str:
    """Which of the names the scales of `codes` have."""
    for name in names:
        if name in stored:
            if stored[name].dtype not in dtypes:
                raise RequestError(
                    f"tensor {name[:200]}, the scale of a quantised one, has dtype {stored[name].dtype}; "
                    f"only {', '.join(dtypes)} can be read"
                )
            return name
    raise RequestError(f"tensor {codes[:200]} is quantised, but its scale {names[0][:200]} is missing")


def _checked(encoding: Encoding, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> Encoding:
    if len(encoding.shape) < 2 or not all(encoding.shape):
        raise RequestError(f"tensor {encoding.codes[:200]} is quantised and no matrix: shape {list(tensor.shape)}")
    shape = stored[encoding.scale].shape
    # One scale of a whole matrix may have any number of axes.
    if shape != encoding.grid and not (math.prod(encoding.grid) == 1 == math.prod(shape)):
        raise RequestError(
            f"tensor {encoding.scale[:200]} has shape {list(shape)}; the scales of {encoding.codes[:200]}, "
            f"shape {list(tensor.shape)}, must have {list(encoding.grid)}"
        )
    return encoding


def _activation_scales(codes: str) -> Iterator[str]:
    """Of what goes into a quantised matrix product or comes out, and of what attention caches.

    MaxText computes with these unquantised.
    """
    stem = codes.removesuffix(".weight")
    for name in ("input_scale", "output_scale", "activation_scale"):
        yield f"{stem}.{name}"
        yield f"{stem}_{name}"
    for name in ("q_scale", "k_scale", "v_scale"):
        yield f"{stem.rpartition('.')[0]}.{name}"


def _is_scale(scheme: Scheme, name: str, tensor: StoredTensor) -> bool:
    match scheme.method:
        case "mxfp4":
            return name.endswith("_scales")
        case "fp8":
            return name.endswith(("_scale_inv", "_scales_inv")) or tensor.dtype == "F8_E8M0"
    return name.endswith(".weight_scale")
