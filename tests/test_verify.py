"""`verify` finds every checkpoint equal to its source, and any changed element of the source, in every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_folder
from reading import source_tensors
from running import to_maxtext
from test_families import words
from test_oracles import CASES, DATA, Case

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
