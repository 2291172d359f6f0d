"""The converter's main job in a minute, on a checkpoint made here: `make demo`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_checkpoint
from converter.hf.repository import locate, open_repository

FOLDER = Path("tmp/demo")
DEVICES = 16
GEOMETRY: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
"""Qwen3's shape, smaller."""

EMBEDDING = "params.params.token_embedder.embedding"


class DemoError(Exception):
    """A step failed."""


def main() -> int:
    """Run every step; 0 when all of them passed."""
    source, output = FOLDER / "qwen3-small", FOLDER / "maxtext"
    report, message = FOLDER / "report.json", FOLDER / "message.json"
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        _step(1, "Make a small Qwen3-shaped Hugging Face checkpoint of random weights")
        nbytes = write_checkpoint(source, "qwen3-0.6b", file_bytes=40_000_000, **GEOMETRY)
        files = len(list(source.glob("*.safetensors")))
        print(f"{source}: {nbytes / 1e6:.0f} MB of bfloat16 in {files} safetensors files with an index")

        _step(2, f"Convert it to a MaxText checkpoint, sharded over {DEVICES} simulated devices, layers stacked")
        words = ("model_name=qwen3-0.6b", f"base_output_directory={output}", "scan_layers=true")
        flags = (f"--hf_model_path={source}", f"--simulated_cpu_devices_count={DEVICES}")
        seconds = _run("to-maxtext", *words, *flags, f"--report={report}", f"--termination_message={message}")

        _step(3, "Inspect it: every array with its sharding and chunks, as Orbax stored it")
        _run("inspect", str(output))
        _check_sharding(output)
        print(f"\nThe embedding is {DEVICES} chunks, one for each device, so that a device reads only its own.")

        _step(4, "Check it bit by bit: every array read back from storage against the safetensors files")
        _run("verify", str(output), "--source", str(source))

        _step(5, "Break one bit of a copy of the source: the check must fail")
        _check_sees_a_flipped_bit(source, output)
    except (DemoError, OSError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    told = json.loads(message.read_text())
    stored = json.loads(report.read_text())["bytes"]["stored"]
    memory = told["peak_memory_bytes"]
    print(
        f"\nAll right: {nbytes / 1e6:.0f} MB converted in {seconds:.1f} s in all, to {stored / 1e6:.0f} MB.\n"
        f"Peak memory: {memory['anonymous_and_shared'] / 1e6:.0f} MB anonymous + shared, "
        f"{memory['resident'] / 1e6:.0f} MB resident with mapped files.\n"
        "It grows with the largest chunk, not with the model.\n"
        f"Everything is in {FOLDER}. Next: a real model, see README.md."
    )
    return 0


def _step(number: int, what: str) -> None:
    print(f"\n--- {number}. {what}\n", flush=True)


def _run(*arguments: str, expected: int = 0) -> float:
    """Run the converter's command line as a user would; the seconds it took."""
    print(f"$ python -m converter {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "converter", *arguments], check=False).returncode
    if code != expected:
        raise DemoError(f"`{arguments[0]}` ended with exit code {code}, not {expected}")
    return time.monotonic() - start


def _check_sharding(output: Path) -> None:
    """The embedding must be cut into a chunk per device, as MaxText's own converter cuts it."""
    command: Sequence[str] = [sys.executable, "-m", "converter", "inspect", str(output), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    arrays = {array["name"]: array for array in json.loads(done.stdout)["arrays"]}
    rows, width = GEOMETRY["vocab_size"], GEOMETRY["hidden_size"]
    if arrays[EMBEDDING]["chunk_shape"] != [rows // DEVICES, width]:
        raise DemoError(f"{EMBEDDING} has chunks of {arrays[EMBEDDING]['chunk_shape']}")


def _check_sees_a_flipped_bit(source: Path, output: Path) -> None:
    broken = source.with_name("qwen3-broken")
    shutil.copytree(source, broken)
    name = "model.layers.3.mlp.down_proj.weight"
    tensor = open_repository(locate(str(broken), revision=None, token=None)).tensors[name]
    with (broken / tensor.file).open("r+b") as file:
        position = tensor.offset + tensor.nbytes // 2
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1]))
    print(f"one bit of {name} flipped in {broken}", flush=True)
    _run("verify", str(output), "--source", str(broken), expected=4)
    print("It failed with exit code 4, as it should.", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
