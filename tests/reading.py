"""Reading checkpoints and repositories with TensorStore, JSON and the safetensors library, not the converter."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import tensorstore as ts

_NUMPY = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
}


def source_tensors(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file."""
    return {
        name: np.frombuffer(entry["data"], _NUMPY[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in safetensors.deserialize(file.read_bytes())
    }


@dataclass(frozen=True)
class Stored:
    """An array as TensorStore sees it, with the zarr metadata it is stored under."""

    values: np.ndarray
    metadata: dict[str, Any]
    chunk_shape: tuple[int, ...]
    inner_chunk: tuple[int, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.values).tobytes()).hexdigest()

    @property
    def compressed(self) -> bool:
        """Whether zstd is among the codecs."""
        return "zstd" in json.dumps(self.metadata)


def _kvstore(items: Path) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{items}/"}
    if (items / "manifest.ocdbt").exists():
        return {"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": 1024}}
    return base


def is_ocdbt(step: Path) -> bool:
    """Whether a checkpoint's arrays are in one database."""
    return (step / "items" / "manifest.ocdbt").exists()


def array_names(step: Path) -> dict[str, str]:
    """The zarr driver of every array of a checkpoint by name."""
    store = ts.KvStore.open(_kvstore(step / "items")).result()
    drivers = {"zarr.json": "zarr3", ".zarray": "zarr"}
    found = (key.decode().rpartition("/") for key in store.list().result())
    return {name: drivers[last] for name, _, last in found if last in drivers}


def stored_array(step: Path, name: str, driver: str = "zarr3") -> Stored:
    """One array of a checkpoint."""
    kvstore = _kvstore(step / "items")
    if kvstore["driver"] == "file":
        kvstore["path"] += f"{name}/"
    else:
        kvstore["path"] = f"{name}/"
    array = ts.open({"driver": driver, "kvstore": kvstore, "open": True}).result()
    layout: Any = array.chunk_layout
    return Stored(
        array.read().result(),
        array.spec().to_json()["metadata"],
        tuple(layout.write_chunk.shape or ()),
        tuple(layout.read_chunk.shape or ()),
    )


def arrays(step: Path) -> dict[str, Stored]:
    """Every array of a checkpoint, `step` included."""
    return {name: stored_array(step, name, driver) for name, driver in array_names(step).items()}


def digests(step: Path) -> dict[str, str]:
    """sha256 of every array of a checkpoint, `step` included."""
    return {name: array.sha256 for name, array in arrays(step).items()}


def values(step: Path) -> dict[str, np.ndarray]:
    """Every parameter of a checkpoint, named as below `params.params`."""
    return {name.removeprefix("params.params."): array.values for name, array in arrays(step).items() if name != "step"}


def shardings(step: Path) -> dict[str, dict[str, Any]]:
    """The sharding of every array that has one; empty where the checkpoint has no `_sharding`."""
    file = step / "items" / "_sharding"
    if not file.exists():
        return {}
    return {base64.b64decode(key).decode(): json.loads(value) for key, value in json.loads(file.read_bytes()).items()}


def tree_metadata(step: Path) -> dict[str, Any]:
    """`_METADATA`, the keys of its tree as dotted names."""
    content = json.loads((step / "items" / "_METADATA").read_bytes())
    tree = content["tree_metadata"]
    return {**content, "tree_metadata": {".".join(ast.literal_eval(key)): value for key, value in tree.items()}}


def array_metadatas(step: Path) -> dict[str, dict[str, Any]]:
    """`array_metadatas/process_0` by array; empty where there is none."""
    file = step / "items" / "array_metadatas" / "process_0"
    if not file.exists():
        return {}
    listed = [entry["array_metadata"] for entry in json.loads(file.read_bytes())["array_metadatas"]]
    return {entry["param_name"]: entry for entry in listed}


def step_metadata(step: Path) -> dict[str, Any]:
    """`_CHECKPOINT_METADATA`."""
    return json.loads((step / "_CHECKPOINT_METADATA").read_bytes())
