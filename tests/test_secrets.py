"""A token, however it was given, reaches the hub and nothing else, at any level of logging."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hub as stand_in
import pytest
from checkpoints import write_tiny
from forking import Forks
from hub import Hub
from running import convert, environment

MODEL = "qwen3-0.6b"
REPO = "Qwen/Qwen3-0.6B"
TOKEN = "hf_secretTokenThatNobodySees"
DEBUG = {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "PYTHONFAULTHANDLER": "1"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stand_in.running(REPO) as made:
        yield made


@pytest.mark.parametrize("cache", ["none", "cache"])
@pytest.mark.parametrize("outcome", ["done", "refused"])
@pytest.mark.parametrize("way", ["HF_TOKEN", "word", "HF_TOKEN_PATH", "login"])
def test_token_is_nowhere(way: str, outcome: str, cache: str, hub: Hub, forks: Forks, tmp_path: Path) -> None:
    hub.add(write_tiny(tmp_path / "hf", MODEL), "main")
    secret = tmp_path / "secret" / "token"
    secret.parent.mkdir()
    env: dict[str, str] = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **DEBUG}
    words: list[str] = []
    match way:
        case "HF_TOKEN":
            env["HF_TOKEN"] = TOKEN
        case "word":
            words.append(f"hf_access_token={TOKEN}")
        case "HF_TOKEN_PATH":
            secret.write_text(TOKEN)
            env["HF_TOKEN_PATH"] = str(secret)
        case "login":
            secret = tmp_path / "home" / "token"
            secret.parent.mkdir()
            secret.write_text(TOKEN)

    def authorised(method: str, path: str) -> int | None:
        right = hub.requests[-1].authorization == f"Bearer {TOKEN}"
        return None if path.startswith(("/storage/", "/api/agent")) or (right and outcome == "done") else 403

    hub.fault = authorised
    run = forks.run(
        f"model_name={MODEL}",
        f"base_output_directory={tmp_path / 'out'}",
        f"--report={tmp_path / 'report.json'}",
        f"--termination_message={tmp_path / 'message.json'}",
        f"--cache_dir={'none' if cache == 'none' else tmp_path / 'cache'}",
        *words,
        env=env,
        settings={},
    )
    assert run.code == (0 if outcome == "done" else 2), run.stderr
    assert any(request.authorization == f"Bearer {TOKEN}" for request in hub.requests)
    assert not [r for r in hub.requests if r.path.startswith("/storage/") and r.authorization]
    assert TOKEN not in run.stdout + run.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    if way == "word":
        assert "can be read by others" in run.stderr


@pytest.mark.parametrize("outcome", ["equal", "refused"])
def test_token_of_a_check_is_nowhere(outcome: str, hub: Hub, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", MODEL)
    hub.add(folder, "main")
    out = convert(MODEL, folder, tmp_path / "out")
    hub.fault = lambda method, path: 403 if outcome == "refused" and not path.startswith("/api/agent") else None
    words = [f"--source={REPO}", f"--cache_dir={tmp_path / 'cache'}", f"--report={tmp_path / 'check.json'}"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "converter",
            "verify",
            str(out),
            *words,
            f"--termination_message={tmp_path / 'message'}",
        ],
        env=environment({"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, **DEBUG}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if outcome == "equal" else 2), done.stderr
    assert any(request.authorization == f"Bearer {TOKEN}" for request in hub.requests)
    assert TOKEN not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
