"""Reading a checkpoint: where it is, what arrays it has, how many bytes each takes. Loads no data."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from converter import places
from converter.errors import ConverterError, RequestError, WorldError
from converter.maxtext.layout import COMMITTED, ITEM


@dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint.

    Attributes:
      name: key path joined by ".".
      sharding: as Orbax's metadata describe it, None for none.
      write_shape, chunk_shape: outer and inner chunk.
      stored: bytes it takes, chunks and metadata.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str | None
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    stored: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's place and metadata.

    Attributes:
      items: the directory of the pytree.
      ocdbt, zarr3: how its arrays are stored.
      custom_metadata: of the step.
    """

    items: Path
    ocdbt: bool
    zarr3: bool
    custom_metadata: Mapping[str, Any]

    def open(self, name: str) -> ts.TensorStore:
        """An array, opened for reading."""
        driver = "zarr3" if self.zarr3 else "zarr"
        store = (
            {"driver": "ocdbt", "base": places.kvstore(self.items), "path": f"{name}/"}
            if self.ocdbt
            else places.kvstore(self.items / name)
        )
        context = ts.Context(places.context(self.items))
        with reading_back(self.items):
            return ts.open({"driver": driver, "kvstore": store}, open=True, read=True, context=context).result()


_TRANSIENT = ("UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED")
"""TensorStore's words, at the beginning of its messages, for what may succeed later; all others but
`PERMISSION_DENIED` say that what was read makes no sense or is not there."""


@contextlib.contextmanager
def reading_back(items: Path) -> Iterator[None]:
    """A block in which TensorStore reads a checkpoint: what it raises becomes one line.

    Raises:
      RequestError: the checkpoint is damaged, incomplete, or may not be read.
      WorldError: the disk or the bucket failed.
    """
    try:
        yield
    except ConverterError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        status = text.partition(":")[0]
        if not re.match(r"[A-Z_]+:|Error \w+ing\b", text):
            raise
        # What follows in brackets may be as long as a whole request and its answer.
        reason = re.sub(r"\s*\[\w+=.*", "", text)[:300]
        if status in _TRANSIENT or "retry attempts failed" in text:
            raise WorldError(f"{items} cannot be read: {reason}; try again later") from error
        if status in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
            raise RequestError(f"{items} cannot be read: {reason}") from error
        raise RequestError(f"{items} is damaged or incomplete: {reason}; convert it again") from error


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a base directory (its last step), a step or an items directory.

    Raises:
      RequestError: there is none.
      WorldError: it cannot be read.
    """
    items = _items(path)
    try:
        metadata = json.loads((items / "_METADATA").read_bytes())
    except ValueError as error:
        raise RequestError(f"{items / '_METADATA'} is not valid JSON") from error
    except ConverterError:
        raise
    except OSError as error:
        raise WorldError(f"{items / '_METADATA'} cannot be read: {error.strerror or error}") from error
    ocdbt = metadata.get("use_ocdbt", (items / "manifest.ocdbt").exists())
    return Checkpoint(items, bool(ocdbt), bool(metadata.get("use_zarr3", False)), _custom_metadata(items.parent))


def _items(path: Path) -> Path:
    if not path.is_dir():
        raise RequestError(f"{path} is no directory")
    steps = sorted((step for step in path.iterdir() if step.name.isdigit()), key=lambda step: int(step.name))
    for candidate in (path, path / ITEM, path / "default", *(step / ITEM for step in reversed(steps))):
        if (candidate / "_METADATA").is_file():
            if places.is_remote(path) and not (candidate / COMMITTED).is_file():
                raise RequestError(
                    f"{candidate} has no {COMMITTED}, so Orbax does not load it: unfinished, or a copy from a disk"
                )
            return candidate
    raise RequestError(f"{path} holds no Orbax checkpoint: no _METADATA in it, in its {ITEM} or in a step's {ITEM}")


def _custom_metadata(step: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((step / "_CHECKPOINT_METADATA").read_bytes()).get("custom_metadata")
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def stored_arrays(checkpoint: Checkpoint) -> list[StoredArray]:
    """Every array of the checkpoint, by name.

    Raises:
      RequestError: it is damaged.
      WorldError: it cannot be read.
    """
    with reading_back(checkpoint.items):
        return _stored_arrays(checkpoint)


def _stored_arrays(checkpoint: Checkpoint) -> list[StoredArray]:
    sizes = dict(_ocdbt_sizes(checkpoint.items) if checkpoint.ocdbt else places.sizes(checkpoint.items))
    per_array: dict[str, int] = {}
    for key, size in sizes.items():
        name = key.partition("/")[0]
        per_array[name] = per_array.get(name, 0) + size
    metadata = ocp.PyTreeCheckpointer().metadata(checkpoint.items)
    if metadata.item_metadata is None:
        raise RequestError(f"{checkpoint.items} is damaged or incomplete: Orbax cannot read its arrays' metadata")
    arrays = []
    for value in _leaves(metadata.item_metadata.tree):
        shape = tuple(value.shape)
        storage = getattr(value, "storage", None)
        chunk = tuple(storage.chunk_shape) if storage is not None and storage.chunk_shape else shape
        write = tuple(storage.write_shape) if storage is not None and storage.write_shape else chunk
        sharding = None if value.sharding is None else _sharding_text(value.sharding)
        dtype = np.dtype(value.dtype).name
        arrays.append(StoredArray(value.name, shape, dtype, sharding, write, chunk, per_array.get(value.name, 0)))
    return sorted(arrays, key=lambda array: array.name)


def _sharding_text(sharding: Any) -> str:
    """Orbax's sharding metadata in short: without the list of devices, which need not be this machine's."""
    fields = {
        name: getattr(sharding, name) for name in ("shape", "axis_names", "partition_spec") if hasattr(sharding, name)
    }
    if "shape" in fields:
        fields["shape"] = [int(size) for size in fields["shape"]]
    return f"{type(sharding).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _leaves(tree: Any) -> Iterator[Any]:
    """The array metadata in a tree of Orbax metadata."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    elif hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield tree


def _ocdbt_sizes(items: Path) -> Iterator[tuple[str, int]]:
    for key, _, _, size in _ocdbt_values(items):
        yield key, size


def _ocdbt_values(items: Path) -> Iterator[tuple[str, str | None, int, int]]:
    """Key, file, offset and bytes of every value in the OCDBT database, from its index alone; no file if inline."""
    base = ts.KvStore.open(places.kvstore(items), context=ts.Context(places.context(items))).result()

    def walk(location: str, prefix: bytes) -> Iterator[tuple[str, str | None, int, int]]:
        node = ts.ocdbt.dump(base, location).result()
        for entry in node["entries"]:
            if node["height"]:
                yield from walk(entry["location"], prefix + entry["subtree_common_prefix"])
                continue
            key = (prefix + entry["key"]).decode()
            if "inline_value" in entry:
                yield key, None, 0, len(entry["inline_value"])
            else:
                kind_and_file, offset, size = entry["indirect_value"].rsplit(":", 2)
                # "value:<base path>:<relative path>", the base path with its trailing slash.
                yield key, "".join(kind_and_file.split(":")[1:]), int(offset), int(size)

    version = ts.ocdbt.dump(base).result()["versions"][-1]
    if "location" in version["root"]:
        yield from walk(version["root"]["location"], b"")


def is_complete(items: Path) -> bool:
    """Whether every chunk of every array is there, as far as metadata and file sizes tell."""
    try:
        checkpoint = find_checkpoint(items)
        values = dict(_chunk_counts(checkpoint))
        arrays = stored_arrays(checkpoint)
    except (ConverterError, ValueError, OSError):
        return False
    return bool(arrays) and all(
        values.get(array.name, 0)
        >= math.prod(-(-size // chunk) for size, chunk in zip(array.shape, array.write_shape, strict=True))
        for array in arrays
    )


def _chunk_counts(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """Array name -> chunks of it that are there in full."""
    keys = []
    if checkpoint.ocdbt:
        sizes = dict(places.sizes(checkpoint.items))
        for key, file, offset, size in _ocdbt_values(checkpoint.items):
            if file is None or offset + size <= sizes.get(file, 0):
                keys.append(key)
    else:
        keys = [key for key, _ in places.sizes(checkpoint.items)]
    metadata = ("/zarr.json", "/.zarray", "/.zattrs")
    counts: dict[str, int] = {}
    for key in keys:
        if not key.endswith(metadata):
            name = key.partition("/")[0]
            counts[name] = counts.get(name, 0) + 1
    yield from counts.items()
