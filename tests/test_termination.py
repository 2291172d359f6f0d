"""Signals that come where an exception would get lost, or would leave something taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import WORDS
from running import environment, files_below

from converter import termination
from converter.errors import Terminated


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # A shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    termination.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    termination._State.signal = None


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


NUMBERS = pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)


@NUMBERS
def test_is_raised_at_once(number: signal.Signals, kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        send(number)


@NUMBERS
def test_is_deferred(number: signal.Signals, kind: type[BaseException]) -> None:
    with termination.deferred():
        send(number)
        with termination.deferred():
            pass
        with pytest.raises(kind):
            termination.check()


def test_a_second_one_is_ignored() -> None:
    with pytest.raises(Terminated):
        send()
    send()


def test_other_threads_are_not_ended() -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            termination.check()
            assert termination.finish(lambda: 1) == termination.interruptible(lambda: 1) == 1
        except BaseException as error:
            failed.append(error)

    with termination.deferred():
        send()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not failed


@pytest.mark.parametrize("call", [termination.finish, termination.interruptible])
def test_results_and_failures_are_handed_on(call: object) -> None:
    assert callable(call)
    assert call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 // 0)


def test_what_is_begun_is_finished() -> None:
    done = []

    def work() -> None:
        send()
        done.append(1)

    with pytest.raises(Terminated) as raised:
        termination.finish(work)
    assert done
    assert not raised.value.stuck


def test_what_does_not_end_is_left() -> None:
    never = threading.Event()

    def work() -> None:
        send()
        never.wait(60)

    with pytest.raises(Terminated) as raised:
        termination.finish(work, seconds=0.1)
    assert raised.value.stuck
    with pytest.raises(Terminated):
        termination.interruptible(lambda: never.wait(60))
    never.set()


LOST = """
import os, signal, sys
from converter import cli, places

class Last:
    def __del__(self):
        # The handler runs before this ends, and what it raises is ignored.
        os.kill(os.getpid(), signal.SIGTERM)

places.check_space = lambda *_: Last() and None
sys.exit(cli.to_maxtext(sys.argv[1:]))
"""


def test_run_that_loses_it_ends_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST, *WORDS, f"base_output_directory={tmp_path / 'out'}"],
        env=environment(),
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Exception ignored" in done.stderr
    assert done.returncode == 143, done.stderr
    assert files_below(tmp_path) == set()
