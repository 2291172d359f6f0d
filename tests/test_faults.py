"""The proxy of faults does what its name says: seen with a plain HTTP client and a plain server behind it."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
from faults import Faults, Proxy, one

CONTENT = bytes(range(256)) * 400


class _Echo(BaseHTTPRequestHandler):
    """Answers a GET with `CONTENT` and a PUT with what it was sent."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self.seen[self.path] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self.command == "PUT" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Kept", "yes")
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    _Echo.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(url: str, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes, str | None]:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("X-Kept")
    finally:
        connection.close()


def test_passes_everything_untouched(upstream: str) -> None:
    with Proxy(upstream) as proxy:
        assert ask(proxy.url, "/a?b=c") == (200, CONTENT, "yes")
        assert ask(proxy.url, "/a", "PUT", b"sent") == (200, b"sent", "yes")
        assert proxy.requests == [("GET", "/a?b=c", None), ("PUT", "/a", None)]


def test_errors(upstream: str) -> None:
    with Proxy(upstream, Faults(error=1, statuses=(503,))) as proxy:
        assert ask(proxy.url, "/a")[0] == 503
    assert not _Echo.seen


@pytest.mark.parametrize(("fault", "seen"), [("refuse", 0), ("lose", 1)])
def test_resets_without_an_answer(fault: str, seen: int, upstream: str) -> None:
    with Proxy(upstream, one(fault)) as proxy, pytest.raises(ConnectionError):
        ask(proxy.url, "/a")
    assert _Echo.seen["/a"] == seen


def test_resets_in_the_middle(upstream: str) -> None:
    with Proxy(upstream, Faults(reset=1)) as proxy, pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        ask(proxy.url, "/a")


def test_truncates(upstream: str) -> None:
    with Proxy(upstream, Faults(truncate=1)) as proxy, pytest.raises(http.client.IncompleteRead) as raised:
        ask(proxy.url, "/a")
    assert CONTENT.startswith(raised.value.partial)
    assert len(raised.value.partial) < len(CONTENT)


@pytest.mark.parametrize("fault", ["flip", "flip_sent"])
def test_flips_one_bit(fault: str, upstream: str) -> None:
    with Proxy(upstream, one(fault)) as proxy:
        _, content, _ = ask(proxy.url, "/a", "PUT", CONTENT)
    differing = [a ^ b for a, b in zip(content, CONTENT, strict=True) if a != b]
    assert len(differing) == 1
    assert differing[0].bit_count() == 1


def test_stalls(upstream: str) -> None:
    with Proxy(upstream, Faults(stall=1, stall_seconds=0.3)) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=0.1)
        connection.request("GET", "/a")
        with pytest.raises(TimeoutError):
            connection.getresponse()
        assert ask(proxy.url, "/b")[1] == CONTENT


def test_the_seed_decides(upstream: str) -> None:
    def faults(seed: int) -> list[str | None]:
        with Proxy(upstream, Faults(seed=seed, error=0.3)) as proxy:
            for i in range(40):
                ask(proxy.url, f"/{i % 20}")
            return [fault for _, _, fault in proxy.requests]

    first = faults(1)
    assert first == faults(1)
    assert first != faults(2)
    assert 4 <= first.count("error") <= 22


def test_only_some_requests(upstream: str) -> None:
    with Proxy(upstream, Faults(error=1, only=lambda method, path: method == "PUT")) as proxy:
        assert ask(proxy.url, "/a")[0] == 200
        assert ask(proxy.url, "/a", "PUT", b"x")[0] >= 429
        assert proxy.count() == proxy.count("error") == 1
