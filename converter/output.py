"""The place a checkpoint goes to: what is there already, what a killed run left, and the swap of an overwrite."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from converter.errors import RequestError, WorldError
from converter.maxtext.layout import ITEM, STEP

RECORD = "conversion.json"
"""File in the checkpoint's directory that says which request it is the result of."""

_REPLACEMENT = f"{STEP}.replacement"
_REPLACED = f"{STEP}.replaced"


def read_record(step: Path) -> dict[str, Any] | None:
    """What `RECORD` of a complete checkpoint says, None where there is none."""
    if not (step / "_CHECKPOINT_METADATA").is_file() or not (step / ITEM / "_METADATA").is_file():
        return None
    try:
        record = json.loads((step / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def looks_like_checkpoint(step: Path) -> bool:
    """Whether a directory is empty or has something of a checkpoint, so that overwriting it is what is meant."""
    names = {path.name for path in step.iterdir()}
    return not names or bool(names & {"_CHECKPOINT_METADATA", ITEM, "commit_success.txt"})


def existing_ancestor(path: Path) -> Path:
    """`path` or the nearest directory above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_writable(directory: Path) -> None:
    """Raise RequestError where `directory` cannot be made or written into by this user."""
    found = existing_ancestor(directory)
    if not found.is_dir():
        raise RequestError(f"cannot write to {directory}: {found} is a file")
    if not os.access(found, os.W_OK | os.X_OK):
        raise RequestError(f"cannot write to {directory}: {found} is read-only or not this user's")


def check_space(directory: Path, needed: int) -> None:
    """Raise WorldError where less than `needed` bytes are free."""
    free = shutil.disk_usage(existing_ancestor(directory)).free
    if free < needed:
        raise WorldError(
            f"not enough space in {directory}: about {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"
        )


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[None]:
    """Hold `directory`, made if need be, for one converter; clean up what a killed one left.

    The lock is the kernel's and ends with the process. Directories made here that are empty in the end go again.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY)
        except PermissionError as error:
            raise RequestError(f"cannot make {directory}: permission denied") from error
        except OSError as error:
            raise WorldError(f"cannot make {directory}: {error.strerror or error}") from error
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorldError(f"another converter is writing to {directory}; wait for it to end") from error
        recover(directory)
        yield


def _remove_empty(directories: list[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()


def half_swapped(directory: Path) -> bool:
    """Whether a run was killed between the two renames of an overwrite."""
    return (directory / _REPLACED).exists() and not (directory / STEP).exists()


def recover(directory: Path) -> None:
    """Undo a half-made swap and remove what a killed run left."""
    if half_swapped(directory):
        (directory / _REPLACED).rename(directory / STEP)
    remove_partial(directory)


def remove_partial(directory: Path) -> None:
    """Remove everything a conversion writes before its checkpoint is complete."""
    for pattern in (f"{_REPLACEMENT}*", _REPLACED, f"{STEP}.orbax-checkpoint-tmp*"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def target(directory: Path, *, overwrite: bool) -> Path:
    """Where the checkpoint is to be written: its own place, or beside the one it will replace."""
    step = directory / STEP
    return directory / _REPLACEMENT if overwrite and step.exists() else step


def publish(directory: Path, written: Path) -> None:
    """Put a complete checkpoint into its place, if it is not there."""
    step = directory / STEP
    if written == step:
        return
    step.rename(directory / _REPLACED)
    written.rename(step)
    shutil.rmtree(directory / _REPLACED, ignore_errors=True)
