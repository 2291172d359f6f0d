"""What runs the command line in the tests' own process, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

IMAGE = "us-docker.pkg.dev/acme/images/converter@sha256:" + "0" * 64
RUN = "conv-20260813T123008"


@dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line it ended with."""
        lines = [line for line in self.err.splitlines() if line.startswith("jobs: error:")]
        assert len(lines) == 1, self.err
        assert self.err.rstrip().endswith(lines[0]), "nothing follows the error"
        return lines[0]


Command = Callable[..., Ran]


@pytest.fixture
def jobs(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `python -m jobs ...` in this process."""
    from jobs.cli import main

    def run(*words: str) -> Ran:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
