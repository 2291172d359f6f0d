"""Running the image's containers with podman and runc, as a Job's pod would."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent

SOURCE = "https://example.com/a/repository"
SECRET = "do-not-keep-this-3f9a"
"""Stands in the pip.conf that the build gets."""

MODEL = "qwen3-0.6b"
USER = 65532
MEMORY = 1 << 30
WRITABLE = ("/home/converter", "/tmp", "/cache")


@dataclass(frozen=True)
class Containers:
    """The image and where podman keeps it.

    Attributes:
      environment: of podman's processes; says where its storage is.
    """

    image: str
    environment: Mapping[str, str] = field(repr=False)

    def podman(self, *arguments: object, check: bool = True) -> str:
        """A podman command; what it prints."""
        words = ["podman", "--runtime", "runc", *(str(each) for each in arguments)]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def start(
        self,
        *arguments: object,
        name: str = "",
        entrypoint: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        memory: int = MEMORY,
        network: str = "none",
    ) -> subprocess.Popen[str]:
        """Start a container that may do as little as a pod's: no root, no capabilities, no `network`, so many bytes of
        `memory`, nothing to write but `mounts` (path in the container -> here) and a tmpfs for each other of WRITABLE.
        """
        mounts = mounts or {}
        words = [
            *("podman", "--runtime", "runc", "run", "--rm", "--network", network),
            *("--user", f"{USER}:{USER}", "--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *("--read-only", "--read-only-tmpfs=false"),
            *("--memory", str(memory), "--memory-swap", str(memory)),
            # podman's own defaults are above what a container without CAP_SYS_RESOURCE around it may set.
            *(word for kind in ("nofile", "nproc") for word in ("--ulimit", f"{kind}={_ulimit(kind)}")),
            # U: the user's, as a pod's fsGroup makes an emptyDir.
            *(word for path in WRITABLE if path not in mounts for word in ("--tmpfs", f"{path}:U")),
            *(word for path, here in mounts.items() for word in ("--volume", f"{here}:{path}")),
            *(word for key, value in (env or {}).items() for word in ("--env", f"{key}={value}")),
            *(("--name", name) if name else ()),
            *(("--entrypoint", entrypoint[0]) if entrypoint else ()),
            self.image,
            *entrypoint[1:],
            *(str(each) for each in arguments),
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        """Start a container and wait for its end."""
        return finish(self.start(*arguments, **options), timeout)

    def python(self, program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a Python program in the image."""
        return self.run(program, *arguments, entrypoint=("python", "-c"), **options)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Wait for a container's end."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # Files come and go.
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.005)
    raise AssertionError(f"waited {seconds} s in vain")


def make_image(containers: Containers) -> Containers:
    """`make image`."""
    build(["make", "--no-print-directory", "image"], {**containers.environment, "IMAGE": containers.image})
    return containers


def build(command: list[str | Path], environment: dict[str, str]) -> None:
    """Run a command that makes something; what it says if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}", pytrace=False)


def _ulimit(kind: str) -> str:
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{kind.upper()}"))[1]
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    return f"{most}:{most}"
