"""Waiting for Jobs, and what their ends mean to a CI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jobs.cluster import Cluster
from jobs.errors import WorldError
from jobs.status import FAILED, Status, observe

# Of several failures the first of these is told: a bug, a wrong request, a difference; all others may go away.
_SEVERITY = (1, 2, 4)
_MOST_FAILURES = 30


def wait_for(
    cluster: Cluster,
    names: Sequence[str],
    *,
    timeout: float | None,
    interval: float,
    tell: Callable[[str], None],
) -> list[Status]:
    """The Jobs' states once all have ended; each change is told as a line.

    Args:
      timeout, interval: seconds.

    Raises:
      WorldError: time is up, a Job is gone, or the cluster does not answer for many looks in a row.
      RequestError: the cluster refuses.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    seen: dict[str, tuple[str, str, str]] = {}
    failures = 0
    while True:
        try:
            found = observe(cluster, names=names)
            failures = 0
        except WorldError as error:
            failures += 1
            if failures > _MOST_FAILURES:
                raise
            tell(f"jobs: warning: {error}")
            found = []
        else:
            if gone := set(names) - {each.job for each in found}:
                raise WorldError(f"Job {', '.join(sorted(gone))} is gone: it was cancelled while this waited for it")
        for each in found:
            key = (each.state, each.step, each.reason)
            if seen.get(each.job) != key:
                seen[each.job] = key
                tell(_line(each))
        if found and all(each.done for each in found):
            return found
        if deadline is not None and time.monotonic() + interval > deadline:
            late = ", ".join(f"{each.job} is {each.state}" for each in found if not each.done)
            raise WorldError(f"time is up after {timeout:g} s: {late or 'the cluster does not answer'}")
        time.sleep(interval)


def exit_code(found: Sequence[Status]) -> int:
    """0 if all are checked; else that of the worst failure, 3 where another try can help."""
    codes = {each.exit_code for each in found if each.state == FAILED}
    if not codes:
        return 0
    return next((code for code in _SEVERITY if code in codes), WorldError.exit_code)


def _line(status: Status) -> str:
    parts = [f"{status.job}: {status.state}", status.step, f"on {status.node}" if status.node else ""]
    return ", ".join(filter(None, parts)) + (f" ({status.reason})" if status.reason else "")
