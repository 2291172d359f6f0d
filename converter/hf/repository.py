"""One Hugging Face repository, opened: its config.json and where every tensor of it lies. No data is read."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from converter.errors import RequestError, WorldError
from converter.hf.files import INDEX, read_json, weight_files, weight_map
from converter.hf.hub import Download, download
from converter.hf.safetensors import StoredTensor, read_header

NUMPY_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""safetensors dtypes that can be read as arrays -> numpy's."""

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

    def array(self, name: str) -> np.ndarray:
        """The tensor as a read-only, memory-mapped array: pages are read when they are touched."""
        tensor = self.tensors[name]
        dtype = NUMPY_DTYPES[tensor.dtype]
        if tensor.nbytes == 0:
            return np.empty(tensor.shape, dtype)
        count = tensor.nbytes // dtype.itemsize
        mapped = self._map(tensor.file)
        return np.frombuffer(mapped, dtype, count, tensor.offset).reshape(tensor.shape)

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


def open_repository(location: str, *, revision: str | None, token: str | None) -> Repository:
    """Open a local folder or a hub id; the latter is downloaded to the hub's cache first.

    Raises:
      RequestError: there is no such repository, or it is not a complete safetensors checkpoint.
      WorldError: the disk, the network or the hub failed.
    """
    folder = Path(location).expanduser()
    if folder.is_dir():
        fetched = Download(folder, None, {})
    elif folder.exists():
        raise RequestError(f"{location} is a file; give the folder that holds config.json and the weights")
    elif _HUB_ID.fullmatch(location):
        fetched = download(location, revision=revision, token=token)
    else:
        raise RequestError(
            f"no such folder: {location} (and it has not the form org/name of a repository on the hub)"
        )
    root = fetched.root
    config = read_json(root / "config.json", f"{location} has no config.json; is it a model repository?")
    names = weight_files(root, [path.name for path in root.iterdir()], location)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for tensor, stored in read_header(root / name).items():
            if tensor in tensors:
                raise RequestError(f"tensor {tensor} is both in {tensors[tensor].file.name} and in {name}")
            tensors[tensor] = stored
    _check_index(root, tensors)
    files = tuple(SourceFile(name, (root / name).stat().st_size, fetched.sha256.get(name)) for name in names)
    return Repository(location, fetched.revision, root, config, files, tensors)


def _check_index(root: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if not (root / INDEX).exists():
        return
    for tensor, name in weight_map(root).items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise RequestError(f"{root / INDEX} puts tensor {tensor[:200]!r} into {name}, which lacks it")
