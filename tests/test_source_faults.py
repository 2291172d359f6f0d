"""Conversions from servers that fail now and then: each ends right, or fails clean and leaves nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import buckets
import hub as stand_in
import pytest
from buckets import Bucket
from checkpoints import write_tiny
from faults import Faults, Proxy
from hub import Hub
from reading import arrays
from running import Run, convert, files_below, to_maxtext_process

from converter import retrying
from converter.errors import RequestError, WorldError

MODEL = "qwen3-0.6b"
REPO = "Qwen/Qwen3-0.6B"
RUNS = 100
WAYS = ("hub by ranges", "hub's cache", "bucket by ranges", "bucket's cache")
PART = 20


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with buckets.running() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("repository") / "hf", MODEL, shards=2)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests(convert(MODEL, folder, tmp_path_factory.mktemp("expected") / "out"))


def digests(step: Path) -> dict[str, str]:
    return {name: array.sha256 for name, array in arrays(step).items()}


def one_run(seed: int, hub: Hub, bucket: Bucket, source: str, work: Path) -> tuple[Run, int]:
    """A conversion with the faults of a seed, and how many met it."""
    way = WAYS[seed % len(WAYS)]
    work.mkdir()
    flips = 0.1 if way.startswith("bucket") and seed % 8 >= 4 else 0.0
    faults = Faults(
        seed=seed, error=0.1, refuse=0.04, lose=0.04, reset=0.04, truncate=0.04, stall=0.02, stall_seconds=1.0,
        flip=flips, only=None if not flips else lambda method, address: "alt=media" in address,
    )  # fmt: skip
    upstream = hub.endpoint if way.startswith("hub") else bucket.server
    with Proxy(upstream, faults) as proxy:
        env = {"HF_HOME": str(work / "home"), "TMPDIR": str(work)}
        env |= {"HF_ENDPOINT": proxy.url} if way.startswith("hub") else bucket.environment(proxy.url)
        done = to_maxtext_process(
            f"model_name={MODEL}",
            f"base_output_directory={work / 'out'}",
            f"hf_model_path={REPO if way.startswith('hub') else source}",
            "--cache_dir=none" if "ranges" in way else f"--cache_dir={work / 'cache'}",
            "--retry_seconds=20",
            f"--termination_message={work / 'message.json'}",
            env=env,
        )
        return done, proxy.count()


@pytest.mark.faults
@pytest.mark.parametrize("first", range(0, RUNS, PART))
def test_runs_with_faults(first: int, bucket: Bucket, folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    source = bucket.add(folder, f"faulty-{first}")
    with stand_in.running(REPO) as hub, ThreadPoolExecutor(2) as pool:
        hub.add(folder, "main")
        # What the hub redirects to goes through the proxy as well.
        hub.storage = ""
        runs = list(
            pool.map(lambda seed: one_run(seed, hub, bucket, source, tmp_path / str(seed)), range(first, first + PART))
        )
    codes: Counter[int] = Counter()
    for seed, (done, _) in enumerate(runs, first):
        codes[done.code] += 1
        assert "Traceback" not in done.stderr, (seed, done.stderr)
        message = json.loads((tmp_path / str(seed) / "message.json").read_bytes())
        assert message["exit_code"] == done.code
        assert done.stderr.count("trying again") <= 1, (seed, done.stderr)
        if done.code == 0:
            assert digests(tmp_path / str(seed) / "out" / "0") == expected, seed
        else:
            # A flipped byte of a header or an answer may make a request look wrong.
            assert done.code == 3 or (done.code == 2 and WAYS[seed % 4].startswith("bucket")), (seed, done.stderr)
            assert len(done.errors) == 1, (seed, done.stderr)
            left = {name for name in files_below(tmp_path / str(seed)) if not name.startswith(("home", "cache"))}
            assert left <= {"message.json"}, (seed, left)
    assert sum(count for _, count in runs) > PART
    assert codes[0] >= PART // 2, codes


# The policy


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
            retrying.call(lambda outcomes=outcomes: attempt(outcomes), what="it", verdict=_verdict, seconds=60)
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
