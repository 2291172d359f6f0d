"""Certificates of servers that are not trusted: trying again does not help, naming the right authorities does.

The client libraries look at different variables: huggingface_hub (OpenSSL) at SSL_CERT_FILE, requests, through which
byte ranges and buckets are read, at REQUESTS_CA_BUNDLE, and TensorStore at TENSORSTORE_CA_BUNDLE, which follows
REQUESTS_CA_BUNDLE here unless it is set.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from converter.errors import ConverterError, RequestError, WorldError

_PARSING = ("PEM", "X509", "ASN1")
"""OpenSSL's libraries that read a file of certificates."""


def configure() -> None:
    """Let TensorStore trust what requests trusts."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE")
    if bundle:
        name = "TENSORSTORE_CA_PATH" if Path(bundle).is_dir() else "TENSORSTORE_CA_BUNDLE"
        os.environ.setdefault(name, bundle)


def problem(error: BaseException, what: str) -> ConverterError | None:
    """What a failure means where a certificate is behind it, None where none is.

    Args:
      what: failed, for the message.

    Returns:
      WorldError: the server's certificate is not trusted, is another host's or has expired.
      RequestError: the user's own file of certificates cannot be used.
    """
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return WorldError(
                f"{what} failed: the certificate of {_host(causes)} is not to be trusted: {_why(cause)}; if your "
                "network has an authority of its own, set SSL_CERT_FILE and REQUESTS_CA_BUNDLE to the file with its "
                "certificates"
            )
        unread = isinstance(cause, ssl.SSLError) and cause.library in _PARSING
        if unread or "TLS CA certificate bundle" in str(cause):
            return RequestError(f"{what} failed: there are no certificates in {_bundle()}")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _why(error: ssl.SSLCertVerificationError) -> str:
    return str(getattr(error, "verify_message", "") or error.reason or error).rstrip(".")


def _host(causes: list[BaseException]) -> str:
    for cause in causes:
        try:
            parts = urlsplit(str(cause.request.url))  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, ValueError):
            # No request, or one that httpx was not told.
            continue
        if parts.hostname:
            return parts.netloc.rpartition("@")[2]
    return "the server"


def _bundle() -> str:
    names = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    return " or ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name)) or "the system's bundle"
