"""The place a checkpoint goes to: what is there already, what a killed run left, and the swap of an overwrite.

On a disk a checkpoint appears by a rename. A bucket has none; there Orbax writes in place and makes the folder a
checkpoint by its last object, `COMMITTED`, in the item and in the step. What has no such object is not loaded. An
overwrite is written beside the old checkpoint and, once it is complete, copied into its place within the service: the
old `COMMITTED` goes first, the new one comes last, and what a killed run began of this the next one finishes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter import places, termination
from converter.errors import RequestError, WorldError
from converter.maxtext.layout import COMMITTED, ITEM, STEP

log = logging.getLogger("converter")

RECORD = "conversion.json"
"""File in the checkpoint's directory that says which request it is the result of."""

_REPLACEMENT = f"{STEP}.replacement"
_REPLACED = f"{STEP}.replaced"
_LEASE = f"{STEP}.lease"


@dataclass(frozen=True)
class Hold:
    """An output that is this process's to write to.

    Attributes:
      begin: called with the place of the checkpoint before it is written to.
      check: raises WorldError where it no longer is; costs nothing.
      abandon: leave all as it is, for the next run to clean up.
    """

    begin: Callable[[Path], None] = lambda _: None
    check: Callable[[], None] = lambda: None
    abandon: Callable[[], None] = lambda: None


def read_record(step: Path) -> dict[str, Any] | None:
    """What `RECORD` of a complete checkpoint says, None where there is none."""
    needed = [step / "_CHECKPOINT_METADATA", step / ITEM / "_METADATA"]
    if places.is_remote(step):
        needed += [step / COMMITTED, step / ITEM / COMMITTED]
    if not all(path.is_file() for path in needed):
        return None
    try:
        record = json.loads((step / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def looks_like_checkpoint(step: Path) -> bool:
    """Whether a directory is empty or has something of a checkpoint, so that overwriting it is what is meant."""
    names = {path.name for path in step.iterdir()}
    return not names or bool(names & {"_CHECKPOINT_METADATA", ITEM, COMMITTED})


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Hold]:
    """Hold `directory`, made if need be, for one converter; clean up what a killed one left, and after a failure.

    Meanwhile signals are raised only by `termination.check` and `termination.finish`.

    Raises:
      WorldError: another converter holds it.
    """
    # What is taken here must be given back, so a signal is only raised where somebody asks.
    with termination.deferred(), _leased(directory) if places.is_remote(directory) else _locked(directory) as hold:
        yield hold


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[Hold]:
    """On a disk: the lock is the kernel's and ends with the process. Directories made here that are empty go again."""
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
        if _half_swapped(directory):
            (directory / _REPLACED).rename(directory / STEP)
        _remove_partial(directory)
        try:
            yield Hold()
        except BaseException:
            _remove_partial(directory)
            raise


@contextlib.contextmanager
def _leased(directory: Path) -> Iterator[Hold]:
    """In a bucket: a lease. It is left to expire where something unfinished could not be removed."""
    from converter import buckets
    from converter.lease import Lease

    lease = Lease(directory / _LEASE)
    buckets.before_write.append(lease.confirm)
    try:
        termination.finish(lease.acquire)
        if lease.note:
            termination.finish(lambda: _recover(directory, lease.note))

        def begin(target: Path) -> None:
            lease.write_note(target.name)
            if target.name == _REPLACEMENT:
                # What a request that was under way when its run was killed has brought since; or nothing.
                buckets.remove_tree(target, marker=COMMITTED)

        yield Hold(begin, lease.check, lease.keep)
    except BaseException as error:
        if getattr(error, "stuck", False):
            lease.keep()
        if lease.held and not lease.kept and lease.note:
            try:
                _remove_unfinished(directory, lease.note, seconds=buckets.CLEANING_SECONDS)
            except Exception as failure:
                log.warning("what was written to %s is left for the next run to remove: %s", directory, failure)
                error.stuck = True  # type: ignore[attr-defined]
                lease.keep()
        raise
    finally:
        buckets.before_write.remove(lease.confirm)
        lease.release()


def _remove_empty(directories: list[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()


def interrupted(directory: Path) -> bool:
    """Whether a run was killed, or is at work, in a way that only `opened` tells or sets right."""
    if places.is_remote(directory):
        return (directory / _LEASE).exists()
    return _half_swapped(directory)


def _half_swapped(directory: Path) -> bool:
    """Whether a run was killed between the two renames of an overwrite on a disk."""
    return (directory / _REPLACED).exists() and not (directory / STEP).exists()


def _remove_partial(directory: Path) -> None:
    """On a disk: remove everything a conversion writes before its checkpoint is complete."""
    for pattern in (f"{_REPLACEMENT}*", _REPLACED, f"{STEP}.orbax-checkpoint-tmp*"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _recover(directory: Path, unfinished: str) -> None:
    """In a bucket: finish or remove what a killed run left at the place that its lease names."""
    if unfinished == _REPLACEMENT and (directory / unfinished / COMMITTED).exists():
        log.info("%s was being replaced when a run was killed: finishing that", directory / STEP)
        publish(directory, directory / unfinished)
    else:
        _remove_unfinished(directory, unfinished)


def _remove_unfinished(directory: Path, unfinished: str, *, seconds: float | None = None) -> None:
    """In a bucket: remove what was written to a place, unless it is complete.

    Raises:
      WorldError: a replacement is complete, and in the middle of its way into place.
    """
    from converter import buckets

    if not (directory / unfinished / COMMITTED).exists():
        buckets.remove_tree(directory / unfinished, marker=COMMITTED, seconds=seconds)
    elif unfinished == _REPLACEMENT:
        raise WorldError(f"{directory / unfinished} is complete; the next run puts it into its place")


def target(directory: Path, *, overwrite: bool) -> Path:
    """Where the checkpoint is to be written: its own place, or beside the one it will replace."""
    step = directory / STEP
    return directory / _REPLACEMENT if overwrite and step.exists() else step


def publish(directory: Path, written: Path) -> None:
    """Put a complete checkpoint into its place, if it is not there."""
    step = directory / STEP
    if written == step:
        return
    if places.is_remote(directory):
        from converter import buckets

        # Each begins with, or ends with, what makes the folder a checkpoint.
        buckets.remove_tree(step, marker=COMMITTED)
        buckets.copy_tree(written, step, marker=COMMITTED)
        buckets.remove_tree(written, marker=COMMITTED)
        return
    step.rename(directory / _REPLACED)
    written.rename(step)
    shutil.rmtree(directory / _REPLACED, ignore_errors=True)
