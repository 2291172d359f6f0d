"""A LoRA adapter merged into what is read: W' = W + scale * B A in float32, cast back to W's dtype, box by box.

BLAS may sum in another order where a matrix has another shape. So a product is always computed in tiles of one shape,
which lie on a grid over the whole tensor: no element depends on which box it is read in. Such a tile is so small that
OpenBLAS computes it in the thread that asks for it, and its sums run over the rank in order, as they do in its product
of the whole matrices as long as the rank is not above some two hundred.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from converter.hf.adapter import Adapter, Pair
from converter.hf.repository import Repository
from converter.mapping import Box, Piece, View
from converter.reading import ReadBox

TASK_BYTES = 1 << 20
"""Of boxes that are read at a time, since a merged box is in memory."""

_TILE = 1 << 14
"""Elements of a tile at most."""

_WORK = 1 << 18
"""Multiplications up to which OpenBLAS uses one thread: SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD."""

_SIDE = 256
"""Rows and columns that are worked on at a time, a whole number of tiles: what fits the caches."""

_LEAST = 16
"""Rows and columns of a tile at least: what BLAS' inner loops compute side by side."""


def merging_reader(read: ReadBox, adapter: Adapter, placed: Mapping[str, Pair]) -> ReadBox:
    """Read boxes of a base into which an adapter is merged.

    Args:
      read: reads the base.
      placed: the pairs, by the name of the tensor that they are added to.
    """

    def merged(piece: Piece, box: Box) -> np.ndarray:
        content = read(piece, box)
        pair = placed.get(piece.tensor)
        return content if pair is None else _merged(content, piece.view, box, pair, adapter.repository)

    return merged


def _merged(content: np.ndarray, view: View, box: Box, pair: Pair, matrices: Repository) -> np.ndarray:
    """A box of the view of a base's tensor with the product of the pair added, in memory and in stored order."""
    seen = content.squeeze(view.stacked)
    stored = seen.transpose(np.argsort(view.order))
    rows, columns = _lines(view, box, pair.inputs)
    values = np.array(stored, order="C").reshape(len(rows), len(columns))
    _add(values, rows, columns, pair, matrices)
    return np.expand_dims(values.reshape(stored.shape).transpose(_ranks(view.order)), view.stacked)


def _ranks(order: tuple[int, ...]) -> list[int]:
    """Where each axis of the view is among the stored axes that are seen."""
    stored = sorted(order)
    return [stored.index(axis) for axis in order]


def _lines(view: View, box: Box, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the stored matrix that a box of the view holds, both ascending."""
    picked = dict(view.picked)
    parts = [part for axis, part in enumerate(box) if axis not in view.stacked]
    taken = [
        np.asarray([picked[axis]]) if axis in picked else np.arange(size)[parts[view.order.index(axis)]]
        for axis, size in enumerate(view.split)
    ]
    boundary = next(at for at in range(len(taken) + 1) if math.prod(view.split[at:]) == inputs)
    first, rest = divmod(view.offset, inputs)
    assert rest == 0, "a part of a matrix begins with a row"
    rows = _flattened(taken[:boundary], view.split[:boundary])
    return first + rows, _flattened(taken[boundary:], view.split[boundary:])


def _flattened(taken: list[np.ndarray], sizes: tuple[int, ...]) -> np.ndarray:
    """The indices into one axis that several make up."""
    flat = np.zeros(1, np.int64)
    for indices, size in zip(taken, sizes, strict=True):
        flat = (flat[:, None] * size + indices).reshape(-1)
    return flat


def _tile(rank: int) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two."""
    elements = min(_TILE, _WORK // (1 << (rank - 1).bit_length()))
    rows = max(_LEAST, 1 << ((max(1, elements).bit_length() - 1) // 2))
    return rows, max(_LEAST, elements // rows)


def _add(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, pair: Pair, matrices: Repository) -> None:
    """Add the product's elements in these rows and columns to `values`, in place."""
    height, width = _tile(pair.rank)
    a = matrices.elements(pair.a, slice(0, pair.rank * pair.inputs)).reshape(pair.rank, pair.inputs)
    b = matrices.elements(pair.b, slice(0, pair.rank * pair.outputs)).reshape(pair.outputs, pair.rank)
    across = list(_runs(columns, width, a.T))
    for down, from_rows, left in _runs(rows, height, b):
        for part, from_columns, right in across:
            product = np.empty((len(left), height, len(right), width), np.float32)
            # Tile by tile: a product of its own each.
            np.matmul(left[:, None], right.swapaxes(1, 2), out=product.swapaxes(1, 2))
            product *= np.float32(pair.scale)
            kept = product.reshape(len(left) * height, len(right) * width)[from_rows][:, from_columns]
            values[down, part] = (values[down, part].astype(np.float32) + kept).astype(values.dtype)


def _runs(lines: np.ndarray, size: int, matrix: np.ndarray) -> Iterator[tuple[slice, slice | np.ndarray, np.ndarray]]:
    """Ascending lines in groups, each with what of a matrix its tiles need.

    Args:
      size: of a tile.
      matrix: has a row for every line there is.

    Yields:
      Which of the lines are in the group, where they are among the lines of its tiles, and those: [tiles, size, rank].
    """
    tiles, position = np.unique(lines // size, return_inverse=True)
    at = position * size + lines % size
    count = max(1, _SIDE // size)
    for first in range(0, len(tiles), count):
        group = tiles[first : first + count]
        begin, end = np.searchsorted(position, (first, first + count))
        inside = at[begin:end] - first * size
        run = inside[-1] - inside[0] + 1 == len(inside)
        part = np.zeros((len(group), size, matrix.shape[1]), np.float32)
        for into, tile in zip(part, group, strict=True):
            found = matrix[tile * size : (tile + 1) * size]
            into[: len(found)] = found
        yield slice(begin, end), slice(inside[0], inside[-1] + 1) if run else inside, part
