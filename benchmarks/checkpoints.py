"""Random-weight checkpoints with the exact geometry of a supported model: `python -m benchmarks.checkpoints NAME DIR`.

A checkpoint takes the names and shapes of its tensors from the model's configuration and the family's rules alone, so
every model that can be converted can be made. Its files are laid out as on the hub: one up to 4 GB, above that
shards in the order of the layers with an index. Values are normal with standard deviation 0.02, as freshly initialised
weights are, and compress as real ones do: zstd -3 leaves 78 % of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from converter.mapping import integer_tensors, stored_shapes
from converter.models import MODELS
from converter.rules import Family

FILE_BYTES = 4_000_000_000
"""Most tensor bytes in a file, as in the shards of Qwen3's repositories on the hub."""

DEVIATION = 0.02

_BLOCK = 1 << 22
"""Elements that are made at a time."""


@dataclass(frozen=True)
class _Float:
    """A floating point format.

    Attributes:
      name: in config.json.
      code: in a safetensors header.
      random: the bits of a value that are as good as random in weights: the sign, and the mantissa but for its first
        two bits.
    """

    name: str
    code: str
    dtype: np.dtype
    random: np.unsignedinteger


FLOATS = {
    "bfloat16": _Float("bfloat16", "BF16", np.dtype(ml_dtypes.bfloat16), np.uint16(0x801F)),
    "float16": _Float("float16", "F16", np.dtype(np.float16), np.uint16(0x80FF)),
    "float32": _Float("float32", "F32", np.dtype(np.float32), np.uint32(0x801FFFFF)),
}


def make_config(model_name: str, *, dtype: str = "bfloat16", **overrides: Any) -> dict[str, Any]:
    """A config.json for a model of this name; `overrides` are keys of it, for other sizes than the model's own."""
    family = MODELS[model_name]
    return {
        "architectures": list(family.architectures),
        "model_type": family.model_types[0],
        "dtype": dtype,
        **family.models[model_name].config,
        **overrides,
    }


def tensor_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a repository, in the order of the hub's shards: embedding, layers, the rest."""

    def rank(name: str) -> float:
        layer = re.search(r"\.(\d+)\.", name)
        return int(layer[1]) if layer else -1 if "embed" in name else math.inf

    shapes = stored_shapes(family, family.fill(config))
    return {
        name: shapes[name] for name in sorted(shapes, key=lambda name: (rank(name), name.endswith("head.weight"), name))
    }


def total_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str = "bfloat16") -> int:
    """Bytes of all the tensors: `total_size` of an index on the hub."""
    return sum(math.prod(shape) for shape in shapes.values()) * FLOATS[dtype].dtype.itemsize


def write_checkpoint(
    folder: Path,
    model_name: str,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    file_bytes: int = FILE_BYTES,
    **overrides: Any,
) -> int:
    """Make a checkpoint of random weights in `folder`.

    A tensor's values depend on the seed and its name only. Takes about 50 MB of memory, whatever the size.

    Args:
      file_bytes: most tensor bytes in a file (a larger tensor gets a file of its own).
      overrides: keys of config.json, for other sizes than the model's own.

    Returns:
      Bytes of the tensors.
    """
    config = make_config(model_name, dtype=dtype, **overrides)
    shapes = tensor_shapes(MODELS[model_name], config)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(shapes, file_bytes, FLOATS[dtype].dtype.itemsize)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    weights = _Weights(FLOATS[dtype], seed)
    integers = integer_tensors(MODELS[model_name], MODELS[model_name].fill(config))
    for name, tensors in zip(names, shards, strict=True):
        _write_file(folder / name, {tensor: shapes[tensor] for tensor in tensors}, weights, integers)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total_bytes(shapes, dtype)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return total_bytes(shapes, dtype)


def _shards(shapes: Mapping[str, tuple[int, ...]], file_bytes: int, itemsize: int) -> list[list[str]]:
    """Tensor names per file: cut where the next tensor would exceed `file_bytes`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if shards[-1] and size + nbytes > file_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], weights: _Weights, integers: Container[str]) -> None:
    """One safetensors file, its tensors in the order of their names, as the library writes them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in sorted(shapes):
        nbytes = math.prod(shapes[name]) * (8 if name in integers else weights.float.dtype.itemsize)
        header[name] = {
            "dtype": "I64" if name in integers else weights.float.code,
            "shape": list(shapes[name]),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(shapes):
            if name in integers:
                file.write(np.zeros(shapes[name], np.int64).data)
                continue
            for block in weights.blocks(name, math.prod(shapes[name])):
                file.write(block.data)


class _Weights:
    """Blocks of random weights, faster than drawing each from a normal distribution.

    Magnitudes come from one block of normal values, shifted for every piece; signs and the rest of the mantissas are
    drawn anew. So nothing repeats that a compressor could find.
    """

    def __init__(self, kind: _Float, seed: int) -> None:
        self.float = kind
        self._seed = seed
        normal = np.random.Generator(np.random.SFC64(seed)).standard_normal(_BLOCK, np.float32)
        normal *= np.float32(DEVIATION)
        # Twice in a row, so that any shift of it is one slice.
        self._magnitudes = np.tile(normal.astype(kind.dtype).view(kind.random.dtype) & ~kind.random, 2)

    def blocks(self, name: str, count: int) -> Iterator[np.ndarray]:
        """`count` values of the tensor `name`, as unsigned integers, block by block."""
        generator = np.random.SFC64([self._seed, zlib.crc32(name.encode())])
        for start in range(0, count, _BLOCK):
            size = min(_BLOCK, count - start)
            raw = generator.random_raw(1 + -(-size * self.float.dtype.itemsize // 8))
            shift = int(raw[0] % _BLOCK)
            values = raw[1:].view(self.float.random.dtype)[:size]
            values &= self.float.random
            values |= self._magnitudes[shift : shift + size]
            yield values


def main(argv: Sequence[str] | None = None) -> int:
    """Make a checkpoint from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model_name", help="a name that `python -m converter models` lists")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=FLOATS, default="bfloat16")
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the model has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.model_name not in MODELS:
        parser.error(f"unknown model {options.model_name!r}; `python -m converter models` lists the names")
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    overrides = {} if options.layers is None else {"num_hidden_layers": options.layers}
    start = time.monotonic()
    nbytes = write_checkpoint(options.folder, options.model_name, dtype=options.dtype, seed=options.seed, **overrides)
    print(f"{options.folder}: {nbytes:,} bytes of tensors in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
