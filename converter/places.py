"""Where things lie that are not a source: on a disk or in a bucket.

A place on a disk is a `pathlib.Path`, one in a bucket an `epath.Path`, which has the same methods. This module has what
the two do differently; `output` builds on it, and nothing else asks which of the two a path is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from converter import termination, units
from converter.errors import ConverterError, RequestError, WorldError
from converter.hf.space import existing

SCHEME = "gs://"

_PROBE = ".writable.probe"


def parse(key: str, text: str) -> Path:
    """The place that a word of the command line names.

    Raises:
      RequestError: it can be none.
    """
    if text.startswith(SCHEME):
        return _bucket_path(key, text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise RequestError(f"{key}={text}: give a local path or one of a bucket, gs://BUCKET/PATH")
    return local(key, text)


def parse_output(key: str, text: str) -> Path:
    """The place of a checkpoint that is to be written, which a word of the command line names.

    Raises:
      RequestError: it can be none.
    """
    path = parse(key, text)
    if re.search(r"[\[*]", str(path)):
        # It would find no database to put together, and leave a checkpoint without one.
        raise RequestError(f"{key}={path}: Orbax looks for its files by patterns, so no [ or * in the path, please")
    return path


def local(key: str, text: str) -> Path:
    """The place on a disk that a word of the command line names.

    Raises:
      RequestError: it can be none.
    """
    path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - `..` without following links
    try:
        path.exists()
    except OSError as error:
        raise RequestError(f"{key}={text[:100]}...: {error.strerror}") from error
    return path


def _bucket_path(key: str, text: str) -> Path:
    bucket, _, name = text.removeprefix(SCHEME).rstrip("/").partition("/")
    # https://cloud.google.com/storage/docs/buckets#naming and .../objects#naming
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]", bucket):
        raise RequestError(f"{key}={text[:300]}: {bucket[:100]!r} can be no bucket's name")
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") or re.search(r"[\x00-\x1f\x7f#?*\[\]]", part) for part in parts):
        raise RequestError(f"{key}={text[:300]}: no empty parts, dots or any of # ? * [ ] in a bucket's paths, please")
    if len(name.encode()) > 600:
        raise RequestError(f"{key}={text[:100]}...: too long")
    from etils import epath

    from converter import buckets

    buckets.configure()
    return cast(Path, epath.Path(text.rstrip("/")))


def is_remote(path: Path) -> bool:
    """Whether a place is in a bucket."""
    return str(path).startswith(SCHEME)


def is_taken(path: Path) -> bool:
    """Whether there is anything at a place; on a disk, a link that leads nowhere too."""
    return path.exists() or os.path.lexists(path)


def kvstore(directory: Path) -> dict[str, str]:
    """TensorStore's spec of a directory."""
    if not is_remote(directory):
        return {"driver": "file", "path": f"{directory.resolve()}/"}
    from converter import buckets

    bucket, name = buckets.split(directory)
    return {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}


def context(directory: Path) -> dict[str, Any]:
    """TensorStore's context for a directory."""
    if not is_remote(directory):
        return {}
    from converter import buckets

    return buckets.TENSORSTORE


def sizes(directory: Path) -> Iterator[tuple[str, int]]:
    """Every file below a directory, by its name from there, with its bytes."""
    if is_remote(directory):
        from converter import buckets

        yield from buckets.sizes(directory)
        return
    for path in directory.rglob("*"):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path.stat().st_size


def check_writable(directory: Path) -> None:
    """Find out whether files can be made below a directory, which need not exist yet.

    Raises:
      RequestError: they cannot, or there is no such bucket.
      WorldError: the bucket does not answer.
    """
    if is_remote(directory):
        from converter import buckets

        # Always the same name: where this run is killed, the next one removes it.
        probe = directory / _PROBE

        def try_it() -> None:
            buckets.write(probe, b"")
            buckets.remove(probe)

        termination.finish(try_it)
        return
    found = existing(directory)
    if not found.is_dir():
        raise RequestError(f"cannot write to {directory}: {found} is a file")
    for path in (directory, *directory.parents):
        if path != found and path.is_symlink():
            raise RequestError(f"cannot write to {directory}: {path} is a link that leads nowhere")
        if path == found:
            break
    if not os.access(found, os.W_OK | os.X_OK):
        raise RequestError(f"cannot write to {directory}: {found} is read-only or not this user's")


def check_file(path: Path) -> None:
    """Find out whether a file can be written, as `check_writable` does.

    Raises:
      RequestError: it cannot: there is a directory of that name, say.
      WorldError: the bucket does not answer.
    """
    if not is_remote(path) and path.is_dir():
        raise RequestError(f"cannot write {path}: it is a directory; give a file's name")
    check_writable(path.parent)


def check_space(directory: Path, needed: int) -> None:
    """Raise WorldError where less than `needed` bytes are free; a bucket has no end."""
    if is_remote(directory):
        return
    free = shutil.disk_usage(existing(directory)).free
    if free < needed:
        raise WorldError(f"not enough space in {directory}: about {units.size(needed)} needed, {units.size(free)} free")


def stop_seconds(directory: Path) -> float | None:
    """How long what writes to a place may take to stop; a bucket that does not answer could take minutes."""
    return termination.FINISH_SECONDS if is_remote(directory) else None


def failure(directory: Path, text: str) -> ConverterError | None:
    """What an error of TensorStore's means for a bucket, None where it is no error of a bucket's."""
    if not is_remote(directory):
        return None
    # The status that the service gave and TensorStore's own words for it.
    if re.search(r"PERMISSION_DENIED|UNAUTHENTICATED|http_response_code='40[13]'", text):
        return RequestError(f"no permission to write to {directory} (HTTP 401 or 403); nothing was kept")
    if re.search(r"http_response_code='404'", text):
        return RequestError(f"the bucket of {directory} is gone (HTTP 404)")
    if re.search(
        r"retry attempts failed|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|DATA_LOSS|checksum"
        r"|http_response_code=|curl_code=|object metadata|Error \w+ing\b|gs://|\bgcs\b",
        text,
    ):
        # What follows in brackets, as long as the whole request and its answer, may have the status in it.
        reason = re.sub(r"\s*\[\w+=.*", "", text)
        status = re.search(r"http_response_code='(\d+)'", text)
        reason = f"{reason[:300]} (HTTP {status[1]})" if status else reason[:300]
        return WorldError(f"writing to {directory} failed: {reason}; nothing was kept")
    return None


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all; what cannot be replaced, a device or a mount, is written into."""
    if is_remote(path):
        path.write_bytes(content)
        return
    if path.exists() and (not path.is_file() or not os.access(path.parent, os.W_OK)):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        try:
            partial.replace(path)
        except OSError:
            # A file that is a mount of its own.
            if not path.is_file():
                raise
            path.write_bytes(content)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
