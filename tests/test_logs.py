"""What a run says: as JSON, and that it is alive."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import to_maxtext

from converter import convert, logs, progress

Tiny = Callable[[str], Path]


def test_json_lines(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is an object, with the figures of the progress among them."""
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.001)
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={tiny('qwen3-0.6b')}",
        "--log_format=json",
    )
    assert run.code == 0, run.stderr
    entries = [json.loads(line) for line in run.stderr.splitlines()]
    assert all({"time", "severity", "message"} <= entry.keys() for entry in entries)
    (moving,) = [entry for entry in entries if entry.get("phase") == "converting"][-1:]
    needed = {"bytes", "total_bytes", "bytes_per_second", "eta_seconds", "memory_bytes", "peak_memory_bytes"}
    assert needed <= moving.keys()
    assert 0 < moving["memory_bytes"] <= moving["peak_memory_bytes"]
    (done,) = [entry for entry in entries if entry.get("phase") == "done"]
    # 2 bytes for each of the source's elements.
    weights = (tiny("qwen3-0.6b") / "model.safetensors").stat().st_size
    assert weights - 8192 < done["bytes"] < weights
    assert {"plan", "write", "finish"} <= done["seconds"].keys()


@pytest.mark.parametrize("flag", [["--log_format=json"], ["log_format=json"], ["--log_format", "json"]])
def test_json_errors(flag: list[str], tmp_path: Path) -> None:
    run = to_maxtext("model_name=nonsense", f"base_output_directory={tmp_path}", *flag)
    (line,) = run.stderr.splitlines()
    entry = json.loads(line)
    assert (entry["severity"], entry["exit_code"], run.code) == ("ERROR", 2, 2)
    assert "nonsense" in entry["message"]


def test_a_bug_is_one_json_line(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "make_plan", lambda *_, **__: 1 / 0)
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={tiny('qwen3-0.6b')}",
        "--log_format=json",
    )
    assert run.code == 1
    entry = json.loads(run.stderr.splitlines()[-1])
    assert entry["exit_code"] == 1
    assert "ZeroDivisionError" in entry["message"]


@pytest.mark.parametrize("phase", ["plan", "finish"])
def test_heartbeat_in_every_phase(phase: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long: here planning, or the swap in the end."""
    assert logs.HEARTBEAT_SECONDS + 1 < 60
    monkeypatch.setattr(logs, "HEARTBEAT_SECONDS", 0.2)
    where, name = {"plan": (convert, "make_plan"), "finish": (convert.output, "publish")}[phase]
    original = getattr(where, name)

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(1.2)
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, slow)
    run = to_maxtext(
        "model_name=qwen3-0.6b", f"base_output_directory={tmp_path / 'out'}", f"--hf_model_path={tiny('qwen3-0.6b')}"
    )
    assert run.code == 0, run.stderr
    beats = re.findall(rf"^{phase}: \d+ s so far, memory \d+\.\d+ GB$", run.stderr, re.MULTILINE)
    # The phase takes longer where other tests run beside.
    assert 2 <= len(beats) <= 30
