"""Many runs that something breaks: each ends right or fails clean, and what comes next puts everything right.

Every run is a process of its own, forked from one that has imported everything. What a bucket holds is read from the
server's folder, past the proxy with the faults.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import buckets as servers
import pytest
from buckets import Bucket, Server
from checkpoints import DATA
from faults import Faults, Proxy
from forking import Forks
from reading import arrays
from running import Run, files_below

pytestmark = pytest.mark.faults

SOURCE = DATA / "qwen3" / "hf_bf16"
ORACLE = json.loads((DATA / "qwen3" / "oracle.json").read_bytes())
EXPECTED = {
    scan: {
        name: entry["sha256"]
        for name, entry in json.loads((DATA / "qwen3" / f"expected_bf16_{scan}.json").read_bytes())["arrays"].items()
    }
    for scan in ("scan", "unscan")
}
WORDS = [
    f"model_name={ORACLE['model_name']}",
    *(f"{word}={value}" for word, value in ORACLE["words"].items()),
    f"hf_model_path={SOURCE}",
]

MARKERS = ("0/commit_success.txt", "0/items/commit_success.txt")

SETTINGS: dict[str, Any] = {
    "buckets.DEADLINE_SECONDS": 3.0,
    "buckets.CLEANING_SECONDS": 3.0,
    "retrying.FIRST_WAIT": 0.01,
    "retrying.LONGEST_WAIT": 0.1,
    "buckets.TIMEOUT_SECONDS": 2.0,
    "buckets.TENSORSTORE": {
        "gcs_request_retries": {"max_retries": 12, "initial_delay": "10ms", "max_delay": "100ms"},
    },
    # A dead one's lease has ended at once; the service's clock has whole seconds.
    "lease.EXPIRE_SECONDS": -2.0,
}

RUNS = 100
KILLS = 50


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = servers.start()
    yield found
    found.stop()
    shutil.rmtree(found.folder)


@pytest.fixture(scope="module")
def bucket(server: Server) -> Bucket:
    return server.make_bucket("faults")


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("said")) as found:
        yield found


def digests(step: Path) -> dict[str, str]:
    return {name: array.sha256 for name, array in arrays(step).items()}


def left_in(folder: Path, where: str) -> set[str]:
    """What lies in an output; the server keeps folders that no object is in any more, which a bucket does not have."""
    if where == "disk":
        return {path.name for path in folder.iterdir()}
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}


def faults_of(seed: int) -> Faults:
    """One kind or all of them, on 1 to 30 % of the requests, and on nearly all every tenth time.

    Bytes are flipped in what objects hold, which checksums cover, and not in answers that only TLS protects.
    """
    decide = random.Random(seed)
    rate = decide.uniform(0.01, 0.3)
    kinds = ["error", "refuse", "lose", "reset", "truncate"]
    if seed % 10 == 9:
        return Faults(seed, error=0.9)
    if seed % 2:
        return Faults(seed, **{kind: rate / len(kinds) for kind in kinds}, stall=0.02, stall_seconds=0.3)
    kind = decide.choice([*kinds, "flip"])
    return Faults(seed, **{kind: rate}, only=(lambda _, address: "alt=media" in address) if kind == "flip" else None)


def check_clean_failure(run: Run) -> None:
    assert run.code == 3, run.stderr
    assert len(run.errors) == 1, run.stderr
    assert "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("storage", ["true-true", "false-true", "true-false", "false-false"])
def test_runs_with_faults(storage: str, bucket: Bucket, server: Server, forks: Forks) -> None:
    """A hundred in all, each with a bucket that fails in its own way."""
    ocdbt, zarr3 = storage.split("-")
    ended: Counter[int] = Counter()
    met = 0
    number = ["true-true", "false-true", "true-false", "false-false"].index(storage)
    for seed in range(number, RUNS, 4):
        output = f"run-{seed}"
        with Proxy(server.url, faults_of(seed)) as proxy:
            run = forks.run(
                *WORDS,
                f"base_output_directory={bucket.url(output)}",
                f"checkpoint_storage_use_ocdbt={ocdbt}",
                f"checkpoint_storage_use_zarr3={zarr3}",
                env=servers.environment(proxy.url),
                settings=SETTINGS,
            )
            met += proxy.count()
        ended[run.code] += 1
        step = bucket.folder / output / "0"
        if run.code:
            check_clean_failure(run)
        if any((bucket.folder / output / marker).exists() for marker in MARKERS) or run.code == 0:
            assert digests(step) == EXPECTED["scan"], f"{seed}: {run.stderr}"
        if run.code == 0:
            assert all((bucket.folder / output / marker).exists() for marker in MARKERS), seed
        assert len(re.findall("fails for now", run.stderr)) <= 1, run.stderr
        # Whatever it left, the next one gets it right.
        again = forks.run(
            *WORDS,
            f"base_output_directory={bucket.url(output)}",
            f"checkpoint_storage_use_ocdbt={ocdbt}",
            f"checkpoint_storage_use_zarr3={zarr3}",
            "--if_exists=skip",
            env=servers.environment(server.url),
            settings=SETTINGS,
        )
        assert again.code == 0, f"{seed}: {again.stderr}"
        assert digests(step) == EXPECTED["scan"], seed
        assert left_in(bucket.folder / output, "bucket") == {"0"}, seed
    assert met > 100
    assert ended[0] > sum(ended.values()) / 2, ended
    assert ended[0] + ended[3] == sum(ended.values())


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_sigkill_at_any_moment(where: str, bucket: Bucket, server: Server, forks: Forks, tmp_path: Path) -> None:
    """Every other time an older checkpoint is being replaced."""
    decide = random.Random(where)
    env = servers.environment(server.url)
    words = [*WORDS, "--threads=1"]

    def place(number: int) -> tuple[str, Path]:
        if where == "disk":
            return str(tmp_path / f"kill-{number}"), tmp_path / f"kill-{number}"
        return bucket.url(f"kill-{number}"), bucket.folder / f"kill-{number}"

    took = []
    for number in (-1, -2, -3):
        began = time.monotonic()
        assert forks.run(*words, f"base_output_directory={place(number)[0]}", env=env, settings=SETTINGS).code == 0
        took.append(time.monotonic() - began)
    # The first may be many times as slow.
    usual = min(took)
    killed = 0
    for number in range(KILLS):
        output, folder = place(number)
        target = f"base_output_directory={output}"
        overwrite = bool(number % 2)
        if overwrite:
            first = forks.run(*words, target, "scan_layers=false", env=env, settings=SETTINGS)
            assert first.code == 0, first.stderr
        run = forks.start(*words, target, "--if_exists=overwrite", env=env, settings=SETTINGS)
        time.sleep(decide.uniform(0, 1.1 * usual))
        run.kill()
        killed += run.wait().code < 0
        step = folder / "0"
        if where == "bucket":
            # A request that was under way when it was killed.
            time.sleep(0.05)
        whole = step.exists() and (where == "disk" or all((folder / marker).exists() for marker in MARKERS))
        if whole:
            assert digests(step) in (list(EXPECTED.values()) if overwrite else [EXPECTED["scan"]]), number
        elif where == "bucket":
            assert not (folder / MARKERS[0]).exists(), number
            if (folder / MARKERS[1]).exists():
                assert digests(step) in list(EXPECTED.values()), number
        again = forks.run(*words, target, "--if_exists=overwrite", env=env, settings=SETTINGS)
        assert again.code == 0, f"{number}: {again.stderr}"
        assert digests(step) == EXPECTED["scan"], number
        assert left_in(folder, where) == {"0"}, (number, files_below(folder))
    assert killed > KILLS / 2
