"""Measuring and bounding this process's memory (Linux)."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""mallopt(3)."""

_LARGE_BLOCK_BYTES = 1 << 20

_KEPT_BYTES = 1 << 30

LARGE_CHUNK_BYTES = 32 << 20
"""Chunks from this size on are worth giving memory back for as soon as it is free."""

_SAMPLE_SECONDS = 0.02


def limit() -> int:
    """Bytes this process may use: the machine's memory or its cgroup's limit, whichever is less."""
    total: int = psutil.virtual_memory().total
    for path in _cgroup_files("memory.max", "memory.limit_in_bytes"):
        text = path.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return total


def use_one_heap() -> None:
    """Make glibc use one heap for all threads and keep what was freed in it; to be called before threads start.

    It gives each thread a heap of its own, whose memory the others cannot use, and gives memory at a heap's end back
    to the system again and again, which costs a page fault for every 4 KiB when it is needed the next time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_CHUNK_BYTES)


def return_large_blocks() -> None:
    """Make glibc return large blocks to the system when they are freed: among them, the heap would leave gaps."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


@dataclass(frozen=True)
class Usage:
    """Bytes: resident, and of these anonymous + shared memory (what cannot be dropped; mapped files can)."""

    resident: int
    anonymous: int


def usage() -> Usage:
    """This process's memory now."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssShmem"):
            fields[name] = int(value.split()[0]) * 1024
    return Usage(fields["VmRSS"], fields["RssAnon"] + fields["RssShmem"])


def process_age() -> float:
    """Seconds since this process began."""
    # Field 22, counted after the command's name, which may hold anything but ends with the last ")".
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def cgroup_peak() -> int | None:
    """The highest memory use of this process's cgroup, bytes, where the kernel tells (cgroup v1 and v2).

    It counts every process of the group since it was made, and the page cache they used.
    """
    for path in _cgroup_files("memory.peak", "memory.max_usage_in_bytes"):
        return int(path.read_text())
    return None


def _cgroup_files(v2: str, v1: str) -> list[Path]:
    """The readable files of this name in the process's memory cgroup."""
    candidates = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            candidates += [Path("/sys/fs/cgroup") / group.lstrip("/") / v2, Path("/sys/fs/cgroup") / v2]
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            candidates += [root / group.lstrip("/") / v1, root / v1]
    return [path for path in candidates if os.access(path, os.R_OK)]


class Monitor:
    """Samples this process's memory in a thread of its own, at least every 50 ms, and keeps the peaks.

    Attributes:
      current: the last sample.
    """

    def __init__(self) -> None:
        self.current = usage()
        self._peak = self.current
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    @property
    def peak(self) -> Usage:
        """The highest of each figure so far."""
        return self._peak

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sample()
            time.sleep(_SAMPLE_SECONDS)

    def _sample(self) -> None:
        now = self.current = usage()
        self._peak = Usage(max(self._peak.resident, now.resident), max(self._peak.anonymous, now.anonymous))
