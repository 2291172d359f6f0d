"""What of a remote source will be read again, kept on disk for as long as that lasts.

A file without a name, so that it goes with the process however that ends. The place of a range that is no longer
needed is used again: the kernel has its pages in memory already, where new ones cost several times as much.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from converter.errors import WorldError

_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


def in_memory(folder: Path) -> bool:
    """Whether a folder's files take memory instead of disk."""
    resolved = folder.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (resolved, *resolved.parents) if path in mounts), "") in _MEMORY_FILESYSTEMS


def free_bytes(folder: Path) -> int:
    """What a spool in a folder may take; 0 where there is no such folder or it may not be written to."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK) or in_memory(folder):
        return 0
    return shutil.disk_usage(folder).free


class _Room:
    """First fit in a row of bytes of any length; what is given back joins what is free beside it."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = [(0, sys.maxsize)]

    def take(self, size: int) -> int:
        """Where `size` bytes begin that nobody has."""
        number = next(i for i, (begin, end) in enumerate(self._free) if end - begin >= size)
        begin, end = self._free[number]
        self._free[number] = (begin + size, end)
        return begin

    def give(self, begin: int, size: int) -> None:
        self._free = merged([*self._free, (begin, begin + size)])


@dataclass
class _Held:
    """A range of a file that is to be kept: where it lies here, and which of its bytes are there."""

    begin: int
    end: int
    place: int | None = None
    there: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """What it takes: whole pages."""
        return -(-(self.end - self.begin) // mmap.PAGESIZE) * mmap.PAGESIZE


class Spool:
    """Ranges of files, put there in pieces and looked at from any thread."""

    def __init__(self, folder: Path, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Begin.

        Args:
          folder: where the file lies.
          ranges: file, begin, end of what will be kept; they do not overlap.

        Raises:
          WorldError: the disk is full or broken.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._room = _Room()
        self._held: dict[str, list[_Held]] = {}
        for file, begin, end in sorted(ranges):
            self._held.setdefault(file, []).append(_Held(begin, end))
        # Most of it is never used: a file of holes.
        size = sum(held.size for each in self._held.values() for held in each)
        with self._errors():
            # Closed when nobody holds it any more: a thread may be in the middle of `put` when all others give up.
            self._file: IO[bytes] | None = tempfile.TemporaryFile(prefix="converter-", dir=folder, buffering=0)  # noqa: SIM115
            self._file.truncate(size)
            self._map: mmap.mmap | None = mmap.mmap(self._file.fileno(), size) if size else None

    def put(self, file: str, begin: int, data: memoryview) -> None:
        """Keep bytes of a file.

        Raises:
          WorldError: the disk is full or broken.
        """
        with self._lock:
            spool = self._file
            if spool is None:
                return
            held = self._find(file, begin, begin + len(data))
            assert held is not None, "nobody announced it"
            if held.place is None:
                held.place = self._room.take(held.size)
            place = held.place + begin - held.begin
        written = 0
        with self._errors():
            while written < len(data):
                written += os.pwrite(spool.fileno(), data[written:], place + written)
        with self._lock:
            held.there = merged([*held.there, (begin, begin + len(data))])

    def view(self, file: str, begin: int, end: int) -> memoryview | None:
        """Bytes of a file, mapped; None where not all of them are there."""
        with self._lock:
            held = self._find(file, begin, end)
            if held is None or held.place is None or self._map is None:
                return None
            if not any(first <= begin and end <= last for first, last in held.there):
                return None
            place = held.place + begin - held.begin
            return memoryview(self._map)[place : place + end - begin]

    def drop(self, file: str, begin: int, end: int) -> None:
        """Forget a range that was announced; nobody may look at it any more."""
        with self._lock:
            held = self._find(file, begin, end)
            if held is not None and held.place is not None:
                self._room.give(held.place, held.size)
                held.place, held.there = None, []

    def close(self) -> None:
        """Give everything back, as soon as nobody looks at it any more."""
        with self._lock:
            self._held.clear()
            self._file = self._map = None

    def _find(self, file: str, begin: int, end: int) -> _Held | None:
        """The range that has these bytes."""
        ranges = self._held.get(file, [])
        number = bisect.bisect_right(ranges, begin, key=lambda held: held.begin) - 1
        return ranges[number] if number >= 0 and end <= ranges[number].end else None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "; give --spool_dir=FOLDER on another disk, or --spool_dir=none" if full else ""
            raise WorldError(f"keeping what was read in {self._folder} failed: {error.strerror}{hint}") from error


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as possible, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
