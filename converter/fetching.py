"""In which order a conversion reads a remote source, and how many bytes that takes: the schedule as byte ranges."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from converter import units
from converter.errors import RequestError, WorldError
from converter.hf.ahead import Segment
from converter.hf.quantised import Weights
from converter.hf.repository import Repository, Source
from converter.hf.safetensors import StoredTensor
from converter.hf.spool import free_bytes
from converter.mapping import Box, Piece
from converter.plan import ArrayPlan
from converter.reading import ranges
from converter.schedule import Reading, Schedule
from converter.stream import tasks_of

_WINDOW_BYTES, _LEAST_WINDOW = 64 << 20, 16 << 20
"""Read ahead into memory, or on the way into the spool; of a small source, and where many threads read large tasks."""

_OF_CHUNK, _OF_SOURCE = 4, 32
"""The window is at most such a part of the largest chunk, where that is more, and of the source: a small one is over
before a large window would have helped."""

_SPOOL_WINDOW_BYTES = 256 << 20
"""Read ahead into the spool, while what lies there already is walked again."""

_LEAST_SEGMENT, _MOST_SEGMENT = 1 << 20, 8 << 20
"""What one request asks for at most: much enough that its latency matters little."""

_GAP_BYTES = 64 << 10
"""Of a file are rather read in vain than left out by a request more."""

_LEAST_CONNECTIONS, _MOST_CONNECTIONS = 8, 32
"""Requests under way at a time."""

_MERGING = "merging an adapter"


@dataclass(frozen=True)
class Reads:
    """What a conversion reads of a remote source.

    Attributes:
      nbytes: in all.
      spool: folder for what is read more than once, None where that is asked for again.
      spool_bytes: it takes at most.
    """

    nbytes: int
    spool: Path | None
    spool_bytes: int


def reading(threads: int, nbytes: int, largest_chunk: int) -> Reading:
    """The memory of reading ahead: the window, and what the tasks at work took out of it.

    Args:
      nbytes: of the source.
      largest_chunk: bytes; what is promised on memory grows with it, so that the window may.
    """
    most = min(max(_WINDOW_BYTES, largest_chunk // _OF_CHUNK), max(_LEAST_WINDOW, nbytes // _OF_SOURCE))
    window = min(most, max(_WINDOW_BYTES, 2 * threads * _MOST_SEGMENT))
    # The tasks of all threads together hold no more than is read ahead.
    segment = min(_MOST_SEGMENT, max(_LEAST_SEGMENT, window // max(2 * threads, _LEAST_CONNECTIONS)))
    return Reading(window + threads * segment, segment, window)


def segments(schedule: Schedule, weights: Weights, in_memory: Container[str], *, spooled: bool) -> Iterator[Segment]:
    """What the writer reads, in the order in which it does.

    Args:
      in_memory: tensors of which what is read is made in memory, decoded or merged.
      spooled: what is read again later is kept, so that it is fetched once.
    """
    kept: set[tuple[str, int, int]] = set()
    again = {array.name for array in schedule.plan.arrays if spooled and _read_again(schedule, array)}
    walked = _Walked(weights, again)
    for number, group in enumerate(schedule.groups):
        joined = _Joined(number, schedule.reading.task_bytes or _MOST_SEGMENT)
        for task in tasks_of(group, schedule.reading.task_bytes, in_memory, walked.lacks):
            joined.begin(task.piece.tensor if task.piece.tensor in weights.encodings else None)
            for tensor, begin, end in ranges(weights, task.piece, task.source):
                joined.add(tensor, begin, end, keep=task.chunk.array.name in again)
        walked.end_group()
        for segment in joined.segments(backwards=bool(number % 2)):
            key = (segment.file, segment.begin, segment.end)
            if key not in kept:
                yield segment
            if segment.keep:
                kept.add(key)


class _Walked:
    """What earlier groups have read and is kept: its tasks need not even be made, of which there may be millions."""

    def __init__(self, weights: Weights, again: Container[str]) -> None:
        """Begin; `again`: the arrays whose sources are kept."""
        self._weights = weights
        self._again = again
        self._before: set[tuple[str, int, int]] = set()
        self._now: set[tuple[str, int, int]] = set()

    def lacks(self, array: ArrayPlan, piece: Piece, boxes: Iterable[Box]) -> bool:
        """Whether anything must be fetched for these boxes of a piece."""
        if array.name not in self._again:
            return True
        read = {(tensor.file, begin, end) for box in boxes for tensor, begin, end in ranges(self._weights, piece, box)}
        self._now |= read
        return not read <= self._before

    def end_group(self) -> None:
        self._before |= self._now
        self._now = set()


@dataclass
class _Growing:
    """A segment to which ranges are added; `last`: the number of the read that was added last."""

    file: str
    begin: int
    end: int
    parts: list[tuple[int, int]]
    keep: bool
    last: int

    def add(self, begin: int, end: int, most: int, number: int) -> bool:
        """Add the range of a read, unless it lies too far away or makes the segment too large."""
        gap = 0 if self.keep else _GAP_BYTES
        grows = end > self.end
        if not self.begin <= begin <= self.end + gap or (grows and end - self.begin > most):
            return False
        self.end, self.last = max(end, self.end), number
        self.parts.append((begin, end))
        return True


class _Joined:
    """What the tasks of a group read, one after the other; ranges that lie beside each other are one segment."""

    def __init__(self, group: int, most: int) -> None:
        self._grown: list[_Growing] = []
        self._reads = 0
        self._group = group
        self._most = most
        self._encoded: str | None = None
        # The last segment of each kind: scales are read by turns with codes.
        self._latest: dict[tuple[str, int, bool], _Growing] = {}

    def segments(self, *, backwards: bool) -> list[Segment]:
        """In the order in which they are first needed by a walk that goes forwards or backwards."""
        grown = sorted(self._grown, key=lambda each: each.last, reverse=True) if backwards else self._grown
        return [Segment(each.file, each.begin, each.end, tuple(each.parts), self._group, each.keep) for each in grown]

    def begin(self, encoded: str | None) -> None:
        """Begin with a task, which reads what the tensor `encoded` is made of, None for one that is not encoded."""
        if encoded is not None and encoded != self._encoded:
            self._latest.clear()
        self._encoded = encoded

    def add(self, tensor: StoredTensor, begin: int, end: int, *, keep: bool) -> None:
        """Read a range; `keep`: it will be read again later."""
        # What is kept must be found again in the same pieces, so it is cut at every tensor.
        kind = (tensor.file, tensor.offset if keep or self._encoded else -1, keep)
        latest = self._latest.get(kind)
        self._reads += 1
        if latest is not None and latest.add(begin, end, self._most, self._reads):
            return
        if self._encoded is None:
            self._latest.clear()
        self._latest[kind] = _Growing(tensor.file, begin, end, [(begin, end)], keep, self._reads)
        self._grown.append(self._latest[kind])


def _read_again(schedule: Schedule, array: ArrayPlan) -> bool:
    """Whether some of an array's sources are read more than once: in several passes, or by two pieces."""
    names = [piece.tensor for piece in array.parameter.pieces]
    return schedule.passes(array) > 1 or len(set(names)) < len(names)


def used(schedule: Schedule, weights: Weights) -> dict[int, list[tuple[str, int, int]]]:
    """The tensors that are read more than once, by the last group that reads them, as byte ranges."""
    found: dict[int, list[tuple[str, int, int]]] = {}
    for name, (_, last) in _lifetimes(schedule).items():
        found.setdefault(last, []).extend(map(_range, weights.stored(name)))
    return found


def _range(tensor: StoredTensor) -> tuple[str, int, int]:
    return tensor.file, tensor.offset, tensor.offset + tensor.nbytes


def _lifetimes(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """First and last group that reads a tensor, for those that are read more than once."""
    found: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(schedule.groups):
        for array in {id(chunk.array): chunk.array for chunk in group}.values():
            if _read_again(schedule, array):
                for piece in array.parameter.pieces:
                    found[piece.tensor] = (found.get(piece.tensor, (number,))[0], number)
    return found


def spool_bytes(schedule: Schedule, weights: Weights) -> int:
    """What the spool takes at most: the tensors it holds at a time, and what is read ahead."""
    changes: dict[int, int] = {}
    held = most = total = 0
    for name, (first, last) in _lifetimes(schedule).items():
        size = sum(tensor.nbytes for tensor in weights.stored(name))
        total += size
        changes[first] = changes.get(first, 0) + size
        # They go when the group after has begun.
        changes[last + 2] = changes.get(last + 2, 0) - size
    for number in sorted(changes):
        held += changes[number]
        most = max(most, held)
    return min(most + _SPOOL_WINDOW_BYTES, total)


def plan_reads(weights: Weights, schedule: Schedule, in_memory: Container[str], spool: Path | None) -> Reads | None:
    """What a conversion will read over the network, None where the source is here.

    Args:
      in_memory: tensors of which what is read is made in memory.
      spool: folder for what is read more than once; not used where it has not the room.
    """
    if weights.repository.remote is None:
        return None
    needed = spool_bytes(schedule, weights)
    fits = spool is not None and 0 < needed <= free_bytes(spool)
    parts = segments(schedule, weights, in_memory, spooled=fits)
    return Reads(sum(part.size for part in parts), spool if fits else None, needed)


@contextlib.contextmanager
def reading_ahead(
    weights: Weights, schedule: Schedule, in_memory: Container[str], reads: Reads | None, stop: threading.Event
) -> Iterator[None]:
    """Fetch what a conversion is about to read, where it comes over the network, until the block ends."""
    remote = weights.repository.remote
    if remote is None or reads is None:
        yield
        return
    spooled = reads.spool is not None
    remote.read_ahead(
        segments(schedule, weights, in_memory, spooled=spooled),
        limit=schedule.reading.window,
        spool_limit=_SPOOL_WINDOW_BYTES,
        connections=min(_MOST_CONNECTIONS, schedule.reading.window // (schedule.reading.task_bytes or _MOST_SEGMENT)),
        spool=reads.spool,
        used=used(schedule, weights) if spooled else {},
        stop=stop,
    )
    try:
        yield
    finally:
        remote.close()


@contextlib.contextmanager
def tensors_held(weights: Weights, names: Iterable[str], spool: Path | None, threads: int) -> Iterator[None]:
    """Have whole tensors at hand for as long as the block lasts, whatever parts of them are read how often.

    Raises:
      WorldError: the source is remote, and there is no room on disk for them.
    """
    tensors = [tensor for name in dict.fromkeys(names) for tensor in weights.stored(name)]
    with _held(weights.repository, tensors, spool, threads, "comparing with a source"):
        yield


def check_adapter(adapter: Source, spool: Path | None) -> None:
    """Raise RequestError where an adapter is to be merged that is read over the network and may be kept nowhere."""
    if spool is None and adapter.read_from_afar:
        raise _no_spool(_MERGING)


def _no_spool(what: str) -> RequestError:
    return RequestError(
        f"{what} that is read over the network needs it on disk meanwhile: spool_dir=none does not allow that; "
        "give --spool_dir=FOLDER, or --cache_dir=FOLDER"
    )


@contextlib.contextmanager
def adapter_held(adapter: Repository, spool: Path | None, threads: int) -> Iterator[None]:
    """Have the matrices of an adapter that is merged at hand for as long as the block lasts, checked.

    Every box of the base that is read needs much of them again.

    Raises:
      WorldError: the adapter is remote, and there is no room on disk for it, or it came damaged.
    """
    with _held(adapter, list(adapter.tensors.values()), spool, threads, _MERGING):
        if adapter.remote is not None:
            adapter.remote.check()
        yield


@contextlib.contextmanager
def _held(
    repository: Repository, tensors: list[StoredTensor], spool: Path | None, threads: int, what: str
) -> Iterator[None]:
    remote = repository.remote
    if remote is None:
        yield
        return
    needed = sum(tensor.nbytes for tensor in tensors)
    if spool is None:
        raise _no_spool(what)
    if free_bytes(spool) < needed:
        raise WorldError(
            f"{what} that is read over the network takes {units.size(needed)} of disk at a time, and {spool} has not: "
            "give --spool_dir=FOLDER with that, or --cache_dir=FOLDER with all of it"
        )
    connections = min(_MOST_CONNECTIONS, max(_LEAST_CONNECTIONS, threads))
    with remote.held([*map(_range, tensors)], spool, connections):
        yield
