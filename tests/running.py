"""Running the converter's command line, in this process and in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

DEVICES = 16
"""Devices that JAX comes up with in the process of the tests; other counts need a process of their own."""


@dataclass(frozen=True)
class Run:
    """How a command ended and what it said."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The error lines on stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("converter: error:")]


def to_maxtext(*words: object) -> Run:
    """Run `to_maxtext` in this process."""
    from converter.cli import to_maxtext as command

    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Run(code, out.getvalue(), err.getvalue())


def convert(model_name: str, source: Path, output: Path, *words: object) -> Path:
    """Convert in this process, which must succeed; the checkpoint's step directory."""
    run = to_maxtext(f"model_name={model_name}", f"base_output_directory={output}", f"--hf_model_path={source}", *words)
    assert run.code == 0, run.stderr
    return output / "0"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process: this one's without what would change a conversion."""
    dropped = ("HF_", "M_", "JOBSET_NAME", "XLA_FLAGS", "JAX_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}


def command(*words: object) -> list[str]:
    """The command that runs `to_maxtext` in a process of its own."""
    return [sys.executable, "-m", "converter.to_maxtext", *map(str, words)]


def to_maxtext_process(
    *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> Run:
    """Run `to_maxtext` in a process of its own."""
    done = subprocess.run(
        command(*words), env=environment(env), cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False
    )
    return Run(done.returncode, done.stdout, done.stderr)


def start_to_maxtext(*words: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `to_maxtext` in a process of its own."""
    return subprocess.Popen(
        command(*words), env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def python_process(code: str, *arguments: object, timeout: float = 300) -> str:
    """Run Python code in a process of its own, which must succeed; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(),
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_below(folder: Path) -> set[str]:
    """Every file and directory below a folder, hidden ones too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
