"""One Hugging Face repository, opened: its config.json and where every tensor of it lies. No weights are read.

Wherever it is - a folder, the hub, a bucket - a repository is a set of files of which byte ranges can be had:
mapped from a disk (`local.py`) or asked for over HTTP (`streamed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from converter import retrying
from converter.errors import RequestError
from converter.hf import bucket, cache, hub
from converter.hf.files import CONFIG, INDEX, check_small, parse_json, read_small, reading, weight_files, weight_map
from converter.hf.local import LocalFiles, opened
from converter.hf.location import BucketFolder, Folder, HubModel, parse_location
from converter.hf.remote import Server
from converter.hf.safetensors import StoredTensor, read_header
from converter.hf.streamed import StreamedFiles

NUMPY_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
}
"""safetensors dtypes that can be read as arrays -> numpy's; codes of eight bits are read as the bytes they are."""

WEIGHT_DTYPES = ("BF16", "F16", "F32", "I32", "I64")
"""Those of tensors that are stored as the numbers they mean."""

NO_CACHE = "none"
"""The word for a cache that is none: files are read by ranges, and nothing is kept."""

_HEADERS_AT_A_TIME = 8

_MOST_TENSORS = 500_000
"""Of a repository; several times what the largest published ones have."""


@dataclass(frozen=True)
class Access:
    """How remote sources are reached.

    Attributes:
      token: for the hub; None for the one in the environment or logged in with.
      cache: folder to keep files in, `NO_CACHE`, or None for the usual: the hub's own cache, none for buckets.
      seconds: for how long a request is tried again.
    """

    token: str | None = field(default=None, repr=False)
    cache: str | None = None
    seconds: float = retrying.DEFAULT_SECONDS

    @property
    def folder(self) -> Path | None:
        """The cache's folder where one was given."""
        return Path(self.cache).expanduser() if self.cache not in (None, NO_CACHE) else None


@dataclass(frozen=True)
class SourceFile:
    """A weight file: its name in the repository, its size in bytes and what its server knows it by."""

    name: str
    size: int
    sha256: str | None = None
    crc32c: int | None = None
    generation: str | None = None


@dataclass(frozen=True)
class Repository:
    """An opened repository.

    Attributes:
      name: the folder, hub id or URL as it was given.
      revision: the hub's commit, None elsewhere.
      config: config.json as it stands.
      files: the weight files.
      tensors: every tensor by name.
      data: the files' content.
    """

    name: str
    revision: str | None
    config: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, StoredTensor]
    data: LocalFiles | StreamedFiles = field(repr=False, compare=False)

    @property
    def remote(self) -> StreamedFiles | None:
        """The files where they are read over the network, None where they are here."""
        return self.data if isinstance(self.data, StreamedFiles) else None

    def array(self, name: str) -> np.ndarray:
        """The tensor as a read-only array: memory-mapped where its file is here, read whole where not."""
        shape = self.tensors[name].shape
        return self.elements(name, slice(0, int(np.prod(shape, dtype=np.int64)))).reshape(shape)

    def elements(self, name: str, part: slice) -> np.ndarray:
        """A range of the tensor's elements in stored order, as a flat array; memory-mapped as `array` is."""
        tensor = self.tensors[name]
        dtype = NUMPY_DTYPES[tensor.dtype]
        if part.start >= part.stop:
            return np.empty(0, dtype)
        begin, end = tensor.offset + part.start * dtype.itemsize, tensor.offset + part.stop * dtype.itemsize
        return np.frombuffer(self.data.bytes_of(tensor.file, begin, end), dtype)

    def prefetch(self, name: str, first: int, end: int) -> None:
        """Read elements `first` to `end` of a tensor, of a file that is here, into the page cache, and no others."""
        tensor = self.tensors[name]
        size = NUMPY_DTYPES[tensor.dtype].itemsize
        if isinstance(self.data, LocalFiles):
            self.data.prefetch(tensor.file, tensor.offset + first * size, tensor.offset + end * size)

    def positions(self) -> dict[str, int]:
        """The rank of every tensor in the order in which the files hold them."""
        ordered = sorted(self.tensors, key=lambda name: (self.tensors[name].file, self.tensors[name].offset))
        return {name: rank for rank, name in enumerate(ordered)}


@dataclass(frozen=True)
class Source:
    """A repository that was found, its content pinned but perhaps not here yet.

    Attributes:
      name: as the user gave it.
      root: the folder its files are in, None while they are elsewhere.
      identity: what its content is known by; equal for equal content.
      revision: the commit on the hub.
      server: where its files are read from where they are not here.
      download: brings them here; None where they are read from afar.
    """

    name: str
    root: Path | None
    identity: Mapping[str, Any]
    revision: str | None = None
    server: Server | None = None
    download: Callable[[], Path] | None = field(default=None, repr=False, compare=False)

    @property
    def read_from_afar(self) -> bool:
        """Whether its files are not brought here but read where they are, by ranges."""
        return self.root is None and self.download is None

    def fetch(self) -> Source:
        """The same with its files here, if they are to be: downloads what the cache lacks."""
        if self.root is not None or self.download is None:
            return self
        return replace(self, root=self.download())

    def streamed(self) -> Source:
        """The same, read from afar, where that is possible: for those who read headers only."""
        return self.fetch() if self.server is None else replace(self, download=None)


def locate(
    location: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    access: Access | None = None,
    names: Sequence[str] = (),
) -> Source:
    """Find a folder, a model on the hub or a folder of a bucket, without reading or downloading weights.

    Args:
      names: files that are wanted of it, as far as they are there; none for those of a model.

    Raises:
      RequestError: there is no such repository.
      WorldError: the network or the server failed.
    """
    access = access or Access(token)
    match parse_location(location, revision):
        case Folder(path):
            return Source(location, path, _folder_identity(path))
        case HubModel() as model:
            return _hub_source(location, model, access, names)
        case BucketFolder() as folder:
            return _bucket_source(location, folder, access, names)


def _hub_source(location: str, model: HubModel, access: Access, names: Sequence[str]) -> Source:
    kept = hub.Cache(access.folder, access.token, access.seconds)
    pinned = hub.pin(model, kept)
    identity = {"repository": model.repo, "revision": pinned.commit}
    server = None if pinned.offline else hub.server(pinned, kept)
    if access.cache == NO_CACHE:
        if pinned.offline:
            raise RequestError(f"cache_dir={NO_CACHE}: with HF_HUB_OFFLINE only the cache can be read")
        return Source(location, None, identity, pinned.commit, server)
    return Source(location, None, identity, pinned.commit, server, lambda: hub.download(model, pinned, kept, names))


def _bucket_source(location: str, folder: BucketFolder, access: Access, names: Sequence[str]) -> Source:
    server = bucket.find(folder, seconds=access.seconds)
    identity = {
        "files": {
            name: [file.size, file.crc32c if file.crc32c is not None else file.generation]
            for name, file in sorted(server.files.items())
            if name.endswith((".json", ".safetensors"))
        }
    }
    kept = access.folder
    if kept is None:
        return Source(location, None, identity, None, server)
    where = kept / "gs" / folder.bucket / folder.prefix
    return Source(location, None, identity, None, server, lambda: cache.download(server, where, names))


def _folder_identity(folder: Path) -> dict[str, Any]:
    """Names, sizes and times of the files a conversion reads; the folder's own path does not matter."""
    with reading(folder):
        stats = {
            path.name: path.stat()
            for path in sorted(folder.iterdir())
            if path.suffix in (".json", ".safetensors") and path.is_file()
        }
    return {"files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}}


@dataclass(frozen=True)
class SourceFiles:
    """A source's files: what all kinds of repositories have in common while one is being opened.

    Attributes:
      names: of all files; of a source that was downloaded only of those that were wanted.
      label: a file's name for messages.
      small: reads a JSON file.
      weights: the size of a file, and what reads parts of it.
      data: their content.
    """

    names: frozenset[str]
    label: Callable[[str], str]
    small: Callable[[str], bytes]
    weights: Callable[[str], tuple[int, Callable[[int, int], bytes]]]
    data: LocalFiles | StreamedFiles

    def parsed(self, name: str) -> dict[str, Any]:
        """The object that a JSON file holds."""
        return parse_json(self.small(name), self.label(name))

    def header(self, name: str, size: int, read: Callable[[int, int], bytes]) -> dict[str, StoredTensor]:
        """The tensors of a weight file; `size` and `read` as `weights` gives them.

        What comes from a server and makes no sense is asked for again: what was damaged on the way comes differently.

        Raises:
          RequestError: it is no whole, well-formed safetensors file.
          WorldError: it was damaged on the way, or cannot be read.
        """
        try:
            return read_header(self.label(name), name, size, read)
        except RequestError:
            if not isinstance(self.data, StreamedFiles):
                raise
            return read_header(self.label(name), name, size, read)


def open_files(source: Source) -> SourceFiles:
    """The files of a source that was fetched, here or on their server.

    Raises:
      RequestError, WorldError: its folder cannot be read.
    """
    if source.root is not None:
        return _opened_folder(source.root)
    assert source.server is not None, "fetch the source first"
    return _opened_server(source.server, StreamedFiles(source.server))


def open_repository(source: Source) -> Repository:
    """Read config.json, the index and every header of a source.

    Raises:
      RequestError: it is not a complete safetensors checkpoint.
      WorldError: it cannot be read.
    """
    files = open_files(source)
    if CONFIG not in files.names:
        raise RequestError(f"{source.name} has no {CONFIG}; is it a model repository?")
    config = files.parsed(CONFIG)
    index = files.small(INDEX) if INDEX in files.names else None
    names = weight_files(files.names, None if index is None else lambda: index, files.label(INDEX), source.name)
    tensors: dict[str, StoredTensor] = {}
    sizes = {}

    counts: list[int] = []

    def header(name: str) -> dict[str, StoredTensor]:
        sizes[name], read = files.weights(name)

        def unless_too_many(begin: int, end: int) -> bytes:
            if sum(counts) > _MOST_TENSORS:
                raise RequestError(f"{source.name} has more tensors than any model: over {_MOST_TENSORS}")
            return read(begin, end)

        found = files.header(name, sizes[name], unless_too_many)
        counts.append(len(found))
        return found

    pool = ThreadPoolExecutor(_HEADERS_AT_A_TIME if source.root is None else 1)
    try:
        for name, found in zip(names, pool.map(header, names), strict=True):
            for tensor, stored in found.items():
                if tensor in tensors:
                    raise RequestError(f"tensor {tensor[:200]} is both in {tensors[tensor].file} and in {name}")
                tensors[tensor] = stored
    finally:
        # After the first failure the other headers, of which there may be many, are not wanted.
        pool.shutdown(cancel_futures=True)
    if index is not None:
        _check_index(weight_map(index, files.label(INDEX)), tensors, files.label(INDEX))
    described = tuple(source_file(source, name, sizes[name]) for name in names)
    return Repository(source.name, source.revision, config, described, tensors, files.data)


def source_file(source: Source, name: str, size: int) -> SourceFile:
    """A weight file with what its server, if any, knows it by."""
    known = source.server.files.get(name) if source.server is not None else None
    if known is None:
        return SourceFile(name, size)
    return SourceFile(name, size, known.sha256, known.crc32c, known.generation)


def _opened_folder(root: Path) -> SourceFiles:
    with reading(root):
        names = frozenset(path.name for path in root.iterdir())
    return SourceFiles(
        names,
        lambda name: str(root / name),
        lambda name: read_small(root, name),
        lambda name: opened(root / name),
        LocalFiles(root),
    )


def _opened_server(server: Server, data: StreamedFiles) -> SourceFiles:
    def label(name: str) -> str:
        return f"{server.label}/{name}"

    def small(name: str) -> bytes:
        size = server.files[name].size
        check_small(size, label(name))
        return data.whole(name)

    def weights(name: str) -> tuple[int, Callable[[int, int], bytes]]:
        if name not in server.files:
            raise RequestError(f"{label(name)} does not exist")
        return server.files[name].size, lambda begin, end: bytes(data.fetch(name, begin, end))

    return SourceFiles(frozenset(server.files), label, small, weights, data)


def _check_index(placed: Mapping[str, str], tensors: Mapping[str, StoredTensor], label: str) -> None:
    for tensor, name in placed.items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise RequestError(f"{label} puts tensor {tensor[:200]!r} into {name}, which lacks it")
