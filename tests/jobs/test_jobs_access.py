"""The check of the token against a hub, and of reports against a bucket: small HTTP servers in their place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jobs import reports
from jobs.errors import RequestError, WorldError

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_abcdefghijklmnop"

Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def http(answer: Callable[[str, dict[str, str]], Answer]) -> Iterator[str]:
    """A server that answers GET by path and headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path, {key.lower(): value for key, value in self.headers.items()})
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def hub(path: str, headers: dict[str, str]) -> Answer:
    """A hub with one public and two gated repositories, one of which the token may read."""
    if path == "/api/models/acme/public/auth-check":
        return 200, {}, b"{}"
    if path == "/api/models/acme/open-to-me/auth-check" and headers.get("authorization") == f"Bearer {TOKEN}":
        return 200, {}, b"{}"
    if path.startswith("/api/models/acme/broken"):
        return 500, {}, b""
    if path.startswith(("/api/models/acme/gated", "/api/models/acme/open-to-me")):
        status = 403 if "authorization" in headers else 401
        return status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}"
    return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def ask(endpoint: str, repository: str, tmp_path: Path, *, token: str = "", secret: str = "s") -> tuple[int, str]:
    """`check_access` in a process of its own, as the hub's address is read at import; exit code and what it said."""
    script = (
        "import sys\nfrom jobs.access import check_access\nfrom jobs.errors import RequestError\n"
        "try:\n  print(*check_access(sys.argv[1], sys.argv[2]), sep='\\n')\n"
        "except RequestError as error:\n  print(error); sys.exit(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, repository, secret],
        cwd=ROOT,
        env={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        | ({"HF_TOKEN": token} if token else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("repository", "token", "secret", "code", "told"),
    [
        ("acme/public", "", "s", 0, ""),
        ("acme/public", TOKEN, "s", 0, ""),
        ("acme/open-to-me", TOKEN, "s", 0, ""),
        ("acme/gated", TOKEN, "s", 2, "the token may not read it; ask on https://huggingface.co/acme/gated"),
        ("acme/gated", "", "", 2, "the Jobs have no token"),
        ("acme/gated", "", "s", 0, "set HF_TOKEN here"),
        ("acme/nothing", TOKEN, "s", 2, "not on the hub"),
        ("acme/broken", TOKEN, "s", 0, "could not be asked"),
    ],
)
def test_access(tmp_path: Path, repository: str, token: str, secret: str, code: int, told: str) -> None:
    with http(hub) as endpoint:
        returned, said = ask(endpoint, repository, tmp_path, token=token, secret=secret)
    assert returned == code, said
    assert told in said
    assert bool(said) is bool(told)


def test_an_unreachable_hub_is_a_warning(tmp_path: Path) -> None:
    returned, said = ask("http://127.0.0.1:9", "acme/public", tmp_path)
    assert returned == 0
    assert "could not be asked" in said


REPORT = json.dumps({"request": {"model_name": "qwen3-4b"}}).encode()


def bucket(path: str, headers: dict[str, str]) -> Answer:
    """Cloud Storage's JSON API with a few objects."""
    answers: dict[str, Answer] = {
        "/storage/v1/b/acme/o/a%2Freport.json?alt=media": (200, {}, REPORT),
        "/storage/v1/b/acme/o/secret%2Freport.json?alt=media": (403, {}, b"{}"),
        "/storage/v1/b/acme/o/slow%2Freport.json?alt=media": (503, {}, b""),
        "/storage/v1/b/acme/o/odd%2Freport.json?alt=media": (200, {}, b"<html>"),
    }
    return answers.get(path, (404, {}, b"Not Found"))


def test_reports_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    with http(bucket) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint.removeprefix("http://"))
        found = {"unscanned": "gs://acme/a", "scanned": "gs://acme/b"}
        assert reports.unfinished(found, "qwen3-4b") == ["scanned"]
        assert reports.unfinished(found, "qwen3-8b") == ["unscanned", "scanned"]
        with pytest.raises(RequestError, match="no permission"):
            reports.read("gs://acme/secret/report.json")
        with pytest.raises(WorldError, match="503"):
            reports.read("gs://acme/slow/report.json")
        with pytest.raises(RequestError, match="not a converter's report"):
            reports.read("gs://acme/odd/report.json")


def test_no_credentials_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(RequestError, match="application-default") as refused:
        reports.read("gs://acme/a/report.json")
    assert "\n" not in str(refused.value)
