"""A hub on this machine for measurements: serves one folder of any size behind HF_ENDPOINT, from the page cache.

python -m benchmarks.hub FOLDER ORG/NAME    # prints its address, serves until it is ended
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_COMMIT = "0" * 40


def server(folder: Path, repo: str, digests: dict[str, str]) -> ThreadingHTTPServer:
    """Ready to serve on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """No log."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if re.fullmatch(rf"/api/models/{repo}(/revision/[^/]+)?", path):
                self._json({"id": repo, "sha": _COMMIT, "siblings": [_sibling(folder, n, digests) for n in digests]})
            elif re.fullmatch(rf"/api/models/{repo}/tree/[^/]+", path):
                self._json([_entry(folder, name, digests) for name in digests])
            elif (found := re.fullmatch(rf"/{repo}/resolve/[^/]+/(.+)", path)) and found[1] in digests:
                self._file(folder / found[1], digests[found[1]])
            else:
                self._answer(404, {"Content-Length": "0"})

        def _json(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self._answer(200, {"Content-Length": str(len(body)), "Content-Type": "application/json"})
            self.wfile.write(body)

        def _answer(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def _file(self, path: Path, digest: str) -> None:
            size = path.stat().st_size
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
            begin = int(found[1]) if found else 0
            end = min(size, int(found[2]) + 1) if found and found[2] else size
            headers = {"Content-Length": str(end - begin), "ETag": f'"{digest}"', "X-Repo-Commit": _COMMIT}
            if found:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            self._answer(206 if found else 200, headers)
            self.wfile.flush()
            if self.command == "HEAD":
                return
            with path.open("rb") as file:
                while begin < end:
                    begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    return made


def _sibling(folder: Path, name: str, digests: dict[str, str]) -> dict[str, Any]:
    size = (folder / name).stat().st_size
    return {
        "rfilename": name,
        "size": size,
        "blobId": "0" * 40,
        "lfs": {"sha256": digests[name], "size": size, "pointerSize": 130},
    }


def _entry(folder: Path, name: str, digests: dict[str, str]) -> dict[str, Any]:
    size = (folder / name).stat().st_size
    lfs = {"oid": digests[name], "size": size, "pointerSize": 130}
    return {"type": "file", "path": name, "size": size, "oid": "0" * 40, "lfs": lfs}


def main() -> None:
    """Serve."""
    folder, repo = Path(sys.argv[1]), sys.argv[2]
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    made = server(folder, repo, digests)
    print(f"http://127.0.0.1:{made.server_port}", flush=True)
    made.serve_forever()


if __name__ == "__main__":
    main()
