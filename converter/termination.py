"""SIGTERM, and Ctrl-C: where a run may be left at any point they are raised, elsewhere at the points that ask.

An exception that a signal's handler raises comes up wherever the main thread is at that moment. In a finaliser or one
of the garbage collector's callbacks (JAX has one) it gets lost; between a lock's or a lease's being taken and the block
that gives it back, it leaves it taken. So while something is held nothing is raised but by `check` and `finish`, and a
run that may have lost a signal elsewhere finds it by `check`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import TypeVar

from converter.errors import Terminated

T = TypeVar("T")

FINISH_SECONDS = 10.0
"""For what must not be left half done; Kubernetes gives a pod 30 seconds from SIGTERM on where nothing else is said."""

_WAIT_SECONDS = 0.1
"""Not for ever at once: a signal that arrives just before a wait begins would only be seen after it."""


class _State:
    """What the handlers know.

    Attributes:
      signal: that arrived, or None.
      deferred: how many blocks the main thread is in that are left only where they ask.
    """

    signal: int | None = None
    deferred = 0


def install() -> None:
    """Handle SIGTERM and Ctrl-C from here on."""
    _State.signal = None
    signal.signal(signal.SIGTERM, _handle)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def ignore() -> None:
    """Ignore SIGTERM from here on: what is left takes milliseconds, and the result is there."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    # Once is enough: what cleans up must not be interrupted by an impatient second SIGTERM. A second Ctrl-C means it.
    signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else signal.default_int_handler)
    _State.signal = number
    if not _State.deferred:
        raise _exception(number)


def _exception(number: int) -> BaseException:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def check() -> None:
    """Raise what a signal that has arrived asks for, Terminated or KeyboardInterrupt; in the main thread only."""
    if _State.signal is not None and threading.current_thread() is threading.main_thread():
        raise _exception(_State.signal)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A block in which only `check` and `finish` raise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.deferred += 1
    try:
        yield
    finally:
        _State.deferred -= 1


def finish(call: Callable[[], T], *, seconds: float = FINISH_SECONDS) -> T:
    """Call; a signal that comes meanwhile is raised when the call has ended, or after `seconds`.

    Raises:
      Terminated, KeyboardInterrupt: after the call, which is `stuck` where it has not ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    with deferred():
        check()
        result = _started(call)
        while not result.done() and _State.signal is None:
            wait([result], timeout=_WAIT_SECONDS)
        if _State.signal is not None:
            wait([result], timeout=seconds)
            error = _exception(_State.signal)
            if not result.done():
                error.stuck = True  # type: ignore[attr-defined]
            raise error
        return result.result()


def interruptible(call: Callable[[], T]) -> T:
    """Call something that must not be interrupted, and need not be waited for: a signal ends the wait at once."""
    with deferred():
        result = _started(call)
        while not result.done():
            check()
            wait([result], timeout=_WAIT_SECONDS)
        return result.result()


def _started(call: Callable[[], T]) -> Future[T]:
    """Call in a thread that the process's end does not wait for."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="call", daemon=True).start()
    return result
