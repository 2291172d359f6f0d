"""Google Cloud Storage: single objects and trees of them, by `gs://` paths, and as the file system behind epath.

All that is written goes through here but the arrays' metadata and the database that Orbax merges, which TensorStore's
own driver writes, with the retries that `TENSORSTORE` asks of it. Credentials are the application's default ones, on
GKE those of Workload Identity. Only operations on objects are used, so that a role without any right on the bucket
itself is enough.

Transient failures (408, 429, 5xx, connections that break or stall, names that do not resolve, damaged downloads) are
tried again until a deadline, as `retrying.py` does it; all others end the run at once
(https://cloud.google.com/storage/docs/retry-strategy). The client library is imported when it is first needed.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import google_crc32c
from fsspec import register_implementation
from fsspec.spec import AbstractFileSystem

from converter import certificates, environment, gcs, retrying
from converter.errors import RequestError, WorldError
from converter.hf.checksums import crc32c, parse_crc32c

if TYPE_CHECKING:
    import requests
    from google.cloud.storage import Blob, Client
    from google.cloud.storage import Bucket as ClientBucket

T = TypeVar("T")

SCHEME = "gs://"

DEADLINE_SECONDS = 600.0
"""How long a transient failure is tried again. Jobs try a whole conversion again after that.

Twice what a source is given (`retrying.DEFAULT_SECONDS`): whoever gives up reading keeps what a cache has, and asks for
the rest the next time; whoever gives up writing throws away all that was written."""

CLEANING_SECONDS = 15.0
"""The same for cleaning up at the end; Kubernetes gives a pod 30 seconds from SIGTERM on where nothing else is said."""

TENSORSTORE: dict[str, Any] = {
    # Waits of 0.5, 1, 2, 4, 8, 16 and then up to 30 seconds, with jitter: ten minutes and the tries themselves.
    "gcs_request_retries": {"max_retries": 24, "initial_delay": "500ms", "max_delay": "30s"},
}
"""Context of TensorStore's driver (https://google.github.io/tensorstore/kvstore/gcs/index.html)."""

_ENVIRONMENT = {
    # Without these, TensorStore waits for ever on a connection that has died without a word.
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
    # For traces nobody makes, the client library would ask for the bucket itself.
    "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true",
}
"""https://google.github.io/tensorstore/environment.html, and the client library's _opentelemetry_tracing.py. What the
user has set stays."""

TIMEOUT_SECONDS = 60.0
"""Of one request: to connect, and between bytes of the answer."""

_SEND_BYTES = 4 << 20
"""Handed to the connection at a time."""

_THREADS = 8
"""Objects copied or removed at a time; the client library keeps ten connections."""

before_write: list[Callable[[], None]] = []
"""Called before Orbax writes an object; raises where nothing may be written any more."""


class Refused(RequestError, PermissionError):  # noqa: N818 - what it is to the user
    """The bucket is not there, or these credentials may not do that."""


class Unreachable(WorldError, OSError):  # noqa: N818
    """The bucket did not answer as it should until the deadline, or is not trusted. To Orbax, a file system's error."""


def configure() -> None:
    """Make `gs://` paths work in epath, hence in Orbax."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    certificates.configure()
    for name in ("gs", "gcs"):
        register_implementation(name, _FileSystem, clobber=True)


def split(path: object) -> tuple[str, str]:
    """`gs://bucket/some/name` -> (bucket, some/name)."""
    bucket, _, name = str(path).removeprefix(SCHEME).partition("/")
    return bucket, name.strip("/")


def read(path: object) -> bytes:
    """An object's content, its checksum checked.

    Raises:
      FileNotFoundError: there is no such object.
    """
    bucket, name = split(path)
    content: bytes = call(
        bucket, lambda: _bucket(bucket).blob(name).download_as_bytes(retry=None, timeout=TIMEOUT_SECONDS)
    )
    return content


def write(path: object, content: bytes, *, checked: bool = False) -> None:
    """Make or replace an object, which is there whole or not at all.

    Args:
      checked: ask `before_write` before every try.
    """
    bucket, name = split(path)

    def attempt() -> None:
        if checked:
            _check()
        upload(_bucket(bucket).blob(name), content)

    call(bucket, attempt, of="bucket")


def _check() -> None:
    for check in before_write:
        check()


def send(path: object, pieces: Sequence[bytes]) -> None:
    """Make an object of bytes given in pieces, none of which is copied, where there was none.

    The client library would copy each several times. Failures are as with `write`; the checksum is compared with that
    of what was stored, where `write` has the service refuse what arrives damaged.
    """
    bucket, name = split(path)
    expected = (sum(map(len, pieces)), functools.reduce(google_crc32c.extend, pieces, 0))
    # What may be replaced: none, or what an earlier try has made. Whoever loses the lease in the middle of a request
    # must not replace what its successor has written.
    generation = 0

    def attempt() -> None:
        nonlocal generation
        _check()
        address = gcs.address("upload/", bucket)
        response = _session().post(
            address,
            params={"uploadType": "media", "name": name, "ifGenerationMatch": str(generation)},
            data=cast(Iterable[bytes], _Body(pieces)),
            headers={"Content-Type": "application/octet-stream"},
            timeout=TIMEOUT_SECONDS,
            allow_redirects=False,
            **environment.settings(address),
        )
        if response.status_code == 412:
            # A try whose answer got lost has made it.
            found = _bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS, retry=None)
            described = {"size": found.size, "crc32c": found.crc32c, "generation": found.generation} if found else {}
        else:
            described = _described(response)
        try:
            generation = int(described.get("generation", 0))
            stored = (int(described["size"]), parse_crc32c(described["crc32c"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConnectionError(f"HTTP {response.status_code} with an answer that makes no sense") from error
        if stored != expected:
            raise ConnectionError(f"{name} was damaged on its way into the bucket")

    call(bucket, attempt, of="bucket")


def _described(response: requests.Response) -> dict[str, Any]:
    """What the service says of an object that it has stored.

    Raises:
      google.api_core.exceptions.GoogleAPICallError: it has not.
    """
    from google.api_core.exceptions import from_http_status

    if response.status_code >= 400:
        # Not `from_http_response`, which takes the answer for one of the service's.
        raise from_http_status(response.status_code, response.text, response=response)
    try:
        described = response.json()
    except ValueError:
        # Some proxy's.
        return {}
    return described if isinstance(described, dict) else {}


class _Body:
    """Pieces as the body of a request, of known length; they may be sent again."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            for start in range(0, len(piece), _SEND_BYTES):
                # The time limit is for each of these.
                yield memoryview(piece)[start : start + _SEND_BYTES]


_sessions = threading.local()


def _session() -> requests.Session:
    """This thread's."""
    found: requests.Session | None = getattr(_sessions, "session", None)
    if found is None:
        found = _sessions.session = gcs.session(gcs.READ_WRITE)
    return found


def upload(blob: Blob, content: bytes, *, generation: int | None = None) -> None:
    """One try at writing an object; with `generation`, only over that one, 0 being none.

    The service is told the content's CRC-32C and refuses what arrives as something else; what it says that it has
    stored is compared as well.

    Raises:
      ConnectionError: the content was damaged on the way.
    """
    blob.upload_from_string(
        content,
        content_type="application/octet-stream",
        checksum="crc32c",
        if_generation_match=generation,
        timeout=TIMEOUT_SECONDS,
        retry=None,
    )
    if blob.crc32c and parse_crc32c(blob.crc32c) != crc32c(content):
        raise ConnectionError(f"{blob.name} was damaged on its way into the bucket")


def get(path: object) -> Blob | None:
    """An object with its metadata, None where there is none."""
    bucket, name = split(path)
    return call(bucket, lambda: _bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS, retry=None))


def remove(path: object, *, seconds: float | None = None) -> None:
    """Remove an object, if it is there."""
    bucket, name = split(path)
    _remove(bucket, name, seconds)


def sizes(path: object) -> Iterator[tuple[str, int]]:
    """Name and bytes of every object below a path, by its name from there; what only marks a folder is left out."""
    bucket, name = split(path)
    for blob in _list(bucket, name):
        if not blob.name.endswith("/"):
            yield _below(blob.name, name), int(blob.size)


def children(path: object) -> tuple[dict[str, int], set[str]]:
    """What lies directly below a path: objects, with their bytes, and folders."""
    bucket, name = split(path)
    prefix = f"{name}/" if name else ""

    def ask() -> tuple[list[Blob], set[str]]:
        found = _client().list_blobs(
            bucket, prefix=prefix, delimiter="/", timeout=TIMEOUT_SECONDS, retry=None, fields=_FIELDS
        )
        return list(found), set(found.prefixes)

    blobs, prefixes = call(bucket, ask, of="bucket")
    files = {_below(blob.name, name): int(blob.size) for blob in blobs if not blob.name.endswith("/")}
    return files, {_below(folder, name).rstrip("/") for folder in prefixes}


def any_below(path: object) -> bool:
    """Whether there is any object below a path."""
    bucket, name = split(path)
    prefix = f"{name}/" if name else ""
    found = call(
        bucket,
        lambda: list(
            _client().list_blobs(
                bucket, prefix=prefix, max_results=1, timeout=TIMEOUT_SECONDS, retry=None, fields=_FIELDS
            )
        ),
        of="bucket",
    )
    return bool(found)


def remove_tree(path: object, *, marker: str | None = None, seconds: float | None = None) -> None:
    """Remove every object below a path, first of all those called `marker`, the outermost before the inner ones."""
    bucket, name = split(path)
    names = [blob.name for blob in _list(bucket, name, seconds)]
    markers = _called(marker, names)
    for found in markers:
        _remove(bucket, found, seconds)
    _in_parallel(lambda found: _remove(bucket, found, seconds), set(names) - set(markers))


def copy_tree(source: object, target: object, *, marker: str) -> None:
    """Copy every object below a path, within the service; last of all those called `marker`, the inner ones first."""
    bucket, name = split(source)
    other, onto = split(target)
    names = [blob.name for blob in _list(bucket, name)]
    markers = _called(marker, names)

    def copy(found: str) -> None:
        to = _bucket(other).blob(f"{onto}/{_below(found, name)}")
        call(other, lambda: _rewrite(_bucket(bucket).blob(found), to))

    _in_parallel(copy, set(names) - set(markers))
    for found in reversed(markers):
        copy(found)


def _called(marker: str | None, names: Iterable[str]) -> list[str]:
    """The objects whose name in their folder is `marker`, the outermost first."""
    return sorted((name for name in names if marker and name.endswith(f"/{marker}")), key=lambda name: name.count("/"))


def call(bucket: str, ask: Callable[[], T], *, seconds: float | None = None, of: str = "object") -> T:
    """Call, again after transient failures, and turn what remains into one line.

    Args:
      seconds: to try for; `DEADLINE_SECONDS` if None.
      of: what HTTP 404 says is missing, object or bucket.

    Raises:
      FileNotFoundError: no such object.
      Refused: no such bucket, no credentials, or no permission.
      Unreachable: no success until the deadline, or a certificate that is not trusted.
      google.api_core.exceptions.PreconditionFailed: as it is.
    """
    from google.api_core.exceptions import PreconditionFailed

    limit = DEADLINE_SECONDS if seconds is None else seconds
    try:
        return retrying.call(ask, what=f"{SCHEME}{bucket}", verdict=_verdict, seconds=limit, reason=_reason)
    except (PreconditionFailed, RequestError):
        raise
    except WorldError as error:
        raise Unreachable(str(error)) from error
    except Exception as error:
        raise _translated(bucket, error, of) from error


def _translated(bucket: str, error: Exception, of: str) -> Exception:
    from google.auth.exceptions import GoogleAuthError

    where = f"{SCHEME}{bucket}"
    status = _status(error)
    if status == 404 and of == "object" and not _missing_bucket(error):
        return FileNotFoundError(f"{where}: no such object")
    if status == 404:
        return Refused(f"there is no bucket {where}; make it or give another")
    if status in (401, 403):
        return Refused(
            f"no permission on {where} (HTTP {status}): its objects must be readable and writable by these "
            f"credentials, as with roles/storage.objectUser"
        )
    if isinstance(error, GoogleAuthError):
        return Refused(
            f"no credentials for {where}: run `gcloud auth application-default login`, or set "
            f"GOOGLE_APPLICATION_CREDENTIALS ({_reason(error)})"
        )
    if status is not None:
        return Refused(f"{where} refuses the request (HTTP {status}): {_reason(error)}")
    return error


def _missing_bucket(error: Exception) -> bool:
    return "bucket does not exist" in str(error)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an exception of the client library, None where it is no failure's: of damaged content."""
    status = getattr(error, "code", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    try:
        return int(status) if status is not None and int(status) >= 400 else None
    except (TypeError, ValueError):
        return None


def _verdict(error: Exception) -> float | None:
    """See `retrying.Verdict`: for what the client library raises."""
    import requests
    import urllib3
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    status = _status(error)
    if status == 400 and "doesn't match calculated" in str(error):
        # What arrived has another checksum than what was sent.
        return 0.0
    if status is not None:
        headers = getattr(getattr(error, "response", None), "headers", {})
        return retrying.retry_after(headers.get("Retry-After")) if retrying.is_transient_status(status) else None
    if isinstance(error, RefreshError):
        return 0.0 if error.retryable else None
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
        return None
    transient = (
        *(ConnectionError, TimeoutError, TransportError, DataCorruption, InvalidResponse),
        *(requests.RequestException, urllib3.exceptions.HTTPError),
    )
    return 0.0 if isinstance(error, transient) else None


def _reason(error: BaseException) -> str:
    """Why, in one short line without the request's address and headers."""
    status = _status(error)
    if status is None:
        return retrying.one_line(error)
    import http.client

    return f"HTTP {status} {http.client.responses.get(status, '')}".strip()


@functools.lru_cache(maxsize=1)
def _client() -> Client:
    """The process's client. It asks for no project: none is needed for objects."""
    from google.cloud import storage

    return storage.Client(project=None)


def _bucket(name: str) -> ClientBucket:
    """A handle, without asking for it."""
    return _client().bucket(name)


_FIELDS = "items(name,size),prefixes,nextPageToken"


def _list(bucket: str, name: str, seconds: float | None = None) -> list[Blob]:
    """Every object below a name."""
    prefix = f"{name}/" if name else ""
    return call(
        bucket,
        lambda: list(_client().list_blobs(bucket, prefix=prefix, timeout=TIMEOUT_SECONDS, retry=None, fields=_FIELDS)),
        seconds=seconds,
        of="bucket",
    )


def _below(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :] if prefix else name


def _remove(bucket: str, name: str, seconds: float | None) -> None:
    try:
        call(bucket, lambda: _bucket(bucket).blob(name).delete(timeout=TIMEOUT_SECONDS, retry=None), seconds=seconds)
    except FileNotFoundError:
        return


def _rewrite(source: Blob, target: Blob) -> None:
    """Copy within the service; large objects take several calls, each of which goes on where the last one ended."""
    token: str | None = None
    while True:
        token, _, _ = target.rewrite(source, token=token, timeout=TIMEOUT_SECONDS, retry=None)
        if token is None:
            return


def _in_parallel(do: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="bucket") as pool:
        for _ in pool.map(do, sorted(names)):
            pass


class _Upload(io.BytesIO):
    """A file that becomes an object when it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            write(self._path, content, checked=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            # An unfinished file becomes no object.
            super().close()
        self.close()


class _FileSystem(AbstractFileSystem):  # type: ignore[misc]
    """What epath needs of a file system (etils/epath/backend.py). Folders are there as long as something is in them."""

    protocol = ("gs", "gcs")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        files, folders = children(path)
        if not files and not folders:
            entry = self.info(path)
            entries = [entry] if entry["type"] == "file" else []
        else:
            entries = [_file(f"{path}/{name}", size) for name, size in files.items()]
            entries += [_folder(f"{path}/{name}") for name in folders]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path).rstrip("/")
        if "/" in path and (blob := get(path)) is not None:
            return _file(path, int(blob.size))
        if any_below(path) or "/" not in path:
            return _folder(path)
        raise FileNotFoundError(f"{SCHEME}{path}")

    def exists(self, path: str, **_: Any) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        return any_below(self._strip_protocol(path))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Nothing to do."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do."""

    def rmdir(self, path: str) -> None:
        """Nothing to do."""

    def rm_file(self, path: str) -> None:
        remove(self._strip_protocol(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        if recursive:
            if not any_below(path):
                raise FileNotFoundError(f"{SCHEME}{path}")
            remove_tree(path)
        elif get(path) is None:
            raise FileNotFoundError(f"{SCHEME}{path}")
        else:
            remove(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        path = self._strip_protocol(path)
        if mode == "rb":
            return io.BytesIO(read(path))
        if mode == "wb":
            return _Upload(path)
        raise NotImplementedError(f"objects cannot be opened as {mode!r}")


def _file(path: str, size: int) -> dict[str, Any]:
    return {"name": path, "size": size, "type": "file"}


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}
