"""What of a remote source will be read again, kept on disk for as long as that lasts.

A file of holes for each source file, of its size, holds the ranges that were put there at their own offsets; it has no
name, so it goes with the process however that ends. Ranges that are no longer needed become holes again.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
from pathlib import Path

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


class Spool:
    """Ranges of files, put there and looked at from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._maps: dict[str, mmap.mmap] = {}
        self._files: dict[str, int] = {}
        self._ranges: dict[str, list[tuple[int, int]]] = {}

    def put(self, file: str, size: int, begin: int, data: bytes) -> None:
        """Keep bytes of a file of `size` bytes.

        Raises:
          WorldError: the disk is full or broken.
        """
        try:
            with self._lock:
                if file not in self._maps:
                    self._open(file, size)
                descriptor = self._files[file]
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, memoryview(data)[written:], begin + written)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "; give --spool_dir=FOLDER on another disk, or --spool_dir=none" if full else ""
            raise WorldError(f"keeping what was read in {self._folder} failed: {error.strerror}{hint}") from error
        with self._lock:
            self._ranges[file] = merged([*self._ranges[file], (begin, begin + len(data))])

    def view(self, file: str, begin: int, end: int) -> memoryview | None:
        """Bytes of a file, mapped; None where not all of them are there."""
        with self._lock:
            ranges = self._ranges.get(file)
            if not ranges:
                return None
            place = bisect.bisect_right(ranges, (begin, 1 << 63)) - 1
            if place < 0 or ranges[place][1] < end:
                return None
            return memoryview(self._maps[file])[begin:end]

    def drop(self, file: str, begin: int, end: int) -> None:
        """Forget bytes `begin` to `end` and give their disk space back; nobody may look at them any more."""
        with self._lock:
            if file not in self._maps:
                return
            self._ranges[file] = [
                part
                for first, last in self._ranges[file]
                for part in ((first, min(last, begin)), (max(first, end), last))
                if part[0] < part[1]
            ]
            # Whole pages only: the others hold bytes of the neighbours.
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            last = end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                # Not every file system can; then the space comes back at the end.
                with contextlib.suppress(OSError):
                    self._maps[file].madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Give everything back, as soon as nobody looks at it any more."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
            self._maps.clear()
            self._ranges.clear()

    def _open(self, file: str, size: int) -> None:
        descriptor, name = tempfile.mkstemp(prefix="converter-", dir=self._folder)
        os.unlink(name)  # noqa: PTH108
        os.ftruncate(descriptor, size)
        self._maps[file] = mmap.mmap(descriptor, size)
        self._files[file] = descriptor
        self._ranges[file] = []


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as possible, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
