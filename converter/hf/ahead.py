"""Reading ahead: ranges of remote files are fetched in the order they will be needed, a bounded number of bytes early.

Whoever needs a range takes it out of the segment it was announced with; a segment is dropped when everything was taken
that it was announced for. Segments are taken in about the order they were announced in, so those held are always the
next ones. What lies on disk as soon as it has come counts against a limit of its own, so that the network need not wait
while the layers of one array are walked again and again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_WAIT_SECONDS = 0.1

_STUCK_SECONDS = 1.0
"""After so long without anything taken or fetched, whoever waits for what is not announced helps himself."""


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
    """A segment.

    Attributes:
      left: how often it is still to be taken.
      come: whoever waits for its content waits here: nobody else need be woken.
      data: its content, once that has come.
    """

    segment: Segment
    left: int
    come: threading.Condition
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
        self._lock = threading.Lock()
        # Where those wait who have nothing to fetch for now, and those who need what is not announced yet.
        self._room, self._announced = threading.Condition(self._lock), threading.Condition(self._lock)
        self._held: set[_Held] = set()
        # Who takes what: (group, file, begin, end) -> segments that were announced with it.
        self._due: dict[tuple[int, str, int, int], deque[_Held]] = {}
        self._group = -1
        self._bytes = self._disk_bytes = 0
        self._fetching, self._moved = 0, time.monotonic()
        self._next = next(segments, None)
        self._closed = False
        self._error: BaseException | None = None
        for _ in range(connections):
            threading.Thread(target=self._run, name="ahead", daemon=True).start()

    def reach(self, group: int) -> None:
        """Begin with the reading for a group of chunks; that for all groups before is over."""
        with self._lock:
            self._group = group
            for key in [key for key in self._due if key[0] < group]:
                del self._due[key]
            for held in [held for held in self._held if held.segment.group < group]:
                self._drop(held)

    def take(self, file: str, begin: int, end: int, stop: threading.Event) -> memoryview | None:
        """A range that the group reached needs; None where nobody fetches it.

        Raises:
          Aborted: closed, or `stop` was set, while waiting.
          ConverterError: a fetch failed.
        """
        with self._lock:
            while True:
                if self._error is not None:
                    raise self._error
                if self._closed or stop.is_set():
                    raise Aborted
                if due := self._due.get((self._group, file, begin, end)):
                    held = due[0]
                    if held.data is not None:
                        due.popleft()
                        self._taken(held)
                        return held.data[begin - held.segment.begin : end - held.segment.begin]
                    # Not for ever at once, for the sake of `stop`.
                    held.come.wait(_WAIT_SECONDS)
                    continue
                if (found := self._elsewhere(file, begin, end)) is not None:
                    return found
                if self._next is None or self._next.group > self._group or self._is_stuck(self._next):
                    return None
                self._announced.wait(_WAIT_SECONDS)

    def close(self) -> None:
        """Fetch no more; what is being fetched is dropped."""
        with self._lock:
            self._closed = True
            self._held.clear()
            self._due.clear()
            self._room.notify_all()

    def _is_stuck(self, segment: Segment) -> bool:
        """Whether nothing moves: all is held for others who wait as well."""
        idle = time.monotonic() - self._moved > _STUCK_SECONDS
        return idle and not self._fetching and not self._fits(segment)

    def _taken(self, held: _Held) -> None:
        self._moved = time.monotonic()
        held.left -= 1
        if not held.left:
            self._drop(held)

    def _drop(self, held: _Held) -> None:
        self._held.discard(held)
        if held.segment.keep:
            self._disk_bytes -= held.segment.size
        elif held.data is not None:
            self._bytes -= held.segment.size
        self._wake()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and self._next is not None and not self._fits(self._next):
                    self._room.wait()
                if self._closed or self._next is None or self._error is not None:
                    return
                held = self._announce(self._next)
                self._fetching += 1
                try:
                    self._next = next(self._segments, None)
                except BaseException as error:
                    self._fail(error)
                    return
                self._wake()
            try:
                data = self._fetch(held.segment)
            except BaseException as error:
                with self._lock:
                    self._fail(error)
                return
            with self._lock:
                held.data, self._moved = data, time.monotonic()
                self._fetching -= 1
                if held.segment.keep or held not in self._held:
                    self._bytes -= held.segment.size
                    self._wake()
                held.come.notify_all()

    def _announce(self, segment: Segment) -> _Held:
        held = _Held(segment, len(segment.parts), threading.Condition(self._lock))
        self._held.add(held)
        for begin, end in segment.parts:
            self._due.setdefault((segment.group, segment.file, begin, end), deque()).append(held)
        self._bytes += segment.size
        if segment.keep:
            self._disk_bytes += segment.size
        self._announced.notify_all()
        return held

    def _wake(self) -> None:
        """Have another thread fetch the next segment, if there is room for it."""
        if self._next is not None and self._fits(self._next):
            self._room.notify()

    def _fits(self, segment: Segment) -> bool:
        in_memory = self._bytes == 0 or self._bytes + segment.size <= self._limit
        on_disk = not segment.keep or self._disk_bytes == 0 or self._disk_bytes + segment.size <= self._disk_limit
        return in_memory and on_disk

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._room.notify_all()
