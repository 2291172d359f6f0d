"""How one chunk of an array is stored: its key in the key-value store and its bytes.

TensorStore reads what is made here; it is made here because TensorStore needs about three times a chunk's size
to write it and one thread. A chunk of a zarr3 array is a shard of one inner chunk (Orbax gives both the same shape):
the compressed bytes, then an index of (offset, length) and its CRC-32C
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html). A chunk of a zarr2 array
is the compressed bytes alone.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from zstandard import ZstdCompressor

from converter.datafiles import Buffer

_compressors = threading.local()
"""Each thread's compressors by level: making one takes a page fault for every 4 KiB of its tables."""


@dataclass(frozen=True)
class ChunkFormat:
    """What the array's metadata say of its chunks.

    Attributes:
      zarr3: zarr version 3, else 2.
      level: zstd level, None for no compression.
    """

    zarr3: bool
    level: int | None

    def key(self, index: tuple[int, ...]) -> str:
        """The chunk's key below the array's own."""
        if self.zarr3:
            return "/".join(("c", *map(str, index)))
        return ".".join(map(str, index)) or "0"

    def encode(self, chunk: np.ndarray, workers: int) -> list[Buffer]:
        """The stored bytes, in pieces, of a C-contiguous little-endian chunk, compressed by `workers` threads.

        What is not compressed is the chunk's own memory.
        """
        data: Buffer = chunk.reshape(-1).view(np.uint8).data
        if self.level is not None:
            # In one call, from where the data are: in pieces, zstd copies them to a window of its own.
            data = _compressor(self.level, workers).compress(data)
        if not self.zarr3:
            return [data]
        index = struct.pack("<QQ", 0, len(data))
        return [data, index + struct.pack("<I", google_crc32c.value(index))]


def _compressor(level: int, workers: int) -> ZstdCompressor:
    if workers > 1:
        # Its threads' buffers are large: not to be kept.
        return ZstdCompressor(level=level, threads=workers)
    key = str(level)
    found: ZstdCompressor | None = getattr(_compressors, key, None)
    if found is None:
        found = ZstdCompressor(level=level)
        setattr(_compressors, key, found)
    return found


def chunk_format(metadata: Mapping[str, Any], zarr3: bool) -> ChunkFormat:
    """Read the format off an array's metadata, the `metadata` of a TensorStore zarr or zarr3 spec.

    Raises:
      ValueError: the metadata ask for something that `ChunkFormat` does not write.
    """
    if not zarr3:
        compressor = metadata["compressor"]
        if compressor is None:
            return ChunkFormat(False, None)
        if compressor["id"] != "zstd":
            raise ValueError(f"unexpected zarr2 compressor {compressor}")
        return ChunkFormat(False, compressor["level"])
    (shard,) = metadata["codecs"]
    inner = shard["configuration"]
    names = [codec["name"] for codec in inner["codecs"]]
    one_inner_chunk = inner["chunk_shape"] == metadata["chunk_grid"]["configuration"]["chunk_shape"]
    at_end = inner.get("index_location", "end") == "end"
    index_codecs = [codec["name"] for codec in inner["index_codecs"]]
    if (
        shard["name"] != "sharding_indexed"
        or names not in (["bytes"], ["bytes", "zstd"])
        or index_codecs != ["bytes", "crc32c"]
        or not one_inner_chunk
        or not at_end
    ):
        raise ValueError(f"unexpected zarr3 codecs {metadata['codecs']}")
    return ChunkFormat(True, inner["codecs"][1]["configuration"]["level"] if "zstd" in names else None)
