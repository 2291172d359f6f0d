"""Room on disk for what is kept of a remote repository."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from converter import units
from converter.errors import WorldError

log = logging.getLogger("converter")


def existing(path: Path) -> Path:
    """`path` or the nearest directory above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_cache_space(folder: Path, files: Iterable[tuple[int, Path, Path | None]]) -> None:
    """Say what must still be downloaded into a folder, and refuse where the disk lacks the room.

    Args:
      files: size of each, where it will be when it is here, and where a part of it may be already.

    Raises:
      WorldError: the disk has less free than that.
    """
    needed = sum(size - _size(partial) for size, path, partial in files if not path.exists())
    if needed <= 0:
        return
    free = shutil.disk_usage(existing(folder)).free
    log.info("downloading %s to %s, where %s are free", units.size(needed), existing(folder), units.size(free))
    if free < needed:
        raise WorldError(
            f"not enough space in {folder} for the download: {units.size(needed)} needed, {units.size(free)} free; "
            "give --cache_dir=FOLDER on another disk, or --cache_dir=none to read without one"
        )


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0
