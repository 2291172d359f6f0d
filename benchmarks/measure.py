"""Running a command and measuring it from outside: CPU, wall, memory, disk reads; and printing the results."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAMPLE_SECONDS = 0.02

_INBLOCK_BYTES = 512
"""Unit of rusage's ru_inblock on Linux, which is /proc/<pid>/io's read_bytes in it."""


@dataclass(frozen=True)
class Run:
    """What one process took.

    Attributes:
      wall, cpu: seconds; CPU of all threads, user and system.
      anonymous: peak of anonymous + shared memory, bytes, sampled.
      read: bytes it caused to be read from the disk.
      output: what it wrote to stdout and stderr.
    """

    wall: float
    cpu: float
    anonymous: int
    read: int
    output: str


class CommandError(Exception):
    """A measured command failed; the message has its output."""


def run(command: Sequence[str], *, before_exec: Callable[[], None] | None = None) -> Run:
    """Run a command to its end.

    Args:
      before_exec: called in the new process.

    Raises:
      CommandError: its exit code is not 0.
    """
    with tempfile.TemporaryFile() as captured:
        start = time.monotonic()
        # preexec_fn is safe here: no other thread of this process is alive.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=captured, stderr=subprocess.STDOUT, preexec_fn=before_exec
        )
        peak = _Peak(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        anonymous = peak.stop()
        captured.seek(0)
        output = captured.read().decode(errors="replace")
    if process.returncode != 0:
        raise CommandError(f"{' '.join(command)}\nended with exit code {process.returncode}:\n{output[-4000:]}")
    return Run(wall, usage.ru_utime + usage.ru_stime, anonymous, usage.ru_inblock * _INBLOCK_BYTES, output)


@dataclass(frozen=True)
class StartUp:
    """Wall and CPU seconds of a process until it mapped the first file of its source."""

    wall: float
    cpu: float


def start_up(command: Sequence[str], files: Sequence[Path]) -> StartUp:
    """Start a conversion, end it when it begins to read one of `files`, and tell what it took until then.

    Raises:
      CommandError: it ended before it read one.
    """
    names = [str(file.resolve()) for file in files]
    with tempfile.TemporaryFile() as captured:
        start = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=captured, stderr=subprocess.STDOUT)
        maps = Path(f"/proc/{process.pid}/maps")
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(OSError, psutil.Error):
                mapped = maps.read_text(errors="replace")
                wall, times = time.monotonic() - start, watched.cpu_times()
                if any(name in mapped for name in names):
                    process.terminate()
                    process.wait()
                    return StartUp(wall, times.user + times.system)
            time.sleep(_SAMPLE_SECONDS / 2)
        captured.seek(0)
        raise CommandError(f"{' '.join(command)}\nread nothing:\n{captured.read().decode(errors='replace')[-4000:]}")


class _Peak:
    """Samples a process's anonymous + shared memory in a thread."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._peak

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            with contextlib.suppress(OSError):
                lines = self._status.read_text().splitlines()
                sizes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
                self._peak = max(self._peak, 1024 * sum(sizes))


def to_maxtext(*words: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """The command line of a conversion."""
    return [*python, "-m", "converter.to_maxtext", *words]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a repository's folder."""
    return sorted(folder.glob("*.safetensors"))


def size(path: Path) -> int:
    """Bytes of a file or of all files in a directory."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def warm(files: Sequence[Path]) -> None:
    """Read the files once, so that the page cache holds what of them it can."""
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def chill(files: Sequence[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """An empty directory in `parent`; what earlier runs wrote is on the disk before it is used."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    os.sync()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine() -> str:
    """One line: processor, cores, memory, system, Python."""
    model = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} x {model}, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every column but the first to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
