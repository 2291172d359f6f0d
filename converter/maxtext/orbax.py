"""Everything the converter takes from Orbax, its private modules included; nothing else imports those.

Orbax stays in charge of the tree's metadata, of sharding and array metadata, of merging OCDBT databases and of the
atomic finish. Only the arrays' data do not pass through it: they are leaves of a type of our own, whose handler
creates each array as Orbax would and lets a callback write its chunks.

Pinned to orbax-checkpoint 0.12.8. When an upgrade breaks this file, look at: the names imported from `_src` below;
`_async_serialize_replica_slices` and `ArrayHandler.serialize` in `_src/serialization/jax_array_handlers.py`, which
`_StreamedHandler` follows; and `ArrayWriteSpec` in `_src/serialization/tensorstore_utils.py`, which decides on chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.serialization import (
    jax_array_handlers,
    ocdbt_utils,
    tensorstore_utils,
    type_handler_registry,
    type_handlers,
    types,
)

from converter.datafiles import DATA_FILE_BYTES, Buffer, open_files
from converter.maxtext import devices
from converter.maxtext.layout import ITEM
from converter.maxtext.ocdbt import Database

_DATABASE = "ocdbt.process_1"
"""The database of the chunks, beside Orbax's `ocdbt.process_0`, which keeps the arrays' metadata; both are merged."""

_NODE_CACHE_BYTES = 16 << 20
"""Cache of the OCDBT database's index while it is written; Orbax's own limit is 100 MB."""


@dataclass(frozen=True)
class Storage:
    """How arrays are stored.

    Attributes:
      ocdbt: in one key-value database, else in a directory per array.
      zarr3: zarr version 3, else 2.
      compression: zstd, else none.
      chunk_bytes: largest chunk; larger shards are cut.
    """

    ocdbt: bool
    zarr3: bool
    compression: bool
    chunk_bytes: int


@dataclass(frozen=True)
class Leaf:
    """An array of the tree whose data are written by a callback.

    Attributes:
      name: its parts joined by ".", what lies above the parameters included.
      shape, dtype: of the whole array.
      device_count: simulated devices it is sharded over.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    device_count: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Store = Callable[[str, str, Sequence[Buffer]], None]
"""Takes a chunk's array, its key below the array's own and its bytes, in pieces; from several threads."""

Write = Callable[[Store], Mapping[str, bytes]]
"""Writes the data of the created arrays; returns further files of the step, by name."""


def write_metadata(leaf: Leaf, storage: Storage) -> dict[str, Any]:
    """The zarr metadata that Orbax gives the array: shape, chunks and codecs. Touches no disk."""
    spec = tensorstore_utils.ArrayWriteSpec(
        "/unused",
        leaf.name,
        global_shape=leaf.shape,
        write_shape=devices.write_shape(leaf.shape, leaf.device_count),
        dtype=leaf.dtype,
        chunk_byte_size=storage.chunk_bytes,
        use_compression=storage.compression,
        use_zarr3=storage.zarr3,
        use_ocdbt=storage.ocdbt,
        ocdbt_target_data_file_size=DATA_FILE_BYTES,
        process_id=0,
    )
    metadata: dict[str, Any] = spec.json["metadata"]
    return metadata


def chunk_shape(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The outer chunk shape in zarr metadata of either version."""
    if "chunks" in metadata:
        return tuple(metadata["chunks"])
    return tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])


class _ScalarHandler(type_handlers.ScalarHandler):  # type: ignore[misc]
    """Orbax's, which also hands on what says that the scalars are written."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Future[Sequence[future.Future]] = Future()

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[types.ParamInfo],
        args: Sequence[types.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        try:
            futures: Sequence[future.Future] = await super().serialize(values, infos, args)
        except BaseException as error:
            self.begun.set_exception(error)
            raise
        self.begun.set_result(futures)
        return futures


class _StreamedHandler(types.TypeHandler):  # type: ignore[misc]
    """Creates each leaf's array as Orbax would, then lets `write` fill them all."""

    def __init__(self, typestr: str, scalars: _ScalarHandler, write: Write, window: int) -> None:
        self._typestr = typestr
        self._scalars = scalars
        self._write = write
        self._window = window
        self._array_metadata_store = array_metadata_store.Store()

    def typestr(self) -> str:
        return self._typestr

    async def metadata(self, infos: Sequence[types.ParamInfo]) -> Sequence[Any]:
        raise NotImplementedError("streamed leaves are only written")

    async def deserialize(
        self, infos: Sequence[types.ParamInfo], args: Sequence[types.RestoreArgs] | None = None
    ) -> Sequence[Any]:
        raise NotImplementedError("streamed leaves are only written")

    async def serialize(
        self,
        values: Sequence[Leaf],
        infos: Sequence[types.ParamInfo],
        args: Sequence[types.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        saves = args or [types.SaveArgs()] * len(values)
        return [
            future.CommitFutureAwaitingContractedSignals(self._serialize(values, infos, saves), name="streamed_arrays")
        ]

    async def _serialize(
        self, values: Sequence[Leaf], infos: Sequence[types.ParamInfo], args: Sequence[types.SaveArgs]
    ) -> None:
        ocdbt = bool(infos[0].is_ocdbt_checkpoint)
        shardings = [devices.sharding(leaf.shape, leaf.device_count) for leaf in values]
        sharded = any(sharding is not None for sharding in shardings)
        if sharded:
            await jax_array_handlers._async_serialize_shardings(shardings, infos, primary_host=0)
        context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": _NODE_CACHE_BYTES}}, parent=infos[0].ts_context)
        # One writer after the other: two would contend for the database's manifest.
        for scalar in await asyncio.wrap_future(self._scalars.begun):
            await asyncio.to_thread(scalar.result)
        transaction = ts.Transaction(atomic=True) if ocdbt else None
        metadatas = []
        for leaf, info, arg in zip(values, infos, args, strict=True):
            await info.await_path_creation()
            spec = tensorstore_utils.build_array_write_spec(
                info=info,
                arg=arg,
                global_shape=leaf.shape,
                local_shape=devices.write_shape(leaf.shape, leaf.device_count),
                dtype=leaf.dtype,
                use_ocdbt=ocdbt,
                process_index=ocdbt_utils.get_process_index_for_subdir(ocdbt),
            )
            await ts.open(ts.Spec(spec.json), create=True, open=True, context=context, transaction=transaction)
            metadatas.append(spec.metadata)
        if transaction is not None:
            await transaction.commit_async()
        if sharded:
            await self._array_metadata_store.write(
                checkpoint_dir=infos[0].parent_dir, array_metadatas=metadatas, process_index=0
            )
        for name, content in self._fill(infos[0].parent_dir, ocdbt).items():
            (infos[0].parent_dir.parent / name).write_bytes(content)

    def _fill(self, directory: Path, ocdbt: bool) -> Mapping[str, bytes]:
        """Let the arrays' chunks be written; what else is to be."""
        files = open_files(directory / _DATABASE if ocdbt else directory, self._window)
        try:
            if ocdbt:
                database = Database(files)
                others = self._write(lambda array, key, value: database.write(f"{array}/{key}", value))
                database.finish()
            else:
                others = self._write(lambda array, key, value: files.put(f"{array}/{key}", value))
                files.finish()
        except BaseException:
            files.abort()
            raise
        return others


def save(
    directory: Path,
    leaves: Sequence[Leaf],
    storage: Storage,
    *,
    custom_metadata: Mapping[str, Any],
    ts_context: Mapping[str, Any],
    write: Write,
    window: int,
) -> None:
    """Save a MaxText checkpoint step of these parameters at `directory`, which appears whole or not at all.

    Args:
      directory: the step's directory, which must not exist.
      leaves: the parameters; below `params` they become a TrainState.
      custom_metadata: of the step.
      ts_context: TensorStore's context for the directory.
      write: called when the arrays are created, with what stores a chunk; must write every chunk, and return when they
        are written what other files the step is to have, by name.
      window: bytes that are on their way into a bucket at a time.
    """
    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        # What Orbax itself reads and writes with TensorStore: the step, and the databases that it merges.
        context.update(ts_context)
    sharded = bool(leaves) and leaves[0].device_count > 1
    scalars = _ScalarHandler()
    streamed = _StreamedHandler("jax.Array" if sharded else "np.ndarray", scalars, write, window)
    handlers = [(int, scalars), (Leaf, streamed)]
    if sharded:
        # Orbax takes the write shapes that it notes in the tree's metadata from the store of this type's handler.
        handlers.append((jax.Array, streamed))
    registry = type_handler_registry.create_type_handler_registry(*handlers)
    params: dict[str, Any] = {}
    for leaf in leaves:
        *parents, last = leaf.name.split(".")
        node = params
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    # MaxText's TrainState, or parameters alone.
    tree = {"step": 0, **params, "opt_state": {}} if "params" in params else params
    if "params" not in params:
        # There is no scalar to wait for.
        scalars.begun.set_result([])
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=storage.chunk_bytes), tree)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=storage.ocdbt,
        use_zarr3=storage.zarr3,
        use_compression=storage.compression,
        type_handler_registry=registry,
    )
    # Otherwise the threads that write wait five minutes for directories whose creation has failed in another thread.
    options = ocp.CompositeOptions(async_options=ocp.AsyncOptions(create_directories_asynchronously=False))
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler(composite_options=options, **{ITEM: handler}))
    checkpointer.save(
        epath.Path(directory),
        args=ocp.args.Composite(
            **{ITEM: ocp.args.PyTreeSave(item=tree, save_args=save_args, ocdbt_target_data_file_size=DATA_FILE_BYTES)}
        ),
        custom_metadata=dict(custom_metadata),
    )
    checkpointer.close()
