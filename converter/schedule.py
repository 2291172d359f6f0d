"""In which groups chunks are written, so that memory stays within a budget and sources are read few times.

Chunks of one group are filled in one walk over their sources, compressed side by side and committed together. A
scanned array is cut across all of its layers, so each of its chunks needs a part of every row of every layer: the
array's sources are walked once per group, from memory where the page cache holds them, from disk where not.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from converter.memory import LARGE_CHUNK_BYTES
from converter.plan import ArrayPlan, Chunk, Plan

BASE_BYTES = 95_000_000
"""Anonymous memory of the process before the first chunk: Python, JAX, Orbax, TensorStore."""

DEVICE_BYTES = 120_000
"""Anonymous memory that each simulated device adds."""

_MIN_BATCH = 32 << 20

_STORED_FRACTION = 0.8
"""What zstd leaves of bfloat16 weights."""

_MARGIN = 0.95
"""Of the promise may be predicted, since a prediction is not exact."""

_KEPT_BATCHES = 3.5
"""Batches' worth of memory that stays with the process where small chunks come and go."""

_BUSY_BYTES = 96 << 20
"""Of chunks in a group keep the threads busy."""

PROMISED_BYTES = 400_000_000
PROMISED_CHUNKS = 2.5
"""The promise: peak anonymous memory is at most so many bytes plus so many times the largest chunk."""


@dataclass(frozen=True)
class Schedule:
    """A plan's chunks in groups.

    Attributes:
      budget: bytes of uncompressed chunks in a group; one chunk at least.
      threads: how many threads fill, compress and write.
      scratch: bytes that each of them needs to decode its source.
    """

    plan: Plan
    budget: int
    threads: int
    scratch: int = 0

    @cached_property
    def groups(self) -> tuple[tuple[Chunk, ...], ...]:
        return tuple(self._group())

    def _group(self) -> Iterator[tuple[Chunk, ...]]:
        group: list[Chunk] = []
        size = 0
        for array in self.plan.arrays:
            if group and array.strided and size + array.nbytes > self.budget:
                # An array that began in what is left of a group would be walked once more.
                yield tuple(group)
                group, size = [], 0
            for chunk in array.chunks():
                if group and size + chunk.nbytes > self.budget:
                    yield tuple(group)
                    group, size = [], 0
                group.append(chunk)
                size += chunk.nbytes
        if group:
            yield tuple(group)

    @property
    def largest_group(self) -> int:
        """Bytes of the largest group, each chunk aligned."""
        return max((sum(aligned(chunk.nbytes) for chunk in group) for group in self.groups), default=0)

    @property
    def batch(self) -> int:
        """Stored bytes to a transaction."""
        return _batch(self.budget)

    @property
    def peak_memory(self) -> int:
        """Predicted peak of anonymous memory, bytes."""
        chunks = max(self.groups, key=lambda group: sum(chunk.nbytes for chunk in group), default=())
        size = sum(chunk.nbytes for chunk in chunks)
        return _process(self.plan.devices, self.threads * self.scratch) + _peak(
            size, len(chunks), self.plan.largest_chunk, self.threads
        )

    def rereads(self, memory_limit: int) -> bool:
        """Whether the page cache is too small for the sources that a pass over them leaves for the next pass.

        Args:
          memory_limit: bytes this process may use, its page cache included.
        """
        walked = (array.nbytes for array in self.plan.arrays if self.passes(array) > 1)
        return max(walked, default=0) > memory_limit - self.peak_memory

    def passes(self, array: ArrayPlan) -> int:
        """How often the array's sources are walked."""
        if not array.strided:
            return 1
        return math.ceil(math.prod(array.grid) / max(1, self.budget // array.chunk_nbytes))


def aligned(size: int) -> int:
    """The next multiple of a cache line, 64 bytes."""
    return -(-size // 64) * 64


def _process(devices: int, scratch: int) -> int:
    return BASE_BYTES + DEVICE_BYTES * devices + scratch


def _batch(budget: int) -> int:
    """Stored bytes after which what was written is committed to the database."""
    return max(_MIN_BATCH, budget // 4)


def _peak(size: int, count: int, chunk: int, threads: int) -> int:
    """Bytes for a group: its chunks, the compressed form of those at work, and two batches being committed."""
    busy = min(count, threads) * chunk
    batches = 2 if chunk >= LARGE_CHUNK_BYTES else _KEPT_BATCHES
    return int(size + max(busy, _STORED_FRACTION * busy + batches * _batch(size)))


def default_budget(plan: Plan, threads: int, memory_limit: int, scratch: int = 0) -> int:
    """Bytes of chunks in a group: what the promise on memory allows and no more than a quarter of the machine.

    Small chunks need less than that to keep the threads busy, and a group that is small itself stays nearer to the
    processor's caches; only where the page cache cannot hold a stack do larger groups save something, reading.

    Args:
      memory_limit: bytes this process may use.
      scratch: bytes that each thread needs to decode its source.
    """
    chunk = max(1, plan.largest_chunk)
    promised = (PROMISED_BYTES + PROMISED_CHUNKS * chunk) * _MARGIN
    room = min(promised, max(memory_limit / 4, PROMISED_BYTES)) - _process(plan.devices, threads * scratch)
    counts = range(1, max(2, int(room // chunk) + 1))
    count = max(1, bisect.bisect_right(counts, room, key=lambda count: _peak(count * chunk, count, chunk, threads)))
    enough = threads * math.ceil(_BUSY_BYTES / (chunk * threads))
    if enough < count and not Schedule(plan, enough * chunk, threads, scratch).rereads(memory_limit):
        count = enough
    return count * chunk
