"""Reading ahead: ranges of remote files are fetched in the order they will be needed, a bounded number of bytes early.

Whoever needs a range takes it out of the segment it was announced with; a segment is dropped when everything was taken
that it was announced for. Segments are taken in about the order they were announced in, so those held are always the
next ones. What lies on disk as soon as it has come counts against a limit of its own, so that the network need not wait
while the layers of one array are walked again and again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A range of a file that is fetched in one request.

    Attributes:
      file: its name in the repository.
      begin, end: bytes.
      parts: the ranges in it that will be taken, one for each time.
      group: of chunks that it is read for.
      keep: it will be read again later.
    """

    file: str
    begin: int
    end: int
    parts: tuple[tuple[int, int], ...]
    group: int
    keep: bool

    @property
    def size(self) -> int:
        return self.end - self.begin


class Aborted(Exception):  # noqa: N818 - not an error
    """Nobody waits for what is read any more."""


@dataclass(eq=False)
class _Held:
    """A segment, how often it is still to be taken, and its content once that has come."""

    segment: Segment
    left: int
    data: memoryview | None = None


class Ahead:
    """Fetches segments in threads of its own until it is closed.

    The threads are daemons: a request that hangs must not keep the process from ending.
    """

    def __init__(
        self,
        segments: Iterator[Segment],
        fetch: Callable[[Segment], memoryview],
        elsewhere: Callable[[str, int, int], memoryview | None],
        *,
        limit: int,
        disk_limit: int,
        connections: int,
    ) -> None:
        """Begin.

        Args:
          segments: in the order they will be needed.
          fetch: gets one, into memory or onto the disk, as its `keep` says.
          elsewhere: gives a range that need not be fetched, None where there is no such.
          limit: bytes that are held in memory or on their way; one segment at least.
          disk_limit: bytes on disk that nobody has taken yet, or are on their way there; one segment at least.
          connections: how many segments are fetched at a time.
        """
        self._segments = segments
        self._fetch = fetch
        self._elsewhere = elsewhere
        self._limit = limit
        self._disk_limit = disk_limit
        self._changed = threading.Condition()
        self._held: set[_Held] = set()
        # Who takes what: (group, file, begin, end) -> segments that were announced with it.
        self._due: dict[tuple[int, str, int, int], deque[_Held]] = {}
        self._group = -1
        self._bytes = self._disk_bytes = 0
        self._next = next(segments, None)
        self._closed = False
        self._error: BaseException | None = None
        for _ in range(connections):
            threading.Thread(target=self._run, name="ahead", daemon=True).start()

    def reach(self, group: int) -> None:
        """Begin with the reading for a group of chunks; that for all groups before is over."""
        with self._changed:
            self._group = group
            for key in [key for key in self._due if key[0] < group]:
                del self._due[key]
            for held in [held for held in self._held if held.segment.group < group]:
                self._drop(held)
            self._changed.notify_all()

    def take(self, file: str, begin: int, end: int, stop: threading.Event) -> memoryview | None:
        """A range that the group reached needs; None where nobody fetches it.

        Raises:
          Aborted: closed, or `stop` was set, while waiting.
          ConverterError: a fetch failed.
        """
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._closed or stop.is_set():
                    raise Aborted
                key = (self._group, file, begin, end)
                due = self._due.get(key)
                if due and (data := due[0].data) is not None:
                    held = due.popleft()
                    self._taken(held)
                    return data[begin - held.segment.begin : end - held.segment.begin]
                if not due:
                    if (found := self._elsewhere(file, begin, end)) is not None:
                        return found
                    if self._next is None or self._next.group > self._group:
                        return None
                # Not for ever at once, for the sake of `stop`.
                self._changed.wait(0.1)

    def close(self) -> None:
        """Fetch no more; what is being fetched is dropped."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._due.clear()
            self._changed.notify_all()

    def _taken(self, held: _Held) -> None:
        held.left -= 1
        if not held.left:
            self._drop(held)
            self._changed.notify_all()

    def _drop(self, held: _Held) -> None:
        self._held.discard(held)
        if held.segment.keep:
            self._disk_bytes -= held.segment.size
        elif held.data is not None:
            self._bytes -= held.segment.size

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and self._next is not None and not self._fits(self._next):
                    self._changed.wait()
                if self._closed or self._next is None or self._error is not None:
                    return
                held = self._announce(self._next)
                self._bytes += held.segment.size
                if held.segment.keep:
                    self._disk_bytes += held.segment.size
                try:
                    self._next = next(self._segments, None)
                except BaseException as error:
                    self._fail(error)
                    return
            try:
                data = self._fetch(held.segment)
            except BaseException as error:
                with self._changed:
                    self._fail(error)
                return
            with self._changed:
                held.data = data
                if held.segment.keep or held not in self._held:
                    self._bytes -= held.segment.size
                self._changed.notify_all()

    def _announce(self, segment: Segment) -> _Held:
        held = _Held(segment, len(segment.parts))
        self._held.add(held)
        for begin, end in segment.parts:
            self._due.setdefault((segment.group, segment.file, begin, end), deque()).append(held)
        return held

    def _fits(self, segment: Segment) -> bool:
        in_memory = self._bytes == 0 or self._bytes + segment.size <= self._limit
        on_disk = not segment.keep or self._disk_bytes == 0 or self._disk_bytes + segment.size <= self._disk_limit
        return in_memory and on_disk

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.notify_all()
