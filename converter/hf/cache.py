"""A local cache of a bucket's folder: each object once, whole and checked.

An object is written beside its place and gets its name when all of it is there and has its CRC-32C; what a killed run
left is continued. One process downloads an object at a time, others wait for it. A name ends with the object's
generation, so an object that was replaced is another file; the folder of one state of the objects links to its files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from converter.errors import RequestError, WorldError
from converter.hf.checksums import combined, crc32c
from converter.hf.files import CONFIG, INDEX, weight_files
from converter.hf.remote import Ranges, RemoteFile, Server
from converter.hf.space import check_cache_space

_RANGE_BYTES = 16 << 20
_AT_A_TIME = 8
_POLL_SECONDS = 0.1


def download(server: Server, folder: Path, names: Sequence[str] = ()) -> Path:
    """Bring config.json, the index and the weights into a folder; the folder that holds them by their names.

    Args:
      names: what is wanted instead, as far as it is there.

    Raises:
      RequestError: there are no safetensors weights, or the folder may not be written to.
      WorldError: the network or the server failed, or the disk is full.
    """
    try:
        objects = folder / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        ranges = Ranges(server)
        if not names:
            small = [server.files[name] for name in (CONFIG, INDEX) if name in server.files]
            for file in small:
                _bring(ranges, file, objects, threading.Event())
            index = objects / _name(server.files[INDEX]) if INDEX in server.files else None
            weights = weight_files(
                list(server.files), index.read_bytes if index else None, f"{server.label}/{INDEX}", server.label
            )
            for name in weights:
                if name not in server.files:
                    raise RequestError(f"{server.label}/{name} does not exist")
            names = [*(file.name for file in small), *weights]
        files = [server.files[name] for name in names if name in server.files]
        check_cache_space(objects, [(f.size, objects / _name(f), objects / f"{_name(f)}.part") for f in files])
        _bring_all(ranges, files, objects)
        return _linked(folder, objects, files)
    except PermissionError as error:
        raise RequestError(f"{folder} may not be written to by this user; give another --cache_dir") from error
    except OSError as error:
        hint = "; give --cache_dir=FOLDER on another disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise WorldError(f"downloading to {folder} failed: {error.strerror or error}{hint}") from error


def _name(file: RemoteFile) -> str:
    return f"{file.name}.{file.generation}"


def _bring_all(ranges: Ranges, files: list[RemoteFile], objects: Path) -> None:
    """Several at a time, in threads; the first failure ends the others."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="download")
    waiting = [pool.submit(_bring, ranges, file, objects, stop) for file in files]
    try:
        for each in waiting:
            while not each.done():
                # Awake now and then, so that a signal is noticed.
                time.sleep(_POLL_SECONDS)
            each.result()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _bring(ranges: Ranges, file: RemoteFile, objects: Path, stop: threading.Event) -> None:
    path = objects / _name(file)
    if path.exists():
        return
    with _locked(path.with_name(f"{path.name}.lock"), stop):
        if path.exists() or stop.is_set():
            return
        partial = path.with_name(f"{path.name}.part")
        for _ in range(2):
            if not _continue(ranges, file, partial, stop):
                return
            if file.crc32c is None or _crc32c_of(partial) == file.crc32c:
                partial.replace(path)
                return
            partial.unlink()
        raise WorldError(f"{file.name} of {ranges.server.label} came twice with another CRC-32C than the object's")


def _continue(ranges: Ranges, file: RemoteFile, partial: Path, stop: threading.Event) -> bool:
    """Append what a partial file lacks; False where that was stopped."""
    block = bytearray(min(_RANGE_BYTES, file.size))
    with partial.open("ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
            out.seek(0)
        while out.tell() < file.size:
            if stop.is_set():
                return False
            part = memoryview(block)[: file.size - out.tell()]
            ranges.read(file.name, out.tell(), part)
            out.write(part)
        out.flush()
        os.fsync(out.fileno())
    return True


def _crc32c_of(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while part := file.read(_RANGE_BYTES):
            total = combined(total, crc32c(part), len(part))
    return total


@contextlib.contextmanager
def _locked(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold a lock file; the lock is the kernel's and ends with the process."""
    with path.open("w") as file:
        while not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
        yield


def _linked(folder: Path, objects: Path, files: list[RemoteFile]) -> Path:
    """A folder with the files under their own names, as links."""
    state = hashlib.sha256("\n".join(sorted(map(_name, files))).encode()).hexdigest()[:16]
    made = folder / "states" / state
    made.mkdir(parents=True, exist_ok=True)
    for file in files:
        with contextlib.suppress(FileExistsError):
            (made / file.name).symlink_to(os.path.relpath(objects / _name(file), made))
    return made
