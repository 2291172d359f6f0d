"""Many runs that something breaks: each ends right or fails clean, and what comes next puts everything right.

Every run is a process of its own, forked from one that has imported everything; several run at a time, since most of
them wait. Each has a bucket of its own: to list anything in one, the server looks at all that is in it. What a bucket
holds is read from the server's folder, past the proxy with the faults.
"""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import buckets as servers
import hub as stand_in
import pytest
from buckets import MARKERS, Server
from checkpoints import write_tiny
from faults import Faults, Proxy, seeded
from forking import Forks
from hub import Hub
from oracle import SCANNED, UNSCANNED, WORDS
from reading import digests
from running import Run, convert, files_below

pytestmark = pytest.mark.faults

RUNS = 100
MOMENTS = 50
AT_ONCE = 5

SETTINGS: dict[str, Any] = {
    "buckets.DEADLINE_SECONDS": 3.0,
    "buckets.CLEANING_SECONDS": 3.0,
    "buckets.TENSORSTORE": {
        "gcs_request_retries": {"max_retries": 12, "initial_delay": "10ms", "max_delay": "100ms"},
    },
    "retrying.FIRST_WAIT": 0.02,
    "retrying.LONGEST_WAIT": 0.2,
    # A dead one's lease has ended at once; the service's clock has whole seconds.
    "lease.EXPIRE_SECONDS": -2.0,
}

IMPATIENT: dict[str, Any] = {"buckets.TIMEOUT_SECONDS": 2.0, "hf.remote._TIMEOUT": [2.0, 2.0]}
IMPATIENT_ENVIRONMENT = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
"""Every other run gives up a request that stalls for ten seconds and asks again; the rest wait."""


def settings(seed: int) -> dict[str, Any]:
    return SETTINGS | IMPATIENT if seed // 4 % 2 else SETTINGS


def environment(seed: int) -> dict[str, str]:
    return IMPATIENT_ENVIRONMENT if seed // 4 % 2 else {}


def check_ending(run: Run, seed: int, began: float, codes: tuple[int, ...] = (0, 3)) -> None:
    """It ends well, or says in one line why not; once a minute it says that it tries again."""
    assert run.code in codes, f"{seed}: {run}"
    assert len(run.errors) == (run.code != 0), f"{seed}: {run.stderr}"
    assert "Traceback" not in run.stderr, f"{seed}: {run.stderr}"
    minutes = (time.monotonic() - began) // 60
    assert len(re.findall("trying again", run.stderr)) <= 1 + minutes, f"{seed}: {run.stderr}"


def check_endings(ended: Counter[int], met: Counter[str | None]) -> None:
    """Most get through what they meet, and every kind was met."""
    assert ended[0] > sum(ended.values()) / 2, ended
    assert all(met[kind] for kind in ("error", "refuse", "lose", "reset", "truncate", "stall", "flip")), met


def markers(folder: Path) -> list[bool]:
    return [(folder / marker).exists() for marker in MARKERS]


def left_in(folder: Path) -> set[str]:
    """What lies in an output; the server keeps folders that no object is in any more, which a bucket does not have."""
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}


STORAGES = ("true-true", "false-true", "true-false", "false-false")


def test_buckets_with_faults(server: Server, forks: Forks) -> None:
    """Each fails in its own way while a checkpoint is written to it."""
    ended: Counter[int] = Counter()
    met: Counter[str | None] = Counter()

    def one(seed: int) -> None:
        bucket = server.make_bucket(f"faults-{seed}")
        folder = bucket.folder / "out"
        ocdbt, zarr3 = STORAGES[seed % 4].split("-")
        words = (
            *WORDS,
            f"base_output_directory={bucket.url('out')}",
            f"checkpoint_storage_use_ocdbt={ocdbt}",
            f"checkpoint_storage_use_zarr3={zarr3}",
            # Enough chunks for faults to meet; without OCDBT each is an object.
            "simulated_cpu_devices_count=4",
        )
        began = time.monotonic()
        with Proxy(server.url, seeded(seed, lambda address: "alt=media" in address)) as proxy:
            env = {**servers.environment(proxy.url), **environment(seed)}
            run = forks.run(*words, env=env, settings=settings(seed))
        ended[run.code] += 1
        met.update(fault for _, _, fault in proxy.requests)
        check_ending(run, seed, began)
        if any(markers(folder)) or run.code == 0:
            assert digests(folder / "0") == SCANNED, f"{seed}: {run.stderr}"
        if run.code == 0:
            assert all(markers(folder)), seed
        # Whatever it left, the next one gets it right.
        again = forks.run(*words, "--if_exists=skip", env=servers.environment(server.url), settings=SETTINGS)
        assert again.code == 0, f"{seed}: {again.stderr}"
        assert digests(folder / "0") == SCANNED, seed
        assert left_in(folder) == {"0"}, seed

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(RUNS)))
    check_endings(ended, met)


def test_flipped_bytes_of_a_database(server: Server, forks: Forks) -> None:
    """What is read back while a checkpoint is written has checksums, or no longer makes sense; whichever byte it is."""

    def one(seed: int) -> int:
        bucket = server.make_bucket(f"flips-{seed}")
        began = time.monotonic()
        faults = Faults(seed, flip=0.2, only=lambda _, address: "alt=media" in address and ".process_0" in address)
        with Proxy(server.url, faults) as proxy:
            run = forks.run(
                *WORDS,
                f"base_output_directory={bucket.url('out')}",
                env=servers.environment(proxy.url),
                settings=SETTINGS,
            )
        check_ending(run, seed, began)
        if run.code == 0:
            assert digests(bucket.folder / "out" / "0") == SCANNED, seed
        else:
            assert bucket.objects() == set(), seed
        return proxy.count("flip")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert sum(pool.map(one, range(40))) > 20


MODEL = "qwen3-0.6b"
REPO = "Qwen/Qwen3-0.6B"
WAYS = ("hub by ranges", "hub's cache", "bucket by ranges", "bucket's cache")


@pytest.fixture(scope="module")
def hub(repository: Path) -> Iterator[Hub]:
    with stand_in.running(REPO) as found:
        found.add(repository, "main")
        # What it redirects to goes through the proxy as well.
        found.storage = ""
        yield found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("repository") / "hf", MODEL, shards=2)


@pytest.fixture(scope="module")
def expected(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the folder itself gives, which other tests hold against MaxText's own converter."""
    return digests(convert(MODEL, repository, tmp_path_factory.mktemp("expected") / "out"))


def test_sources_with_faults(
    server: Server, forks: Forks, hub: Hub, repository: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """Each fails in its own way while weights are read from it."""
    source = server.make_bucket("source-faults").add(repository, "model")
    ended: Counter[int] = Counter()
    met: Counter[str | None] = Counter()

    def checked(way: str, address: str) -> bool:
        """Ranges of the hub's come with no checksum."""
        return "alt=media" in address or (way == "hub's cache" and "/storage/" in address)

    def one(seed: int) -> None:
        way, work = WAYS[seed % 4], tmp_path / str(seed)
        work.mkdir()
        upstream = hub.endpoint if way.startswith("hub") else server.url
        began = time.monotonic()
        with Proxy(upstream, seeded(seed, lambda address: checked(way, address))) as proxy:
            there = {"HF_ENDPOINT": proxy.url} if way.startswith("hub") else servers.environment(proxy.url)
            run = forks.run(
                f"model_name={MODEL}",
                f"base_output_directory={work / 'out'}",
                f"hf_model_path={REPO if way.startswith('hub') else source}",
                "--cache_dir=none" if "ranges" in way else f"--cache_dir={work / 'cache'}",
                "--retry_seconds=3",
                f"--termination_message={work / 'message.json'}",
                env={"HF_HOME": str(work / "home"), "TMPDIR": str(work), **there, **environment(seed)},
                settings=settings(seed),
            )
        ended[run.code] += 1
        met.update(fault for _, _, fault in proxy.requests)
        # A file's checksum is compared when all of it was read; a header that makes no sense is refused before.
        check_ending(run, seed, began, (0, 2, 3) if proxy.count("flip") and way == "bucket by ranges" else (0, 3))
        assert json.loads((work / "message.json").read_bytes())["exit_code"] == run.code
        if run.code == 0:
            assert digests(work / "out" / "0") == expected, seed
        left = {Path(name).parts[0] for name in files_below(work)} - {"home", "cache"}
        assert left == {"message.json", *(["out"] if run.code == 0 else [])}, (seed, left)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(RUNS)))
    check_endings(ended, met)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_ended_at_any_moment(where: str, number: signal.Signals, server: Server, forks: Forks, tmp_path: Path) -> None:
    """Every other time an older checkpoint is replaced. SIGTERM leaves nothing; after SIGKILL the next run does."""
    words = [*WORDS, "--threads=1"]
    took: list[float] = []
    ended: Counter[int] = Counter()

    def place(name: str) -> tuple[str, Path]:
        if where == "disk":
            return str(tmp_path / name), tmp_path / name
        bucket = server.make_bucket(name)
        return bucket.url("out"), bucket.folder / "out"

    def run(output: str, *more: str) -> None:
        """A conversion that nobody disturbs."""
        began = time.monotonic()
        done = forks.run(
            *words,
            f"base_output_directory={output}",
            "--if_exists=overwrite",
            *more,
            env=servers.environment(server.url),
            settings=SETTINGS,
        )
        assert done.code == 0, done.stderr
        took.append(time.monotonic() - began)

    def one(seed: int) -> None:
        decide = random.Random(f"{where} {number} {seed}")
        output, folder = place(f"{number.name.lower()}-{seed}")
        old = {}
        if seed % 2:
            run(output, "scan_layers=false")
            old = UNSCANNED
        # However busy the machine is: as long as the last ones took.
        usual = statistics.median(took[-AT_ONCE:])
        with Proxy(server.url) as proxy:
            begun = forks.start(
                *words,
                f"base_output_directory={output}",
                "--if_exists=overwrite",
                env=servers.environment(proxy.url),
                settings=SETTINGS,
            )
            time.sleep(decide.uniform(0, 1.1 * usual))
            begun.send(number)
            done = begun.wait()
        ended[done.code] += 1
        whole = (folder / "0").exists() and (where == "disk" or all(markers(folder)))
        found = digests(folder / "0") if whole or any(markers(folder)) else {}
        if done.code == 0:
            assert whole, seed
            assert found == SCANNED, seed
        elif number == signal.SIGKILL:
            assert done.code == -number, (seed, done)
            assert found in (old, SCANNED, {}), seed
        else:
            assert done.code in (143, -number), (seed, done)
            assert found == old, seed
        # Python itself tells of an exception that came where it had to be ignored; the run ends all the same.
        assert "Traceback" not in done.stderr or "Exception ignored" in done.stderr, (seed, done.stderr)
        if number == signal.SIGTERM:
            assert left_in(folder) == ({"0"} if found else set()), (seed, done, files_below(folder))
        run(output)
        assert digests(folder / "0") == SCANNED, seed
        assert left_in(folder) == {"0"}, (seed, files_below(folder))

    # The first may be many times as slow.
    for i in range(3):
        run(place(f"{number.name.lower()}-first-{i}")[0])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(MOMENTS)))
    assert sum(ended.values()) - ended[0] > MOMENTS / 4, ended
