"""The plan of a conversion: every array with its chunks, in the order they are written, and what that will take.

Everything that can be wrong with a request or its source is found while the plan is made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from converter.errors import RequestError
from converter.mapping import Box, Parameter, Piece
from converter.maxtext.chunks import ChunkFormat, chunk_format
from converter.maxtext.devices import Partition, partition
from converter.maxtext.layout import ROOT
from converter.maxtext.orbax import Leaf, Storage, chunk_shape, write_metadata


@dataclass(frozen=True, eq=False)
class Chunk:
    """One stored chunk: its place in the grid and the box of the array it holds."""

    array: ArrayPlan
    index: tuple[int, ...]

    @cached_property
    def box(self) -> Box:
        return tuple(
            slice(i * size, (i + 1) * size) for i, size in zip(self.index, self.array.chunk_shape, strict=True)
        )

    @property
    def nbytes(self) -> int:
        return self.array.chunk_nbytes


@dataclass(frozen=True, eq=False)
class ArrayPlan:
    """One array of the checkpoint: what it holds and how it is stored.

    Attributes:
      parameter: its content.
      leaf: its name, shape, dtype and sharding for Orbax.
      partition: the partition spec, None when not sharded.
      chunk_shape: of a stored chunk; divides `shape`.
      format: of a chunk's bytes.
    """

    parameter: Parameter
    leaf: Leaf
    partition: Partition | None
    chunk_shape: tuple[int, ...]
    format: ChunkFormat

    @property
    def name(self) -> str:
        return self.leaf.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def dtype(self) -> np.dtype:
        return self.leaf.dtype

    @property
    def nbytes(self) -> int:
        return self.leaf.nbytes

    @cached_property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @cached_property
    def strided(self) -> bool:
        """Whether every chunk needs a part of all of the sources, so that each group of chunks reads them anew."""
        return any(
            size < extent and (extent == 1 or axis != piece.view.outer_axis)
            for piece in self.parameter.pieces[:1]
            for axis, (size, extent) in enumerate(zip(self.chunk_shape, self.shape, strict=True))
            if len(self.parameter.pieces) == 1 or axis not in piece.view.stacked
        )

    @cached_property
    def padded(self) -> bool:
        """Whether some elements come from no tensor."""
        boxes = (math.prod(part.stop - part.start for part in piece.source) for piece in self.parameter.pieces)
        return int(sum(boxes)) < math.prod(self.shape)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        return tuple(n // c for n, c in zip(self.shape, self.chunk_shape, strict=True))

    def chunks(self) -> Iterator[Chunk]:
        """In grid order, the last axis fastest."""
        return (Chunk(self, index) for index in itertools.product(*map(range, self.grid)))

    def pieces_near(self, boxes: Sequence[Box]) -> list[Piece]:
        """The pieces that touch what lies between boxes of the array, in order: of experts, a few of thousands."""
        pieces = self.parameter.pieces
        if len(pieces) <= 1:
            return list(pieces)
        low, high = _bounds(boxes)
        begin, end = self._piece_bounds
        touched = (begin < high.max(axis=0)) & (end > low.min(axis=0))
        return [pieces[number] for number in touched.all(axis=1).nonzero()[0]]

    @cached_property
    def _piece_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return _bounds([piece.target for piece in self.parameter.pieces])


def _bounds(boxes: Sequence[Box]) -> tuple[np.ndarray, np.ndarray]:
    """Where boxes begin and end, each of shape (boxes, axes)."""
    begin = np.asarray([[part.start for part in box] for box in boxes], np.int64)
    return begin, np.asarray([[part.stop for part in box] for box in boxes], np.int64)


_MOST_CHUNKS = 1_000_000
"""Of one array. An extent that is a large prime number can only be cut into single rows."""


@dataclass(frozen=True)
class Plan:
    """What a conversion will write.

    Attributes:
      arrays: in the order they are written.
      devices, scan, storage: of the request.
    """

    arrays: tuple[ArrayPlan, ...]
    devices: int
    scan: bool
    storage: Storage

    @cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def largest_chunk(self) -> int:
        return max((array.chunk_nbytes for array in self.arrays), default=0)


def array_plan(parameter: Parameter, devices: int, storage: Storage, root: str = ROOT) -> ArrayPlan:
    """How one parameter is stored."""
    leaf = Leaf(root + parameter.path, parameter.shape, parameter.dtype, devices)
    metadata = write_metadata(leaf, storage)
    return ArrayPlan(
        parameter,
        leaf,
        partition(parameter.shape, devices),
        chunk_shape(metadata),
        chunk_format(metadata, storage.zarr3),
    )


def make_plan(
    parameters: list[Parameter],
    positions: Mapping[str, int],
    *,
    devices: int,
    scan: bool,
    storage: Storage,
    root: str = ROOT,
) -> Plan:
    """Plan the parameters over `devices` simulated devices.

    Args:
      positions: rank of every tensor in the order of the files, so that reading goes forward through them.
      root: how the names of all arrays begin.

    Raises:
      RequestError: the arrays would be cut in more chunks than can be planned for, let alone stored.
    """
    arrays = [array_plan(parameter, devices, storage, root) for parameter in parameters]
    for array in arrays:
        if math.prod(array.grid) > _MOST_CHUNKS:
            raise RequestError(
                f"{array.name} of shape {array.shape} would be stored in {math.prod(array.grid)} chunks, each of shape "
                f"{array.chunk_shape}; give a larger --chunk_byte_size or another number of devices"
            )
    arrays.sort(key=lambda array: min((positions[piece.tensor] for piece in array.parameter.pieces), default=0))
    return Plan(tuple(arrays), devices, scan, storage)
