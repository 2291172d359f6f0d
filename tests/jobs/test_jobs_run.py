"""A rendered Job's containers, run one after the other by this machine's Python in place of the image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from buckets import Bucket
from commands import IMAGE, RUN

from jobs.catalogue import catalogue
from jobs.render import Container, Request, check_report_path, containers, outputs, render, report_path
from jobs.reports import unfinished
from jobs.settings import Overrides, make

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen3-0.6b"
MESSAGE = "/dev/termination-log"


def run(container: Container, volumes: Path, extra: Mapping[str, str] | None = None) -> tuple[int, dict[str, object]]:
    """Run a container's words with its environment, its volumes under `volumes`; its exit code and message."""
    message = volumes / "termination-log"
    message.unlink(missing_ok=True)

    def outside(path: str) -> str:
        mount = max((each for each in container.mounts if f"{path}/".startswith(f"{each}/")), key=len)
        (volumes / container.mounts[mount]).mkdir(exist_ok=True)
        return str(volumes / container.mounts[mount] / path[len(mount) :].strip("/"))

    env = {name: outside(value) for name, value in container.env.items()}
    words = [word.replace(MESSAGE, str(message)) for word in container.args]
    for at, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--cache_dir":
            words[at] = f"{flag}={outside(value)}"
    done = subprocess.run(
        [sys.executable, "-m", "converter", *words],
        cwd=ROOT,
        env={**env, "PATH": os.environ["PATH"], **(extra or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert all(json.loads(line)["severity"] for line in done.stderr.splitlines()), "entries of Cloud Logging"
    return done.returncode, json.loads(message.read_text()) if message.exists() else {}


def test_a_pod_runs_to_its_end_and_its_replacement_goes_on(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    settings = make(None, Overrides(output_root=str(tmp_path / "out"), output_claim="results"))
    request = Request(catalogue()[MODEL], RUN, IMAGE, source=str(tiny(MODEL)))
    job = render(request, settings)
    unscanned, scanned, check = containers(job)
    # The first pod is lost behind its first init container.
    code, message = run(unscanned, tmp_path)
    assert (code, message["result"], message["exit_code"]) == (0, "converted", 0)
    assert unfinished(outputs(job), MODEL) == ["scanned"]
    # Its replacement starts from the first again.
    results = [run(container, tmp_path) for container in (unscanned, scanned)]
    assert [(code, message["result"]) for code, message in results] == [(0, "skipped"), (0, "converted")]
    assert unfinished(outputs(job), MODEL) == []
    report = json.loads(Path(report_path(outputs(job)["scanned"])).read_text())
    assert report["request"]["model_name"] == MODEL
    code, message = run(check, tmp_path)
    assert (code, message["result"]) == (0, "equal")
    written = json.loads(Path(report_path(outputs(job)["unscanned"])).read_text())["arrays"]
    assert message["checked"] == {"arrays": len(written), "differences": 0}
    checked = json.loads(Path(check_report_path(outputs(job)["unscanned"])).read_text())
    assert checked["differences"] == []
    for output in outputs(job).values():
        assert (Path(output) / "0" / "items").is_dir()


def test_a_model_in_a_bucket_is_downloaded_once(tiny: Callable[[str], Path], bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    settings = make(None, Overrides(output_root=str(tmp_path / "out"), output_claim="results"))
    bucket.add(tiny(MODEL), "model")
    job = render(Request(catalogue()[MODEL], RUN, IMAGE, source=bucket.url("model")), settings)
    size = (tiny(MODEL) / "model.safetensors").stat().st_size
    ended, copies = [], set()
    for container in containers(job):
        code, message = run(container, tmp_path, bucket.environment())
        ended.append((code, message["result"]))
        files = [path.stat() for path in (tmp_path / "cache").rglob("*")]
        copies |= {file.st_ino for file in files if file.st_size == size}
    assert ended == [(0, "converted"), (0, "converted"), (0, "equal")]
    assert len(copies) == 1


def test_a_source_that_is_not_there_fails_the_job_for_good(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    settings = make(None, Overrides(output_root=str(tmp_path / "out"), output_claim="results"))
    job = render(Request(catalogue()[MODEL], RUN, IMAGE, source=str(tmp_path / "nothing")), settings)
    code, message = run(containers(job)[0], tmp_path)
    assert code == 2
    assert message["exit_code"] == 2
    assert code in job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
