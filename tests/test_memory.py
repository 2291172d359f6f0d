"""Peak memory: what the plan predicts and what the converter promises, measured on real conversions.

The promise is 400 MB + 2.5 x the largest stored chunk of anonymous memory for the whole process; the bounds of the
first two cases are what a reader of the README is told about these models.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from buckets import Bucket
from quantising import write_hole
from running import environment, to_maxtext_process

from benchmarks.checkpoints import write_checkpoint
from converter.models import MODELS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "qwen3-0.6b"
    write_checkpoint(folder, "qwen3-0.6b")
    return folder


def plan_figure(stdout: str, pattern: str) -> int:
    """A figure that `--dry_run` prints."""
    match = re.search(pattern, stdout)
    assert match, stdout[-2000:]
    return int(match[1].replace(",", ""))


def measure(
    name: str,
    source: Path | None,
    tmp_path: Path,
    *words: str,
    output: str | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, int, int]:
    """Peak anonymous memory, the plan's prediction and the largest chunk, bytes."""
    common = [f"model_name={name}", f"base_output_directory={output or tmp_path / 'out'}", *words]
    if source is not None:
        common.append(f"hf_model_path={source}")
    planned = to_maxtext_process(*common, "--dry_run", env=env, timeout=300)
    assert planned.code == 0, planned.stderr
    report = tmp_path / "report.json"
    done = to_maxtext_process(*common, f"--report={report}", env=env, timeout=600)
    assert done.code == 0, done.stderr
    peak = json.loads(report.read_bytes())["peak_memory_bytes"]["anonymous_and_shared"]
    predicted = plan_figure(planned.stdout, r"predicted peak memory \(anonymous\): ([\d,]+)")
    return peak, predicted, plan_figure(planned.stdout, r"largest chunk: ([\d,]+)")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("scan_layers=false",),
        ("simulated_cpu_devices_count=1",),
        ("simulated_cpu_devices_count=1", "scan_layers=false", "--threads=4"),
        ("save_dtype=float32", "--compression=none"),
        ("checkpoint_storage_use_ocdbt=false", "checkpoint_storage_use_zarr3=false"),
        ("--threads=8",),
        ("--chunk_byte_size=8MB",),
    ],
    ids=lambda words: " ".join(words) or "default",
)
def test_memory_is_bounded_and_predicted(words: tuple[str, ...], qwen3: Path, tmp_path: Path) -> None:
    peak, predicted, chunk = measure("qwen3-0.6b", qwen3, tmp_path, *words)
    assert peak <= 400e6 + 2.5 * chunk
    assert peak <= 1.1 * predicted
    if not words:
        assert peak <= 500e6


def test_memory_follows_the_budget(qwen3: Path, tmp_path: Path) -> None:
    peak, predicted, _ = measure("qwen3-0.6b", qwen3, tmp_path, "--memory_budget=32MB")
    assert peak <= 1.1 * predicted
    assert predicted < 300e6


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Six times the model of the first case."""
    source = tmp_path / "qwen3-4b"
    write_checkpoint(source, "qwen3-4b")
    peak, predicted, chunk = measure("qwen3-4b", source, tmp_path)
    assert peak <= min(700e6, 400e6 + 2.5 * chunk)
    assert peak <= 1.1 * predicted


@contextlib.contextmanager
def hub(folder: Path, name: str) -> Iterator[str]:
    """A hub in a process of its own that has a model; its address."""
    repo = MODELS[name].models[name].hub
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.hub", str(folder), repo],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("name", "words", "most"),
    [
        ("qwen3-0.6b", (), 500e6),
        ("qwen3-0.6b", ("--spool_dir=none",), 500e6),
        ("qwen3-0.6b", ("--threads=8", "scan_layers=false"), 500e6),
        ("qwen3-4b", (), 700e6),
    ],
    ids=["0.6b", "0.6b no spool", "0.6b unscanned", "4b"],
)
def test_memory_from_the_hub_to_a_bucket(
    name: str, words: tuple[str, ...], most: float, bucket: Bucket, tmp_path: Path
) -> None:
    source = tmp_path / name
    write_checkpoint(source, name)
    with hub(source, name) as address:
        words = (*words, "--cache_dir=none", *([] if "--spool_dir=none" in words else [f"--spool_dir={tmp_path}"]))
        env = {"HF_ENDPOINT": address, **bucket.environment()}
        peak, predicted, chunk = measure(name, None, tmp_path, *words, output=bucket.url("out"), env=env)
    shutil.rmtree(bucket.folder)
    assert peak <= min(most, 400e6 + 2.5 * chunk)
    assert peak <= 1.1 * predicted


@pytest.mark.parametrize(
    ("name", "layers", "words", "most"),
    [
        ("qwen3-30b-a3b", 12, ("--chunk_byte_size=64MB",), 700e6),
        ("deepseek3-671b", 4, ("--chunk_byte_size=256MB",), 2**31),
    ],
    ids=["12 layers, small chunks", "larger than the machine"],
)
def test_experts_take_little(name: str, layers: int, words: tuple[str, ...], most: float, tmp_path: Path) -> None:
    """Stacks of experts and layers at full width: 16 and 30 GB, each stack larger than what may be used."""
    source = write_hole(tmp_path / "hf", name, layers)
    peak, predicted, chunk = measure(name, source, tmp_path, *words)
    assert peak <= min(most, 400e6 + 2.5 * chunk)
    assert peak <= 1.1 * predicted


@pytest.mark.parametrize(
    "quantization", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}], ids=["bfloat16", "fp8"]
)
def test_plan_of_all_of_deepseek3(quantization: dict[str, Any] | None, tmp_path: Path) -> None:
    """Its memory is stated, and within the promise."""
    source = write_hole(tmp_path / "hf", "deepseek3-671b", 61, quantization)
    planned = to_maxtext_process(
        "model_name=deepseek3-671b", f"base_output_directory={tmp_path / 'out'}", f"hf_model_path={source}",
        "--chunk_byte_size=256MB", "--dry_run",
    )  # fmt: skip
    assert planned.code == 0, planned.stderr
    chunk = plan_figure(planned.stdout, r"largest chunk: ([\d,]+)")
    assert plan_figure(planned.stdout, r"predicted peak memory \(anonymous\): ([\d,]+)") <= 400e6 + 2.5 * chunk
    assert chunk <= 256e6
    # 671 billion parameters (arXiv 2412.19437), two bytes each.
    assert plan_figure(planned.stdout, r"32 arrays, ([\d,]+) bytes") >= 2 * 671e9


@pytest.mark.parametrize(
    "words", [(), ("scan_layers=false",), ("--threads=8",), ("save_dtype=float32",)], ids=lambda words: " ".join(words)
)
@pytest.mark.parametrize(
    ("name", "layers", "quantization"),
    [
        ("qwen3-30b-a3b", 4, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("gpt-oss-20b", 4, {"quant_method": "mxfp4"}),
    ],
    ids=["fp8", "mxfp4"],
)
def test_decoding_takes_little(
    name: str, layers: int, quantization: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    """Several GB, of which a layer's fused experts alone exceed what may be used."""
    source = write_hole(tmp_path / "hf", name, layers, quantization)
    peak, predicted, chunk = measure(name, source, tmp_path, *words)
    assert peak <= 400e6 + 2.5 * chunk
    assert peak <= 1.1 * predicted


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """6.2 GB of random weights."""
    folder = tmp_path_factory.mktemp("memory") / "qwen3-30b-a3b"
    write_checkpoint(folder, "qwen3-30b-a3b", num_hidden_layers=4)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("words", [(), ("simulated_cpu_devices_count=1",)], ids=["default", "one device"])
def test_stacked_experts(words: tuple[str, ...], experts: Path, tmp_path: Path) -> None:
    """The experts of all layers are one array, so that the largest chunk is large: 1.6 GB where nothing is sharded."""
    peak, predicted, chunk = measure("qwen3-30b-a3b", experts, tmp_path, *words)
    assert peak <= 400e6 + 2.5 * chunk
    assert peak <= 1.1 * predicted
    if not words:
        assert peak <= 2 << 30
