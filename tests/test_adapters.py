"""LoRA adapters: alone and merged, what MaxText's converter makes of them, and better where it ignores what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA
from reading import Stored, arrays, shardings, step_metadata
from running import Run, to_maxtext
from test_oracles import facts

MODELS = {"llama3.1": "llama3.1-8b", "qwen3": "qwen3-0.6b"}

SAVE_DTYPES = {"bf16": "bfloat16", "f32": "float32"}

ALONE = {
    # Expected result -> adapter, dtype of the result.
    "f32": ("adapter_f32", "float32"),
    "bf16": ("adapter_bf16", "bfloat16"),
    "f32src_bf16": ("adapter_f32", "bfloat16"),
    "bf16src_f32": ("adapter_bf16", "float32"),
    "partial_f32": ("adapter_partial_f32", "float32"),
}

MERGED = {
    # Expected result -> adapter, base; the dtype of the result is the base's.
    "f32": ("adapter_f32", "hf_f32"),
    "bf16": ("adapter_bf16", "hf_bf16"),
    "f32adapter_bf16": ("adapter_f32", "hf_bf16"),
    "partial_f32": ("adapter_partial_f32", "hf_f32"),
}


def expected(family: str, kind: str, variant: str, scan: bool) -> dict[str, Any]:
    """A reference: the arrays and the step's metadata."""
    path = DATA / f"lora-{family}" / f"expected_{kind}_{variant}_{'scan' if scan else 'unscan'}.json"
    return json.loads(path.read_bytes())


def alone(family: str, adapter: Path, output: Path, *words: object) -> Run:
    """Convert an adapter without its base's weights."""
    return to_maxtext(
        f"model_name={MODELS[family]}",
        f"base_output_directory={output}",
        f"hf_lora_adapter_path={adapter}",
        f"--hf_model_path={DATA / family / 'hf_f32'}",
        *words,
    )


def step_of(family: str, adapter: Path, output: Path) -> Path:
    return output / MODELS[family] / adapter.name / "0"


def described(step: Path) -> dict[str, dict[str, Any]]:
    sharded = shardings(step)
    return {name: facts(name, array, sharded.get(name)) for name, array in arrays(step).items()}


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("variant", ALONE)
@pytest.mark.parametrize("family", MODELS)
def test_alone_equals_maxtext(family: str, variant: str, scan: bool, tmp_path: Path) -> None:
    name, dtype = ALONE[variant]
    adapter = DATA / f"lora-{family}" / name
    run = alone(
        family, adapter, tmp_path, f"scan_layers={scan}", f"--save_dtype={dtype}", "--adapter_layout=converter"
    )
    assert run.code == 0, run.stderr
    step = step_of(family, adapter, tmp_path)
    wanted = expected(family, "adapter", variant, scan)
    found = described(step)
    assert found.keys() == wanted["arrays"].keys()
    differing = {name for name in found if found[name] != wanted["arrays"][name]}
    assert not differing, {name: (found[name], wanted["arrays"][name]) for name in sorted(differing)[:3]}
    metadata = step_metadata(step)["custom_metadata"]
    assert metadata.items() >= wanted["checkpoint_metadata"]["custom_metadata"].items()


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("variant", MERGED)
@pytest.mark.parametrize("family", MODELS)
def test_merged_equals_maxtext(family: str, variant: str, scan: bool, tmp_path: Path) -> None:
    adapter, base = MERGED[variant]
    run = to_maxtext(
        f"model_name={MODELS[family]}",
        f"base_output_directory={tmp_path}",
        f"scan_layers={scan}",
        f"hf_lora_adapter_path={DATA / f'lora-{family}' / adapter}",
        "load_parameters_path=merge",
        f"--hf_model_path={DATA / family / base}",
        f"--save_dtype={SAVE_DTYPES[base.removeprefix('hf_')]}",
        *(["vocab_size=" + str(v)] if (v := vocabulary(family)) else []),
    )
    assert run.code == 0, run.stderr
    wanted = expected(family, "merged", variant, scan)
    found = described(tmp_path / "0")
    assert found.keys() == wanted["arrays"].keys()
    differing = {name for name in found if found[name] != wanted["arrays"][name]}
    assert not differing, {name: (found[name], wanted["arrays"][name]) for name in sorted(differing)[:3]}
    assert step_metadata(tmp_path / "0")["custom_metadata"] == wanted["checkpoint_metadata"]["custom_metadata"]


def vocabulary(family: str) -> int | None:
    return json.loads((DATA / family / "oracle.json").read_bytes())["words"].get("vocab_size")
