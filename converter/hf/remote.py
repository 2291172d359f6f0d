"""Ranges of files that lie on a server, over HTTP: the hub's and a bucket's alike.

A request asks for one range. What comes back must be that range of a file of the expected size; anything else, a cut
connection included, is tried again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converter import retrying
from converter.errors import ConverterError, RequestError

if TYPE_CHECKING:
    import requests

_TIMEOUT = (10.0, 30.0)
"""Seconds until a connection is made, and between two arrivals of data."""

_PIECE_BYTES = 256 << 10
"""Read at a time: it stays in the processor's cache until it is copied."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server, its content pinned.

    Attributes:
      name: in its repository.
      size: bytes.
      url: where ranges of it are asked for.
      sha256: as the hub knows it.
      git_sha1: of a small file on the hub, as a git blob.
      crc32c: as a bucket knows it.
      generation: of the object in a bucket.
    """

    name: str
    size: int
    url: str
    sha256: str | None = None
    git_sha1: str | None = None
    crc32c: int | None = None
    generation: str | None = None


@dataclass(frozen=True)
class Server:
    """How to ask for files of one repository.

    Attributes:
      label: the repository, for messages.
      files: by name.
      session: makes a session that is authorised to read them; each thread has its own.
      refused: what an HTTP status that is final means for the user: the file's name, the status.
      seconds: for how long a request is tried again.
    """

    label: str
    files: Mapping[str, RemoteFile]
    session: Callable[[], requests.Session]
    refused: Callable[[str, int], ConverterError]
    seconds: float


class _Refused(Exception):  # noqa: N818 - an answer
    """An HTTP status that is no success."""

    def __init__(self, status: int, wait: float) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.wait = wait


class _BrokenError(OSError):
    """An answer that is not what was asked for."""


class Ranges:
    """Reads ranges from a server, from any thread."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._own = threading.local()
        self._moved: dict[str, str] = {}

    def read(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `begin` on.

        Raises:
          RequestError: the server will not give them.
          WorldError: it failed for too long.
        """
        file = self.server.files[name]
        if not out:
            return
        try:
            retrying.call(
                lambda: self._once(file, begin, out),
                what=f"reading {name} of {self.server.label}",
                verdict=verdict,
                seconds=self.server.seconds,
            )
        except _Refused as error:
            raise self.server.refused(name, error.status) from None

    def _once(self, file: RemoteFile, begin: int, out: memoryview) -> None:
        session = self._session()
        end = begin + len(out)
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        moved = self._moved.get(file.name)
        with session.get(moved or file.url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            status = response.status_code
            if status >= 400 and moved is not None:
                # The address that the server sent us to expires; ask for a new one.
                self._moved.pop(file.name, None)
                raise _Refused(status if retrying.is_transient_status(status) else 503, 0.0)
            if status == 416:
                raise RequestError(f"{file.name} of {self.server.label} is shorter than announced: it has changed")
            if status not in (200, 206):
                raise _Refused(status, retrying.retry_after(response.headers.get("Retry-After")))
            if response.history:
                self._moved[file.name] = response.url
            _check_range(response.headers, status, file, begin, end)
            _fill(out, response)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._own, "session", None)
        if session is None:
            session = self._own.session = self.server.session()
        return session


def verdict(error: Exception) -> float | None:
    """See `retrying.Verdict`: for what a request can raise."""
    import requests
    import urllib3
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, GoogleAuthError):
        # The server of credentials may be out of reach for a moment; credentials that are no good stay so.
        return 0.0 if error.retryable else None
    if isinstance(error, _Refused):
        return error.wait if retrying.is_transient_status(error.status) else None
    transient = (requests.RequestException, urllib3.exceptions.HTTPError, OSError)
    return 0.0 if isinstance(error, transient) else None


def _check_range(headers: Mapping[str, str], status: int, file: RemoteFile, begin: int, end: int) -> None:
    if status == 200:
        if (begin, end) != (0, file.size) or headers.get("Content-Length") not in (None, str(file.size)):
            raise _BrokenError(f"the server answers with the whole of {file.name} to a question for a part")
        return
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
    if not found or (int(found[1]), int(found[2])) != (begin, end - 1):
        raise _BrokenError(f"the server answers with another part of {file.name} than was asked for")
    if found[3] not in ("*", str(file.size)):
        raise RequestError(f"{file.name} has {found[3]} bytes and not {file.size}: it has changed while it was read")


def _fill(out: memoryview, response: requests.Response) -> None:
    """Read an answer's body into memory that is there already: new memory costs a page fault for every 4 KiB."""
    filled = 0
    while filled < len(out):
        part = response.raw.read(min(len(out) - filled, _PIECE_BYTES), decode_content=False)
        if not part:
            raise _BrokenError(f"the connection ended {len(out) - filled} bytes too early")
        out[filled : filled + len(part)] = part
        filled += len(part)
