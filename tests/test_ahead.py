"""What is read ahead stays within its limits, and goes on where there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from converter.hf.ahead import Aborted, Ahead, Segment

SIZE = 10


class Source:
    """Segments of one file, and what was fetched of them."""

    def __init__(self, keep: str) -> None:
        """`keep`: of each segment whether it is, y or n."""
        self.segments = [
            Segment("f", SIZE * i, SIZE * (i + 1), 1, group=0, keep=each == "y") for i, each in enumerate(keep)
        ]
        self.fetched: list[int] = []

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def fetch(self, segment: Segment) -> memoryview:
        self.fetched.append(segment.begin // SIZE)
        return memoryview(bytes(range(segment.begin, segment.end)))


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
        made.append(Ahead(iter(source), source.fetch, lambda *_: None, limit=25, disk_limit=65, connections=2))
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
    taken = reading.take("f", 2, 9, threading.Event())
    assert taken is not None
    assert bytes(taken[1]) == bytes(range(2, 9))
    settled(source, after)


def test_everything_comes_in_the_end(ahead: Callable[[Source], Ahead]) -> None:
    source = Source("ynnyyynyyyynnnyyyyyyyyyyn")
    reading = ahead(source)
    for i in range(25):
        taken = reading.take("f", SIZE * i, SIZE * (i + 1), threading.Event())
        assert taken is not None
        assert bytes(taken[1]) == bytes(range(SIZE * i, SIZE * (i + 1)))
    assert sorted(source.fetched) == list(range(25))
    assert reading.take("f", 0, 5, threading.Event()) is None


def test_who_waits_is_sent_away_at_the_end(ahead: Callable[[Source], Ahead]) -> None:
    reading = ahead(Source("n" * 12))
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Aborted):
        reading.take("f", 100, 110, stop)
