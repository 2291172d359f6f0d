"""Where chunks go: files that are appended to or written whole, on a disk or in a bucket.

What is written here belongs to a checkpoint that is not complete, so that nothing need appear at once; what `finish`
has returned for is stored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from converter import places

Buffer = bytes | memoryview
"""A piece of a value: bytes, or a view of single bytes that change later."""

DATA_FILE_BYTES = 2 << 30
"""Size from which on nothing is appended to a file, MaxText's DEFAULT_OCDBT_TARGET_DATA_FILE_SIZE."""

OBJECT_BYTES = 8 << 20
"""The same of an object in a bucket, which is in memory until it is sent."""

_MOST_PIECES = 1024
"""Of one call to the kernel (IOV_MAX)."""

_UPLOADS = 16
"""Objects sent at a time at most."""

_SYNC_BYTES = 128 << 20
"""Written to a file between two times that the disk is asked to store it: at the end alone would take long then."""


@dataclass(frozen=True)
class Place:
    """Where a value is: a file, by its path from the directory, and bytes in it."""

    file: str
    offset: int
    length: int


class DataFiles(Protocol):
    """Files below a directory; what several threads may call."""

    def append(self, value: Sequence[Buffer]) -> Place:
        """Store a value given in pieces in one of the files."""

    def put(self, name: str, value: Sequence[Buffer]) -> None:
        """Make a file of a value."""

    def finish(self) -> None:
        """Store what is only in memory or the kernel's; the last call."""

    def abort(self) -> None:
        """Write nothing any more; the last call."""


def open_files(directory: Path, window: int) -> DataFiles:
    """The files of a directory, which need not exist.

    Args:
      window: bytes that are on their way into a bucket at a time, or one value if that is more.
    """
    return _Objects(directory, window) if places.is_remote(directory) else _Files(directory)


def size(value: Sequence[Buffer]) -> int:
    """Bytes of a value given in pieces."""
    return sum(map(len, value))


def _new_name() -> str:
    """As TensorStore names data files."""
    return f"d/{secrets.token_hex(16)}"


class _File:
    """One file that is appended to, by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self.name = _new_name()
        self.size = 0
        self.unsynced = 0
        self.descriptor: int | None = _create(directory / self.name)

    def append(self, value: Sequence[Buffer]) -> Place:
        assert self.descriptor is not None, "nothing follows what is full"
        place = Place(self.name, self.size, size(value))
        _write(self.descriptor, value)
        self.size += place.length
        self.unsynced += place.length
        return place

    def sync(self) -> None:
        assert self.descriptor is not None, "nothing is stored after the end"
        os.fsync(self.descriptor)

    def close(self) -> None:
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)


class _Files:
    """On a disk. There are as many files as threads that write at a time: the kernel lets one in at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: set[_File] = set()
        self._free: list[_File] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._failure: OSError | None = None
        self._folders: set[Path] = set()

    def append(self, value: Sequence[Buffer]) -> Place:
        try:
            file = self._free.pop()
        except IndexError:
            file = _File(self._directory)
            self._open.add(file)
            self._note_folders(file.name)
        place = file.append(value)
        full = file.size >= DATA_FILE_BYTES
        if full or file.unsynced >= _SYNC_BYTES:
            file.unsynced = 0
            self._pool.submit(self._store, file, last=full)
        if not full:
            self._free.append(file)
        if self._failure is not None:
            raise self._failure
        return place

    def _store(self, file: _File, *, last: bool) -> None:
        """Have the disk store what is in a file; `last`: nothing will follow."""
        try:
            file.sync()
            if last:
                self._close(file)
        except OSError as error:
            self._failure = self._failure or error

    def put(self, name: str, value: Sequence[Buffer]) -> None:
        self._note_folders(name)
        descriptor = _create(self._directory / name)
        try:
            _write(descriptor, value)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _note_folders(self, name: str) -> None:
        self._folders.update(self._directory / parent for parent in Path(name).parents)

    def _close(self, file: _File) -> None:
        self._open.discard(file)
        file.close()

    def finish(self) -> None:
        for file in self._free:
            self._pool.submit(self._store, file, last=True)
        self._pool.shutdown()
        if self._failure is not None:
            raise self._failure
        for folder in sorted(self._folders, reverse=True):
            _store_folder(folder)

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in list(self._open):
            with contextlib.suppress(OSError):
                self._close(file)


def _create(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _store_folder(folder: Path) -> None:
    """Have the disk store which files a folder has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Not every file system has this for folders.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _write(descriptor: int, value: Sequence[Buffer]) -> None:
    rest = [memoryview(piece) for piece in value]
    while rest:
        written = os.writev(descriptor, rest[:_MOST_PIECES])
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][written:]


class _Objects:
    """In a bucket, where an object is there whole or not at all: values are gathered to `OBJECT_BYTES`, then sent."""

    def __init__(self, directory: Path, window: int) -> None:
        self._directory = directory
        self._window = window
        self._pool = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="upload")
        # Held while an object waits for room, so that no more than one does.
        self._lock = threading.Lock()
        self._name = _new_name()
        self._gathered: list[bytes] = []
        self._arrived = threading.Condition()
        self._on_way: list[int] = []
        self._failure: BaseException | None = None

    def append(self, value: Sequence[Buffer]) -> Place:
        kept = _kept(value)
        with self._lock:
            place = Place(self._name, size(self._gathered), size(kept))
            self._gathered += kept
            if place.offset + place.length >= OBJECT_BYTES:
                self._send_gathered()
        return place

    def put(self, name: str, value: Sequence[Buffer]) -> None:
        with self._lock:
            self._send(name, _kept(value))

    def _send_gathered(self) -> None:
        name, self._name = self._name, _new_name()
        gathered, self._gathered = self._gathered, []
        self._send(name, gathered)

    def _send(self, name: str, value: Sequence[bytes]) -> None:
        """Send an object, once there is room for it on the way."""
        nbytes = size(value)
        with self._arrived:
            self._await(lambda: sum(self._on_way) + nbytes <= self._window and len(self._on_way) < _UPLOADS)
            self._on_way.append(nbytes)
        self._pool.submit(self._sent, name, value, nbytes)

    def _sent(self, name: str, value: Sequence[bytes], nbytes: int) -> None:
        from converter import buckets

        failure: BaseException | None = None
        try:
            buckets.send(self._directory / name, value)
        except BaseException as error:
            failure = error
        with self._arrived:
            self._failure = self._failure or failure
            self._on_way.remove(nbytes)
            self._arrived.notify_all()

    def _await(self, enough: Callable[[], bool]) -> None:
        """Wait until enough has arrived, or all; raise what made an object fail."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._failure is not None or not self._on_way or enough())
            if self._failure is not None:
                raise self._failure

    def finish(self) -> None:
        with self._lock:
            if self._gathered:
                self._send_gathered()
            self._await(lambda: False)
            self._pool.shutdown()

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _kept(value: Sequence[Buffer]) -> list[bytes]:
    return [piece if isinstance(piece, bytes) else piece.tobytes() for piece in value]
