"""Plain Orbax restores the result, and its metadata are those of MaxText's own checkpoint."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import restoring
from checkpoints import DATA
from reading import (
    array_metadatas,
    array_names,
    arrays,
    is_ocdbt,
    shardings,
    step_metadata,
    stored_array,
    tree_metadata,
)
from running import DEVICES, convert, environment, to_maxtext_process

AXIS = "checkpoint_sharding_axis"

STORAGES = list(itertools.product((True, False), (True, False), ("zstd", "none")))
"""ocdbt, zarr3, compression."""


def storage_id(storage: tuple[bool, bool, str]) -> str:
    ocdbt, zarr3, compression = storage
    return f"{'ocdbt' if ocdbt else 'files'}-{'zarr3' if zarr3 else 'zarr2'}-{compression}"


def expected_arrays(family: str, scan: bool) -> dict[str, Any]:
    """MaxText's arrays of the bfloat16 model."""
    name = f"expected_bf16_{'scan' if scan else 'unscan'}.json"
    return json.loads((DATA / family / name).read_bytes())["arrays"]


def convert_with_devices(devices: int, output: Path, scan: bool = True) -> Path:
    """Convert the tiny Qwen3 in a process of its own."""
    run = to_maxtext_process(
        "model_name=qwen3-0.6b",
        f"base_output_directory={output}",
        f"scan_layers={scan}",
        f"--hf_model_path={DATA / 'qwen3' / 'hf_bf16'}",
        f"--simulated_cpu_devices_count={devices}",
    )
    assert run.code == 0, run.stderr
    return output / "0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of the tiny Qwen3, scanned unless the name says otherwise."""
    root, source = tmp_path_factory.mktemp("made"), DATA / "qwen3" / "hf_bf16"
    found = {
        "unscanned": convert("qwen3-0.6b", source, root / "unscanned", "scan_layers=false"),
        "unsharded": convert_with_devices(1, root / "unsharded"),
        "maxtext": DATA / "qwen3" / "maxtext_bf16_scan" / "0",
    }
    for storage in STORAGES:
        ocdbt, zarr3, compression = storage
        found[storage_id(storage)] = convert(
            "qwen3-0.6b",
            source,
            root / storage_id(storage),
            f"checkpoint_storage_use_ocdbt={ocdbt}",
            f"checkpoint_storage_use_zarr3={zarr3}",
            f"--compression={compression}",
        )
    return found


def restored_by_process(devices: int, steps: list[Path]) -> dict[str, Any]:
    """What every way of restoring gives under other devices than this process has."""
    done = subprocess.run(
        [sys.executable, restoring.__file__, str(devices), *map(str, steps)],
        env=environment(),
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check_leaves(found: restoring.Leaves, expected: dict[str, Any]) -> None:
    """The leaves are the expected arrays, and `opt_state` is empty."""
    assert found.keys() == {*expected, "opt_state"}
    assert found["opt_state"] == {"type": "empty"}
    for name in expected.keys() - {"step"}:
        same = ("shape", "dtype", "sha256")
        assert [found[name][key] for key in same] == [expected[name][key] for key in same], name
    assert found["step"]["type"] == "int"
    assert found["step"]["sha256"] == expected["step"]["sha256"]


@pytest.mark.parametrize("devices", [1, 8, DEVICES])
def test_every_way_restores_every_storage(made: dict[str, Path], devices: int) -> None:
    if devices == DEVICES:
        results = {str(step): restoring.every_way(step) for step in made.values()}
    else:
        results = restored_by_process(devices, list(made.values()))
    for name, step in made.items():
        ways = results[str(step)]
        as_saved = devices == DEVICES or name == "unsharded"
        assert len(ways) == (6 if as_saved else 4), name
        for found in ways.values():
            check_leaves(found, expected_arrays("qwen3", scan=name != "unscanned"))


def test_restored_as_saved_leaves_are_of_the_saved_type(made: dict[str, Path]) -> None:
    for name, kind in (("ocdbt-zarr3-zstd", "jax.Array"), ("unsharded", "ndarray")):
        for found in restoring.restored(made[name], restoring.AS_SAVED).values():
            assert {leaf["type"] for leaf in found.values()} == {kind, "int", "empty"}


@pytest.mark.parametrize("storage", STORAGES, ids=storage_id)
def test_storage_is_what_was_asked_for(made: dict[str, Path], storage: tuple[bool, bool, str]) -> None:
    ocdbt, zarr3, compression = storage
    step = made[storage_id(storage)]
    assert is_ocdbt(step) == ocdbt
    assert set(array_names(step).values()) == {"zarr3" if zarr3 else "zarr"}
    metadata = tree_metadata(step)
    assert (metadata["use_ocdbt"], metadata["use_zarr3"]) == (ocdbt, zarr3)
    expected = expected_arrays("qwen3", scan=True)
    found = arrays(step)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.sha256 == expected[name]["sha256"], name
        assert list(array.chunk_shape) == expected[name]["chunk_shape"], name
        if name != "step":
            assert array.compressed == (compression == "zstd"), name


THEIRS = sorted(DATA.glob("*/maxtext_*"))
"""Metadata of checkpoints that MaxText made."""


@pytest.fixture(scope="module")
def beside_theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """What this converter makes of the sources of `THEIRS`."""
    found = {}
    for folder in THEIRS:
        oracle = json.loads((folder.parent / "oracle.json").read_bytes())
        words = [f"{word}={value}" for word, value in oracle["words"].items()]
        scan = f"scan_layers={str(folder.name.endswith('_scan')).lower()}"
        output = tmp_path_factory.mktemp("beside") / "out"
        found[folder] = convert(oracle["model_name"], folder.parent / "hf_bf16", output, scan, *words)
    return found


@pytest.mark.parametrize("folder", THEIRS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_metadata_are_those_of_maxtext(folder: Path, beside_theirs: dict[Path, Path]) -> None:
    step, theirs = beside_theirs[folder], folder / "0"
    assert shardings(step) == shardings(theirs)
    assert array_metadatas(step) == array_metadatas(theirs)
    assert step_metadata(step).keys() == step_metadata(theirs).keys()
    for key in ("custom_metadata", "metrics", "performance_metrics"):
        assert step_metadata(step)[key] == step_metadata(theirs)[key]
    assert (step / "commit_success.txt").exists()
    assert (step / "items" / "commit_success.txt").exists()


@pytest.mark.parametrize("folder", THEIRS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_tree_metadata_are_those_of_maxtext(folder: Path, beside_theirs: dict[Path, Path]) -> None:
    ours, theirs = tree_metadata(beside_theirs[folder]), tree_metadata(folder / "0")
    entries, expected = ours.pop("tree_metadata"), theirs.pop("tree_metadata")
    assert ours == theirs
    assert entries.keys() == expected.keys()
    for name, entry in expected.items():
        assert entries[name] == entry, name


def test_zarr_metadata_are_those_of_maxtext(made: dict[str, Path]) -> None:
    for name in array_names(made["maxtext"]):
        ours, theirs = (stored_array(made[key], name).metadata for key in ("ocdbt-zarr3-zstd", "maxtext"))
        assert ours == theirs, name


def test_one_device_gives_no_sharding(made: dict[str, Path]) -> None:
    """As MaxText with one device: no shardings, plain arrays, one chunk to an array."""
    step = made["unsharded"]
    assert not (step / "items" / "_sharding").exists()
    assert array_metadatas(step) == {}
    kinds = {name: entry["value_metadata"] for name, entry in tree_metadata(step)["tree_metadata"].items()}
    for name, array in arrays(step).items():
        assert array.chunk_shape == array.inner_chunk == array.values.shape, name
        kind = "scalar" if name == "step" else "np.ndarray"
        assert kinds[name] == {"value_type": kind, "skip_deserialize": False}, name
    assert kinds["opt_state"] == {"value_type": "Dict", "skip_deserialize": True}


@pytest.mark.parametrize("devices", [3, 7, pytest.param(1024, marks=pytest.mark.slow)])
def test_odd_device_counts(devices: int, tmp_path: Path) -> None:
    step = convert_with_devices(devices, tmp_path / "out")
    expected = expected_arrays("qwen3", scan=True)
    found, sharded = arrays(step), shardings(step)
    assert sharded.keys() == expected.keys() - {"step"}
    for name, array in found.items():
        assert array.sha256 == expected[name]["sha256"], name
        if name == "step":
            continue
        shape = array.values.shape
        if shape[0] % devices == 0:
            spec: list[str | None] = [AXIS]
        elif len(shape) > 1 and shape[1] % devices == 0:
            spec = [None, AXIS]
        else:
            spec = [None]
        assert sharded[name]["partition_spec"] == spec, name
        assert sharded[name]["shape"] == [devices]
        assert sharded[name]["axis_names"] == [AXIS]
        assert [device["id"] for device in sharded[name]["device_mesh"]["mesh"]] == list(range(devices))
    results = restored_by_process(devices, [step])[str(step)]
    assert len(results) == 6
    for leaves in results.values():
        check_leaves(leaves, expected)
