"""The arithmetic of quantised weights: stored codes and their scales -> numbers, box by box.

A code is an element of few bits; every block of a matrix has a scale, and the number is code x scale. The product is
formed in float32 and rounded once to what was asked for, as the published dequantisations do: DeepSeek's
inference/kernel.py (weight_dequant), transformers' integrations/finegrained_fp8.py and mxfp4.py, and
compressed-tensors, which rounds to the scale's dtype in between. Codes: E4M3 and E2M1, scales in E8M0, of the OCP
Microscaling Formats specification 1.0.

All products that a scale can have are computed first, one for each code, and then looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from converter.hf.repository import Repository

FP4_BLOCK = 32
"""Elements of a row that share a scale, in all of the four-bit formats."""

_TABLES = 256
"""Of 256 products each, in which one number of 16 bits finds its way."""

_PER_TABLE = 256
"""Where fewer numbers than this share a scale, they are multiplied one by one."""

_TILE = 1 << 16
"""Elements decoded at a time, so that what lies between the steps stays in the second-level cache."""

SCRATCH_BYTES = 2 << 20
"""What decoding a box of `TASK_BYTES` takes at most, the box included."""

TASK_BYTES = 1 << 20
"""Of decoded numbers at a time."""


@dataclass(frozen=True)
class Encoding:
    """How one tensor is stored.

    Attributes:
      codes, scale: names of the stored tensors.
      shape: of the tensor that they mean: matrices, any number of axes of them.
      block: rows and columns of a matrix that share a scale.
      four_bits: whether codes are E2M1, two to a byte, the lower half first; otherwise E4M3.
      through: dtype to which the product is rounded before it is rounded to the one that is asked for.
    """

    codes: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    four_bits: bool = False
    through: np.dtype | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the scales."""
        *matrices, rows, columns = self.shape
        return (*matrices, -(-rows // self.block[0]), -(-columns // self.block[1]))

    @property
    def width(self) -> int:
        """Codes to a row, bytes."""
        return self.shape[-1] // 2 if self.four_bits else self.shape[-1]


def decode(repository: Repository, encoding: Encoding, box: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """A box of an encoded tensor, bfloat16 or float32.

    Args:
      box: of the tensor's own axes; slices with a start, a stop and perhaps a step.
    """
    *outer, rows, columns = box
    numbers = np.empty([len(_positions(part)) for part in box], dtype)
    decode_matrix = _decode_four_bits if encoding.four_bits else _decode_eight_bits
    # Overflow and what is not a number come out as the formats say.
    with np.errstate(all="ignore"):
        for at, matrix in _matrices(encoding, outer):
            decode_matrix(repository, encoding, matrix, rows, columns, numbers[at])
    return numbers


def ranges(encoding: Encoding, box: tuple[slice, ...]) -> Iterator[tuple[str, slice]]:
    """What `decode` reads for a box: elements of a stored tensor, in the order in which it does."""
    *outer, rows, _ = box
    for _, matrix in _matrices(encoding, outer):
        yield from _stored_rows(encoding, matrix, rows)


def _matrices(encoding: Encoding, outer: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The matrices of a box: where each is in it, and its number in the tensor."""
    chosen = [_positions(part) for part in outer]
    for at in np.ndindex(*map(len, chosen)):
        matrix = 0
        for size, indices, i in zip(encoding.shape, chosen, at, strict=False):
            matrix = matrix * size + indices[i]
        yield at, matrix


def _positions(part: slice) -> range:
    return range(part.start, part.stop, part.step or 1)


def _stored_rows(encoding: Encoding, matrix: int, rows: slice) -> Iterator[tuple[str, slice]]:
    """The elements that hold the codes of some rows of a matrix, and those that hold the scales of their blocks."""
    height, width = encoding.shape[-2], encoding.width
    blocks, across = encoding.grid[-2:]
    last = _positions(rows)[-1]
    yield encoding.codes, slice((matrix * height + rows.start) * width, (matrix * height + last + 1) * width)
    first, end = rows.start // encoding.block[0], last // encoding.block[0] + 1
    yield encoding.scale, slice((matrix * blocks + first) * across, (matrix * blocks + end) * across)


def _stored(repository: Repository, encoding: Encoding, matrix: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """The codes of some rows, and the scales of the blocks that they lie in."""
    codes, scales = (repository.elements(*each) for each in _stored_rows(encoding, matrix, rows))
    codes = codes.view(np.uint8).reshape(-1, encoding.width)
    return codes[:: rows.step or 1], scales.reshape(-1, encoding.grid[-1])


def _rounded(values: np.ndarray, through: np.dtype | None, dtype: np.dtype) -> np.ndarray:
    return (values if through is None else values.astype(through)).astype(dtype, copy=False)


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


# Eight bits: a table of the 256 products of every scale.


@cache
def _e4m3() -> np.ndarray:
    values: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def _wide(scales: np.ndarray, code: str) -> np.ndarray:
    """Scales in float32, of the safetensors dtype `code`."""
    if code == "F8_E8M0":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    wide: np.ndarray = scales.astype(np.float32)
    return wide


def _decode_eight_bits(
    repository: Repository, encoding: Encoding, matrix: int, rows: slice, columns: slice, numbers: np.ndarray
) -> None:
    codes, stored = _stored(repository, encoding, matrix, rows)
    codes = codes[:, columns]
    scales = _wide(stored, repository.tensors[encoding.scale].dtype)
    # Which scale of `scales` each row and column has.
    down = np.asarray(_positions(rows)) // encoding.block[0] - rows.start // encoding.block[0]
    across = np.asarray(_positions(columns)) // encoding.block[1]
    left, right = int(across[0]), int(across[-1]) + 1
    scales, across = scales[:, left:right], across - left
    count = right - left
    step = max(1, _TILE // codes.shape[1])
    if count > _TABLES or codes.size < _PER_TABLE * scales.size:
        for start in range(0, codes.shape[0], step):
            tile = slice(start, start + step)
            values = np.take(_e4m3(), codes[tile])
            factors = scales[down[tile]]
            values *= factors if count == 1 else factors[:, across]
            numbers[tile] = _rounded(values, encoding.through, numbers.dtype)
        return
    bits = numbers.view(_bits(numbers.dtype))
    offsets = (across << 8).astype(np.uint16)
    for first in range(0, scales.shape[0], _TABLES // count):
        some = scales[first : first + _TABLES // count]
        products = _rounded(_e4m3() * some[..., np.newaxis], encoding.through, numbers.dtype)
        table = products.view(bits.dtype).reshape(-1)
        begin, end = np.searchsorted(down, (first, first + len(some)))
        for start in range(begin, end, step):
            tile = slice(start, min(start + step, end))
            which = codes[tile] if count == 1 else codes[tile] + offsets
            if len(some) > 1:
                which = which + ((down[tile, np.newaxis] - first) * count << 8).astype(np.uint16)
            bits[tile] = np.take(table, which)


# Four bits: one table of the products of every scale with every byte, which is two codes.


@cache
def _pairs(dtype: np.dtype, nan: bool) -> np.ndarray:
    """The two numbers that a byte means, by (scale << 8 | byte), as one unsigned integer."""
    codes = np.arange(256, dtype=np.uint8)
    both = np.stack([codes & 15, codes >> 4], axis=-1)
    values = both.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    products = np.ldexp(values, np.arange(-127, 129).reshape(-1, 1, 1))
    if nan:
        products[255] = np.nan
    return np.ascontiguousarray(products.astype(dtype)).view(f"u{2 * dtype.itemsize}").reshape(-1)


def _decode_four_bits(
    repository: Repository, encoding: Encoding, matrix: int, rows: slice, columns: slice, numbers: np.ndarray
) -> None:
    codes, scales = _stored(repository, encoding, matrix, rows)
    if rows.step is not None or encoding.block[0] > 1:
        first = rows.start // encoding.block[0]
        scales = scales[np.asarray(_positions(rows)) // encoding.block[0] - first]
    # An exponent in U8 that is all ones is one like others to transformers; in E8M0 it means no number.
    table = _pairs(numbers.dtype, repository.tensors[encoding.scale].dtype == "F8_E8M0")
    last = _positions(columns)[-1]
    begin, end = columns.start // 2, last // 2 + 1
    across = encoding.block[1] // 2
    left, right = begin // across, -(-end // across)
    shift = begin - left * across
    within = slice(columns.start - 2 * begin, last + 1 - 2 * begin, columns.step)
    bits = numbers.view(_bits(numbers.dtype))
    step = max(1, _TILE // (2 * (end - begin)))
    for start in range(0, codes.shape[0], step):
        tile = slice(start, start + step)
        which = np.repeat(scales[tile, left:right].astype(np.uint16) << 8, across, axis=1)
        which = which[:, shift : shift + end - begin]
        which |= codes[tile, begin:end]
        bits[tile] = np.take(table, which).view(bits.dtype)[:, within]


def prefetch(repository: Repository, encoding: Encoding, first: int, end: int) -> None:
    """Read what elements `first` to `end` of an encoded tensor are made of ahead, scales where they are many."""
    if not encoding.four_bits:
        repository.prefetch(encoding.codes, first, end)
        return
    repository.prefetch(encoding.codes, first // 2, -(-end // 2))
    count = math.prod(encoding.grid)
    per_scale = math.prod(encoding.block)
    repository.prefetch(encoding.scale, min(count, first // per_scale), min(count, -(-end // per_scale)))
