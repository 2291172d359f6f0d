"""Checkpoints in a bucket: written, restored by plain Orbax, replaced, refused, cleaned up; with a real server."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import buckets as servers
import pytest
from buckets import TOKEN, Bucket, Server
from checkpoints import write_tiny
from faults import NO_FAULTS, Faults, Proxy, one
from forking import Fork, Forks
from oracle import SCANNED, SOURCE, WORDS
from running import ROOT, Run, environment, to_maxtext, to_maxtext_process

from converter import buckets, cli, lease, retrying
from converter.errors import WorldError

MARKERS = {f"out/{marker}" for marker in servers.MARKERS}


@pytest.fixture(autouse=True)
def _fast(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Talk to the server, and do not wait long between tries."""
    use(server.url, monkeypatch)
    # What is told once a minute was told by no test before.
    monkeypatch.setattr(retrying, "_notices", retrying._Notices())
    monkeypatch.setattr(retrying, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(retrying, "LONGEST_WAIT", 0.05)
    retries = {"max_retries": 20, "initial_delay": "10ms", "max_delay": "50ms"}
    monkeypatch.setitem(buckets.TENSORSTORE, "gcs_request_retries", retries)


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Talk to another address from here on."""
    for name, value in servers.environment(url).items():
        monkeypatch.setenv(name, value)
    buckets._client.cache_clear()
    monkeypatch.setattr(retrying, "_notices", retrying._Notices())


def convert(bucket: Bucket, *words: object) -> Run:
    return to_maxtext(*WORDS, f"base_output_directory={bucket.url('out')}", *words)


def read(*words: str) -> Run:
    """Run another command in this process."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(words)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Run(code, out.getvalue(), err.getvalue())


def refused(run: Run, code: int, part: str) -> None:
    """One line, no traceback."""
    assert run.code == code, run.stderr
    assert len(run.errors) == 1, run.stderr
    assert part in run.errors[0]
    assert "Traceback" not in run.stderr


def plain_orbax(steps: list[str]) -> dict[str, dict[str, Any]]:
    """What plain Orbax, through gcsfs and in a process without the converter, restores."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "restoring.py"), "16", *steps],
        env=environment(),
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check_equals_oracle(ways: Mapping[str, Mapping[str, Any]]) -> None:
    """Every way gives what MaxText's own converter made."""
    assert len(ways) == 6
    for way, found in ways.items():
        arrays = {name: leaf["sha256"] for name, leaf in found.items() if name.startswith("params.")}
        assert arrays == {name: digest for name, digest in SCANNED.items() if name != "step"}, way


STORAGES = [
    (ocdbt, zarr3) for ocdbt in ("true", "false") for zarr3 in ("true", "false")
]  # fmt: skip


def test_every_storage_is_restored_by_plain_orbax(bucket: Bucket) -> None:
    steps = []
    for ocdbt, zarr3 in STORAGES:
        output = bucket.url(f"ocdbt-{ocdbt}/zarr3-{zarr3}")
        run = to_maxtext(
            *WORDS,
            f"base_output_directory={output}",
            f"checkpoint_storage_use_ocdbt={ocdbt}",
            f"checkpoint_storage_use_zarr3={zarr3}",
        )
        assert run.code == 0, run.stderr
        assert f"load_parameters_path={output}/0/items" in run.stdout
        steps.append(f"{output}/0")
    found = plain_orbax(steps)
    assert list(found) == steps
    for ways in found.values():
        check_equals_oracle(ways)
    objects = bucket.objects()
    assert not {name for name in objects if "lease" in name or "probe" in name or "replacement" in name}
    assert "ocdbt-true/zarr3-true/0/items/manifest.ocdbt" in objects
    assert "ocdbt-false/zarr3-true/0/items/params.params.token_embedder.embedding/zarr.json" in objects
    assert "ocdbt-false/zarr3-false/0/items/params.params.token_embedder.embedding/.zarray" in objects


def test_bucket_root_is_a_place(bucket: Bucket) -> None:
    run = to_maxtext(*WORDS, f"base_output_directory={bucket.url()}")
    assert run.code == 0, run.stderr
    assert "0/commit_success.txt" in bucket.objects()


def test_if_exists(bucket: Bucket) -> None:
    assert convert(bucket).code == 0
    before = {name: bucket.read(name) for name in bucket.objects()}
    refused(convert(bucket), 2, f"{bucket.url('out/0')} exists")
    skipped = convert(bucket, "--if_exists=skip")
    assert skipped.code == 0
    assert "nothing to do" in skipped.stderr
    refused(convert(bucket, "--if_exists=skip", "scan_layers=false"), 2, "not the complete result of this request")
    assert {name: bucket.read(name) for name in bucket.objects()} == before
    replaced = convert(bucket, "--if_exists=overwrite", "scan_layers=false")
    assert replaced.code == 0, replaced.stderr
    check_nothing_else(bucket)
    assert not bucket.objects() & set(before) - {name for name in before if not re.search(r"/d/[0-9a-f]{32}$", name)}, (
        "data of the old checkpoint are left"
    )
    listing = json.loads(read("inspect", bucket.url("out"), "--json").stdout)
    assert listing["custom_metadata"] == {"scan_layers": False}
    assert read("verify", bucket.url("out"), "--source", str(SOURCE)).code == 0


@pytest.mark.parametrize("marker", sorted(MARKERS))
def test_unfinished_is_not_skipped_nor_removed(marker: str, bucket: Bucket) -> None:
    """A folder without Orbax's last object that is no run's own: perhaps the copy of a disk's checkpoint."""
    assert convert(bucket).code == 0
    (bucket.folder / marker).unlink()
    before = bucket.objects()
    for mode in ("refuse", "skip"):
        refused(convert(bucket, f"--if_exists={mode}"), 2, "exists")
        assert bucket.objects() == before
    if "items" in marker:
        refused(read("inspect", bucket.url("out")), 2, "commit_success.txt")
    assert convert(bucket, "--if_exists=overwrite").code == 0
    assert bucket.objects() >= MARKERS
    assert read("verify", bucket.url("out"), "--source", str(SOURCE)).code == 0


def test_what_is_no_checkpoint_is_not_overwritten(bucket: Bucket) -> None:
    bucket.put("out/0/thesis.txt", b"mine")
    refused(convert(bucket, "--if_exists=overwrite"), 2, "is no checkpoint")
    assert bucket.objects() == {"out/0/thesis.txt"}


@pytest.mark.parametrize("where", ["base_output_directory=gs://no-such-bucket/out", "--report=gs://no-such-bucket/r"])
def test_missing_bucket(where: str, bucket: Bucket, tmp_path: Path) -> None:
    message = tmp_path / "message.json"
    run = convert(bucket, where, f"--termination_message={message}")
    refused(run, 2, "there is no bucket gs://no-such-bucket")
    assert len(run.stderr.splitlines()) == 1
    assert json.loads(message.read_bytes())["exit_code"] == 2
    assert bucket.objects() == set()


def test_missing_bucket_and_checkpoint_to_read(bucket: Bucket) -> None:
    for words in (["inspect", "gs://no-such-bucket/a"], ["verify", "gs://no-such-bucket/a", f"--source={SOURCE}"]):
        refused(read(*words), 2, "there is no bucket gs://no-such-bucket")
    refused(read("inspect", bucket.url("nothing")), 2, bucket.url("nothing"))


@pytest.mark.parametrize("status", [401, 403])
def test_bucket_that_cannot_be_written(
    status: int, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found while planning, and asked once: retrying is useless."""
    faults = Faults(error=1, statuses=(status,), only=lambda method, _: method in ("POST", "PUT"))
    with Proxy(server.url, faults) as proxy:
        use(proxy.url, monkeypatch)
        run = convert(bucket)
        assert proxy.count() == 1
    # To a 401 the client library answers by refreshing its credentials, of which it has none here.
    refused(run, 2, f"no permission on gs://{bucket.name} (HTTP 403)" if status == 403 else "no credentials")
    assert len(run.stderr.splitlines()) == 1


def test_bucket_that_cannot_be_read(bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(server.url, Faults(error=1, statuses=(403,))) as proxy:
        use(proxy.url, monkeypatch)
        refused(read("inspect", bucket.url("out")), 2, f"no permission on gs://{bucket.name}")
        assert proxy.count() <= 2


def test_only_objects_are_asked_for(bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role has no right on the bucket itself."""
    with Proxy(server.url) as proxy:
        use(proxy.url, monkeypatch)
        assert convert(bucket).code == 0
        assert convert(bucket, "--if_exists=overwrite").code == 0
        assert read("inspect", bucket.url("out")).code == 0
        addresses = {address for _, address, _ in proxy.requests}
    assert addresses
    assert not {address for address in addresses if not re.match(r"/(upload/|download/)?storage/v1/b/[^/]+/o", address)}


def test_inspect_is_the_same_as_on_disk(bucket: Bucket, tmp_path: Path) -> None:
    for output in (bucket.url("out"), tmp_path / "out"):
        assert to_maxtext(*WORDS, f"base_output_directory={output}").code == 0
    listings = [
        json.loads(read("inspect", str(path), "--json").stdout)
        for path in (bucket.url("out"), bucket.url("out/0"), bucket.url("out/0/items"), tmp_path / "out")
    ]
    assert {listing.pop("path") for listing in listings[:3]} == {bucket.url("out/0/items")}
    del listings[3]["path"]
    assert listings == [listings[3]] * 4
    assert {array["name"] for array in listings[0]["arrays"]} == set(SCANNED)


def test_verify_finds_a_difference(bucket: Bucket, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "one", "qwen3-0.6b", seed=1)
    other = write_tiny(tmp_path / "other", "qwen3-0.6b", seed=2)
    run = to_maxtext("model_name=qwen3-0.6b", f"hf_model_path={source}", f"base_output_directory={bucket.url('out')}")
    assert run.code == 0, run.stderr
    assert read("verify", bucket.url("out"), "--source", str(source)).code == 0
    report = bucket.url("reports/check.json")
    run = read("verify", bucket.url("out"), "--source", str(other), f"--report={report}")
    assert run.code == 4
    assert "params.params.token_embedder.embedding" in run.stdout
    told = json.loads(bucket.read("reports/check.json"))
    assert told["checkpoint"] == bucket.url("out/0/items")
    assert told["differences"]


def test_report(bucket: Bucket) -> None:
    run = convert(bucket, f"--report={bucket.url('reports/deep/r.json')}")
    assert run.code == 0, run.stderr
    report = json.loads(bucket.read("reports/deep/r.json"))
    assert report["request"]["output"] == bucket.url("out")
    assert {array["name"] for array in report["arrays"]} == set(SCANNED) - {"step"}
    assert {name for name in bucket.objects() if not name.startswith("out/0/")} == {"reports/deep/r.json"}


def test_termination_message_is_local(bucket: Bucket) -> None:
    refused(convert(bucket, f"--termination_message={bucket.url('m')}"), 2, "termination_message")


def test_the_token_is_in_no_log(bucket: Bucket, server: Server, tmp_path: Path) -> None:
    """Whatever ends the run, and whoever logs."""
    message = tmp_path / "message.json"
    said = []
    only_data: Callable[[str, str], bool] = lambda method, address: "ocdbt.process" in address  # noqa: E731
    for faults in (Faults(), Faults(error=1, statuses=(403,)), Faults(error=1, statuses=(401,), only=only_data)):
        with Proxy(server.url, faults) as proxy:
            run = to_maxtext_process(
                *WORDS,
                f"base_output_directory={bucket.url('out')}",
                "--if_exists=overwrite",
                f"--termination_message={message}",
                env={**servers.environment(proxy.url), "TENSORSTORE_VERBOSE_LOGGING": "gcs=1"},
            )
        said += [str(run.code), run.stdout, run.stderr, message.read_text()]
    assert said[0::4] == ["0", "2", "2"], said
    assert TOKEN not in "".join(said)
    assert not [name for name in bucket.objects() if TOKEN.encode() in bucket.read(name)]


@pytest.mark.parametrize(
    "faults",
    [
        Faults(1, error=0.3),
        Faults(2, refuse=0.2),
        Faults(3, lose=0.2),
        Faults(4, reset=0.2),
        Faults(5, truncate=0.2),
        Faults(6, stall=0.1, stall_seconds=0.3),
    ],
    ids=["error", "refuse", "lose", "reset", "truncate", "stall"],
)
def test_transient_faults_are_tried_again(
    faults: Faults, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And told of once a minute, not at each try."""
    with Proxy(server.url, faults) as proxy:
        use(proxy.url, monkeypatch)
        # An object for each chunk: many requests, always of the same names.
        run = convert(bucket, "checkpoint_storage_use_ocdbt=false")
        assert proxy.count() >= 5
    assert run.code == 0, run.stderr
    assert len(re.findall("fails for now", run.stderr)) <= 1
    use(server.url, monkeypatch)
    assert read("verify", bucket.url("out"), "--source", str(SOURCE)).code == 0
    assert bucket.objects() >= MARKERS
    check_nothing_else(bucket)


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_damaged_download_is_tried_again(
    fault: str, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status says that all is well, its checksum or its length that it is not."""
    content = bytes(range(256))
    bucket.put("out/some", content)
    seen = itertools.count()
    faults = one(fault, only=lambda _, address: "alt=media" in address and next(seen) < 3)
    with Proxy(server.url, faults) as proxy:
        use(proxy.url, monkeypatch)
        assert buckets.read(bucket.url("out/some")) == content
        assert proxy.count(fault) == 3
        monkeypatch.setattr(buckets, "DEADLINE_SECONDS", 0.5)
        proxy.faults = one(fault)
        with pytest.raises(buckets.Unreachable, match="try again later"):
            buckets.read(bucket.url("out/some"))


def test_trying_again_has_an_end(bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "DEADLINE_SECONDS", 1.0)
    with Proxy(server.url, Faults(error=1, statuses=(503,))) as proxy:
        use(proxy.url, monkeypatch)
        start = time.monotonic()
        run = convert(bucket)
        assert 0.5 < time.monotonic() - start < 10
        assert proxy.count() > 3
    refused(run, 3, "HTTP 503")
    assert len(re.findall("fails for now", run.stderr)) == 1


def test_failure_in_the_middle_leaves_nothing(bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data cannot be written, all else can."""
    faults = Faults(error=1, statuses=(503,), only=lambda method, address: method == "POST" and "%2Fd%2F" in address)
    with Proxy(server.url, faults) as proxy:
        use(proxy.url, monkeypatch)
        run = convert(bucket)
        assert proxy.count() >= 20
    refused(run, 3, "HTTP 503")
    assert bucket.objects() == set()


def test_failure_before_the_data_is_no_wait(bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax's threads wait up to five minutes for each other's signals; none waits for what has failed."""
    monkeypatch.setattr(buckets, "DEADLINE_SECONDS", 1.0)
    step = re.compile("out%2F0%2Fitems(%2F)?[?&]")
    faults = Faults(error=1, statuses=(503,), only=lambda _, address: step.search(address) is not None)
    with Proxy(server.url, faults) as proxy:
        use(proxy.url, monkeypatch)
        began = time.monotonic()
        run = convert(bucket)
        assert time.monotonic() - began < 30
        assert proxy.count() > 3
    refused(run, 3, "HTTP 503")
    assert bucket.objects() == set()


def is_data(method: str, address: str) -> bool:
    """Whether a request writes a chunk; without OCDBT each is an object."""
    return method == "POST" and "%2Fc%2F" in address


SLOW = Faults(stall=1, stall_seconds=0.2, only=is_data)
"""Many seconds for all chunks together, in which a run finds out that it has to end."""


def held(server: Server, which: Callable[[str, str], bool] = is_data, *, passed: int = 3) -> Proxy:
    """A server that does some requests of a kind, then no more until the proxy has other faults."""
    seen = itertools.count()
    only = lambda method, address: which(method, address) and next(seen) >= passed  # noqa: E731
    return Proxy(server.url, Faults(stall=1, stall_seconds=600, only=only))


def start_held(forks: Forks, bucket: Bucket, proxy: Proxy, *words: object, **settings: float) -> Fork:
    """Start a conversion and wait until it waits for a server that holds it."""
    run = forks.start(
        *WORDS,
        f"base_output_directory={bucket.url('out')}",
        "checkpoint_storage_use_ocdbt=false",
        *words,
        env=servers.environment(proxy.url),
        settings={name.replace("__", "."): value for name, value in settings.items()},
    )
    run.wait_until(lambda: proxy.count("stall") > 0)
    return run


def wait_for_a_chunk(run: Fork, bucket: Bucket, prefix: str = "out/0/") -> None:
    """Until one is in the bucket: those that are not held take a moment."""
    run.wait_until(lambda: any(name.startswith(prefix) and "/c/" in name for name in bucket.objects()))


def expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead one's lease has ended at once; the service's clock has whole seconds."""
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", -2.0)


def check_nothing_else(bucket: Bucket) -> None:
    """There is the checkpoint, and nothing that a run needs only meanwhile."""
    assert not {name for name in bucket.objects() if not name.startswith("out/0/")}


def check_no_checkpoint(bucket: Bucket) -> None:
    """Neither plain Orbax nor the converter sees one."""
    assert not bucket.objects() & MARKERS
    code = """
import sys
import orbax.checkpoint as ocp, orbax.checkpoint.experimental.v1 as v1
from etils import epath
output = epath.Path(sys.argv[1])
with ocp.CheckpointManager(output, item_names=("items",), options=ocp.CheckpointManagerOptions(read_only=True)) as m:
    assert m.all_steps() == [], m.all_steps()
for load in (
    lambda: ocp.PyTreeCheckpointer().restore(output / "0" / "items"),
    lambda: v1.load(output / "0", checkpointable_name="items"),
):
    try:
        load()
    except Exception:
        continue
    raise AssertionError("something was loaded")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, bucket.url("out")],
        env=environment(),
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_sigterm_cleans_up(bucket: Bucket, server: Server, forks: Forks, tmp_path: Path) -> None:
    message = tmp_path / "message.json"
    with held(server) as proxy:
        run = start_held(forks, bucket, proxy, f"--termination_message={message}")
        wait_for_a_chunk(run, bucket)
        run.terminate()
        proxy.faults = SLOW
        done = run.wait()
    assert done.code == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(message.read_bytes())["exit_code"] == 143
    assert bucket.objects() == set()
    assert convert(bucket).code == 0


UPLOADS = ("probe", "lease", "lease's note", "_CHECKPOINT_METADATA")
"""In this order; the client library has names in the body."""


@pytest.mark.parametrize("number", range(len(UPLOADS)), ids=UPLOADS)
def test_sigterm_amid_an_upload(number: int, bucket: Bucket, server: Server, forks: Forks) -> None:
    """The server does what it was asked for before, and nothing stays of it."""
    with held(server, lambda _, address: "uploadType=multipart" in address, passed=number) as proxy:
        run = start_held(forks, bucket, proxy)
        run.terminate()
        proxy.faults = NO_FAULTS
        done = run.wait()
    assert done.code == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert bucket.objects() == set()


def test_sigkill_while_trying_whether_it_can_be_written(bucket: Bucket, server: Server, forks: Forks) -> None:
    """The object that this makes goes with the next run."""
    with held(server, lambda method, _: method == "DELETE", passed=0) as proxy:
        run = start_held(forks, bucket, proxy)
        run.send(signal.SIGKILL)
        run.wait()
    assert len(bucket.objects()) == 1
    assert convert(bucket).code == 0
    check_nothing_else(bucket)


@pytest.mark.faults
def test_sigterm_while_the_bucket_is_gone(
    bucket: Bucket, server: Server, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in time all the same; the next run cleans up."""
    with held(server) as proxy:
        run = start_held(forks, bucket, proxy)
        proxy.faults = Faults(stall=1, stall_seconds=600)
        began = time.monotonic()
        run.send(signal.SIGTERM)
        done = run.wait()
        assert time.monotonic() - began < 29
    assert done.code == 143, done.stderr
    assert done.stderr.splitlines()[-1].endswith("left for the next run to remove")
    assert not bucket.objects() & MARKERS
    assert "out/0.lease" in bucket.objects()
    refused(convert(bucket), 3, "another converter")
    expire(monkeypatch)
    assert convert(bucket).code == 0
    check_nothing_else(bucket)


@pytest.mark.faults
def test_sigkill_and_the_next_run(
    bucket: Bucket, server: Server, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed one blocks for less than two minutes; whoever comes then starts anew."""
    with held(server) as proxy:
        run = start_held(forks, bucket, proxy)
        wait_for_a_chunk(run, bucket)
        run.send(signal.SIGKILL)
        run.wait()
    left = bucket.objects()
    assert "out/0.lease" in left
    check_no_checkpoint(bucket)
    for mode in ("refuse", "skip", "overwrite"):
        refused(convert(bucket, f"--if_exists={mode}"), 3, "another converter is writing")
    assert bucket.objects() == left
    assert lease.EXPIRE_SECONDS + lease.RENEW_SECONDS <= 120
    expire(monkeypatch)
    done = convert(bucket)
    assert done.code == 0, done.stderr
    assert read("verify", bucket.url("out"), "--source", str(SOURCE)).code == 0
    check_nothing_else(bucket)
    assert not {name for name in left & bucket.objects() if "/c/" in name}


def test_second_converter_is_refused(bucket: Bucket, server: Server, forks: Forks) -> None:
    with held(server) as proxy:
        run = start_held(forks, bucket, proxy)
        began = time.monotonic()
        refused(convert(bucket), 3, f"another converter is writing to {bucket.url('out')}")
        assert time.monotonic() - began < 10
        proxy.faults = NO_FAULTS
        done = run.wait()
    assert done.code == 0, done.stderr
    assert read("verify", bucket.url("out"), "--source", str(SOURCE)).code == 0


def take_over(path: str) -> None:
    """Take a lease as if its holder had died; what the frozen holder has under way may come between."""
    from google.api_core.exceptions import PreconditionFailed

    other = lease.Lease(path)
    for _ in range(10):
        blob = buckets.get(path)
        assert blob is not None
        with contextlib.suppress(PreconditionFailed):
            other._put(int(blob.generation))
            return
    raise AssertionError("somebody else goes on writing it")


def test_a_taken_lease_ends_the_run(bucket: Bucket, server: Server, forks: Forks) -> None:
    """Frozen for longer than its lease, a converter must not write into what is another's by now."""
    with held(server) as proxy:
        run = start_held(forks, bucket, proxy, lease__RENEW_SECONDS=0.2)
        run.send(signal.SIGSTOP)
        take_over(bucket.url("out/0.lease"))
        proxy.faults = SLOW
        run.send(signal.SIGCONT)
        done = run.wait()
    assert done.code == 3, done.stderr
    assert "another converter has taken over" in done.stderr
    assert not bucket.objects() & MARKERS
    assert "out/0.lease" in bucket.objects()


class TestLease:
    """Leases alone."""

    def test_is_given_back(self, bucket: Bucket) -> None:
        first = lease.Lease(bucket.url("x/0.lease"))
        first.acquire()
        with pytest.raises(Exception, match="another converter"):
            lease.Lease(bucket.url("x/0.lease")).acquire()
        first.release()
        assert bucket.objects() == set()
        second = lease.Lease(bucket.url("x/0.lease"))
        second.acquire()
        assert second.note == ""
        second.release()

    def test_is_kept_alive(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
        monkeypatch.setattr(lease, "EXPIRE_SECONDS", 2.5)
        first = lease.Lease(bucket.url("x/0.lease"))
        first.acquire()
        time.sleep(4)
        with pytest.raises(Exception, match="another converter"):
            lease.Lease(bucket.url("x/0.lease")).acquire()
        first.release()

    @pytest.mark.parametrize("expire_seconds", [lease.EXPIRE_SECONDS, -2.0])
    def test_what_a_dead_one_had_under_way(
        self, expire_seconds: float, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its last renewal arrives while it is taken over: that counts as any other."""
        from google.api_core.exceptions import PreconditionFailed

        path = bucket.url("x/0.lease")
        dead, heir = lease.Lease(path), lease.Lease(path)
        dead._put(0)
        dead.note = "0.replacement"
        monkeypatch.setattr(lease, "EXPIRE_SECONDS", -2.0)
        get, asked = buckets.get, itertools.count(1)

        def get_then_renew(path: object) -> Any:
            # Each refusal is looked at twice: by what was refused, and by what may be taken over.
            number = next(asked)
            if number == 4:
                lease.EXPIRE_SECONDS = expire_seconds
            found = get(path)
            if number == 2:
                dead._put(dead._generation)
            return found

        monkeypatch.setattr(buckets, "get", get_then_renew)
        if expire_seconds > 0:
            with pytest.raises(WorldError, match="renewed its lease 0 s ago; a dead one's ends in"):
                heir.acquire()
            return
        heir.acquire()
        assert heir.note == "0.replacement"
        with pytest.raises(PreconditionFailed):
            dead._put(dead._generation)
        heir.confirm()
        heir.release()
        assert bucket.objects() == set()

    def test_is_given_back_while_it_is_asked_for(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        path = bucket.url("x/0.lease")
        first, second = lease.Lease(path), lease.Lease(path)
        first.acquire()
        first.write_note("0")
        get = buckets.get

        def release_then_get(path: object) -> Any:
            first.release()
            return get(path)

        monkeypatch.setattr(buckets, "get", release_then_get)
        second.acquire()
        assert second.note == ""
        second.release()

    def test_answers_that_get_lost(self, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was written although nobody said so is its own."""
        asked: list[str] = []

        def every_other(method: str, address: str) -> bool:
            if method != "POST":
                return False
            asked.append(address)
            return len(asked) % 2 == 1

        with Proxy(server.url, Faults(lose=1, only=every_other)) as proxy:
            use(proxy.url, monkeypatch)
            first = lease.Lease(bucket.url("x/0.lease"))
            first.acquire()
            for note in ("a", "b"):
                first.write_note(note)
            assert proxy.count("lose") == 3
            with pytest.raises(Exception, match="another converter"):
                lease.Lease(bucket.url("x/0.lease")).acquire()
            first.release()


@pytest.mark.faults
def test_kill_while_an_overwrite_is_published(
    bucket: Bucket, server: Server, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is complete by then; the next run, whatever it is asked, puts it into its place."""
    assert convert(bucket, "scan_layers=false").code == 0
    with held(server, lambda _, address: "rewriteTo" in address) as proxy:
        run = start_held(forks, bucket, proxy, "checkpoint_storage_use_ocdbt=true", "--if_exists=overwrite")
        run.send(signal.SIGKILL)
        assert run.wait().code == -signal.SIGKILL
    check_no_checkpoint(bucket)
    assert "out/0.replacement/commit_success.txt" in bucket.objects()
    expire(monkeypatch)
    done = convert(bucket, "--if_exists=skip")
    assert done.code == 0, done.stderr
    assert "nothing to do" in done.stderr
    check_nothing_else(bucket)
    (ways,) = plain_orbax([bucket.url("out/0")]).values()
    check_equals_oracle(ways)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_overwrite_keeps_the_old_one(
    number: signal.Signals, bucket: Bucket, server: Server, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert convert(bucket, "scan_layers=false").code == 0
    before = {name: bucket.read(name) for name in bucket.objects()}
    with held(server) as proxy:
        run = start_held(forks, bucket, proxy, "--if_exists=overwrite")
        wait_for_a_chunk(run, bucket, "out/0.replacement/")
        if number == signal.SIGTERM:
            run.terminate()
            proxy.faults = SLOW
        else:
            run.send(number)
        done = run.wait()
    assert done.code == (143 if number == signal.SIGTERM else -number), done.stderr
    assert {name: bucket.read(name) for name in bucket.objects() if name.startswith("out/0/")} == before
    if number == signal.SIGTERM:
        assert bucket.objects() == set(before)
    expire(monkeypatch)
    refused(convert(bucket), 2, "exists")
    assert bucket.objects() == set(before)
