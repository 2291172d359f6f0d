"""What is tried again, how often, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from converter import retrying
from converter.errors import RequestError, WorldError


class _Failure(Exception):  # noqa: N818
    def __init__(self, wait: float | None = 0.0) -> None:
        super().__init__("it\nfailed")
        self.wait = wait


def _verdict(error: Exception) -> float | None:
    return error.wait if isinstance(error, _Failure) else None


class _Clock:
    """Time that passes by sleeping only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


def failing(times: int, *waits: float | None) -> Iterator[Exception | None]:
    yield from (_Failure(wait) for wait in (waits or (0.0,) * times))
    while True:
        yield None


def attempt(outcomes: Iterator[Exception | None]) -> str:
    outcome = next(outcomes)
    if outcome is not None:
        raise outcome
    return "done"


def test_transient_failures_are_tried_again(clock: _Clock) -> None:
    outcomes = failing(8)
    assert retrying.call(lambda: attempt(outcomes), what="it", verdict=_verdict, seconds=600) == "done"
    assert len(clock.sleeps) == 8
    assert all(0 < wait <= retrying.LONGEST_WAIT + 1 for wait in clock.sleeps)
    assert len(set(clock.sleeps)) == 8, "with jitter"


def test_time_is_up(clock: _Clock) -> None:
    outcomes = failing(10_000)
    with pytest.raises(WorldError, match="it failed: it failed; gave up after"):
        retrying.call(lambda: attempt(outcomes), what="it", verdict=_verdict, seconds=120)
    assert clock.now <= 1000 + 120


def test_what_is_final_is_not_tried_again(clock: _Clock) -> None:
    for error in (_Failure(None), RequestError("no"), WorldError("no"), ValueError("no")):
        outcomes = iter([error])
        with pytest.raises(type(error)):
            retrying.call(partial(attempt, outcomes), what="it", verdict=_verdict, seconds=60)
    assert not clock.sleeps


def test_the_server_says_how_long_to_wait(clock: _Clock) -> None:
    outcomes = failing(2, 7.0, 40.0)
    assert retrying.call(lambda: attempt(outcomes), what="it", verdict=_verdict, seconds=600) == "done"
    assert 7 <= clock.sleeps[0] <= 9
    assert 40 <= clock.sleeps[1] <= 51
    outcomes = failing(1, 7200.0)
    with pytest.raises(WorldError):
        retrying.call(lambda: attempt(outcomes), what="it", verdict=_verdict, seconds=600)
    assert len(clock.sleeps) == 2, "longer than there is time: given up at once"


def test_retry_after() -> None:
    assert retrying.retry_after("12") == 12
    assert retrying.retry_after(None) == 0
    assert retrying.retry_after("-3") == 0
    assert retrying.retry_after("soon") == 0
    assert retrying.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retrying.retry_after("Fri, 21 Oct 2145 07:28:00 GMT") > 1e9
