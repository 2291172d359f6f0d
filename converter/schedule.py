"""In which groups chunks are written, so that memory stays within a budget and sources are read few times.

Chunks of one group are filled in one walk over their sources, and compressed and stored side by side. A
scanned array is cut across all of its layers, so each of its chunks needs a part of every row of every layer: the
array's sources are walked once per group, from memory where the page cache holds them, from disk where not.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from converter.datafiles import OBJECT_BYTES
from converter.memory import LARGE_CHUNK_BYTES
from converter.plan import ArrayPlan, Chunk, Plan

BASE_BYTES = 95_000_000
"""Anonymous memory of the process before the first chunk: Python, JAX, Orbax, TensorStore."""

DEVICE_BYTES = 120_000
"""Anonymous memory that each simulated device adds."""

_WORKER_BYTES, _WORKERS_BYTES = 16_000_000, 36_000_000
"""What zstd takes for each of several threads that compress one chunk together, and for all of them."""

_WINDOW_BYTES = 6 * OBJECT_BYTES
"""On their way into a bucket at a time, so that no connection waits for the next object."""

_GAP_BYTES = 16 << 20
"""Of gaps in the heap, between what lives short and what lives long."""

_COMPRESSED = 0.8
"""What zstd leaves of bfloat16 weights."""

_STEP_BYTES = 1 << 20
"""Between two budgets that are compared."""

_MARGIN = 0.95
"""Of the promise may be predicted, since a prediction is not exact."""

PARALLEL_ZSTD_BYTES = 16 << 20
"""Chunks from this size on are compressed by several threads when there are fewer chunks than threads."""

_BUSY_BYTES = 96 << 20
"""Of chunks in memory keep the threads busy."""

PROMISED_BYTES = 400_000_000
PROMISED_CHUNKS = 2.5
"""The promise: peak anonymous memory is at most so many bytes plus so many times the largest chunk."""


@dataclass(frozen=True)
class Reading:
    """What reading the source takes.

    Attributes:
      memory: bytes.
      task_bytes: of the source that one task may read, None for any number.
      window: bytes that are read ahead.
    """

    memory: int
    task_bytes: int | None
    window: int


MAPPED = Reading(0, None, 0)
"""Of files that are mapped: their pages are the kernel's."""


@dataclass(frozen=True)
class Schedule:
    """A plan's chunks in groups.

    Attributes:
      budget: bytes of uncompressed chunks in memory; one chunk at least.
      threads: how many threads fill, compress and write.
      at_once: groups in memory: with two, the next one is filled while the last one is compressed.
      reading: what reading the source takes.
      remote: the checkpoint goes into a bucket.
    """

    plan: Plan
    budget: int
    threads: int
    at_once: int
    reading: Reading = MAPPED
    remote: bool = False

    @property
    def group_budget(self) -> int:
        """Bytes of chunks in a group."""
        return self.budget // self.at_once

    @cached_property
    def groups(self) -> tuple[tuple[Chunk, ...], ...]:
        return tuple(self._group())

    def _group(self) -> Iterator[tuple[Chunk, ...]]:
        group: list[Chunk] = []
        size = 0
        for array in self.plan.arrays:
            if group and array.strided and size + array.nbytes > self.group_budget:
                # An array that began in what is left of a group would be walked once more.
                yield tuple(group)
                group, size = [], 0
            for chunk in array.chunks():
                if group and size + chunk.nbytes > self.group_budget:
                    yield tuple(group)
                    group, size = [], 0
                group.append(chunk)
                size += chunk.nbytes
        if group:
            yield tuple(group)

    @property
    def returns_memory(self) -> bool:
        """Whether the compressed forms of chunks are given back to the system each time."""
        return self.plan.largest_chunk >= LARGE_CHUNK_BYTES

    @property
    def largest_group(self) -> int:
        """Bytes of the largest group, each chunk aligned."""
        return max((sum(aligned(chunk.nbytes) for chunk in group) for group in self.groups), default=0)

    @property
    def window(self) -> int:
        """Stored bytes that are on their way into a bucket at a time; 0 where they go to a disk."""
        return _window(self.budget) if self.remote else 0

    @property
    def peak_memory(self) -> int:
        """Predicted peak of anonymous memory, bytes."""
        together = (self.groups[i : i + self.at_once] for i in range(max(1, len(self.groups) - self.at_once + 1)))
        used = (
            sum(map(self._shared, groups)) + self._peak([chunk.nbytes for group in groups for chunk in group])
            for groups in together
            if any(groups)
        )
        return _process(self.plan.devices, self.reading.memory) + max(used, default=0)

    def workers(self, group: tuple[Chunk, ...]) -> int:
        """Threads that compress one large chunk of a group together, where there is no other work for them."""
        large = [chunk.nbytes for chunk in group if chunk.nbytes >= PARALLEL_ZSTD_BYTES]
        if self.at_once > 1 or not large:
            return 1
        promised = PROMISED_BYTES + PROMISED_CHUNKS * self.plan.largest_chunk
        used = _process(self.plan.devices, self.reading.memory) + self._peak([chunk.nbytes for chunk in group])
        counts = range(self.threads // len(large), 1, -1)
        return next((count for count in counts if used + _together(large, count) <= promised), 1)

    def _shared(self, group: tuple[Chunk, ...]) -> int:
        """What zstd takes where several threads compress one chunk together."""
        large = [chunk.nbytes for chunk in group if chunk.nbytes >= PARALLEL_ZSTD_BYTES]
        return _together(large, self.workers(group))

    def _peak(self, chunks: Sequence[int]) -> int:
        return _peak(self.plan, chunks, self.threads, self.window)

    def rereads(self, memory_limit: int) -> bool:
        """Whether the page cache is too small for the sources that a pass over them leaves for the next pass.

        Args:
          memory_limit: bytes this process may use, its page cache included.
        """
        walked = (array.nbytes for array in self.plan.arrays if self.passes(array) > 1)
        return max(walked, default=0) > memory_limit - self.peak_memory

    @property
    def walks_once(self) -> bool:
        """Whether no source is walked again."""
        return all(self.passes(array) == 1 for array in self.plan.arrays)

    def passes(self, array: ArrayPlan) -> int:
        """How often the array's sources are walked."""
        if not array.strided:
            return 1
        return math.ceil(math.prod(array.grid) / max(1, self.group_budget // array.chunk_nbytes))


def aligned(size: int) -> int:
    """The next multiple of a cache line, 64 bytes."""
    return -(-size // 64) * 64


def _process(devices: int, scratch: int) -> int:
    return BASE_BYTES + DEVICE_BYTES * devices + scratch


def _window(budget: int) -> int:
    return max(_WINDOW_BYTES, budget // 4)


def _peak(plan: Plan, chunks: Sequence[int], threads: int, window: int) -> int:
    """Bytes for chunks of these sizes in memory, and for what comes of them.

    Args:
      window: bytes that are on their way into a bucket, 0 on a disk.
    """
    return sum(chunks) + _stored(plan, chunks, threads, window)


def _stored(plan: Plan, chunks: Sequence[int], threads: int, window: int) -> int:
    """Bytes beside chunks of these sizes: the stored form of those at work, and what is being sent."""
    most = heapq.nlargest(threads, chunks)
    # What is not compressed is written to a disk from where it is, and copied on its way into a bucket.
    share = _COMPRESSED if plan.storage.compression else float(window > 0)
    stored = [int(share * chunk) for chunk in most]
    # An object is on its way, however large, the next one is gathered, and connections hold something, too.
    sending = max(window, OBJECT_BYTES + max(stored, default=0)) + 3 * OBJECT_BYTES if window else 0
    return sum(stored) + sending + _GAP_BYTES


def _together(chunks: Sequence[int], workers: int) -> int:
    """Bytes that zstd takes for chunks of these sizes beyond their compressed form, measured with its version 1.5.7."""
    if workers == 1:
        return 0
    return sum(min(_WORKERS_BYTES + workers * _WORKER_BYTES, 2 * chunk) for chunk in chunks)


def make_schedule(
    plan: Plan,
    budget: int | None,
    threads: int,
    memory_limit: int,
    reading: Reading = MAPPED,
    *,
    remote: bool = False,
) -> Schedule:
    """Choose the groups; None leaves the budget to what the promise on memory allows.

    Where the page cache holds the sources, two small groups at a time keep all threads busy; where it does not, a
    large one walks them less often.

    Args:
      budget: bytes of chunks in memory, as the user gave it.
      memory_limit: bytes this process may use; 0 where nothing caches the source.
      reading: what reading the source takes.
      remote: the checkpoint goes into a bucket.
    """
    chunk = max(1, plan.largest_chunk)
    promised = _promised_budget(plan, threads, memory_limit, reading, remote) if budget is None else budget
    enough = 2 * chunk * math.ceil(max(_BUSY_BYTES / chunk, threads) / 2)
    overlapped = Schedule(plan, promised if budget is not None else min(promised, enough), threads, 2, reading, remote)
    in_turn = Schedule(plan, promised, threads, 1, reading, remote)
    if promised < 2 * chunk or overlapped.rereads(memory_limit):
        return in_turn
    # What comes from afar and is walked again lies on disk meanwhile: a copy that only one walk does without.
    if reading.task_bytes is not None and in_turn.walks_once and not overlapped.walks_once:
        return in_turn
    return overlapped


def _promised_budget(plan: Plan, threads: int, memory_limit: int, reading: Reading, remote: bool) -> int:
    """Bytes of chunks that the promise on memory allows, and no more than a quarter of the machine."""
    chunk = max(1, plan.largest_chunk)
    promised = (PROMISED_BYTES + PROMISED_CHUNKS * chunk) * _MARGIN
    room = min(promised, max(memory_limit / 4, PROMISED_BYTES)) - _process(plan.devices, reading.memory)
    steps = range(0, max(0, int(room)), _STEP_BYTES)

    def peak(budget: int) -> int:
        chunks = [chunk] * max(1, budget // chunk)
        return budget + _stored(plan, chunks, threads, _window(budget) if remote else 0)

    return max(chunk, (bisect.bisect_right(steps, room, key=peak) - 1) * _STEP_BYTES)
