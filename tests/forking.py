"""Conversions in processes forked from one that has imported everything: a run costs what it does, not the imports.

Runs may be started and waited for from several threads. As a script it is that process: it reads a JSON line for each
run, forks, and prints the child's process id; for a line with `wait` it prints how that child, which has ended, did so.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from running import Run, environment


class Forks:
    """The process to fork from, while used as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __enter__(self) -> Forks:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def start(self, *words: object, env: Mapping[str, str], settings: Mapping[str, Any]) -> Fork:
        """Start `to_maxtext`; `settings` are values of the converter's modules, as `buckets.DEADLINE_SECONDS`."""
        said = self._folder / f"said-{next(self._numbers)}"
        said.touch()
        pid = self._ask({"words": list(map(str, words)), "env": dict(env), "settings": settings, "said": str(said)})
        return Fork(self, pid, said)

    def run(self, *words: object, env: Mapping[str, str], settings: Mapping[str, Any]) -> Run:
        return self.start(*words, env=env, settings=settings).wait()


class Fork:
    """A run."""

    def __init__(self, forks: Forks, pid: int, said: Path) -> None:
        self._forks = forks
        self._pid = pid
        self._said = said
        # Until somebody waits for the process, its id is its own even when it has ended.
        self._descriptor = os.pidfd_open(pid)
        self.began = time.monotonic()

    @property
    def ended(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        """Send a signal, also to a process that has ended."""
        signal.pidfd_send_signal(self._descriptor, number)

    def wait_until(self, moment: Callable[[], bool], *, seconds: float = 60) -> None:
        """Until something is so; the process must not end before."""
        deadline = time.monotonic() + seconds
        while not moment():
            if self.ended:
                raise AssertionError(f"it has ended: {self.wait()}")
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.005)

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the process knows: its handler has it ignore the next one."""
        self.send(signal.SIGTERM)
        self.wait_until(lambda: self._ignores(signal.SIGTERM))

    def _ignores(self, number: signal.Signals) -> bool:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self._pid}/status").read_text().splitlines())
        return self.ended or bool(int(fields["SigIgn"], 16) >> (number - 1) & 1)

    def wait(self) -> Run:
        select.select([self._descriptor], [], [])
        os.close(self._descriptor)
        code = self._forks._ask({"wait": self._pid})
        said = self._said.read_text()
        self._said.unlink()
        return Run(code, "", said)


def _tuples(value: Any) -> Any:
    """JSON has none, and lists are no time limits to requests."""
    return tuple(value) if isinstance(value, list) else value


def _serve() -> None:
    import importlib

    import google.cloud.storage  # noqa: F401
    import jax
    import orbax.checkpoint  # noqa: F401
    import tenacity  # noqa: F401

    import converter.convert
    import converter.run  # noqa: F401
    from converter import cli

    jax.config.update("jax_platforms", "cpu")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        said = os.open(request["said"], os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ.update(request["env"])
        for name, value in request["settings"].items():
            module, _, attribute = name.rpartition(".")
            setattr(importlib.import_module(f"converter.{module}"), attribute, _tuples(value))
        code = cli.to_maxtext(request["words"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
