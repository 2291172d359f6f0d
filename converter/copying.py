"""The hot loop: copy a box of a memory-mapped tensor into a chunk, transposing on the way.

numpy copies a transposed bfloat16 matrix at a tenth of memory speed: it walks one side with a large stride, often a
power of two, so that the lines it needs evict each other from the cache. Here a tile is first copied as it lies into
a scratch buffer whose rows are padded against that, then transposed from there: five times as fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from converter.mapping import Step

_TILE = 1 << 15
"""Elements of the scratch buffer: 64 KiB of bfloat16, which stays in the second-level cache."""

_RUN = 256
"""Longest run of the source read at a time."""

_PAD = 32
"""Elements between the scratch buffer's rows: a cache line of bfloat16, so that a column spreads over the cache."""

_ARITHMETIC = 1 << 18
"""Elements that go through float32 at a time."""


def copy_box(target: np.ndarray, source: np.ndarray, steps: Sequence[Step]) -> None:
    """`target[...] = steps(source)`, computed in float32 and rounded once where dtypes differ or there are steps.

    A source or a step in float64 makes it float64.

    Args:
      target, source: of the same shape, any strides.
    """
    if target.dtype.kind == "i":
        target[...] = source
        return
    if source.dtype == target.dtype and not steps:
        unsigned = np.dtype(f"u{target.dtype.itemsize}")
        _copy(target.view(unsigned), source.view(unsigned))
        return
    dtype = np.result_type(np.float32, source.dtype, *(step.operand.dtype for step in steps))
    for tile in boxes(target.shape, _ARITHMETIC):
        raw = np.empty(source[tile].shape, source.dtype)
        unsigned = np.dtype(f"u{raw.dtype.itemsize}")
        _copy(raw.view(unsigned), source[tile].view(unsigned))
        values = raw.astype(dtype)
        for step in steps:
            step.apply(values)
        target[tile] = values.astype(target.dtype, copy=False)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    to, of = _contiguous_axis(target), _contiguous_axis(source)
    if to is None or of is None or to == of:
        target[...] = source
        return
    shape = target.shape
    sizes = [1] * len(shape)
    sizes[of] = min(shape[of], _RUN)
    room = _TILE // sizes[of]
    for axis in (to, *(axis for axis in reversed(range(len(shape))) if axis not in (to, of))):
        sizes[axis] = max(1, min(shape[axis], room))
        room //= sizes[axis]
    order = sorted(range(len(shape)), key=lambda axis: abs(source.strides[axis]), reverse=True)
    order.append(order.pop(order.index(of)))
    back = [order.index(axis) for axis in range(len(shape))]
    rows = [sizes[axis] for axis in order]
    scratch = np.empty((*rows[:-1], rows[-1] + _PAD), target.dtype)[..., : rows[-1]].transpose(back)
    for tile in _tiles(shape, sizes):
        part = source[tile]
        staged = scratch[tuple(slice(0, n) for n in part.shape)]
        staged[...] = part
        target[tile] = staged


def _contiguous_axis(array: np.ndarray) -> int | None:
    """The axis with the smallest stride among those that have more than one element."""
    axes = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    return min(axes, key=lambda axis: abs(array.strides[axis])) if axes else None


def boxes(shape: Sequence[int], elements: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array into boxes of at most `elements` elements: whole trailing axes, then a part of one."""
    sizes = [1] * len(shape)
    room = elements
    for axis in reversed(range(len(shape))):
        sizes[axis] = max(1, min(shape[axis], room))
        room //= sizes[axis]
    return _tiles(shape, sizes)


def _tiles(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    return itertools.product(
        *(
            [slice(start, min(start + size, extent)) for start in range(0, extent, size)]
            for extent, size in zip(shape, sizes, strict=True)
        )
    )
