"""Folders of Google Cloud Storage as repositories: the JSON API, with the machine's own credentials.

Facts: https://cloud.google.com/storage/docs/json_api/v1/objects (list, get with alt=media and generation; crc32c of
every object). STORAGE_EMULATOR_HOST names another server, without credentials, as Google's own libraries have it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from converter import retrying
from converter.errors import ConverterError, RequestError
from converter.hf.checksums import parse_crc32c
from converter.hf.location import BucketFolder
from converter.hf.remote import RemoteFile, Server, verdict

if TYPE_CHECKING:
    import requests

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_TIMEOUT = (10.0, 30.0)
_PAGE = 1000


def find(folder: BucketFolder, *, seconds: float) -> Server:
    """The files of a folder at this moment, by generation, so that one that is replaced meanwhile is noticed.

    Raises:
      RequestError: no such bucket or folder, or no access to it.
      WorldError: the service failed for too long.
    """
    endpoint = _endpoint()
    items = _list(folder, f"{endpoint}/storage/v1/b/{quote(folder.bucket, safe='')}/o", seconds)
    files = {}
    for item in items:
        name = item["name"].removeprefix(folder.prefix)
        if not name or "/" in name:
            continue
        media = f"{endpoint}/download/storage/v1/b/{quote(folder.bucket, safe='')}/o/{quote(item['name'], safe='')}"
        files[name] = RemoteFile(
            name,
            int(item["size"]),
            f"{media}?alt=media&generation={item['generation']}",
            # Objects encrypted with a customer's key tell none.
            crc32c=parse_crc32c(item["crc32c"]) if item.get("crc32c") else None,
            generation=str(item["generation"]),
        )
    if not files:
        raise RequestError(f"{folder} does not exist or holds no files")
    return Server(str(folder), files, _session, lambda name, status: _refused(folder, status, name), seconds)


def _list(folder: BucketFolder, url: str, seconds: float) -> list[dict[str, Any]]:
    from google.auth.exceptions import GoogleAuthError

    items: list[dict[str, Any]] = []
    token: str | None = None
    session = _session()
    while True:
        query = {
            "prefix": folder.prefix,
            "delimiter": "/",
            "maxResults": str(_PAGE),
            "fields": "items(name,size,crc32c,generation),nextPageToken",
            **({"pageToken": token} if token else {}),
        }

        def ask(query: dict[str, str] = query) -> dict[str, Any]:
            response = session.get(url, params=query, timeout=_TIMEOUT)
            if response.status_code != 200:
                raise _Answer(response)
            answer = response.json()
            if not isinstance(answer, dict):
                raise OSError("the answer is no list of objects")
            return answer

        try:
            page = retrying.call(ask, what=f"listing {folder}", verdict=_verdict, seconds=seconds)
        except _Answer as error:
            raise _refused(folder, error.status) from None
        except GoogleAuthError as error:
            raise RequestError(f"the credentials for {folder} are no good: {retrying.one_line(error)}") from None
        items += page.get("items") or []
        token = page.get("nextPageToken")
        if not token:
            return items


class _Answer(Exception):  # noqa: N818 - not only errors
    def __init__(self, response: requests.Response) -> None:
        super().__init__(f"HTTP {response.status_code}")
        self.status = response.status_code
        self.wait = retrying.retry_after(response.headers.get("Retry-After"))


def _verdict(error: Exception) -> float | None:
    if isinstance(error, _Answer):
        return error.wait if retrying.is_transient_status(error.status) else None
    return verdict(error)


def _refused(folder: BucketFolder, status: int, name: str | None = None) -> ConverterError:
    where = f"{folder}/{name}" if name else str(folder)
    if status in (401, 403):
        return RequestError(
            f"Google Cloud Storage refuses access to {where} (HTTP {status}): the identity this runs as needs "
            f"roles/storage.objectViewer on {folder.bucket}"
        )
    if status == 404 and name:
        return RequestError(f"{where} was replaced or removed while it was read")
    if status == 404:
        return RequestError(f"there is no bucket {folder.bucket}")
    return RequestError(f"Google Cloud Storage refuses {where} (HTTP {status})")


def _endpoint() -> str:
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return "https://storage.googleapis.com"
    return (host if "://" in host else f"http://{host}").rstrip("/")


def _session() -> requests.Session:
    from google.auth.transport.requests import AuthorizedSession

    # Retries are one place's business, which has a total deadline.
    return AuthorizedSession(_credentials(), max_refresh_attempts=1)  # type: ignore[no-untyped-call]


@cache
def _credentials() -> Any:
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    try:
        return google.auth.default(scopes=[_SCOPE])[0]
    except DefaultCredentialsError:
        # Enough for public buckets; others answer with 401.
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
