"""Restore checkpoints in every way that plain Orbax has, under a number of JAX CPU devices of choice.

As a script, `restoring.py DEVICES STEP...` prints what each way gives for each checkpoint, local or in a bucket: the
sha256 of every leaf.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from etils import epath

Leaves = dict[str, dict[str, Any]]
Tree = dict[str, Any]


def _sharding(shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
    """Over all devices along the first axis where it divides, else replicated."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    cut = bool(shape) and shape[0] % len(jax.devices()) == 0
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x") if cut else jax.sharding.PartitionSpec())


def _is_array(entry: Any) -> bool:
    return len(getattr(entry, "shape", None) or ()) > 0


def v0_as_saved(step: Path) -> Tree:
    return ocp.PyTreeCheckpointer().restore(step / "items")


def _v0_metadata(step: Path) -> Tree:
    return ocp.PyTreeCheckpointer().metadata(step / "items").item_metadata.tree


def _v0_resharding(entry: Any) -> ocp.RestoreArgs:
    if not _is_array(entry):
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=_sharding(entry.shape))


def v0_resharded(step: Path) -> Tree:
    args = jax.tree.map(_v0_resharding, _v0_metadata(step))
    return ocp.PyTreeCheckpointer().restore(step / "items", restore_args=args)


def v0_numpy(step: Path) -> Tree:
    args = jax.tree.map(
        lambda entry: ocp.RestoreArgs(restore_type=np.ndarray) if _is_array(entry) else ocp.RestoreArgs(),
        _v0_metadata(step),
    )
    return ocp.PyTreeCheckpointer().restore(step / "items", restore_args=args)


def manager_resharded(step: Path) -> Tree:
    with ocp.CheckpointManager(step.parent, item_names=("items",)) as manager:
        assert manager.all_steps() == [0]
        args = jax.tree.map(_v0_resharding, _v0_metadata(step))
        return manager.restore(0, args=ocp.args.Composite(items=ocp.args.PyTreeRestore(restore_args=args)))["items"]


def v1_as_saved(step: Path) -> Tree:
    return ocp_v1.load(step, checkpointable_name="items")


def v1_resharded(step: Path) -> Tree:
    metadata = ocp_v1.metadata(step, checkpointable_name="items").metadata
    abstract = jax.tree.map(
        lambda entry: (
            jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=_sharding(entry.shape))
            if _is_array(entry)
            else entry
        ),
        metadata,
    )
    return ocp_v1.load(step, abstract, checkpointable_name="items")


AS_SAVED: tuple[Callable[[Path], Tree], ...] = (v0_as_saved, v1_as_saved)
"""These need the devices that the checkpoint was saved with."""

WITH_SHARDINGS: tuple[Callable[[Path], Tree], ...] = (v0_resharded, v0_numpy, manager_resharded, v1_resharded)
"""These work under any devices."""


def leaves(tree: Tree) -> Leaves:
    """Every leaf by its dotted name, empty dictionaries too."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
    return {".".join(part.key for part in path): _leaf(value) for path, value in flat}


def _is_empty(node: Any) -> bool:
    return isinstance(node, dict) and not node


def _leaf(value: Any) -> dict[str, Any]:
    if _is_empty(value):
        return {"type": "empty"}
    content = np.asarray(value)
    return {
        "type": "jax.Array" if isinstance(value, jax.Array) else type(value).__name__,
        "shape": list(content.shape),
        "dtype": content.dtype.name,
        "sha256": hashlib.sha256(np.ascontiguousarray(content).tobytes()).hexdigest(),
    }


def restored(step: Path, ways: tuple[Callable[[Path], Tree], ...]) -> dict[str, Leaves]:
    """What each way gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {way.__name__: leaves(way(step)) for way in ways}


def saved_devices(step: Path) -> int | None:
    """Devices a checkpoint was saved with, None where it has no shardings."""
    file = step / "items" / "_sharding"
    if not file.exists():
        return None
    return max(len(json.loads(text)["device_mesh"]["mesh"]) for text in json.loads(file.read_bytes()).values())


def every_way(step: Path) -> dict[str, Leaves]:
    """What every way that can work under this process's devices gives."""
    as_saved = saved_devices(step) in (None, len(jax.devices()))
    return restored(step, (*WITH_SHARDINGS, *(AS_SAVED if as_saved else ())))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    found = json.dumps({path: every_way(epath.Path(path)) for path in sys.argv[2:]})
    # Not print: under PYTHONUNBUFFERED it loses what a full pipe does not take at once.
    with open(1, "w", closefd=False) as out:
        out.write(found)
