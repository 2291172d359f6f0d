"""Ranges of files that lie on a server, over HTTP: the hub's and a bucket's alike.

A request asks for one range. What comes back must be that range of a file of the expected size; anything else, a cut
connection included, is tried again. Whatever a server sends, no more of it is read than was asked for, and credentials
go to no other.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from converter import environment, retrying
from converter.errors import ConverterError, RequestError, WorldError
from converter.hf.files import MAX_JSON_BYTES, parse_json

if TYPE_CHECKING:
    import requests

_TIMEOUT = (10.0, 30.0)
"""Seconds until a connection is made, and between two arrivals of data."""

_LEAST_RATE = 10_000.0
"""Bytes per second that an answer's body must bring on average, after as long as one arrival may take: a server that
sends a byte now and then would otherwise never be given up."""

_PIECE_BYTES = 256 << 10
"""Read at a time: it stays in the processor's cache until it is copied."""

_MOST_REDIRECTS = 5

_REDIRECTS = (301, 302, 303, 307, 308)


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
      redirects: it may send us elsewhere; the session must not show its credentials there.
    """

    label: str
    files: Mapping[str, RemoteFile]
    session: Callable[[], requests.Session]
    refused: Callable[[str, int], ConverterError]
    seconds: float
    redirects: bool = True


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
        end = begin + len(out)
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        moved = self._moved.get(file.name)
        response, address = _get(self._session(), moved or file.url, headers=headers, redirects=self.server.redirects)
        with response:
            status = response.status_code
            if status >= 400 and moved is not None:
                # The address that the server sent us to expires; ask for a new one.
                self._moved.pop(file.name, None)
                raise _Refused(status if retrying.is_transient_status(status) else 503, 0.0)
            if status == 416:
                raise RequestError(f"{file.name} of {self.server.label} is shorter than announced: it has changed")
            if status not in (200, 206):
                raise _Refused(status, retrying.retry_after(response.headers.get("Retry-After")))
            _check_range(response.headers, status, file, begin, end)
            _fill(out, response)
            if address != file.url:
                self._moved[file.name] = address

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._own, "session", None)
        if session is None:
            session = self._own.session = self.server.session()
        return session


def ask(
    session: requests.Session,
    url: str,
    query: Mapping[str, str],
    *,
    what: str,
    seconds: float,
    refused: Callable[[int], ConverterError],
    redirects: bool = True,
) -> dict[str, Any]:
    """A JSON object from a server, of the size that a description of a repository may have.

    Args:
      what: is done, for messages.
      seconds: for how long it is tried again.
      refused: what an HTTP status that is final means for the user.
      redirects: as for `Server`.

    Raises:
      RequestError: the server refuses, or answers with more than makes sense.
      WorldError: it failed for too long, or answers with something else.
    """

    def once() -> bytes:
        response, _ = _get(session, url, params=query, redirects=redirects)
        with response:
            if response.status_code != 200:
                raise _Refused(response.status_code, retrying.retry_after(response.headers.get("Retry-After")))
            content = bytearray()
            for part in _arriving(response, decoded=True):
                content += part
                if len(content) > MAX_JSON_BYTES:
                    raise RequestError(f"{what} failed: the answer has no end")
            return bytes(content)

    try:
        content = retrying.call(once, what=what, verdict=verdict, seconds=seconds)
    except _Refused as error:
        raise refused(error.status) from None
    try:
        return parse_json(content, "the answer")
    except RequestError as error:
        # Of a captive portal, say.
        raise WorldError(f"{what} failed: {error}; try again") from error


def _get(session: requests.Session, url: str, *, redirects: bool, **options: Any) -> tuple[requests.Response, str]:
    """The beginning of an answer, and the address where redirections have led to.

    They are followed here since requests would read what comes with a redirection to its end, however long; it does
    that even where it is not to follow, unless it sees none.
    """
    session.get_redirect_target = _nowhere  # type: ignore[method-assign, assignment]
    for _ in range(_MOST_REDIRECTS + 1):
        try:
            known = environment.settings(url)
            response = session.get(url, stream=True, timeout=_TIMEOUT, allow_redirects=False, **known, **options)
        except ValueError as error:
            # All of requests' and urllib3's exceptions about addresses are such.
            raise RequestError(f"{_shown(url)} cannot be asked for: {retrying.one_line(error)}") from error
        location = response.headers.get("Location")
        if not redirects or response.status_code not in _REDIRECTS or location is None:
            return response, url
        response.close()
        url, options = _next(url, location), {**options, "params": None}
    raise RequestError(f"{_shown(url)}: the server sends us on and on")


def _nowhere(response: requests.Response) -> None:
    """What requests is told about redirections."""


def _next(url: str, location: str) -> str:
    """Where a redirection leads: to a web server, and from an encrypted connection to another such."""
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
    except ValueError:
        parts = urlsplit("")
    secure = ("https",) if url.lower().startswith("https:") else ("http", "https")
    if parts.scheme not in secure or not parts.hostname:
        raise RequestError(f"{_shown(url)} sends us to {_shown(location)!r}, where nothing is read from")
    return target


def _shown(url: str) -> str:
    """An address without what may be signed or secret in it."""
    return url.partition("?")[0].partition("#")[0][:200]


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
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _BrokenError(f"the server answers with {file.name} in an encoding that was not asked for")
    if status == 200:
        if (begin, end) != (0, file.size) or headers.get("Content-Length") not in (None, str(file.size)):
            raise _BrokenError(f"the server answers with the whole of {file.name} to a question for a part")
        return
    found = re.fullmatch(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)", headers.get("Content-Range", ""))
    if not found or (int(found[1]), int(found[2])) != (begin, end - 1):
        raise _BrokenError(f"the server answers with another part of {file.name} than was asked for")
    if found[3] not in ("*", str(file.size)):
        raise RequestError(f"{file.name} has {found[3]} bytes and not {file.size}: it has changed while it was read")


def _fill(out: memoryview, response: requests.Response) -> None:
    """Read an answer's body into memory that is there already: new memory costs a page fault for every 4 KiB."""
    filled = 0
    for part in _arriving(response, decoded=False):
        # Whatever comes after what was asked for.
        part = part[: len(out) - filled]
        out[filled : filled + len(part)] = part
        filled += len(part)
        if filled == len(out):
            return
    raise _BrokenError(f"the connection ended {len(out) - filled} bytes too early")


def _arriving(response: requests.Response, *, decoded: bool) -> Iterator[bytes]:
    """An answer's body as it arrives.

    Args:
      decoded: undo its Content-Encoding.

    Raises:
      _BrokenError: it comes too slowly.
    """
    begin, arrived = time.monotonic(), 0
    # Whatever has arrived: a read of a certain size would wait for all of it, however slowly that comes.
    while part := response.raw.read1(_PIECE_BYTES, decode_content=decoded):
        arrived += len(part)
        spent = time.monotonic() - begin
        if spent > _TIMEOUT[1] + arrived / _LEAST_RATE:
            raise _BrokenError(f"only {arrived} bytes came in {spent:.0f} s")
        yield part
