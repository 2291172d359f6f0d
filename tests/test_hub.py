"""Conversions straight from a hub, a stand-in behind HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hub as stand_in
import pytest
from checkpoints import CONFIGS, INDEX, random_tensors, write_folder, write_tiny
from hub import Hub
from reading import digests
from running import Run, convert, files_below, start_to_maxtext, to_maxtext_process

MODEL = "qwen3-0.6b"
REPO = "Qwen/Qwen3-0.6B"
SLOW = pytest.mark.slow
TOKEN = "hf_secretTokenThatNobodySees"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stand_in.running(REPO) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with what repositories have beside the weights."""
    made = write_tiny(tmp_path_factory.mktemp("repository") / "hf", MODEL)
    (made / "README.md").write_text("# A model")
    (made / "tokenizer.json").write_text("{}")
    (made / "pytorch_model.bin").write_bytes(b"pickle")
    (made / "original").mkdir()
    (made / "original" / "consolidated.safetensors").write_bytes(b"not for us")
    (made / "consolidated.safetensors").write_bytes(b"not for us either")
    return made


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the folder itself gives."""
    return digests(convert(MODEL, folder, tmp_path_factory.mktemp("expected") / "out"))


def words(tmp_path: Path) -> list[str]:
    """Convert the hub's repository, with everything that can be written."""
    return [
        f"model_name={MODEL}",
        f"base_output_directory={tmp_path / 'out'}",
        f"--report={tmp_path / 'report.json'}",
        f"--termination_message={tmp_path / 'message.json'}",
        "--retry_seconds=10",
    ]


def environment(hub: Hub, tmp_path: Path, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **more}


def run_from(hub: Hub, tmp_path: Path, *more: object, **env: str) -> Run:
    return to_maxtext_process(*words(tmp_path), *more, env=environment(hub, tmp_path, **env))


def check_failed(run: Run, tmp_path: Path, code: int, *parts: str) -> None:
    """One error line, the exit code, nothing written but the termination message and the hub's cache."""
    assert run.code == code, run.stderr
    assert len(run.errors) == 1, run.stderr
    assert run.stderr.splitlines()[-1] == run.errors[0]
    assert "Traceback" not in run.stderr
    for part in parts:
        assert part in run.errors[0], run.errors[0]
    assert {path.name for path in tmp_path.iterdir()} <= {"message.json", "home"}, list(tmp_path.iterdir())
    message = json.loads((tmp_path / "message.json").read_bytes())
    assert (message["result"], message["exit_code"]) == ("failed", code)
    assert f"converter: error: {message['error']}" == run.errors[0]


def check_token_is_nowhere(run: Run, tmp_path: Path) -> None:
    assert TOKEN not in run.stdout + run.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_model_name_stands_for_its_repository(hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    commit = hub.add(folder, "main")
    run = run_from(hub, tmp_path)
    assert run.code == 0, run.stderr
    assert digests(tmp_path / "out" / "0") == expected
    report = json.loads((tmp_path / "report.json").read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    assert report["source"] == {
        "repository": REPO,
        "revision": commit,
        "files": [{"name": "model.safetensors", "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}],
    }
    assert {request.authorization for request in hub.requests} == {None}
    for name in ("README.md", "tokenizer.json", "pytorch_model.bin", "consolidated.safetensors"):
        assert not hub.asked_for(name), name
    assert len(hub.asked_for("model.safetensors")) == 1

    # Again: nothing is downloaded; and a checkpoint of the same commit is recognised.
    again = run_from(hub, tmp_path, "--if_exists=overwrite")
    assert again.code == 0, again.stderr
    assert len(hub.asked_for("model.safetensors")) == 1
    shutil.rmtree(tmp_path / "home")
    skipped = run_from(hub, tmp_path, "--if_exists=skip")
    assert skipped.code == 0, skipped.stderr
    assert len(hub.asked_for("model.safetensors")) == 1
    assert json.loads((tmp_path / "message.json").read_bytes())["result"] == "skipped"


@pytest.mark.parametrize("shards", [1, pytest.param(3, marks=SLOW)])
def test_revision(shards: int, hub: Hub, tmp_path: Path) -> None:
    """A branch, a tag or a commit other than the main branch's."""
    made = {}
    for seed, revision in enumerate(("main", "v1.0")):
        source = write_tiny(tmp_path / "sources" / revision, MODEL, seed=seed, shards=shards)
        made[revision] = (hub.add(source, revision), digests(convert(MODEL, source, tmp_path / "expected" / revision)))
    commit, expected = made["v1.0"]
    assert expected != made["main"][1]
    for i, revision in enumerate(("v1.0", commit) if shards > 1 else ("v1.0",)):
        folder = tmp_path / str(i)
        folder.mkdir()
        run = run_from(hub, folder, f"--hf_model_path={REPO}", f"--revision={revision}")
        assert run.code == 0, run.stderr
        assert digests(folder / "out" / "0") == expected
        report = json.loads((folder / "report.json").read_bytes())
        assert report["source"]["revision"] == commit
        assert len(report["source"]["files"]) == shards
        assert all(file["sha256"] for file in report["source"]["files"])


@SLOW
def test_branch_that_moved_is_another_request(hub: Hub, tmp_path: Path) -> None:
    hub.add(write_tiny(tmp_path / "sources" / "0", MODEL, seed=0), "main")
    assert run_from(hub, tmp_path).code == 0
    hub.add(write_tiny(tmp_path / "sources" / "1", MODEL, seed=1), "main")
    run = run_from(hub, tmp_path, "--if_exists=skip")
    assert run.code == 2, run.stderr


def refuse(status: int, part: str = "") -> stand_in.Fault:
    """Always answer with this status."""
    return lambda method, path: status if part in path else None


@pytest.mark.parametrize(
    ("status", "error_code", "token"),
    [
        (401, "RepoNotFound", ""),
        (403, "GatedRepo", TOKEN),
        (404, "RepoNotFound", TOKEN),
        pytest.param(400, None, "", marks=SLOW),
        pytest.param(401, None, "", marks=SLOW),
        pytest.param(401, None, TOKEN, marks=SLOW),
        pytest.param(403, None, "", marks=SLOW),
        pytest.param(404, None, "", marks=SLOW),
    ],
)
def test_refused_by_the_hub(
    status: int, error_code: str | None, token: str, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    hub.add(folder, "main")
    hub.fault, hub.error_code = refuse(status), error_code
    run = run_from(hub, tmp_path, **({"HF_TOKEN": token} if token else {}))
    check_failed(run, tmp_path, 2, REPO)
    if token:
        check_token_is_nowhere(run, tmp_path)
    asked = [request for request in hub.requests if request.path.startswith("/api/models/")]
    assert len(asked) == 1, "what will not change is not asked again"


@pytest.mark.parametrize("status", [pytest.param(401, marks=SLOW), 403])
def test_refused_at_the_file(status: int, hub: Hub, folder: Path, tmp_path: Path) -> None:
    """A gated repository tells everybody about itself but gives its files to few."""
    hub.add(folder, "main")
    hub.fault, hub.error_code = refuse(status, "/resolve/"), "GatedRepo"
    run = run_from(hub, tmp_path, HF_TOKEN=TOKEN)
    check_failed(run, tmp_path, 2, REPO)
    check_token_is_nowhere(run, tmp_path)


def test_unknown_revision(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    check_failed(run_from(hub, tmp_path, "--revision=nope"), tmp_path, 2, REPO, "nope")


@SLOW
def test_unknown_repository(hub: Hub, tmp_path: Path) -> None:
    check_failed(run_from(hub, tmp_path, "--hf_model_path=some/other"), tmp_path, 2, "some/other")


def failing_first(times: int, status: int, matches: Callable[[str, str], bool]) -> stand_in.Fault:
    """Fail the first requests of a kind, then no more."""
    left = [times]

    def fault(method: str, path: str) -> int | None:
        if not matches(method, path) or not left[0]:
            return None
        left[0] -= 1
        return status

    return fault


KINDS: dict[str, Callable[[str, str], bool]] = {
    "api": lambda method, path: path.startswith("/api/"),
    "head": lambda method, path: method == "HEAD",
    "config": lambda method, path: method == "GET" and path.endswith("config.json"),
    "weights": lambda method, path: method == "GET" and path.startswith("/storage/"),
}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("api", 500),
        ("weights", 500),
        *(pytest.param(kind, status, marks=SLOW) for kind in KINDS for status in (503, 429, 0)),
        *(pytest.param(kind, 500, marks=SLOW) for kind in ("head", "config")),
    ],
)
def test_failing_then_answering(
    kind: str, status: int, hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.add(folder, "main")
    hub.fault = failing_first(2, status, KINDS[kind])
    run = run_from(hub, tmp_path)
    assert run.code == 0, run.stderr
    assert digests(tmp_path / "out" / "0") == expected


@SLOW
@pytest.mark.parametrize(("kind", "status"), [("api", 500), ("api", 429), ("api", 0), ("weights", 500)])
def test_always_failing(kind: str, status: int, hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    hub.fault = failing_first(1000, status, KINDS[kind])
    run = run_from(hub, tmp_path, HF_TOKEN=TOKEN)
    check_failed(run, tmp_path, 3, REPO)
    check_token_is_nowhere(run, tmp_path)


@SLOW
def test_no_hub_there(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hub = Hub(REPO, endpoint=f"http://127.0.0.1:{closed.getsockname()[1]}")
        check_failed(run_from(hub, tmp_path), tmp_path, 3, REPO)


def test_answer_that_is_no_json(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """A captive portal answers everything with a page of its own."""
    hub.add(folder, "main")
    hub.fault = refuse(200)
    run = run_from(hub, tmp_path)
    assert run.code in (2, 3), run.stderr
    check_failed(run, tmp_path, run.code)


@pytest.mark.parametrize("cuts", [1, pytest.param(4, marks=SLOW)])
def test_cut_download_of_a_small_file(
    cuts: int, hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.add(folder, "main")
    hub.cut, hub.cuts = 10_000, cuts
    run = run_from(hub, tmp_path)
    assert run.code == 0, run.stderr
    assert digests(tmp_path / "out" / "0") == expected


def test_cut_download_is_continued(hub: Hub, tmp_path: Path) -> None:
    """Not begun anew: huggingface_hub keeps what came in pieces of 10 MiB."""
    source = write_tiny(tmp_path / "hf", MODEL, vocab_size=400_000)
    hub.add(source, "main")
    hub.cut, hub.cuts = 12_000_000, 2
    run = run_from(hub, tmp_path)
    assert run.code == 0, run.stderr
    asked = [request.range for request in hub.asked_for("model.safetensors")]
    assert asked == [None, f"bytes={10 << 20}-", f"bytes={20 << 20}-"]
    assert digests(tmp_path / "out" / "0") == digests(convert(MODEL, source, tmp_path / "expected"))


@SLOW
def test_download_that_never_ends_well_is_continued_by_the_next_run(
    hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.add(folder, "main")
    hub.cut, hub.cuts = 0, 1000
    check_failed(run_from(hub, tmp_path), tmp_path, 3, REPO)
    hub.cuts = 0
    run = run_from(hub, tmp_path)
    assert run.code == 0, run.stderr
    assert digests(tmp_path / "out" / "0") == expected


@pytest.mark.parametrize("way", ["environment", pytest.param("word", marks=SLOW)])
def test_token_reaches_the_hub_and_nothing_else(way: str, hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    hub.fault = lambda method, path: None if path.startswith("/storage/") or authorised(hub) else 401
    if way == "environment":
        run = run_from(hub, tmp_path, HF_TOKEN=TOKEN)
    else:
        run = run_from(hub, tmp_path, f"hf_access_token={TOKEN}")
    assert run.code == 0, run.stderr
    storage = {request.authorization for request in hub.requests if request.path.startswith("/storage/")}
    assert storage == {None}
    check_token_is_nowhere(run, tmp_path)


def authorised(hub: Hub) -> bool:
    return hub.requests[-1].authorization == f"Bearer {TOKEN}"


@SLOW
def test_word_wins_over_the_environment(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    hub.fault = lambda method, path: None if path.startswith("/storage/") or authorised(hub) else 401
    assert run_from(hub, tmp_path, f"hf_access_token={TOKEN}", HF_TOKEN="hf_other").code == 0


@pytest.mark.parametrize(
    ("missing", "part"),
    [("model.safetensors", "pickles"), ("config.json", "config.json")],
)
def test_repository_that_lacks_files(missing: str, part: str, hub: Hub, folder: Path, tmp_path: Path) -> None:
    commit = hub.add(folder, "main")
    del hub.files[commit][missing]
    check_failed(run_from(hub, tmp_path), tmp_path, 2, REPO, part)


@SLOW
def test_index_that_names_a_missing_shard(hub: Hub, tmp_path: Path) -> None:
    config = CONFIGS[MODEL]
    source = write_folder(tmp_path / "home" / "hf", config, random_tensors(config), shards=2)
    assert (source / INDEX).exists()
    commit = hub.add(source, "main")
    del hub.files[commit]["model-00002-of-00002.safetensors"]
    check_failed(run_from(hub, tmp_path), tmp_path, 2, "model-00002-of-00002.safetensors")


@SLOW
def test_dry_run_from_the_hub(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    run = run_from(hub, tmp_path, "--dry_run")
    assert run.code == 0, run.stderr
    assert "params.params.token_embedder.embedding" in run.stdout
    assert not (tmp_path / "out").exists()


@SLOW
@pytest.mark.parametrize("named", [True, False], ids=["commit", "default-branch"])
def test_offline(named: bool, hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """HF_HUB_OFFLINE: what an earlier run left in the cache converts, what is not there is refused; nobody is asked."""
    commit = hub.add(folder, "main")
    revision = [f"--revision={commit}"] if named else []
    check_failed(run_from(hub, tmp_path, *revision, HF_HUB_OFFLINE="1"), tmp_path, 2, REPO)
    # A plan reads headers from the hub and leaves nothing; a conversion does.
    assert run_from(hub, tmp_path, "--dry_run").code == 0
    check_failed(run_from(hub, tmp_path, *revision, HF_HUB_OFFLINE="1"), tmp_path, 2, REPO)
    assert run_from(hub, tmp_path).code == 0
    shutil.rmtree(tmp_path / "out")
    asked = len(hub.requests)
    planned = run_from(hub, tmp_path, *revision, "--dry_run", HF_HUB_OFFLINE="1")
    assert planned.code == 0, planned.stderr
    run = run_from(hub, tmp_path, *revision, HF_HUB_OFFLINE="1")
    assert run.code == 0, run.stderr
    assert digests(tmp_path / "out" / "0") == expected
    assert len(hub.requests) == asked


@SLOW
def test_cache_on_a_full_disk(hub: Hub, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "home" / "hf", MODEL, vocab_size=65536)
    hub.add(source, "main")
    disk = tmp_path / "home" / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        run = run_from(hub, tmp_path, HF_HOME=str(disk))
        check_failed(run, tmp_path, 3)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_sigterm_while_downloading(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """It ends at once, also when the hub has gone silent."""
    hub.add(folder, "main")
    arrived, over = threading.Event(), threading.Event()

    def hang(method: str, path: str) -> int | None:
        if path.startswith("/storage/"):
            arrived.set()
            over.wait(60)
        return None

    hub.fault = hang
    process = start_to_maxtext(*words(tmp_path), env=environment(hub, tmp_path, HF_TOKEN=TOKEN))
    try:
        assert arrived.wait(60)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=8)
    finally:
        over.set()
        process.kill()
        process.wait()
    assert process.returncode == 143, err
    assert not [name for name in files_below(tmp_path) if not name.startswith("home") and name != "message.json"]
    message = json.loads((tmp_path / "message.json").read_bytes())
    assert (message["result"], message["exit_code"]) == ("failed", 143)
    check_token_is_nowhere(Run(143, out, err), tmp_path)
