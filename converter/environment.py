"""What the environment says of reaching servers, looked up once for each: requests would do so at every request.

Of ~/.netrc, which it would look at too, nothing is used: credentials come from where the hub's and Google's libraries
have them.
"""

from __future__ import annotations

import functools
import os
from typing import Any
from urllib.parse import urlsplit


def settings(url: str) -> dict[str, Any]:
    """The proxies and the certificates for an address, as arguments of a `requests.Session` without `trust_env`."""
    parts = urlsplit(url)
    return _settings(f"{parts.scheme}://{parts.netloc}")


@functools.cache
def _settings(server: str) -> dict[str, Any]:
    from requests.utils import get_environ_proxies

    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    return {"proxies": get_environ_proxies(server), "verify": bundle or True}
