"""Files of a local folder: memory-mapped, so that pages are read when they are touched."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from pathlib import Path

from converter.errors import RequestError, WorldError

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
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except OSError as error:
                raise WorldError(f"{path} cannot be read: {error.strerror or error}") from error
            mapped = self._maps.setdefault(name, mapped)
        return mapped


def opened(path: Path) -> tuple[int, Callable[[int, int], bytes]]:
    """The size of a file and what reads parts of it.

    Raises:
      RequestError: it does not exist, is no file or may not be read.
      WorldError: it cannot be read.
    """

    def read(begin: int, end: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        except PermissionError as error:
            raise RequestError(f"{path} may not be read by this user") from error
        except OSError as error:
            raise WorldError(f"{path} cannot be read: {error.strerror or error}") from error

    try:
        if path.exists() and not path.is_file():
            # A pipe would be waited for, a device never ends.
            raise RequestError(f"{path} is no file")
        return path.stat().st_size, read
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist") from error
    except PermissionError as error:
        raise RequestError(f"{path} may not be read by this user") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RequestError(f"{path} is a link that leads to itself") from error
        raise WorldError(f"{path} cannot be read: {error.strerror or error}") from error
