"""A small stand-in for the Hugging Face hub: what huggingface_hub asks of it for one model repository."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LARGE = (".safetensors", ".bin")
"""Files that the hub keeps in its large file storage and redirects to."""

PAGE = b"<html><body>Something else</body></html>"
"""Body of a fault's answer."""

Fault = Callable[[str, str], int | None]
"""(method, path) -> an HTTP status to answer with, 0 to drop the connection, None for no fault."""


@functools.lru_cache
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.lru_cache
def git_sha1(content: bytes) -> str:
    """What git calls a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


@dataclass
class Request:
    """One request that the hub got."""

    method: str
    path: str
    authorization: str | None
    range: str | None


@dataclass
class Hub:
    """The hub's content and behaviour; tests change it while it runs.

    Attributes:
      repo: id of the only repository.
      commits: revision (branch, tag or commit) -> commit.
      files: commit -> name -> content.
      fault: asked before each answer.
      error_code: the X-Error-Code that goes with a fault's status.
      cut: after how many bytes a download of a large file breaks off; the first `cuts` of them.
      change: what becomes of a body on its way: the path, the body.
      sizes: name -> size that the hub claims for a file.
      answer: what becomes of an answer on its way, given the path; pieces are sent as they are, and nothing else.
      requests: what it was asked so far.
    """

    repo: str
    commits: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    fault: Fault = lambda method, path: None
    error_code: str | None = None
    cut: int = 0
    cuts: int = 0
    change: Callable[[str, bytes], bytes] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    answer: Callable[[str, Answer], Answer | Iterable[bytes]] | None = None
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""
    storage: str = ""

    def add(self, folder: Path, *revisions: str) -> str:
        """Put a folder's files there as a commit that the revisions name; the commit."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[commit] = files
        self.commits |= dict.fromkeys((*revisions, commit), commit)
        return commit

    def asked_for(self, name: str) -> list[Request]:
        """Downloads (not questions about) a file: for large ones what reached the storage."""
        if not name.endswith(LARGE):
            return [r for r in self.requests if r.method == "GET" and r.path.endswith(f"/{name}")]
        digests = {sha256(files[name]) for files in self.files.values() if name in files}
        return [r for r in self.requests if r.method == "GET" and r.path.removeprefix("/storage/") in digests]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(Request(self.command, path, self.headers["Authorization"], self.headers["Range"]))
        status = hub.fault(self.command, path)
        if status == 0:
            self.close_connection = True
        elif status is not None:
            self._send(status, PAGE, {"X-Error-Code": hub.error_code} if hub.error_code else {})
        elif found := re.fullmatch(rf"/api/models/{hub.repo}(?:/revision/([^/]+))?", path):
            self._info(found[1] or "main")
        elif found := re.fullmatch(rf"/api/models/{hub.repo}/tree/([^/]+)", path):
            self._tree(found[1])
        elif found := re.fullmatch(rf"/{hub.repo}/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2])
        elif found := re.fullmatch(r"/storage/([0-9a-f]{64})", path):
            self._stored(found[1])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _info(self, revision: str) -> None:
        commit = self.hub.commits.get(revision)
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for name, content in self.hub.files[commit].items():
            size = self.hub.sizes.get(name, len(content))
            entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git_sha1(content)}
            if name.endswith(LARGE):
                digest = sha256(content)
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 130}
            siblings.append(entry)
        info = {"id": self.hub.repo, "modelId": self.hub.repo, "sha": commit, "private": False, "siblings": siblings}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _tree(self, revision: str) -> None:
        entries = []
        for name, content in self.hub.files[self.hub.commits[revision]].items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            if name.endswith(LARGE):
                digest = sha256(content)
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _file(self, revision: str, name: str) -> None:
        commit = self.hub.commits.get(revision)
        content = self.hub.files.get(commit or "", {}).get(name)
        if content is None:
            code = "EntryNotFound" if commit else "RevisionNotFound"
            self._send(404, b"", {"X-Error-Code": code, **({"X-Repo-Commit": commit} if commit else {})})
            return
        digest = sha256(content)
        headers = {"X-Repo-Commit": commit or "", "Accept-Ranges": "bytes"}
        if name.endswith(LARGE):
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
            self._send(302, b"", {**headers, **linked, "Location": f"{self.hub.storage}/storage/{digest}"})
        else:
            etag = hashlib.sha1(content).hexdigest()
            self._content(content, {**headers, "ETag": f'"{etag}"'})

    def _stored(self, digest: str) -> None:
        contents = (content for files in self.hub.files.values() for content in files.values())
        content = next(content for content in contents if sha256(content) == digest)
        self._content(content, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}, may_cut=True)

    def _content(self, content: bytes, headers: dict[str, str], *, may_cut: bool = False) -> None:
        """A file or the range of it that is asked for."""
        start, end = 0, len(content)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            start, end = int(found[1]), min(end, int(found[2]) + 1 if found[2] else end)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        status = 206 if found else 200
        body: bytes | memoryview = memoryview(content)[start:end]
        if self.hub.change is not None:
            body = self.hub.change(self.path, bytes(body))
        if may_cut and self.hub.cuts > 0 and self.command == "GET":
            self.hub.cuts -= 1
            self._send(status, body[: self.hub.cut], headers, length=len(body))
            self.close_connection = True
            return
        self._send(status, body, headers)

    def _send(self, status: int, body: bytes | memoryview, headers: dict[str, str], length: int | None = None) -> None:
        headers = {"Content-Length": str(len(body) if length is None else length), **headers}
        if self.hub.answer is not None:
            answer = self.hub.answer(self.path, (status, headers, bytes(body)))
            if not isinstance(answer, tuple):
                self.close_connection = True
                for part in answer:
                    self.wfile.write(part)
                return
            status, headers, body = answer
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error here."""


@contextlib.contextmanager
def running(repo: str) -> Iterator[Hub]:
    """A hub with an empty repository, on a port of this machine. Its storage goes by another host name."""
    hub = Hub(repo)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    hub.storage = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
