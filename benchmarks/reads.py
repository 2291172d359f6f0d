"""How much a conversion reads from the disk when nothing is in the page cache: `python -m benchmarks.reads DIR`.

Scanned layers are cut across all layers, so a budget smaller than a stack walks its tensors several times. The page
cache serves all walks but the first where it has room for one stack; under a memory limit it has not, and the plan
(`--dry_run`) announces how often each tensor is then read from the disk at most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import CommandError, Run, chill, machine, markdown, run, scratch, size, to_maxtext, weight_files
from converter.models import MODELS
from converter.words import parse_bytes


@dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
      scan: scanned or not.
      budget: as --memory_budget, None for the default.
      limited: under the memory limit.
    """

    scan: bool
    budget: str | None
    limited: bool


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[Callable[[], None]]:
    """A memory cgroup (v1 or v2) with this limit: yields what moves the calling process into it.

    Raises:
      OSError: this process may not make one.
    """
    name = f"bench-{os.getpid()}"
    parent, limit_file = _cgroup_parent()
    group = parent / name
    group.mkdir()
    try:
        (group / limit_file).write_text(str(nbytes))
        procs = group / "cgroup.procs"

        def enter() -> None:
            procs.write_text(str(os.getpid()))

        yield enter
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _cgroup_parent() -> tuple[Path, str]:
    """The directory of a cgroup that can have children with a memory limit, and the limit's file in them."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = Path("/sys/fs/cgroup/memory") / group.lstrip("/")
            return (own if own.is_dir() else Path("/sys/fs/cgroup/memory")), "memory.limit_in_bytes"
        if controllers == "":
            own = Path("/sys/fs/cgroup") / group.lstrip("/")
            # A group that has processes cannot give its children a memory limit; a sibling can have one.
            for parent in (own.parent, own, Path("/sys/fs/cgroup")):
                control = parent / "cgroup.subtree_control"
                if control.is_file() and "memory" in control.read_text().split():
                    return parent, "memory.max"
    raise OSError("no memory cgroup that can be divided")


def announced(plan: str) -> tuple[int, float]:
    """What `--dry_run` printed: the most walks over a tensor, and reads as a multiple of the bytes of all arrays."""
    lines = [re.split(r" {2,}", line.strip()) for line in plan.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "array")
    columns = {name: lines[start].index(name) for name in ("bytes", "reads")}
    rows = [
        [int(cells[column].replace(",", "")) for column in columns.values()]
        for cells in lines[start + 2 :]
        if len(cells) == len(lines[start])
    ]
    return max(reads for _, reads in rows), sum(nbytes * reads for nbytes, reads in rows) / sum(n for n, _ in rows)


def measure(
    case: Case, source: Path, model_name: str, work: Path, into_limit: Callable[[], None] | None
) -> tuple[Run, Run]:
    """The dry run and the conversion, the source dropped from the page cache before each."""
    words = [f"model_name={model_name}", f"--hf_model_path={source}", f"scan_layers={str(case.scan).lower()}"]
    if case.budget is not None:
        words.append(f"--memory_budget={case.budget}")
    with scratch(work) as out:
        command = to_maxtext(*words, f"base_output_directory={out}/new")
        before = into_limit if case.limited else None
        plan = run([*command, "--dry_run"], before_exec=before)
        chill(weight_files(source))
        return plan, run(command, before_exec=before)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.reads", description="Measure reads from a cold page cache.")
    parser.add_argument("source", type=Path, help="a checkpoint's folder, as benchmarks.checkpoints makes it")
    parser.add_argument("--model_name", default="qwen3-4b", choices=MODELS, metavar="NAME")
    parser.add_argument("--budget", default="256MB", help="--memory_budget of the conversion (default 256MB)")
    parser.add_argument("--limit", default="1GB", help="memory limit of the limited cases (default 1GB)")
    parser.add_argument("--work", type=Path, default=Path("tmp/bench"), help="where outputs go (default tmp/bench)")
    options = parser.parse_args(argv)
    source: Path = options.source.absolute()
    files = weight_files(source)
    if not files:
        parser.error(f"{options.source} holds no safetensors files; make some with python -m benchmarks.checkpoints")
    nbytes = sum(size(file) for file in files)
    cases = [
        Case(scan=True, budget=None, limited=False),
        Case(scan=True, budget=options.budget, limited=False),
        Case(scan=False, budget=options.budget, limited=False),
        Case(scan=True, budget=options.budget, limited=True),
        Case(scan=False, budget=options.budget, limited=True),
    ]
    rows = []
    with contextlib.ExitStack() as stack:
        into_limit = None
        try:
            into_limit = stack.enter_context(memory_limit(parse_bytes(options.limit)))
        except OSError as error:
            print(f"no case under a memory limit: a memory cgroup cannot be made here ({error})", file=sys.stderr)
            print("as root, or inside `systemd-run --user --scope -p Delegate=yes`, it can", file=sys.stderr)
        for case in cases:
            if case.limited and into_limit is None:
                continue
            try:
                plan, done = measure(case, source, options.model_name, options.work.absolute(), into_limit)
            except CommandError as error:
                print(error, file=sys.stderr)
                return 1
            walks, most = announced(plan.output)
            rows.append(
                (
                    "scanned" if case.scan else "unscanned",
                    case.budget or "default",
                    options.limit if case.limited else "none",
                    str(walks),
                    f"{most:.2f}",
                    f"{done.read / nbytes:.2f}",
                    f"{done.wall:.1f}",
                    f"{done.anonymous / 1e6:.0f}",
                )
            )
            print("measured:", *rows[-1], file=sys.stderr, flush=True)
    print(f"{options.model_name}, {nbytes / 1e9:.2f} GB, weight files: {len(files)}, cold page cache; {machine()}\n")
    header = (
        "layers",
        "memory budget",
        "memory limit",
        "walks announced",
        "reads at most",
        "reads measured",
        "wall s",
        "peak MB",
    )
    print(markdown(header, rows))
    print("\nReads in multiples of the files' size.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
