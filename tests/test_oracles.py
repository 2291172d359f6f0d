"""The result is what MaxText's own converter makes of the same model, to the bit, for every reference in data/."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA
from reading import Stored, arrays, shardings, step_metadata
from running import to_maxtext

_SAVE_DTYPES = {"hf_bf16": "bfloat16", "hf_bf16_sd": "bfloat16", "hf_f32": "float32"}


@dataclass(frozen=True)
class Case:
    """One reference: a source and whether its layers are scanned."""

    family: str
    source: str
    scan: bool

    @property
    def path(self) -> Path:
        dtype = "f32" if self.source == "hf_f32" else "bf16"
        return DATA / self.family / f"expected_{dtype}_{'scan' if self.scan else 'unscan'}.json"

    @property
    def expected(self) -> dict[str, Any]:
        return json.loads(self.path.read_bytes())


CASES = [
    case
    for family in sorted(DATA.iterdir())
    if family.is_dir() and (family / "oracle.json").exists()
    for source in sorted(family.glob("hf_*"))
    for scan in (True, False)
    if (case := Case(family.name, source.name, scan)).path.exists()
]


def converted(case: Case, output: Path) -> Path:
    """Convert with the words that MaxText was given."""
    oracle = json.loads((DATA / case.family / "oracle.json").read_bytes())
    run = to_maxtext(
        "src/maxtext/configs/base.yml",
        f"model_name={oracle['model_name']}",
        f"base_output_directory={output}",
        f"scan_layers={str(case.scan).lower()}",
        "hardware=cpu",
        "skip_jax_distributed_system=True",
        *(f"{word}={value}" for word, value in {"use_multimodal": False, **oracle["words"]}.items()),
        "--lazy_load_tensors=True",
        f"--hf_model_path={DATA / case.family / case.source}",
        f"--save_dtype={_SAVE_DTYPES[case.source]}",
    )
    assert run.code == 0, run.stderr
    return output / "0"


def facts(name: str, array: Stored, sharding: dict[str, Any] | None) -> dict[str, Any]:
    """An array as the references describe it."""
    return {
        "shape": list(array.values.shape),
        "dtype": array.values.dtype.name,
        "sha256": array.sha256,
        "chunk_shape": list(array.chunk_shape),
        "inner_chunk": list(array.inner_chunk),
        "partition_spec": "(no sharding)" if sharding is None else sharding["partition_spec"],
    }


def test_there_are_references() -> None:
    assert len({case.family for case in CASES}) == 27
    assert len(CASES) == 77


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family}-{c.source}-{'scan' if c.scan else 'unscan'}")
def test_equals_maxtext(case: Case, tmp_path: Path) -> None:
    step = converted(case, tmp_path / "out")
    expected = case.expected
    found, sharded = arrays(step), shardings(step)
    assert found.keys() == expected["arrays"].keys()
    described = {name: facts(name, array, sharded.get(name)) for name, array in found.items()}
    differing = {name for name in described if described[name] != expected["arrays"][name]}
    assert not differing, {name: (described[name], expected["arrays"][name]) for name in sorted(differing)[:3]}
    assert step_metadata(step)["custom_metadata"] == expected["checkpoint_metadata"]["custom_metadata"]


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_float32_source_is_cast_to_bfloat16(scan: bool, tmp_path: Path) -> None:
    """bfloat16, the default, of a float32 source is the float32 result rounded once."""
    outputs = [converted(Case("llama3.1", "hf_f32", scan), tmp_path / "f32")]
    run = to_maxtext(
        "model_name=llama3.1-8b",
        f"base_output_directory={tmp_path / 'bf16'}",
        f"scan_layers={scan}",
        f"--hf_model_path={DATA / 'llama3.1' / 'hf_f32'}",
    )
    assert run.code == 0, run.stderr
    outputs.append(tmp_path / "bf16" / "0")
    wide, narrow = map(arrays, outputs)
    assert wide.keys() == narrow.keys()
    for name in narrow.keys() - {"step"}:
        assert narrow[name].values.dtype.name == "bfloat16"
        rounded = wide[name].values.astype(narrow[name].values.dtype)
        assert np.array_equal(narrow[name].values.view(np.uint16), rounded.view(np.uint16)), name
