"""Google Cloud Storage's JSON API: where it answers, and who asks.

STORAGE_EMULATOR_HOST names another server, without credentials, as Google's own libraries have it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import requests

READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
READ_WRITE = "https://www.googleapis.com/auth/devstorage.read_write"
"""What credentials are asked to allow (https://cloud.google.com/storage/docs/oauth-scopes)."""


def address(service: str, bucket: str, name: str | None = None) -> str:
    """The address of a bucket's objects, or of one of them.

    Args:
      service: "" for what is said of objects, "upload/" and "download/" for what is in them.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    base = (host if "://" in host else f"http://{host}").rstrip("/")
    objects = f"{base}/{service}storage/v1/b/{quote(bucket, safe='')}/o"
    return objects if name is None else f"{objects}/{quote(name, safe='')}"


def session(scope: str) -> requests.Session:
    """A session that is authorised, for one thread at a time; its first request may raise GoogleAuthError.

    Its requests are given `environment.settings`.
    """
    from google.auth.transport.requests import AuthorizedSession

    # Retries are one place's business, which has a total deadline.
    made = AuthorizedSession(_credentials(scope), max_refresh_attempts=1)  # type: ignore[no-untyped-call]
    made.trust_env = False
    return made


@cache
def _credentials(scope: str) -> Any:
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    try:
        return google.auth.default(scopes=[scope])[0]
    except DefaultCredentialsError:
        # Enough for public buckets; others answer with 401.
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
