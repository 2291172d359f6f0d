"""One Hugging Face repository, opened: its config.json and where every tensor of it lies. No data is read."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from converter.errors import RequestError, WorldError
from converter.hf.files import CONFIG, INDEX, read_json, weight_files, weight_map
from converter.hf.hub import Pinned, download, pin
from converter.hf.safetensors import StoredTensor, read_header

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

_PREFETCH_BYTES = 1 << 20
"""What the kernel surely reads at one request; of a larger one it may read the beginning only."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class SourceFile:
    """A weight file: its name in the repository, its size in bytes and, from the hub, its sha256."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Repository:
    """An opened repository.

    Attributes:
      name: the folder or hub id as it was given.
      revision: the hub's commit, None for a folder.
      root: the folder the files are in.
      config: config.json as it stands.
      files: the weight files.
      tensors: every tensor by name.
    """

    name: str
    revision: str | None
    root: Path
    config: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, StoredTensor]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)
    _exact: set[Path] = field(default_factory=set, repr=False, compare=False)

    def array(self, name: str) -> np.ndarray:
        """The tensor as a read-only, memory-mapped array: pages are read when they are touched."""
        tensor = self.tensors[name]
        dtype = NUMPY_DTYPES[tensor.dtype]
        if tensor.nbytes == 0:
            return np.empty(tensor.shape, dtype)
        count = tensor.nbytes // dtype.itemsize
        mapped = self._map(tensor.file)
        return np.frombuffer(mapped, dtype, count, tensor.offset).reshape(tensor.shape)

    def elements(self, name: str, part: slice) -> np.ndarray:
        """A range of the tensor's elements in stored order, as a flat array; memory-mapped as `array` is."""
        return self.array(name).reshape(-1)[part]

    def prefetch(self, name: str, first: int, end: int) -> None:
        """Read elements `first` to `end` of a tensor into the page cache, and no others.

        By itself the kernel reads megabytes around every page that is touched, which is right where memory holds them
        until they are needed and wasteful where it does not: so that is switched off from here on.
        """
        tensor = self.tensors[name]
        mapped = self._map(tensor.file)
        if tensor.file not in self._exact:
            mapped.madvise(mmap.MADV_RANDOM)
            self._exact.add(tensor.file)
        size = NUMPY_DTYPES[tensor.dtype].itemsize
        begin = tensor.offset + first * size
        begin -= begin % mmap.PAGESIZE
        stop = tensor.offset + end * size
        for start in range(begin, stop, _PREFETCH_BYTES):
            mapped.madvise(mmap.MADV_WILLNEED, start, min(_PREFETCH_BYTES, stop - start))

    def positions(self) -> dict[str, int]:
        """The rank of every tensor in the order in which the files hold them."""
        ordered = sorted(self.tensors, key=lambda name: (self.tensors[name].file, self.tensors[name].offset))
        return {name: rank for rank, name in enumerate(ordered)}

    def _map(self, path: Path) -> mmap.mmap:
        mapped = self._maps.get(path)
        if mapped is None:
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except OSError as error:
                raise WorldError(f"{path} cannot be read: {error.strerror or error}") from error
            mapped = self._maps.setdefault(path, mapped)
        return mapped


@dataclass(frozen=True)
class Source:
    """A repository that was found, its content pinned but perhaps not here yet.

    Attributes:
      name: as the user gave it.
      root: the folder its files are in, None while it is only on the hub.
      pinned: the commit on the hub, None for a folder.
      identity: what its content is known by; equal for equal content.
    """

    name: str
    root: Path | None
    pinned: Pinned | None
    identity: Mapping[str, Any]

    def fetch(self, token: str | None) -> Source:
        """The same with its files here: downloads what the hub's cache lacks."""
        if self.root is not None or self.pinned is None:
            return self
        return replace(self, root=download(self.pinned, token))


def locate(location: str, *, revision: str | None, token: str | None) -> Source:
    """Find a local folder or a hub id, without reading or downloading weights.

    Raises:
      RequestError: there is no such repository.
      WorldError: the network or the hub failed.
    """
    folder = Path(location).expanduser()
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise RequestError(f"no such folder: {location[:100]}...: {error.strerror}") from error
    if is_folder:
        return Source(location, folder, None, _identity(folder))
    if exists:
        raise RequestError(f"{location} is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(location):
        raise RequestError(f"no such folder: {location} (and it has not the form org/name of a repository on the hub)")
    pinned = pin(location, revision=revision, token=token)
    return Source(location, None, pinned, {"repository": location, "revision": pinned.commit})


def _identity(folder: Path) -> dict[str, Any]:
    """Names, sizes and times of the files a conversion reads; the folder's own path does not matter."""
    try:
        stats = {
            path.name: path.stat()
            for path in sorted(folder.iterdir())
            if path.suffix in (".json", ".safetensors") and path.is_file()
        }
    except PermissionError as error:
        raise RequestError(f"{folder} may not be read by this user") from error
    except OSError as error:
        raise WorldError(f"{folder} cannot be read: {error.strerror or error}") from error
    return {"files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}}


def open_repository(source: Source) -> Repository:
    """Read config.json, the index and every header of a fetched source.

    Raises:
      RequestError: it is not a complete safetensors checkpoint.
      WorldError: it cannot be read.
    """
    root, location = source.root, source.name
    assert root is not None, "fetch the source first"
    config = read_json(root / CONFIG, f"{location} has no {CONFIG}; is it a model repository?")
    names = weight_files(root, [path.name for path in root.iterdir()], location)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for tensor, stored in read_header(root / name).items():
            if tensor in tensors:
                raise RequestError(f"tensor {tensor[:200]} is both in {tensors[tensor].file.name} and in {name}")
            tensors[tensor] = stored
    _check_index(root, tensors)
    sha256 = source.pinned.sha256 if source.pinned else {}
    files = tuple(SourceFile(name, (root / name).stat().st_size, sha256.get(name)) for name in names)
    revision = source.pinned.commit if source.pinned else None
    return Repository(location, revision, root, config, files, tensors)


def _check_index(root: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if not (root / INDEX).exists():
        return
    for tensor, name in weight_map(root).items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise RequestError(f"{root / INDEX} puts tensor {tensor[:200]!r} into {name}, which lacks it")
