"""What is read ahead stays within its limits, and goes on where there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from converter.hf.ahead import Aborted, Ahead, Segment

SIZE = 10


def segment(begin: int, end: int, *parts: tuple[int, int], group: int = 0, keep: bool = False) -> Segment:
    """`parts`: what is taken of it, all at once if none are given."""
    return Segment("f", begin, end, parts or ((begin, end),), group, keep)


class Source:
    """Segments of one file, and what was fetched of them."""

    def __init__(self, keep: str) -> None:
        """`keep`: of each segment whether it is, y or n."""
        self.segments = [segment(SIZE * i, SIZE * (i + 1), keep=each == "y") for i, each in enumerate(keep)]
        self.fetched: list[int] = []

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def fetch(self, segment: Segment) -> memoryview:
        self.fetched.append(segment.begin // SIZE)
        return memoryview(bytes(range(segment.begin, segment.end)))

    def kept(self, _: str, begin: int, end: int) -> memoryview | None:
        """What lies elsewhere: bytes 250 to 254, as 0."""
        return memoryview(bytes(end - begin)) if begin >= 250 and end <= 254 else None


def content(begin: int, end: int) -> bytes:
    return bytes(range(begin, end))


def settled(source: Source, expected: int) -> None:
    """Wait until so many were fetched, and see that no more are."""
    deadline = time.monotonic() + 10
    while len(source.fetched) < expected:
        assert time.monotonic() < deadline, source.fetched
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(source.fetched) == expected


@pytest.fixture
def ahead() -> Iterator[Callable[[Source], Ahead]]:
    made: list[Ahead] = []

    def begin(source: Source) -> Ahead:
        made.append(Ahead(iter(source), source.fetch, source.kept, limit=25, disk_limit=65, connections=2))
        made[-1].reach(0)
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("keep", "before", "after"),
    [
        # 20 bytes of memory, of 25; one more when the first is gone.
        ("n" * 12, 2, 3),
        # 60 bytes of disk, of 65.
        ("y" * 12, 6, 7),
        # What is on disk takes no memory.
        ("yyyyynyyyyyy", 7, 8),
        # It does on its way there, and nothing is fetched before what is needed earlier.
        ("nnnyyyyy", 2, 3),
    ],
)
def test_limits(keep: str, before: int, after: int, ahead: Callable[[Source], Ahead]) -> None:
    source = Source(keep)
    reading = ahead(source)
    settled(source, before)
    assert reading.take("f", 0, 10, threading.Event()) == content(0, 10)
    settled(source, after)


def test_everything_comes_in_the_end(ahead: Callable[[Source], Ahead]) -> None:
    source = Source("ynnyyynyyyynnnyyyyyyyyyyn")
    reading = ahead(source)
    for i in range(25):
        assert reading.take("f", SIZE * i, SIZE * (i + 1), threading.Event()) == content(SIZE * i, SIZE * (i + 1))
    assert sorted(source.fetched) == list(range(25))
    assert reading.take("f", 0, 5, threading.Event()) is None


def test_nobody_takes_what_is_for_others(ahead: Callable[[Source], Ahead]) -> None:
    """A segment of a later group may cover what lies elsewhere, and what a part of this group is."""
    source = Source("")
    source.segments = [
        segment(0, 20, (0, 10), (10, 20)),
        segment(90, 94, (90, 94)),
        segment(0, 10, group=1),
        segment(245, 256, (245, 250), (254, 256), group=1),
    ]
    reading, stop = ahead(source), threading.Event()
    settled(source, 2)
    assert reading.take("f", 10, 20, stop) == content(10, 20)
    assert reading.take("f", 0, 10, stop) == content(0, 10)
    assert reading.take("f", 90, 94, stop) == content(90, 94)
    settled(source, 4)
    assert reading.take("f", 251, 254, stop) == bytes(3)
    assert reading.take("f", 0, 10, stop) is None, "it is the next group's"
    reading.reach(1)
    assert reading.take("f", 0, 10, stop) == content(0, 10)
    assert reading.take("f", 251, 254, stop) == bytes(3)
    assert reading.take("f", 245, 250, stop) == content(245, 250)
    assert reading.take("f", 254, 256, stop) == content(254, 256)


def test_what_nobody_took_makes_room(ahead: Callable[[Source], Ahead]) -> None:
    source = Source("")
    source.segments = [segment(0, 20), segment(20, 24, keep=True), segment(30, 50, group=1), segment(60, 70, group=1)]
    reading, stop = ahead(source), threading.Event()
    settled(source, 2)
    reading.reach(1)
    assert reading.take("f", 30, 50, stop) == content(30, 50)
    assert reading.take("f", 60, 70, stop) == content(60, 70)


def test_nobody_waits_for_what_cannot_come(ahead: Callable[[Source], Ahead]) -> None:
    """All room is held for readers who need something else first: whoever waits is told to fetch it himself."""
    source = Source("")
    source.segments = [segment(0, 12), segment(12, 24), segment(30, 40)]
    reading = ahead(source)
    settled(source, 2)
    assert reading.take("f", 30, 40, threading.Event()) is None


def test_who_waits_is_sent_away_at_the_end(ahead: Callable[[Source], Ahead]) -> None:
    reading = ahead(Source("n" * 12))
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Aborted):
        reading.take("f", 100, 110, stop)
