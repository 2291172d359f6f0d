"""Room on disk for what is kept of a remote repository."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

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
    log.info("downloading %.2f GB to %s, where %.2f GB are free", needed / 1e9, existing(folder), free / 1e9)
    if free < needed:
        raise WorldError(
            f"not enough space in {folder} for the download: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free; "
            "give --cache_dir=FOLDER on another disk, or --cache_dir=none to read without one"
        )


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0
