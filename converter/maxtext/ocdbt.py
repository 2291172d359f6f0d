"""An OCDBT database that is written once: values go to data files as they come, its index and manifest at the end.

The format is https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format. TensorStore reads what is
made here, and Orbax merges it with its own database by reference. It is made here because TensorStore holds all values
of a transaction in memory until they are committed, in many small blocks that it fills under the interpreter's lock.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import google_crc32c

from converter.datafiles import Buffer, DataFiles, Place

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE

_MAX_INLINE_BYTES, _MAX_NODE_BYTES, _VERSIONS_ARITY_LOG2 = 100, 8 << 20, 4
"""TensorStore's defaults, for whoever writes to the database later."""

_NODE_ENTRIES = 4096
"""Of a node of the index; with keys of a few hundred bytes it stays far below `_MAX_NODE_BYTES`."""


@dataclass(frozen=True)
class _Entry:
    """Of a node: a value, or a node below with everything under it.

    Attributes:
      key: of the value, or the first one below.
      place: where it is stored.
      keys, tree_bytes, value_bytes: values below, and the bytes of their nodes and of themselves.
    """

    key: bytes
    place: Place
    keys: int
    tree_bytes: int
    value_bytes: int


class Database:
    """Written by several threads; there is no database before `finish`."""

    def __init__(self, files: DataFiles) -> None:
        self._files = files
        self._places: dict[str, Place] = {}

    def write(self, key: str, value: Sequence[Buffer]) -> None:
        """Store a value given in pieces; it may be in memory only until `finish`."""
        self._places[key] = self._files.append(value)

    def finish(self) -> None:
        """Store what is not stored yet, and what makes it a database."""
        values = sorted((key.encode(), place) for key, place in self._places.items())
        entries = [_Entry(key, place, 1, 0, place.length) for key, place in values]
        height = 0
        nodes = list(self._nodes(entries, height))
        while len(nodes) > 1:
            height += 1
            nodes = list(self._nodes(nodes, height))
        for root in nodes:
            self._files.put("manifest.ocdbt", [_manifest(root, height)])
        self._files.finish()

    def _nodes(self, entries: Sequence[_Entry], height: int) -> Iterator[_Entry]:
        """Store nodes of this height with these entries; what a node above says of each."""
        for start in range(0, len(entries), _NODE_ENTRIES):
            part = entries[start : start + _NODE_ENTRIES]
            node = _node(part, height)
            yield _Entry(
                part[0].key,
                self._files.append([node]),
                sum(entry.keys for entry in part),
                len(node) + sum(entry.tree_bytes for entry in part),
                sum(entry.value_bytes for entry in part),
            )


def _node(entries: Sequence[_Entry], height: int) -> bytes:
    """A node of the index: columns, one after the other."""
    files = sorted({entry.place.file for entry in entries})
    numbers = {file: number for number, file in enumerate(files)}
    keys = [entry.key for entry in entries]
    shared = [_shared(*pair) for pair in pairwise(keys)]
    suffixes = [key[start:] for key, start in zip(keys, [0, *shared], strict=True)]
    columns = [bytes([height]), _file_table(files), _varints([len(entries)])]
    columns += [_varints(shared), _varints(map(len, suffixes))]
    if height:
        # Of each key, nothing is left out in the nodes below.
        columns.append(_varints([0] * len(entries)))
    columns += suffixes
    lengths = _varints(entry.place.length for entry in entries)
    if not height:
        # All values lie in data files: kind 1.
        columns += [lengths, _varints([1] * len(entries))]
    columns.append(_varints(numbers[entry.place.file] for entry in entries))
    columns.append(_varints(entry.place.offset for entry in entries))
    if height:
        columns.append(lengths)
        columns.append(_varints(entry.keys for entry in entries))
        columns.append(_varints(entry.tree_bytes for entry in entries))
        columns.append(_varints(entry.value_bytes for entry in entries))
    return _framed(_NODE_MAGIC, b"".join(columns))


def _shared(first: bytes, second: bytes) -> int:
    """How many bytes two keys begin with in common."""
    return next((i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))


def _manifest(root: _Entry, height: int) -> bytes:
    """The manifest of a database of one version, the first, in one file."""
    single, uncompressed, first_version, no_older_nodes = 0, 0, 1, 0
    configuration = [
        *(uuid.uuid4().bytes, bytes([single])),
        *(_varints([_MAX_INLINE_BYTES, _MAX_NODE_BYTES]), bytes([_VERSIONS_ARITY_LOG2]), _varints([uncompressed])),
    ]
    version = [
        *(_varints([1, first_version]), bytes([height])),
        _varints([0, root.place.offset, root.place.length, root.keys, root.tree_bytes, root.value_bytes]),
        struct.pack("<Q", time.time_ns()),
    ]
    content = [*configuration, _file_table([root.place.file]), *version, _varints([no_older_nodes])]
    return _framed(_MANIFEST_MAGIC, b"".join(content))


def _file_table(files: Sequence[str]) -> bytes:
    """Paths from the database's root; neither prefixes in common nor base paths."""
    names = [file.encode() for file in files]
    zeros = [0] * len(names)
    return b"".join([_varints([len(names)]), _varints(zeros[1:]), _varints(map(len, names)), _varints(zeros), *names])


def _framed(magic: int, body: bytes) -> bytes:
    """With magic, whole length, format version 0, no compression, and CRC-32C."""
    content = struct.pack(">I", magic) + struct.pack("<Q", 12 + 2 + len(body) + 4) + bytes(2) + body
    return content + struct.pack("<I", google_crc32c.value(content))


def _varints(numbers: Iterable[int]) -> bytes:
    """Base-128 numbers, the least significant digit first."""
    out = bytearray()
    for number in numbers:
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)
