"""The writer: fills chunks from the source, compresses them and hands them to the key-value store, group by group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from converter import memory
from converter.copying import copy_box
from converter.mapping import Box, Piece
from converter.maxtext.orbax import OpenArray
from converter.plan import Chunk
from converter.reading import ReadBox
from converter.schedule import Schedule, aligned

_TASK_BYTES = 8 << 20
"""Bytes one thread copies before it takes the next task."""

_PARALLEL_ZSTD_BYTES = 16 << 20
"""Chunks from this size on are compressed by several threads when there are fewer chunks than threads."""


class Stopped(Exception):  # noqa: N818 - not an error
    """Another thread asked the writer to stop."""


@dataclass(frozen=True)
class Writer:
    """Writes the chunks of a schedule.

    Attributes:
      read: gives the source's content for a box of a piece.
      prefetch: reads a range of a tensor's elements ahead; None leaves that to the kernel.
      on_chunk: called with each filled chunk and its content, from several threads.
      on_stored: called with each chunk's uncompressed and stored bytes, from several threads.
      stop: when set, the writer gives up at the next opportunity.
      task_bytes: one thread copies before it takes the next task.
    """

    schedule: Schedule
    read: ReadBox
    prefetch: Callable[[str, int, int], None] | None
    on_chunk: Callable[[Chunk, np.ndarray], None] | None
    on_stored: Callable[[int, int], None]
    stop: threading.Event
    task_bytes: int = _TASK_BYTES

    def write(self, arrays: Iterable[OpenArray]) -> None:
        """Write every chunk of the schedule into `arrays`.

        Raises:
          Stopped: `stop` was set.
        """
        stores = {array.leaf.name: array.store for array in arrays}
        batches = _Batches(self.schedule) if self.schedule.plan.storage.ocdbt else None
        try:
            # Small chunks are made in one block of memory, again and again: giving it back and taking it anew costs a
            # page fault for every 4 KiB. Large ones are given back as soon as they are compressed.
            small = self.schedule.plan.largest_chunk < memory.LARGE_CHUNK_BYTES
            block = np.empty(self.schedule.largest_group, np.uint8) if small else None
            with ThreadPoolExecutor(self.schedule.threads, thread_name_prefix="converter") as pool:
                for number, group in enumerate(self.schedule.groups):
                    buffers = _buffers(group, block)
                    self._fill(pool, group, buffers, backwards=bool(number % 2))
                    if batches is not None:
                        # The last commit's values are gone before compressing makes new ones.
                        batches.wait()
                    self._store(pool, group, buffers, stores, batches)
            if batches is not None:
                batches.finish()
        except BaseException:
            if batches is not None:
                batches.abort()
            raise

    def _fill(
        self, pool: ThreadPoolExecutor, group: tuple[Chunk, ...], buffers: dict[Chunk, np.ndarray], *, backwards: bool
    ) -> None:
        tasks = list(_tasks(group, self.task_bytes))
        if backwards:
            # What the last walk read last is still in the page cache.
            tasks.reverse()

        def fill(task: _Task) -> None:
            if self.stop.is_set():
                raise Stopped
            if self.prefetch is not None and task.first:
                self.prefetch(task.piece.tensor, *task.piece.view.extent(task.source))
            content = self.read(task.piece, task.source)
            copy_box(buffers[task.chunk][task.target], content, task.chunk.array.parameter.steps)

        for _ in pool.map(fill, tasks):
            pass

    def _store(
        self,
        pool: ThreadPoolExecutor,
        group: tuple[Chunk, ...],
        buffers: dict[Chunk, np.ndarray],
        stores: Mapping[str, ts.KvStore],
        batches: _Batches | None,
    ) -> None:
        workers = max(1, self.schedule.threads // len(group))

        def store(chunk: Chunk) -> None:
            if self.stop.is_set():
                raise Stopped
            content = buffers.pop(chunk)
            if self.on_chunk is not None:
                self.on_chunk(chunk, content)
            value = chunk.array.format.encode(content, workers if chunk.nbytes >= _PARALLEL_ZSTD_BYTES else 1)
            del content
            key, target, stored = chunk.array.format.key(chunk.index), stores[chunk.array.name], len(value)
            if batches is None:
                target.write(key, value).result()
            else:
                batches.write(target, key, value)
            self.on_stored(chunk.nbytes, stored)

        for _ in pool.map(store, group):
            pass


class _Batches:
    """Writes to an OCDBT database in transactions of a bounded size, one of them being committed at a time.

    A transaction holds its values in memory; without one, every chunk would be a file of its own.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._limit = schedule.batch
        self._release = schedule.plan.largest_chunk >= memory.LARGE_CHUNK_BYTES
        self._lock = threading.Lock()
        self._transaction = ts.Transaction()
        self._size = 0
        self._committing: ts.Future[Any] | None = None

    def write(self, store: ts.KvStore, key: str, value: bytes) -> None:
        with self._lock:
            store.with_transaction(self._transaction).write(key, value).result()
            self._size += len(value)
            if self._size >= self._limit:
                self._commit()

    def wait(self) -> None:
        """Until the last commit is done."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None
            if self._release:
                memory.release()

    def finish(self) -> None:
        with self._lock:
            self._commit()
            self.wait()

    def abort(self) -> None:
        """Give up what is not committed; nothing is written any more when this returns."""
        with self._lock:
            self._transaction.abort()
            if self._committing is not None:
                # Whether it succeeds no longer matters, only that it has ended.
                self._committing.exception()

    def _commit(self) -> None:
        self.wait()
        self._committing = self._transaction.commit_async()
        self._transaction, self._size = ts.Transaction(), 0


def _buffers(group: tuple[Chunk, ...], block: np.ndarray | None) -> dict[Chunk, np.ndarray]:
    """An array for each chunk of a group, in `block` where there is one."""
    buffers = {}
    start = 0
    for chunk in group:
        array = chunk.array
        if block is None:
            buffers[chunk] = np.empty(array.chunk_shape, array.dtype)
        else:
            buffers[chunk] = block[start : start + chunk.nbytes].view(array.dtype).reshape(array.chunk_shape)
            start += aligned(chunk.nbytes)
        if array.padded:
            # Where no piece reaches: rows that MaxText's vocabulary has beyond the repository's.
            buffers[chunk][...] = array.parameter.fill
    return buffers


@dataclass(frozen=True)
class _Task:
    """Copy a box of a piece's view into a box of a chunk's buffer; `first`: no earlier task reads those rows."""

    piece: Piece
    chunk: Chunk
    target: Box
    source: Box
    first: bool


def _tasks(group: tuple[Chunk, ...], size: int) -> Iterator[_Task]:
    """What fills a group, ordered so that tasks which read the same rows come together."""
    by_array: dict[int, list[Chunk]] = {}
    for chunk in group:
        by_array.setdefault(id(chunk.array), []).append(chunk)
    for chunks in by_array.values():
        for piece in chunks[0].array.parameter.pieces:
            boxes = [(chunk, *found) for chunk in chunks if (found := intersect(piece, chunk.box))]
            parts = [
                [
                    _Task(piece, chunk, *box, first=not (i and chunk.array.strided))
                    for box in _split(piece, chunk, target, source, size)
                ]
                for i, (chunk, target, source) in enumerate(boxes)
            ]
            for i in range(max(map(len, parts), default=0)):
                yield from (tasks[i] for tasks in parts if i < len(tasks))


def intersect(piece: Piece, box: Box) -> tuple[Box, Box] | None:
    """The part of a piece inside `box` of its array: as a box relative to `box`, and as a box of the view."""
    target, source = [], []
    for filled, read, wanted in zip(piece.target, piece.source, box, strict=True):
        step = filled.step or 1
        first = max(0, -(-(wanted.start - filled.start) // step))
        last = -(-(min(wanted.stop, filled.stop) - filled.start) // step)
        if first >= last:
            return None
        start = filled.start + first * step - wanted.start
        target.append(slice(start, start + (last - first - 1) * step + 1, step))
        source.append(slice(read.start + first, read.start + last))
    return tuple(target), tuple(source)


def _split(piece: Piece, chunk: Chunk, target: Box, source: Box, size: int) -> Iterator[tuple[Box, Box]]:
    """Cut a copy into tasks of about `size` bytes along the axis that lies outermost in the file."""
    outer = piece.view.outer_axis
    sizes = [part.stop - part.start for part in source]
    total = int(np.prod(sizes, dtype=np.int64)) * chunk.array.dtype.itemsize
    rows = max(1, sizes[outer] * size // max(1, total))
    step = target[outer].step or 1
    for first in range(0, sizes[outer], rows):
        last = min(first + rows, sizes[outer])
        start = target[outer].start + first * step
        part = slice(start, start + (last - first - 1) * step + 1, step)
        read = slice(source[outer].start + first, source[outer].start + last)
        yield (
            (*target[:outer], part, *target[outer + 1 :]),
            (*source[:outer], read, *source[outer + 1 :]),
        )
