"""The conversion against `cp`, `zstd -3` and MaxText's own converter: `python -m benchmarks.compare DIR`.

Every round runs every case once, so that what else the machine does falls on all of them alike. The sources are in
the page cache (those that fit) and what was written before is on the disk when a case starts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.measure import (
    CommandError,
    Run,
    StartUp,
    machine,
    markdown,
    run,
    scratch,
    size,
    start_up,
    to_maxtext,
    warm,
    weight_files,
)
from converter.models import MODELS

CP, ZSTD, SCANNED, UNSCANNED, ONE_THREAD = "cp", "zstd -3", "scanned", "unscanned", "scanned, 1 thread"
MAXTEXT_SCANNED, MAXTEXT_UNSCANNED = "MaxText scanned", "MaxText unscanned"


@dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
      command: the command line for an empty output folder.
      starts: it has a start-up that can be measured.
    """

    command: Callable[[Path], list[str]]
    starts: bool = False


@dataclass(frozen=True)
class Result:
    """One case in one round."""

    run: Run
    stored: int
    start: StartUp | None


def make_cases(source: Path, model_name: str, threads: int, maxtext: Sequence[str]) -> dict[str, Case]:
    """The cases by name, in the order in which a round runs them.

    Args:
      maxtext: the Python that has MaxText, as the front of a command line; empty to leave it out.
    """
    files = [str(file) for file in weight_files(source)]
    model = (f"model_name={model_name}", f"--hf_model_path={source}")

    def convert(scan: str, count: int) -> Case:
        return Case(
            lambda out: to_maxtext(
                *model, f"base_output_directory={out}/new", f"scan_layers={scan}", f"--threads={count}"
            ),
            starts=True,
        )

    def theirs(scan: str) -> Case:
        words = (
            *model,
            f"scan_layers={scan}",
            "hardware=cpu",
            "skip_jax_distributed_system=True",
            "--simulated_cpu_devices_count=16",
            # Its other way of loading needs PyTorch.
            "--lazy_load_tensors=true",
        )
        module = "maxtext.checkpoint_conversion.to_maxtext"
        return Case(lambda out: [*maxtext, "-m", module, *words, f"base_output_directory={out}/new"])

    cases = {CP: Case(lambda out: ["cp", "--reflink=never", *files, str(out)])}
    if shutil.which("zstd"):
        cases[ZSTD] = Case(lambda out: ["zstd", "-q", "-3", f"-T{threads}", *files, "--output-dir-flat", str(out)])
    cases |= {SCANNED: convert("true", threads), UNSCANNED: convert("false", threads)}
    if threads > 1:
        cases[ONE_THREAD] = convert("true", 1)
    if maxtext:
        cases |= {MAXTEXT_SCANNED: theirs("true"), MAXTEXT_UNSCANNED: theirs("false")}
    return cases


def measure(case: Case, source: Path, work: Path) -> Result:
    """Run a case once."""
    files = weight_files(source)
    start = None
    if case.starts:
        with scratch(work) as out:
            start = start_up(case.command(out), files)
    with scratch(work) as out:
        warm(files)
        done = run(case.command(out))
        return Result(done, size(out), start)


def beyond_start_up(results: Sequence[Result]) -> float:
    """Median CPU seconds, less those of the start-up where it was measured."""
    return median(result.run.cpu - (result.start.cpu if result.start else 0.0) for result in results)


def wall(results: Sequence[Result]) -> float:
    """Median wall seconds."""
    return median(result.run.wall for result in results)


def results_table(results: Mapping[str, Sequence[Result]], nbytes: int) -> str:
    """A row per case; ratios are those of medians."""
    reference = results.get(ZSTD)
    rows = []
    for name, found in results.items():
        starts = [result.start for result in found if result.start]
        rows.append(
            (
                name,
                f"{median(result.run.cpu for result in found):.1f}",
                f"{beyond_start_up(found):.1f}",
                _ratio(beyond_start_up(found), beyond_start_up(reference) if reference else None),
                f"{wall(found):.1f}",
                _ratio(wall(found), wall(reference) if reference else None),
                _ratio(wall(found), wall(results[CP])),
                f"{nbytes / 1e6 / wall(found):.0f}",
                f"{median(start.wall for start in starts):.2f}" if starts else "",
                f"{max(result.run.anonymous for result in found) / 1e6:.0f}",
                f"{found[0].stored / 1e6:.0f}",
            )
        )
    header = (
        "case",
        "CPU s",
        "beyond start-up",
        "to zstd",
        "wall s",
        "to zstd",
        "to cp",
        "MB/s",
        "start-up s",
        "peak MB",
        "stored MB",
    )
    return markdown(header, rows)


def targets_table(results: Mapping[str, Sequence[Result]]) -> str:
    """What the project promises of its speed, against what was measured."""
    scanned, unscanned = results[SCANNED], results[UNSCANNED]
    start = median(result.start.wall for result in [*scanned, *unscanned] if result.start)
    rows = [
        ("unscanned to scanned, wall", "at most 1.3", f"{wall(unscanned) / wall(scanned):.2f}"),
        ("start-up until the first byte is read", "under 2 s", f"{start:.2f} s"),
    ]
    if ZSTD in results:
        zstd = results[ZSTD]
        rows = [
            (
                "scanned to zstd -3, CPU beyond start-up",
                "at most 1.3",
                f"{beyond_start_up(scanned) / beyond_start_up(zstd):.2f}",
            ),
            ("scanned to zstd -3, wall", "at most 1.5", f"{wall(scanned) / wall(zstd):.2f}"),
            *rows,
        ]
    if ONE_THREAD in results:
        rows.append(
            ("one thread to all, wall", "at least 1.6 for two", f"{wall(results[ONE_THREAD]) / wall(scanned):.2f}")
        )
    return markdown(("figure", "target", "measured"), rows)


def _ratio(value: float, reference: float | None) -> str:
    return f"{value / reference:.2f}" if reference else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        "python -m benchmarks.compare", description="Compare conversions with other tools."
    )
    parser.add_argument("source", type=Path, help="a checkpoint's folder, as benchmarks.checkpoints makes it")
    parser.add_argument("--model_name", default="qwen3-0.6b", choices=MODELS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=cores, help="of zstd and the converter (default: one per core)")
    parser.add_argument("--work", type=Path, default=Path("tmp/bench"), help="where outputs go (default tmp/bench)")
    parser.add_argument(
        "--maxtext",
        default="",
        metavar="PYTHON",
        help="measure MaxText's converter too: the Python it is installed for, e.g. 'env PYTHONPATH=/src python3.12'",
    )
    options = parser.parse_args(argv)
    source: Path = options.source.absolute()
    files = weight_files(source)
    if not files:
        parser.error(f"{options.source} holds no safetensors files; make some with python -m benchmarks.checkpoints")
    cases = make_cases(source, options.model_name, options.threads, shlex.split(options.maxtext))
    if ZSTD not in cases:
        print("zstd is missing (Debian package zstd): no comparison with it", file=sys.stderr)
    results: dict[str, list[Result]] = {name: [] for name in cases}
    try:
        for number in range(options.rounds):
            for name, case in cases.items():
                result = measure(case, source, options.work.absolute())
                results[name].append(result)
                print(
                    f"round {number + 1}, {name}: {result.run.wall:.1f} s wall, {result.run.cpu:.1f} s CPU",
                    file=sys.stderr,
                    flush=True,
                )
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1
    nbytes = sum(size(file) for file in files)
    print(f"{options.model_name}, {nbytes / 1e9:.2f} GB, weight files: {len(files)}, {options.threads} threads")
    print(f"Medians of {options.rounds} interleaved rounds; {machine()}\n")
    print(results_table(results, nbytes))
    print()
    print(targets_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
