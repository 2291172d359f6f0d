"""Files of a local folder: memory-mapped, so that pages are read when they are touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from converter.hf.files import reading, size_of

_PREFETCH_BYTES = 1 << 20
"""What the kernel surely reads at one request; of a larger one it may read the beginning only."""


class LocalFiles:
    """The weight files of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._maps: dict[str, mmap.mmap] = {}
        self._exact: set[str] = set()

    def bytes_of(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of a file, mapped; nothing is read yet."""
        return memoryview(self._map(name))[begin:end]

    def prefetch(self, name: str, begin: int, end: int) -> None:
        """Read bytes of a file into the page cache, and no others.

        By itself the kernel reads megabytes around every page that is touched, which is right where memory holds them
        until they are needed and wasteful where it does not: so that is switched off from here on.
        """
        mapped = self._map(name)
        if name not in self._exact:
            mapped.madvise(mmap.MADV_RANDOM)
            self._exact.add(name)
        begin -= begin % mmap.PAGESIZE
        for start in range(begin, end, _PREFETCH_BYTES):
            mapped.madvise(mmap.MADV_WILLNEED, start, min(_PREFETCH_BYTES, end - start))

    def _map(self, name: str) -> mmap.mmap:
        mapped = self._maps.get(name)
        if mapped is None:
            path = self.root / name
            with reading(path), path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            mapped = self._maps.setdefault(name, mapped)
        return mapped


def opened(path: Path) -> tuple[int, Callable[[int, int], bytes]]:
    """The size of a file and what reads parts of it.

    Raises:
      RequestError: it does not exist, is no file or may not be read.
      WorldError: it cannot be read.
    """

    def read(begin: int, end: int) -> bytes:
        with reading(path), path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    return size_of(path), read
