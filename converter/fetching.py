"""In which order a conversion reads a remote source, and how many bytes that takes: the schedule as byte ranges."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.errors import RequestError, WorldError
from converter.hf.ahead import Segment
from converter.hf.quantised import Weights
from converter.hf.repository import NUMPY_DTYPES, Repository
from converter.hf.safetensors import StoredTensor
from converter.hf.spool import free_bytes
from converter.plan import ArrayPlan
from converter.schedule import Reading, Schedule
from converter.stream import tasks_of

WINDOW_BYTES = 64 << 20
"""Read ahead."""

_LEAST_SEGMENT, _MOST_SEGMENT = 1 << 20, 8 << 20
"""What one request asks for at most: much enough that its latency matters little."""

_GAP_BYTES = 64 << 10
"""Of a file are rather read in vain than left out by a request more."""

_CONNECTIONS = 32


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


def segment_bytes(threads: int) -> int:
    """What one request asks for, so that the tasks of all threads together hold no more than is read ahead."""
    return min(_MOST_SEGMENT, max(_LEAST_SEGMENT, WINDOW_BYTES // (2 * threads)))


def connections(threads: int) -> int:
    """How many requests are under way at a time."""
    return min(_CONNECTIONS, WINDOW_BYTES // segment_bytes(threads))


def reading(threads: int) -> Reading:
    """The memory of reading ahead: the window, and what the tasks at work took out of it."""
    segment = segment_bytes(threads)
    return Reading(WINDOW_BYTES + threads * segment, segment)


def segments(schedule: Schedule, tensors: Mapping[str, StoredTensor], *, spooled: bool) -> Iterator[Segment]:
    """What the writer reads, in the order in which it does.

    Args:
      spooled: what is read again later is kept, so that it is fetched once.
    """
    most = schedule.reading.task_bytes or _MOST_SEGMENT
    kept: set[tuple[str, int, int]] = set()
    again = {id(array): spooled and _read_again(schedule, array) for array in schedule.plan.arrays}
    for number, group in enumerate(schedule.groups):
        found: list[Segment] = []
        last: tuple[str, bool] | None = None
        for task in tasks_of(group, schedule.reading.task_bytes):
            tensor = tensors[task.piece.tensor]
            part = task.piece.view.narrowed(task.source)[0]
            size = NUMPY_DTYPES[tensor.dtype].itemsize
            begin, end = tensor.offset + part.start * size, tensor.offset + part.stop * size
            if begin == end:
                continue
            keep = again[id(task.chunk.array)]
            # What is kept must be found again in the same pieces, so it is cut at every tensor.
            kind = (task.piece.tensor if keep else tensor.file, keep)
            before = found[-1] if found and kind == last else None
            if (
                before is not None
                and before.begin <= begin <= before.end + (0 if keep else _GAP_BYTES)
                and max(end, before.end) - before.begin <= most
            ):
                found[-1] = Segment(tensor.file, before.begin, max(end, before.end), before.uses + 1, number, keep)
            else:
                found.append(Segment(tensor.file, begin, end, 1, number, keep))
            last = kind
        for segment in reversed(found) if number % 2 else found:
            key = (segment.file, segment.begin, segment.end)
            if key not in kept:
                yield segment
            if segment.keep:
                kept.add(key)


def _read_again(schedule: Schedule, array: ArrayPlan) -> bool:
    """Whether some of an array's sources are read more than once: in several passes, or by two pieces."""
    names = [piece.tensor for piece in array.parameter.pieces]
    return schedule.passes(array) > 1 or len(set(names)) < len(names)


def used(schedule: Schedule, tensors: Mapping[str, StoredTensor]) -> dict[int, list[tuple[str, int, int]]]:
    """The tensors that are read more than once, by the last group that reads them, as byte ranges."""
    ends = {name: last for name, (_, last) in _lifetimes(schedule).items()}
    found: dict[int, list[tuple[str, int, int]]] = {}
    for name, last in ends.items():
        tensor = tensors[name]
        found.setdefault(last, []).append((tensor.file, tensor.offset, tensor.offset + tensor.nbytes))
    return found


def _lifetimes(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """First and last group that reads a tensor, for those that are read more than once."""
    found: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(schedule.groups):
        for array in {id(chunk.array): chunk.array for chunk in group}.values():
            if _read_again(schedule, array):
                for piece in array.parameter.pieces:
                    found[piece.tensor] = (found.get(piece.tensor, (number,))[0], number)
    return found


def spool_bytes(schedule: Schedule, tensors: Mapping[str, StoredTensor]) -> int:
    """What the spool takes at most: the tensors it holds at a time, and those of the group that is read ahead."""
    changes: dict[int, int] = {}
    for name, (first, last) in _lifetimes(schedule).items():
        changes[first - 1] = changes.get(first - 1, 0) + tensors[name].nbytes
        changes[last + 2] = changes.get(last + 2, 0) - tensors[name].nbytes
    held = most = 0
    for number in sorted(changes):
        held += changes[number]
        most = max(most, held)
    return most


def check_streamable(weights: Weights) -> None:
    """Refuse to read quantised tensors over the network: what decoding needs of codes and scales is not announced.

    Raises:
      RequestError: the source is remote and quantised.
    """
    if weights.encodings and weights.repository.remote is not None:
        raise RequestError(
            f"{weights.repository.name} is quantised, which cannot be read by ranges; "
            "give --cache_dir=FOLDER to download it"
        )


def plan_reads(weights: Weights, schedule: Schedule, spool: Path | None) -> Reads | None:
    """What a conversion will read over the network, None where the source is here.

    Args:
      spool: folder for what is read more than once; not used where it has not the room.
    """
    repository = weights.repository
    if repository.remote is None or weights.encodings:
        return None
    needed = spool_bytes(schedule, repository.tensors)
    fits = spool is not None and 0 < needed <= free_bytes(spool)
    parts = segments(schedule, repository.tensors, spooled=fits)
    return Reads(sum(part.size for part in parts), spool if fits else None, needed)


@contextlib.contextmanager
def reading_ahead(
    repository: Repository, schedule: Schedule, reads: Reads | None, stop: threading.Event
) -> Iterator[None]:
    """Fetch what a conversion is about to read, where it comes over the network, until the block ends."""
    remote = repository.remote
    if remote is None or reads is None:
        yield
        return
    spooled = reads.spool is not None
    remote.read_ahead(
        segments(schedule, repository.tensors, spooled=spooled),
        limit=WINDOW_BYTES,
        connections=connections(schedule.threads),
        spool=reads.spool,
        used=used(schedule, repository.tensors) if spooled else {},
        stop=stop,
    )
    try:
        yield
    finally:
        remote.close()


@contextlib.contextmanager
def tensors_held(repository: Repository, names: Iterable[str], spool: Path | None, threads: int) -> Iterator[None]:
    """Have whole tensors at hand for as long as the block lasts, whatever parts of them are read how often.

    Raises:
      WorldError: the source is remote, and there is no room on disk for them.
    """
    remote = repository.remote
    if remote is None:
        yield
        return
    tensors = [repository.tensors[name] for name in dict.fromkeys(names)]
    needed = sum(tensor.nbytes for tensor in tensors)
    if spool is None or free_bytes(spool) < needed:
        raise WorldError(
            f"comparing with a source that is read over the network takes {needed / 1e9:.2f} GB of disk at a time: "
            "give --spool_dir=FOLDER with that, or --cache_dir=FOLDER with all of it"
        )
    ranges = [(tensor.file, tensor.offset, tensor.offset + tensor.nbytes) for tensor in tensors]
    with remote.held(ranges, spool, connections(threads)):
        yield
