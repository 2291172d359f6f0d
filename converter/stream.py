"""The writer: fills chunks from the source, compresses them and hands them to the store, group by group."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from converter import datafiles
from converter.copying import copy_box
from converter.hf import decoding
from converter.mapping import Box, Piece
from converter.maxtext.orbax import Store
from converter.plan import ArrayPlan, Chunk
from converter.reading import ReadBox
from converter.schedule import PARALLEL_ZSTD_BYTES, Schedule, aligned

_TASK_BYTES = 4 << 20
"""Bytes one thread copies before it takes the next task."""

_BUNDLE = 64
"""Tasks at most that a thread takes at once where they are small."""

_ELEMENT_BYTES = 2
"""Of a source's element, mostly."""


class Stopped(Exception):  # noqa: N818 - not an error
    """Another thread asked the writer to stop."""


@dataclass(frozen=True)
class Writer:
    """Writes the chunks of a schedule.

    Attributes:
      read: gives the source's content for a box of a piece.
      encoded: names of the tensors that `read` decodes, for which it needs memory.
      prefetch: reads a range of a tensor's elements ahead; None leaves that to the kernel.
      on_group: called with the number of each group when its reading begins; that of all groups before is over.
      on_chunk: called with each filled chunk and its content, from several threads.
      on_stored: called with each chunk's uncompressed and stored bytes, from several threads.
      stop: when set, the writer gives up at the next opportunity.
    """

    schedule: Schedule
    read: ReadBox
    encoded: Container[str]
    prefetch: Callable[[str, int, int], None] | None
    on_group: Callable[[int], None] | None
    on_chunk: Callable[[Chunk, np.ndarray], None] | None
    on_stored: Callable[[int, int], None]
    stop: threading.Event

    def write(self, store: Store) -> None:
        """Write every chunk of the schedule.

        Raises:
          Stopped: `stop` was set.
        """
        with ThreadPoolExecutor(self.schedule.threads, thread_name_prefix="converter") as pool:
            try:
                self._write_groups(pool, store)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _write_groups(self, pool: ThreadPoolExecutor, store: Store) -> None:
        """Fill group after group; each is stored while the next is filled.

        The pool works in the order of submission: a thread takes what is to be stored first, else what is to be filled.
        """
        # The same blocks of memory again and again: giving them back and taking them anew costs a page fault each time,
        # in which the kernel, and perhaps a hypervisor below it, finds and clears another page.
        blocks = [np.empty(self.schedule.largest_group, np.uint8) for _ in range(self.schedule.at_once)]
        storing: deque[list[Future[None]]] = deque()
        for number, group in enumerate(self.schedule.groups):
            if len(storing) == self.schedule.at_once:
                _finish(storing.popleft())
            buffers = _buffers(group, blocks[number % len(blocks)])
            if self.on_group is not None:
                self.on_group(number)
            self._fill(pool, group, buffers, backwards=bool(number % 2))
            workers = self.schedule.workers(group)
            storing.append([pool.submit(self._store, chunk, buffers, workers, store) for chunk in group])
        for futures in storing:
            _finish(futures)

    def _fill(
        self, pool: ThreadPoolExecutor, group: tuple[Chunk, ...], buffers: dict[Chunk, np.ndarray], *, backwards: bool
    ) -> None:
        tasks = list(tasks_of(group, self.schedule.reading.task_bytes, self.encoded))
        if backwards:
            # What the last walk read last is still in the page cache.
            tasks.reverse()

        def fill(tasks: Sequence[Task]) -> None:
            if self.stop.is_set():
                raise Stopped
            for task in tasks:
                if self.prefetch is not None and task.first:
                    self.prefetch(task.piece.tensor, *task.piece.view.extent(task.source))
                content = self.read(task.piece, task.source)
                copy_box(buffers[task.chunk][task.target], content, task.chunk.array.parameter.steps)

        for _ in pool.map(fill, _bundles(tasks)):
            pass

    def _store(self, chunk: Chunk, buffers: dict[Chunk, np.ndarray], workers: int, store: Store) -> None:
        if self.stop.is_set():
            raise Stopped
        content = buffers.pop(chunk)
        if self.on_chunk is not None:
            self.on_chunk(chunk, content)
        value = chunk.array.format.encode(content, workers if chunk.nbytes >= PARALLEL_ZSTD_BYTES else 1)
        store(chunk.array.name, chunk.array.format.key(chunk.index), value)
        self.on_stored(chunk.nbytes, datafiles.size(value))


def _finish(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()


def _buffers(group: tuple[Chunk, ...], block: np.ndarray) -> dict[Chunk, np.ndarray]:
    """An array for each chunk of a group, in a block of memory."""
    buffers = {}
    start = 0
    for chunk in group:
        array = chunk.array
        buffers[chunk] = block[start : start + chunk.nbytes].view(array.dtype).reshape(array.chunk_shape)
        start += aligned(chunk.nbytes)
        if array.padded:
            # Where no piece reaches: rows that MaxText's vocabulary has beyond the repository's.
            buffers[chunk][...] = array.parameter.fill
    return buffers


@dataclass(frozen=True)
class Task:
    """Copy a box of a piece's view into a box of a chunk's buffer; `first`: no earlier task reads those rows."""

    piece: Piece
    chunk: Chunk
    target: Box
    source: Box
    first: bool

    @property
    def nbytes(self) -> int:
        count: int = math.prod(part.stop - part.start for part in self.source)
        return count * self.chunk.array.dtype.itemsize


def _bundles(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    """Small tasks together: for a vector of a few bytes, handing it to a thread would take longer than the copy."""
    bundle: list[Task] = []
    size = 0
    for task in tasks:
        bundle.append(task)
        size += max(task.nbytes, _TASK_BYTES // _BUNDLE)
        if size >= _TASK_BYTES:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


def tasks_of(
    group: tuple[Chunk, ...],
    read_bytes: int | None,
    encoded: Container[str] = (),
    wanted: Callable[[ArrayPlan, Piece, list[Box]], bool] | None = None,
) -> Iterator[Task]:
    """What fills a group, ordered so that tasks which read the same rows come together.

    Args:
      read_bytes: of the source that one task may read, None for any number.
      encoded: the tensors that are decoded.
      wanted: whether the tasks are wanted that read these boxes of a piece; None for all.
    """
    by_array: dict[int, list[Chunk]] = {}
    for chunk in group:
        by_array.setdefault(id(chunk.array), []).append(chunk)
    for chunks in by_array.values():
        for piece in chunks[0].array.pieces_near([chunk.box for chunk in chunks]):
            size = decoding.TASK_BYTES if piece.tensor in encoded else _TASK_BYTES
            boxes = [(chunk, *found) for chunk in chunks if (found := intersect(piece, chunk.box))]
            if wanted is not None and not wanted(chunks[0].array, piece, [source for *_, source in boxes]):
                continue
            parts = [
                [
                    Task(piece, chunk, *box, first=not (i and chunk.array.strided))
                    for box in _split(piece, chunk, target, source, size, read_bytes)
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


def _split(
    piece: Piece, chunk: Chunk, target: Box, source: Box, nbytes: int, read_bytes: int | None
) -> Iterator[tuple[Box, Box]]:
    """Cut a copy into tasks of about `nbytes`, along the axis that lies outermost in the file as far as that goes."""
    sizes = [part.stop - part.start for part in source]
    total = math.prod(sizes) * chunk.array.dtype.itemsize
    axes = piece.view.stored_axes
    if read_bytes is not None:
        # Whole rows are read, so that nothing is gained by cutting those.
        read = piece.view.rows(source)
        nbytes = min(nbytes, total * read_bytes // max(1, (read.stop - read.start) * _ELEMENT_BYTES))
        axes = axes[: 1 + next((i for i, axis in enumerate(axes) if sizes[axis] > 1), 0)]
    if total <= nbytes:
        yield target, source
        return
    steps = list(sizes)
    for axis in axes:
        if total <= nbytes:
            break
        steps[axis] = max(1, sizes[axis] * nbytes // total)
        total = total * steps[axis] // sizes[axis]
    order = [*piece.view.stored_axes, *piece.view.stacked]
    for corner in itertools.product(*(range(0, sizes[axis], steps[axis]) for axis in order)):
        to, of = list(target), list(source)
        for axis, first in zip(order, corner, strict=True):
            last = min(first + steps[axis], sizes[axis])
            step = target[axis].step or 1
            start = target[axis].start + first * step
            to[axis] = slice(start, start + (last - first - 1) * step + 1, step)
            of[axis] = slice(source[axis].start + first, source[axis].start + last)
        yield tuple(to), tuple(of)
