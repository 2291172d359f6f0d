"""Trying again what a network or a service may do right a moment later: one policy for every kind of call.

Waits grow from half a second to half a minute, with jitter so that many workers do not come back at once; a service
that says how long to wait (Retry-After) is obeyed. What has not succeeded within the allowed time has failed. The log
says at most once a minute that something is being tried again, however many threads do so. A certificate that is not
trusted will not be trusted a moment later, whatever the kind of call.
"""

from __future__ import annotations

import datetime
import email.utils
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from converter import certificates
from converter.errors import ConverterError, WorldError

log = logging.getLogger("converter")

DEFAULT_SECONDS = 300.0
"""For how long one call to a source is tried again, unless the user says otherwise; a bucket that is written to has
longer (`buckets.DEADLINE_SECONDS`)."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds. TensorStore, which tries again by itself, is given the same (`buckets.TENSORSTORE`)."""

_LOG_SECONDS = 60.0

TRANSIENT_STATUSES = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which the same request may succeed (RFC 9110, RFC 8470, RFC 6585)."""

T = TypeVar("T")
Verdict = Callable[[Exception], float | None]
"""Whether a failure is worth another try: None if not, else the seconds to wait at least, mostly 0."""


def is_transient_status(status: int) -> bool:
    """Whether the same request may get another answer later."""
    return status >= 500 or status in TRANSIENT_STATUSES


def retry_after(text: str | None) -> float:
    """Seconds that a Retry-After header asks for, given as a number or a date (RFC 9110, 10.2.3); 0 without one."""
    if not text:
        return 0.0
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        when = email.utils.parsedate_to_datetime(text)
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, OverflowError):
        return 0.0


def one_line(error: BaseException) -> str:
    """An exception's text on one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def call(
    attempt: Callable[[], T],
    *,
    what: str,
    verdict: Verdict,
    seconds: float,
    reason: Callable[[BaseException], str] = one_line,
) -> T:
    """Call until it succeeds, fails for good, or the time is up.

    Args:
      what: for messages, as "reading model.safetensors" or the place that does not answer.
      verdict: decides about each failure; errors of this program's own are never tried again.
      seconds: within which the last try begins.
      reason: a failure in one short line, for messages.

    Raises:
      WorldError: it was worth another try, but the time is up; or the server's certificate is not trusted.
      RequestError: the user's file of certificates cannot be used.
      Exception: what `attempt` raised and `verdict` called final.
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

    jittered = wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT)

    def failure(state: RetryCallState) -> BaseException:
        assert state.outcome is not None
        error = state.outcome.exception()
        assert error is not None
        return error

    def worthwhile(error: BaseException) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ConverterError):
            return False
        return certificates.problem(error, what) is None and verdict(error) is not None

    def wait(state: RetryCallState) -> float:
        error = failure(state)
        asked = verdict(error) if isinstance(error, Exception) else None
        # Spread over a quarter of what was asked for: everybody was told the same.
        return max(FIRST_WAIT / 10 + jittered(state), (asked or 0.0) * (1 + jittered(state) / LONGEST_WAIT / 4))

    def tell(state: RetryCallState) -> None:
        _notice(f"{what} fails for now ({reason(failure(state))}): trying again for up to {seconds:.0f} s")

    start = time.monotonic()
    try:
        return Retrying(
            retry=retry_if_exception(worthwhile),
            stop=stop_before_delay(seconds),
            wait=wait,
            before_sleep=tell,
            reraise=True,
        )(attempt)
    except Exception as error:
        if not isinstance(error, ConverterError) and (problem := certificates.problem(error, what)) is not None:
            raise problem from error
        if not worthwhile(error):
            raise
        spent = time.monotonic() - start
        raise WorldError(f"{what} failed: {reason(error)}; gave up after {spent:.0f} s, try again later") from error


class _Notices:
    """When something was last said, and how often it was not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last = -_LOG_SECONDS
        self.silent = 0


_notices = _Notices()


def _notice(text: str) -> None:
    with _notices.lock:
        now = time.monotonic()
        if now - _notices.last < _LOG_SECONDS:
            _notices.silent += 1
            return
        more = f" ({_notices.silent} more since the last such line)" if _notices.silent else ""
        _notices.last, _notices.silent = now, 0
    log.warning("%s%s", text, more)
