"""A LoRA adapter merged into what is read: W' = W + scale * B A in float32, cast back to W's dtype, box by box.

BLAS may sum in another order where a matrix has another shape. So a product is always computed in tiles of one shape,
which lie on a grid over the whole tensor: no element depends on which box it is read in. Such a tile is so small that
OpenBLAS computes it in the thread that asks for it, and its sums run over the rank in order, as they do in its product
of the whole matrices as long as the rank is not above some two hundred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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
    scale = np.float32(pair.scale)
    below, across = _cuts(rows, height), _cuts(columns, width)
    right = [(part, inside, np.ascontiguousarray(_padded(a.T, start, width).T)) for part, inside, start in across]
    product = np.empty((height, width), np.float32)
    for down, inner, start in below:
        left = _padded(b, start, height)
        for part, inside, tile in right:
            np.matmul(left, tile, out=product)
            product *= scale
            kept = product[inner][:, inside]
            values[down, part] = (values[down, part].astype(np.float32) + kept).astype(values.dtype)


def _cuts(lines: np.ndarray, size: int) -> list[tuple[slice, slice | np.ndarray, int]]:
    """Ascending lines by the tile that they are in: which of them, where in the tile, where it begins."""
    cuts = []
    begin = 0
    while begin < len(lines):
        start = int(lines[begin]) // size * size
        end = int(np.searchsorted(lines, start + size))
        inside = lines[begin:end] - start
        run = inside[-1] - inside[0] + 1 == len(inside)
        cuts.append((slice(begin, end), slice(int(inside[0]), int(inside[-1]) + 1) if run else inside, start))
        begin = end
    return cuts


def _padded(matrix: np.ndarray, start: int, size: int) -> np.ndarray:
    """Rows of a matrix in float32, zeros beyond its end."""
    part = np.zeros((size, matrix.shape[1]), np.float32)
    found = matrix[start : start + size]
    part[: len(found)] = found
    return part
