"""The monitor of this process's memory, against what the kernel says of it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import psutil

from converter.memory import Monitor

_BLOCK = 20_000
"""Bytes: too large for Python's own allocator, too small for a mapping of its own."""


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_gaps_in_the_heap_are_given_back() -> None:
    """Every second block is freed, so that the heap cannot shrink from its end."""
    blocks = [b"%d" % i * (_BLOCK // len(b"%d" % i)) for i in range(8_000)]
    process = psutil.Process()
    del blocks[::2]
    time.sleep(0.1)
    before = process.memory_info().rss
    assert before > 120e6, "it goes only when asked for"
    with Monitor() as monitor:
        monitor.expected = 0
        wait_for(lambda: process.memory_info().rss < before - 40e6)
    assert len(blocks) == 4_000


def test_the_peak_stays_when_memory_goes() -> None:
    with Monitor() as monitor:
        before = monitor.current.anonymous
        block = mmap.mmap(-1, 100_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        wait_for(lambda: monitor.current.anonymous > before + 90e6)
        block.close()
        wait_for(lambda: monitor.current.anonymous < before + 20e6)
    assert monitor.peak.anonymous > monitor.current.anonymous + 70e6
