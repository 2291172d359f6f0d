"""Conversions in the image, under the restrictions that a Job's pod has."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from containers import MEMORY, MODEL, USER, Containers, finish, wait

pytestmark = pytest.mark.slow

CONVERT = ("to-maxtext", f"model_name={MODEL}", "--hf_model_path=/source", "base_output_directory=/output/qwen3")


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help(words: tuple[str, ...], containers: Containers) -> None:
    done = containers.run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m converter")


def test_models(containers: Containers) -> None:
    done = containers.run("models", "--json")
    assert done.returncode == 0, done.stderr
    assert "qwen3-0.6b" in json.dumps(json.loads(done.stdout))


def test_the_restrictions_hold(containers: Containers) -> None:
    """Those of the tests themselves: without them the others would show little."""
    program = """
import json, os, pathlib, sys
status = dict(line.split(":\\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
def writable(folder):
    try:
        pathlib.Path(folder, "file").touch()
    except OSError:
        return False
    return True
print(json.dumps({
    "process": os.getpid(),
    "user": [*os.getresuid(), *os.getresgid()],
    "capabilities": {key: int(status["Cap" + key], 16) for key in ("Prm", "Eff", "Bnd", "Amb")},
    "no new privileges": status["NoNewPrivs"],
    "networks": os.listdir("/sys/class/net"),
    "writable": [path for path in (
        "/", "/app", "/opt/converter", "/etc", "/var/tmp", "/home/converter", "/tmp", "/cache"
    ) if writable(path)],
}))
"""
    done = containers.python(program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "process": 1,
        "user": [USER] * 6,
        "capabilities": {"Prm": 0, "Eff": 0, "Bnd": 0, "Amb": 0},
        "no new privileges": "1",
        "networks": ["lo"],
        "writable": ["/home/converter", "/tmp", "/cache"],
    }


@pytest.mark.parametrize(("share", "code"), [(0.8, 0), (1.2, 137)])
def test_the_memory_limit_holds(share: float, code: int, containers: Containers) -> None:
    done = containers.python("import sys; len(b'x' * int(sys.argv[1]))", int(MEMORY * share))
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("scan", [True, False])
def test_conversion(scan: bool, containers: Containers, source: Path, output: Path) -> None:
    mounts = {"/source": source, "/output": output}
    words = (*CONVERT, f"scan_layers={scan}", "--termination_message=/output/message.json")
    done = containers.run(*words, mounts=mounts)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    told = json.loads((output / "message.json").read_text())
    print(told["peak_memory_bytes"])
    assert told["peak_memory_bytes"]["anonymous_and_shared"] < MEMORY
    assert (output / "qwen3/0/items").is_dir()
    assert {path.stat().st_uid for path in output.rglob("*")} == {USER}

    done = containers.run("verify", "/output/qwen3", "--source", "/source", mounts=mounts)
    assert done.returncode == 0, done.stderr

    done = containers.run(*words, "--if_exists=skip", mounts=mounts)
    assert done.returncode == 0, done.stderr
    done = containers.run(*words, mounts=mounts)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("to-maxtext", "model_name=qwen3-0.6c", "base_output_directory=/output/qwen3"), "qwen3-0.6c"),
        # Nothing is mounted there.
        (("to-maxtext", "model_name=qwen3-0.6b", "--hf_model_path=/source", "base_output_directory=/data"), "/data"),
    ],
)
def test_bad_requests(words: tuple[str, ...], problem: str, containers: Containers, source: Path, output: Path) -> None:
    done = containers.run(*words, mounts={"/source": source, "/output": output})
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("converter: error:")]
    assert problem in line
    assert files_below(output) == set()


def test_sigterm(containers: Containers, claim: Path, output: Path) -> None:
    """As the kubelet ends a pod."""
    mounts = {"/source": claim / "source", "/output": output}
    words = (*CONVERT, "--threads=1", "--termination_message=/output/message.json")
    process = containers.start(*words, mounts=mounts, name="ended")
    wait(lambda: sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) > 20e6)
    began = time.monotonic()
    containers.podman("stop", "--time", 60, "ended")
    done = finish(process)
    print(f"ended in {time.monotonic() - began:.1f} s")
    assert done.returncode == 143, done.stderr
    assert "SIGTERM" in done.stderr.splitlines()[-1]
    assert json.loads((output / "message.json").read_text())["exit_code"] == 143
    assert files_below(output) == {"message.json"}
