"""What a long run tells: a bar on a terminal, plain lines elsewhere; and how long each phase took."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from converter import units
from converter.memory import Monitor

log = logging.getLogger("converter")

_LINE_SECONDS = 10.0


class Phases:
    """Seconds per phase, in the order they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = [("start", time.monotonic())]

    @property
    def current(self) -> tuple[str, float]:
        """The phase a run is in and for how many seconds."""
        name, start = self._began[-1]
        return name, time.monotonic() - start

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time in the block."""
        start = time.monotonic()
        self._began.append((name, start))
        try:
            yield
        finally:
            self._began.append(("between phases", time.monotonic()))
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


class Meter:
    """Counts bytes and shows them, with rate, time left and memory, while used as a context.

    `add` may be called from any thread.
    """

    def __init__(self, what: str, total: int, monitor: Monitor) -> None:
        self.done = 0
        self.stored = 0
        self._what = what
        self._total = total
        self._monitor = monitor
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[line]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(what, total=total, line="")

    def add(self, done: int, stored: int) -> None:
        """Count bytes of content and the bytes they are stored in."""
        with self._lock:
            self.done += done
            self.stored += stored

    def __enter__(self) -> Meter:
        self._start = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._bar is not None:
            self._show()
            self._bar.stop()

    def _run(self) -> None:
        while not self._stop.wait(0.2 if self._bar is not None else _LINE_SECONDS):
            self._show()

    def _show(self) -> None:
        seconds = time.monotonic() - self._start
        rate = self.done / seconds if seconds > 0 else 0.0
        left = (self._total - self.done) / rate if rate > 0 else 0.0
        peak = self._monitor.peak
        line = (
            f"{units.size(self.done)} of {units.size(self._total)}, {units.size(rate)}/s, {left:.0f} s left, "
            f"memory {units.size(self._monitor.current.anonymous)} (peak {units.size(peak.anonymous)})"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, line=line)
        else:
            fields = {
                "phase": self._what,
                "bytes": self.done,
                "total_bytes": self._total,
                "stored_bytes": self.stored,
                "bytes_per_second": round(rate),
                "eta_seconds": round(left) if rate > 0 else None,
                "memory_bytes": self._monitor.current.anonymous,
                "peak_memory_bytes": peak.anonymous,
            }
            percent = 100 * self.done / max(1, self._total)
            log.info("%s: %.0f %%, %s", self._what, percent, line, extra={"fields": fields})
