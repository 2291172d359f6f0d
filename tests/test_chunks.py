"""Arrays are cut into the chunks that plain Orbax gives a jax.Array of the same shape and sharding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import BFLOAT16, CONFIGS, DATA, planned_arrays, write_sparse
from reading import array_metadatas, arrays, shardings, stored_array
from running import DEVICES, convert, to_maxtext, to_maxtext_process

AXIS = "checkpoint_sharding_axis"
EMBEDDING = "params.params.token_embedder.embedding"


def plain_orbax_save(items: Path, tree: dict[str, Any], chunk_bytes: int, *, zarr3: bool = True) -> None:
    """Save with Orbax alone."""
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk_bytes), tree)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(items.absolute(), args=ocp.args.PyTreeSave(item=tree, save_args=save_args))


def sharded(values: np.ndarray, spec: list[str | None]) -> jax.Array:
    """A jax.Array over all devices."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), (AXIS,))
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))


def maxtext_spec(shape: tuple[int, ...]) -> list[str | None]:
    """MaxText's rule: axis 0 if divisible by the device count, else axis 1, else replicated."""
    if shape[0] % DEVICES == 0:
        return [AXIS]
    if len(shape) > 1 and shape[1] % DEVICES == 0:
        return [None, AXIS]
    return [None]


def check_equal_chunks(step: Path, plain: Path) -> set[tuple[int, ...]]:
    """Both have the same chunks and content; how the arrays are cut."""
    ours, theirs = arrays(step), arrays(plain)
    del ours["step"]
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.chunk_shape == theirs[name].chunk_shape, name
        assert array.inner_chunk == theirs[name].inner_chunk, name
        assert array.metadata == theirs[name].metadata, name
        assert array.sha256 == theirs[name].sha256, name
    assert array_metadatas(step) == array_metadatas(plain)
    return {tuple(np.array(array.values.shape) // array.chunk_shape) for array in ours.values()}


@pytest.mark.parametrize("zarr3", [True, False], ids=["zarr3", "zarr2"])
@pytest.mark.parametrize("chunk_bytes", [500, 2000, 1 << 31])
def test_small_chunks_of_sharded_arrays(chunk_bytes: int, zarr3: bool, tmp_path: Path) -> None:
    step = convert(
        "qwen3-0.6b",
        DATA / "qwen3" / "hf_bf16",
        tmp_path / "ours",
        f"--chunk_byte_size={chunk_bytes}",
        f"checkpoint_storage_use_zarr3={zarr3}",
    )
    specs = {name: entry["partition_spec"] for name, entry in shardings(step).items()}
    assert [None] in specs.values()
    assert [AXIS] in specs.values()
    tree = {name: sharded(array.values, specs[name]) for name, array in arrays(step).items() if name != "step"}
    plain_orbax_save(tmp_path / "plain" / "items", tree, chunk_bytes, zarr3=zarr3)
    cuts = check_equal_chunks(step, tmp_path / "plain")
    assert any(np.prod(cut) > DEVICES for cut in cuts) == (chunk_bytes < 1 << 31)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_small_chunks_of_unsharded_arrays(scan: bool, tmp_path: Path) -> None:
    run = to_maxtext_process(
        "model_name=gemma2-2b",
        f"base_output_directory={tmp_path / 'ours'}",
        f"scan_layers={scan}",
        f"--hf_model_path={DATA / 'gemma2' / 'hf_bf16'}",
        "--simulated_cpu_devices_count=1",
        "--chunk_byte_size=2000",
    )
    assert run.code == 0, run.stderr
    step = tmp_path / "ours" / "0"
    tree = {name: array.values for name, array in arrays(step).items() if name != "step"}
    plain_orbax_save(tmp_path / "plain" / "items", tree, 2000)
    assert any(np.prod(cut) > 1 for cut in check_equal_chunks(step, tmp_path / "plain"))


def test_planned_chunks_of_many_shapes(tmp_path: Path) -> None:
    """The plan's chunks, for shapes that no tiny model has: every kind of sharding, replicated ones cut or not."""
    from converter.maxtext.orbax import Leaf, Storage, chunk_shape, write_metadata

    generator = random.Random(0)
    sizes = (1, 2, 3, 5, 7, 12, 16, 18, 32, 48, 96)
    drawn = {tuple(generator.choices(sizes, k=rank)) for rank in (1, 2, 3, 4) for _ in range(12)}
    shapes = sorted(shape for shape in drawn if np.prod(shape) < 20_000)
    chunk_bytes = 600
    tree = {"x".join(map(str, shape)): sharded(np.zeros(shape, BFLOAT16), maxtext_spec(shape)) for shape in shapes}
    plain_orbax_save(tmp_path / "items", tree, chunk_bytes)
    storage = Storage(ocdbt=True, zarr3=True, compression=True, chunk_bytes=chunk_bytes)
    for shape in shapes:
        name = "x".join(map(str, shape))
        stored = stored_array(tmp_path, name)
        metadata = write_metadata(Leaf(name, shape, BFLOAT16, DEVICES), storage)
        assert chunk_shape(metadata) == stored.chunk_shape == stored.inner_chunk, shape


@pytest.mark.parametrize(
    ("devices", "chunk", "chunks", "sharding"), [(16, "(9496, 1024)", 16, "axis 0"), (1, "(151936, 1024)", 1, "none")]
)
def test_reference_embedding(devices: int, chunk: str, chunks: int, sharding: str, tmp_path: Path) -> None:
    """Qwen3-0.6B's embedding, from its geometry alone."""
    config = {
        **CONFIGS["qwen3-0.6b"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    source = write_sparse(tmp_path / "source", config)
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={source}",
        f"--simulated_cpu_devices_count={devices}",
        "--dry_run",
    )
    assert run.code == 0, run.stderr
    row = planned_arrays(run.stdout)[EMBEDDING]
    assert row["shape"] == "(151936, 1024)"
    assert (row["chunk"], row["chunks"], row["sharding"]) == (chunk, str(chunks), sharding)
    assert not (tmp_path / "out").exists()
