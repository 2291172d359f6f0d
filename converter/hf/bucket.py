"""Folders of Google Cloud Storage as repositories: the JSON API, with the machine's own credentials.

Facts: https://cloud.google.com/storage/docs/json_api/v1/objects (list, get with alt=media and generation; crc32c of
every object).
"""

from __future__ import annotations

import re
from typing import Any

from converter import gcs, retrying
from converter.errors import ConverterError, RequestError, WorldError
from converter.hf.checksums import parse_crc32c
from converter.hf.location import BucketFolder
from converter.hf.remote import RemoteFile, Server, ask

_PAGE = 1000
_MOST_OBJECTS, _MOST_PAGES = 100_000, 1000
_NUMBER = re.compile(r"[0-9]{1,18}")


def find(folder: BucketFolder, *, seconds: float) -> Server:
    """The files of a folder at this moment, by generation, so that one that is replaced meanwhile is noticed.

    Raises:
      RequestError: no such bucket or folder, or no access to it.
      WorldError: the service failed for too long.
    """
    items = _list(folder, seconds)
    files = {}
    try:
        for item in items:
            if (file := _file(folder, item)) is not None:
                files[file.name] = file
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorldError(f"the list of objects in {folder} makes no sense; try again later") from error
    if not files:
        raise RequestError(f"{folder} does not exist or holds no files")
    return Server(
        str(folder),
        files,
        lambda: gcs.session(gcs.READ_ONLY),
        lambda name, status: _refused(folder, status, name),
        seconds,
        # The session authorises whatever it asks for, and the service sends nobody elsewhere.
        redirects=False,
    )


def _file(folder: BucketFolder, item: dict[str, Any]) -> RemoteFile | None:
    """An object as a file, None where it is none of this folder or has a name that no file of ours has.

    Raises:
      KeyError, TypeError, ValueError, AttributeError: it is not described.
    """
    name = item["name"].removeprefix(folder.prefix)
    if not name or "/" in name or not item["name"].isprintable():
        return None
    # It becomes part of a file's name in the cache.
    generation, size = str(item["generation"]), str(item["size"])
    if not _NUMBER.fullmatch(generation) or not _NUMBER.fullmatch(size):
        raise ValueError("no number")
    return RemoteFile(
        name,
        int(size),
        f"{gcs.address('download/', folder.bucket, item['name'])}?alt=media&generation={generation}",
        # Objects encrypted with a customer's key tell none.
        crc32c=parse_crc32c(item["crc32c"]) if item.get("crc32c") else None,
        generation=generation,
    )


def _list(folder: BucketFolder, seconds: float) -> list[dict[str, Any]]:
    from google.auth.exceptions import GoogleAuthError

    items: list[dict[str, Any]] = []
    token: str | None = None
    session = gcs.session(gcs.READ_ONLY)
    for _ in range(_MOST_PAGES):
        query = {
            "prefix": folder.prefix,
            "delimiter": "/",
            "maxResults": str(_PAGE),
            "fields": "items(name,size,crc32c,generation),nextPageToken",
            **({"pageToken": token} if token else {}),
        }

        try:
            page = ask(
                session,
                gcs.address("", folder.bucket),
                query,
                what=f"listing {folder}",
                seconds=seconds,
                refused=lambda status: _refused(folder, status),
                redirects=False,
            )
        except GoogleAuthError as error:
            raise RequestError(f"the credentials for {folder} are no good: {retrying.one_line(error)}") from None
        found, token = page.get("items") or [], page.get("nextPageToken")
        if not isinstance(found, list) or not isinstance(token, str | None):
            raise WorldError(f"the list of objects in {folder} makes no sense; try again later")
        items += found
        if not token:
            return items
        if len(items) > _MOST_OBJECTS:
            break
    raise RequestError(f"{folder} holds too many objects to be a model's repository")


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
