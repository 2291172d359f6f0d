"""The monitor of this process's memory, against what the kernel says of it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

from converter.memory import Monitor


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_peak_stays_when_memory_goes() -> None:
    with Monitor() as monitor:
        before = monitor.current.anonymous
        block = mmap.mmap(-1, 100_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        wait_for(lambda: monitor.current.anonymous > before + 90e6)
        block.close()
        wait_for(lambda: monitor.current.anonymous < before + 20e6)
    assert monitor.peak.anonymous > monitor.current.anonymous + 70e6
