"""The reports that conversions leave beside their checkpoints: what a run has finished, also after its Job is gone."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.errors import RequestError, WorldError
from jobs.render import report_path

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_TIMEOUT = 30  # seconds


def unfinished(outputs: Mapping[str, str], model: str) -> list[str]:
    """Those variants whose directory holds no report of a finished conversion of `model`.

    Raises:
      RequestError, WorldError: the output cannot be read from here.
    """
    return [variant for variant, output in outputs.items() if not _is_of(read(report_path(output)), model)]


def read(path: str) -> Mapping[str, Any] | None:
    """A report, None if there is none.

    Args:
      path: gs://BUCKET/OBJECT, or a file.

    Raises:
      RequestError: this account may not read there, or what is there is no report.
      WorldError: storage failed.
    """
    content = _object(path) if path.startswith("gs://") else _file(path)
    if content is None:
        return None
    try:
        report = json.loads(content)
    except ValueError:
        raise RequestError(f"{path} is not a converter's report; choose another --run-name or remove it") from None
    return report if isinstance(report, dict) else None


def _is_of(report: Mapping[str, Any] | None, model: str) -> bool:
    request = (report or {}).get("request")
    return isinstance(request, dict) and request.get("model_name") == model


def _file(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None


def _object(path: str) -> bytes | None:
    """An object's content, from Cloud Storage's JSON API or an emulator of it."""
    import google.auth
    import google.auth.exceptions
    import google.auth.transport.requests
    import requests

    bucket, _, name = path.removeprefix("gs://").partition("/")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    host = emulator.rstrip("/") or "https://storage.googleapis.com"
    if "://" not in host:
        host = f"http://{host}"
    url = f"{host}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
    try:
        if emulator:
            session = requests.Session()
        else:
            credentials, _ = google.auth.default(scopes=[_SCOPE])
            session = google.auth.transport.requests.AuthorizedSession(credentials)
        with session:
            answer = session.get(url, timeout=_TIMEOUT)
    except google.auth.exceptions.DefaultCredentialsError:
        raise RequestError(f"cannot read {path}: no credentials; gcloud auth application-default login") from None
    except (google.auth.exceptions.GoogleAuthError, requests.RequestException) as error:
        raise WorldError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if answer.status_code == 404:
        return None
    if answer.status_code in (401, 403):
        raise RequestError(f"cannot read {path}: no permission (storage.objects.get)")
    if answer.status_code != 200:
        raise WorldError(f"cannot read {path}: Cloud Storage answered {answer.status_code}")
    return answer.content
