"""`verify` finds every checkpoint equal to its source, and any changed element of the source, in every family.

And what it leaves for programs: the report, the termination message, the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buckets import Bucket
from checkpoints import write_folder, write_tiny
from reading import source_tensors
from running import convert, python_process, to_maxtext
from test_families import words
from test_oracles import CASES, DATA, Case

from converter import buckets, verification
from converter.cli import main

_CASES = {case.family: case for case in reversed(CASES) if case.source == "hf_bf16"}
"""Of every family the scanned reference, where there is one."""


def _verify(capsys: pytest.CaptureFixture[str], checkpoint: Path, source: Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", str(checkpoint), "--source", str(source), "--json"])
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out)
    return code, found


@pytest.mark.parametrize("case", _CASES.values(), ids=lambda case: case.family)
def test_finds_equality_and_any_changed_bit(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = DATA / case.family / case.source
    run = to_maxtext(
        *words(case.family),
        f"hf_model_path={source}",
        f"base_output_directory={tmp_path / 'out'}",
        f"scan_layers={case.scan}",
    )
    assert run.code == 0, run.stderr
    code, found = _verify(capsys, tmp_path / "out", source)
    assert (code, found["differences"]) == (0, [])
    assert found["arrays"] == len(case.expected["arrays"]) - 1

    config = json.loads((source / "config.json").read_bytes())
    tensors = source_tensors(source / "model.safetensors")
    generator = np.random.default_rng(len(case.family))
    layers = sorted(name for name in tensors if ".layers." in name or name.startswith("layers."))
    text = [name for name in layers if "visual" not in name and "vision" not in name and "audio" not in name]
    changed = text[int(generator.integers(len(text)))]
    values = tensors[changed].copy()
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    bits[int(generator.integers(bits.size))] ^= 1
    write_folder(tmp_path / "changed", config, tensors | {changed: values})
    code, found = _verify(capsys, tmp_path / "out", tmp_path / "changed")
    assert code == 4
    assert found["differences"], changed


MODEL = "qwen3-8b"


@pytest.mark.parametrize("together", [0, 300, 1000, 1 << 30])
def test_differences_do_not_depend_on_what_is_read_together(
    together: int,
    checkpoint: Path,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(verification, "_TOGETHER_BYTES", together)
    code, found = _verify(capsys, checkpoint, tiny(MODEL))
    assert (code, found["differences"]) == (0, [])
    config = json.loads((tiny(MODEL) / "config.json").read_bytes())
    tensors = source_tensors(tiny(MODEL) / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    values = tensors[name].copy()
    for row, column in ((40, 3), (2, 21), (9, 21)):
        values.view(np.uint16)[row, column] ^= 1
    changed = write_folder(tmp_path / "changed", config, tensors | {name: values})
    code, found = _verify(capsys, checkpoint, changed)
    assert code == 4
    assert found["differences"] == [
        {
            "array": "params.params.decoder.layers_1.mlp.wi_0.kernel",
            "difference": "3 of 1,536 elements, the first at [3, 40]",
        }
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Path:
    return convert(MODEL, tiny(MODEL), tmp_path_factory.mktemp("checkpoint"), "scan_layers=false")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the same shapes and other weights."""
    folder = write_tiny(tmp_path_factory.mktemp("other"), MODEL)
    config = json.loads((folder / "config.json").read_bytes())
    tensors = source_tensors(folder / "model.safetensors")
    name = "model.norm.weight"
    return write_folder(folder / "changed", config, tensors | {name: tensors[name] + tensors[name].dtype.type(1)})


def _message(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    assert len(content) <= 4096
    message: dict[str, Any] = json.loads(content)
    assert message["version"] == 1
    assert message["seconds"] > 0
    assert message["peak_memory_bytes"]["resident"] > 10_000_000
    return message


def test_report_and_message_of_a_check(checkpoint: Path, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    report, message = tmp_path / "new" / "report.json", tmp_path / "message.json"
    words = ["verify", str(checkpoint), f"--source={tiny(MODEL)}", f"--report={report}"]
    assert main([*words, "--termination_message", str(message)]) == 0
    told = json.loads(report.read_bytes())
    assert told["version"] == 1
    assert told["checkpoint"] == str(checkpoint / "items")
    assert told["source"]["repository"] == str(tiny(MODEL))
    assert told["source"]["files"][0]["name"] == "model.safetensors"
    assert told["differences"] == []
    assert told["seconds"].keys() >= {"start", "plan", "compare"}
    assert told["peak_memory_bytes"]["resident"] > 10_000_000
    assert told["versions"].keys() >= {"converter", "jax", "orbax-checkpoint", "tensorstore", "numpy"}
    ending = _message(message)
    assert (ending["result"], ending["exit_code"], ending["error"]) == ("equal", 0, None)
    assert ending["checked"] == {"arrays": told["arrays"], "differences": 0}
    assert ending["bytes"] == told["bytes"] > 0
    assert ending["output"] == str(checkpoint / "items")


def test_report_and_message_of_a_difference(
    checkpoint: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, message = tmp_path / "report.json", tmp_path / "message.json"
    words = ["verify", str(checkpoint), f"--source={other}", f"--report={report}", f"--termination_message={message}"]
    assert main(words) == 4
    told = json.loads(report.read_bytes())
    assert [each["array"] for each in told["differences"]] == ["params.params.decoder.decoder_norm.scale"]
    ending = _message(message)
    assert (ending["result"], ending["exit_code"]) == ("different", 4)
    assert ending["checked"] == {"arrays": told["arrays"], "differences": 1}
    assert f"converter: error: {ending['error']}" == capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [["--zzqq=1"], ["--threads=x"], ["--retry_seconds=x"], ["--source=/no/such/folder"], ["--log_format=xml"]],
    ids=str,
)
def test_message_of_a_refused_check(
    words: list[str],
    checkpoint: Path,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = tmp_path / "message.json"
    base = ["verify", str(checkpoint), f"--source={tiny(MODEL)}"]
    assert main([*base, f"--termination_message={message}", *words]) == 2
    ending = _message(message)
    assert (ending["result"], ending["exit_code"]) == ("failed", 2)
    assert "checked" not in ending
    assert capsys.readouterr().err.splitlines() == [f"converter: error: {ending['error']}"]


def test_report_that_cannot_be_written_is_found_first(
    checkpoint: Path, tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["verify", str(checkpoint), f"--source={tiny(MODEL)}", f"--report={tmp_path / 'file' / 'report.json'}"]
    assert main(words) == 2
    assert capsys.readouterr().out == ""


def test_message_of_a_check_that_is_ended(checkpoint: Path, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    message = tmp_path / "message.json"
    code = """
import os, signal, subprocess, sys
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 143)
from converter import verification
from converter.cli import main
verification._expected = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or signal.pause()
main(["verify", *sys.argv[1:]])
"""
    python_process(code, checkpoint, f"--source={tiny(MODEL)}", f"--termination_message={message}", timeout=60)
    ending = _message(message)
    assert (ending["result"], ending["exit_code"], ending["error"]) == ("failed", 143, "ended by SIGTERM")


def test_log_of_a_check_in_json(checkpoint: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint), f"--source={other}", "--log_format=json"]) == 4
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[-1]["severity"] == "ERROR"
    assert lines[-1]["exit_code"] == 4


def _flipped(content: bytes) -> bytes:
    """With one other bit in every 64 bytes."""
    return bytes(byte ^ (at % 64 == 20) for at, byte in enumerate(content))


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "truncated": lambda content: content[:10],
    "flipped": _flipped,
}


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_a_damaged_checkpoint(
    ocdbt: bool,
    damage: str,
    where: str,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said in one line, by whoever reads what is damaged."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    buckets._client.cache_clear()
    source = DATA / "qwen3" / "hf_bf16"
    output = tmp_path / "out" if where == "disk" else bucket.url("out")
    run = to_maxtext(
        *words("qwen3"),
        f"hf_model_path={source}",
        f"base_output_directory={output}",
        f"checkpoint_storage_use_ocdbt={ocdbt}",
    )
    assert run.code == 0, run.stderr
    folder = (tmp_path if where == "disk" else bucket.folder) / "out" / "0" / "items"
    paths = folder.glob("d/*") if ocdbt else [folder / "params.params.decoder.decoder_norm.scale" / "zarr.json"]
    for path in sorted(paths):
        left = DAMAGES[damage](path.read_bytes())
        path.unlink()
        if left is not None and where == "disk":
            path.write_bytes(left)
        elif left is not None:
            bucket.put(str(path.relative_to(bucket.folder)), left)
    capsys.readouterr()
    assert main(["verify", str(output), "--source", str(source)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "converter: error:" in line]) == 1, said
    assert "damaged or incomplete" in said[-1], said
    assert "Traceback" not in "".join(said)
