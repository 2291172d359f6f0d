"""The safetensors file format, headers only: where in which file every tensor lies.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes
of JSON mapping names to {dtype, shape, data_offsets}, then the data, without holes. The library's own reader
copies tensors; streaming needs their offsets, so the header is read here and checked as strictly as there.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from converter.errors import RequestError
from converter.hf.files import check_complexity

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""

_SMALL_HEADER_BYTES = 1 << 20

_parsing = threading.Lock()
"""Headers are read in several threads, but parsed one at a time, and large ones read so too: they take much memory."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element, for every dtype of the format."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of its repository: `nbytes` bytes from `offset` on, C order, little endian."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(label: str, name: str, size: int, read: Callable[[int, int], bytes]) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Args:
      label: the file for messages.
      name: the file in its repository.
      size: of the file, bytes.
      read: gives bytes `begin` to `end` of it.

    Raises:
      RequestError: the file is not a whole, well-formed safetensors file.
    """
    if size < 8:
        raise RequestError(f"{label} is no safetensors file: {size} bytes are too few for a header")
    length = int.from_bytes(read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise RequestError(f"{label} is no safetensors file: it claims a header of {length} bytes")
    if 8 + length > size:
        raise RequestError(f"{label} is truncated: a header of {length} bytes, a file of {size}; download it again")
    if length <= _SMALL_HEADER_BYTES:
        header = read(8, 8 + length)
        with _parsing:
            tensors = _parse(label, name, header, 8 + length)
    else:
        with _parsing:
            tensors = _parse(label, name, read(8, 8 + length), 8 + length)
    _check_coverage(label, tensors, 8 + length, size)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _parse(label: str, file: str, header: bytes, data_start: int) -> dict[str, StoredTensor]:
    check_complexity(header, label)
    try:
        entries = json.loads(header, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{label} has a broken safetensors header: {error}") from error
    if not isinstance(entries, dict):
        raise RequestError(f"{label} has a broken safetensors header: it is no JSON object")
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        tensors[name] = _entry(label, file, name, entry, data_start)
    return tensors


def _entry(label: str, file: str, name: str, entry: object, data_start: int) -> StoredTensor:
    def bad(why: str) -> RequestError:
        return RequestError(f"{label} has a broken safetensors header: tensor {name[:200]!r} {why}")

    if not isinstance(entry, dict):
        raise bad("is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"has the unknown dtype {str(dtype)[:100]!r}")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise bad("has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise bad("has no valid data_offsets")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise bad(f"of shape {shape} and dtype {dtype} cannot take {end - begin} bytes")
    return StoredTensor(file, dtype, tuple(shape), data_start + begin, end - begin)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_coverage(label: str, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    position = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise RequestError(
                f"{label} has a broken safetensors header: tensor {name[:200]!r} leaves a hole or overlaps another"
            )
        position += tensor.nbytes
    if position > size:
        raise RequestError(f"{label} is truncated: {size} bytes, its header asks for {position}; download it again")
    if position < size:
        raise RequestError(f"{label} has {size - position} bytes after its last tensor; download it again")
