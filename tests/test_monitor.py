"""The monitor of this process's memory, against what the kernel says of it."""

from __future__ import annotations

import time

import psutil

from converter.memory import Monitor

_BLOCK = 20_000
"""Bytes: too large for Python's own allocator, too small for a mapping of its own."""


def test_gaps_in_the_heap_are_given_back() -> None:
    """Every second block is freed, so that the heap cannot shrink from its end."""
    blocks = [b"%d" % i * (_BLOCK // len(b"%d" % i)) for i in range(8_000)]
    process = psutil.Process()
    del blocks[::2]
    before = process.memory_info().rss
    with Monitor() as monitor:
        time.sleep(0.1)
        kept = process.memory_info().rss
        monitor.expected = 0
        time.sleep(0.5)
    assert kept > before - 20e6, "nobody asked for it yet"
    assert process.memory_info().rss < before - 40e6
    assert len(blocks) == 4_000


def test_the_peak_stays_when_memory_goes() -> None:
    with Monitor() as monitor:
        before = psutil.Process().memory_info().rss
        block = bytearray(b"x") * 100_000_000
        time.sleep(0.1)
        del block
        time.sleep(0.1)
    assert monitor.peak.anonymous > monitor.current.anonymous + 90e6
    assert monitor.peak.resident > before + 90e6
