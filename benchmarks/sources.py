"""From the hub by byte ranges, and to a bucket, against from folder to folder: `python -m benchmarks.sources DIR`.

The hub is one on this machine (`benchmarks/hub.py`), which takes its share of the same processors, and so does a
bucket's server that runs here; the environment says where it is, as for a conversion. `--apart` gives the conversions
processor 0 and the hub the others, where a bucket's server should be too (`taskset`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Run, machine, markdown, run, scratch, size, to_maxtext, warm, weight_files
from converter.models import MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.sources", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint, as benchmarks.checkpoints makes it")
    parser.add_argument("--model_name", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("tmp/bench"))
    parser.add_argument("--bucket", help="gs:// path below which conversions are written, too; what they write stays")
    parser.add_argument("--apart", action="store_true", help="conversions on processor 0 alone, the hub on the others")
    options = parser.parse_args(argv)
    everywhere = os.sched_getaffinity(0)
    if options.apart:
        os.sched_setaffinity(0, everywhere - {0})
    files = weight_files(options.folder)
    repo = MODELS[options.model_name].models[options.model_name].hub
    hub = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.hub", str(options.folder), repo], stdout=subprocess.PIPE, text=True
    )
    try:
        if options.apart:
            os.sched_setaffinity(0, {0})
        assert hub.stdout is not None
        os.environ["HF_ENDPOINT"] = hub.stdout.readline().strip()
        cases = {
            "folder": [f"hf_model_path={options.folder}"],
            "hub by ranges": ["--cache_dir=none"],
            "hub by ranges, no spool": ["--cache_dir=none", "--spool_dir=none"],
            "hub by ranges, unscanned": ["--cache_dir=none", "scan_layers=false"],
        }
        if options.bucket is not None:
            cases |= {f"{name}, to a bucket": cases[name] for name in ("folder", "hub by ranges")}
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        for number in range(options.rounds):
            for name, words in cases.items():
                warm(files)
                with scratch(options.work) as work:
                    output = f"{options.bucket}/{name.split()[0]}-{number}" if "bucket" in name else work / "out"
                    common = [f"model_name={options.model_name}", f"base_output_directory={output}"]
                    runs[name].append(run(to_maxtext(*common, *words)))
    finally:
        hub.terminate()
        hub.wait()
    total = sum(map(size, files))
    base = statistics.median(each.wall for each in runs["folder"])
    print(f"{options.model_name}, {total / 1e9:.2f} GB; {options.rounds} rounds; {machine()}\n")
    rows = []
    for name, measured in runs.items():
        wall = statistics.median(each.wall for each in measured)
        cpu = statistics.median(each.cpu for each in measured)
        peak = max(each.anonymous for each in measured)
        rows.append(
            (name, f"{wall:.1f}", f"{base / wall:.2f}", f"{total / wall / 1e6:.0f}", f"{cpu:.1f}", f"{peak / 1e6:.0f}")
        )
    print(markdown(("case", "wall s", "speed to folder", "MB/s", "CPU s", "peak MB"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
