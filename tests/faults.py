"""A proxy that stands before an HTTP server, a bucket's or the hub's, and breaks some of what passes through it.

What happens to a request follows from the seed, the method, the address and how often that was asked before: threads
may ask in any order, and the same faults meet the same requests again.

    with Proxy(server.url, Faults(seed=1, error=0.1, reset=0.05)) as proxy:
        run_something_against(proxy.url)
    assert proxy.count("error") > 0
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_BLOCK_BYTES = 1 << 16

_HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers that are for one connection only (RFC 9110, section 7.6.1)."""


@dataclass(frozen=True)
class Faults:
    """How likely each fault is for a request; the rest passes untouched. At most one fault meets a request.

    Attributes:
      seed: of every decision.
      error: is answered with one of `statuses`; the server never sees it.
      refuse: the connection is reset; the server never sees it.
      lose: the server does what was asked, then the connection is reset instead of the answer.
      reset: the connection is reset in the middle of the answer's body.
      truncate: the connection is closed in the middle of the answer's body, whose headers promise all of it.
      stall: nothing happens for `stall_seconds` first, unless the proxy's stalls are ended before.
      flip: one byte of the answer's body is another; the headers, checksums included, are those of the right one.
      flip_sent: one byte of the request's body is another.
      statuses: what `error` answers.
      only: which requests faults may meet, by method and address; None for all.
      checked: whose answers can be seen to have a wrong byte, by address; no other is flipped.
    """

    seed: int = 0
    error: float = 0.0
    refuse: float = 0.0
    lose: float = 0.0
    reset: float = 0.0
    truncate: float = 0.0
    stall: float = 0.0
    flip: float = 0.0
    flip_sent: float = 0.0
    stall_seconds: float = 10.0
    statuses: tuple[int, ...] = (500, 502, 503, 504, 429)
    only: Callable[[str, str], bool] | None = None
    checked: Callable[[str], bool] = lambda _: True

    def of(self, method: str, address: str, time_asked: int) -> tuple[str | None, random.Random]:
        """The fault that meets a request asked for the nth time, None for none, and what decides its details."""
        decide = random.Random(f"{self.seed} {method} {address} {time_asked}")
        if self.only is not None and not self.only(method, address):
            return None, decide
        left = decide.random()
        for name in ("error", "refuse", "lose", "reset", "truncate", "stall", "flip", "flip_sent"):
            left -= getattr(self, name)
            if left < 0:
                return None if name == "flip" and not self.checked(address) else name, decide
        return None, decide


NO_FAULTS = Faults()


def one(kind: str, rate: float = 1.0, **settings: Any) -> Faults:
    """Faults of one kind."""
    return Faults(**{kind: rate, **settings})


def seeded(seed: int, checked: Callable[[str], bool]) -> Faults:
    """Faults of one kind or of several, on 1 to 30 % of the requests; some stall for ten seconds; some have no hope.

    A byte is flipped only where the seed has no other faults: a conversion may end there at once.
    """
    decide = random.Random(seed)
    rate = decide.uniform(0.01, 0.3)
    kinds = ("error", "refuse", "lose", "reset", "truncate")
    several: dict[str, Any] = {kind: rate / len(kinds) for kind in kinds}
    which = decide.random()
    if which < 0.1:
        return Faults(seed, error=0.9)
    if which < 0.2:
        return Faults(seed, **several, stall=0.01, stall_seconds=10.0)
    if which < 0.6:
        return Faults(seed, **several, stall=0.02, stall_seconds=0.3)
    return one(decide.choice((*kinds, "flip")), rate, seed=seed, checked=checked)


class Proxy:
    """Serves what a server does, with faults, while used as a context.

    When it ends, what clients have asked until then is done, but for what stalls, and nothing else ever is: what a
    killed process has under way reaches the server before that or not at all.

    Attributes:
      faults: may be replaced at any time; requests that stall then go on.
      requests: method, address and fault of every request, in the order they arrived.
    """

    def __init__(self, upstream: str, faults: Faults = NO_FAULTS) -> None:
        """`upstream` is the server's URL, `http://host:port`."""
        parts = urlsplit(upstream)
        assert parts.scheme == "http", upstream
        assert parts.hostname is not None, upstream
        self._faults = faults
        self.requests: list[tuple[str, str, str | None]] = []
        self._upstream = (parts.hostname, parts.port or 80)
        self._asked: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._go_on = threading.Event()
        self._ended = False
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def count(self, fault: str | None = None) -> int:
        """Requests that met a fault, of one kind or of any."""
        with self._lock:
            return sum(found is not None and fault in (None, found) for _, _, found in self.requests)

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._lock:
            self._faults = faults
            self._go_on.set()
            self._go_on = threading.Event()

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        with self._lock:
            self._ended = True
            for connection in self._connections:
                # What has arrived can still be read, then comes the end.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
            self._go_on.set()
        self._server.server_close()

    def _decide(self, method: str, address: str) -> tuple[str | None, random.Random, Callable[[], bool]]:
        """The fault, what decides its details, and what stalls."""
        with self._lock:
            self._asked[method, address] += 1
            fault, decide = self._faults.of(method, address, self._asked[method, address])
            self.requests.append((method, address, fault))
            go_on, seconds = self._go_on, self._faults.stall_seconds
            return fault, decide, lambda: go_on.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is nothing to tell of."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: Proxy

    def log_message(self, format: str, *args: object) -> None:
        """No log."""

    def setup(self) -> None:
        super().setup()
        self._connection: http.client.HTTPConnection | None = None
        with self.owner._lock:
            self.owner._connections.add(self.request)
            if self.owner._ended:
                self.request.shutdown(socket.SHUT_RD)

    def finish(self) -> None:
        with self.owner._lock:
            self.owner._connections.discard(self.request)
        with contextlib.suppress(OSError):
            super().finish()
        if self._connection is not None:
            self._connection.close()

    def do_GET(self) -> None:
        fault, decide, stall = self.owner._decide(self.command, self.path)
        try:
            body = self._body()
        except (OSError, ValueError):
            # The client has gone in the middle of it.
            self.close_connection = True
            return
        if fault == "stall":
            stall()
            if self.owner._ended:
                self.close_connection = True
                return
        if fault == "error":
            self._answer_error(decide.choice(self.owner.faults.statuses))
            return
        if fault == "refuse":
            self._reset()
            return
        if fault == "flip_sent" and body:
            body = _flipped(body, decide)
        try:
            answer = self._ask(body)
        except OSError:
            self._answer_error(502)
            return
        if fault == "lose":
            answer.read()
            self._reset()
            return
        self._pass_on(answer, fault, decide)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - http.server's names

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self._exactly(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self._exactly(int(self.headers.get("Content-Length") or 0))

    def _exactly(self, size: int) -> bytes:
        content = self.rfile.read(size)
        if len(content) < size:
            raise ValueError("a part of a request")
        return content

    def _ask(self, body: bytes) -> http.client.HTTPResponse:
        """The server's answer; a kept connection that it has closed meanwhile is made anew."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        headers.pop("Expect", None)
        if body or self.command in ("POST", "PUT", "PATCH"):
            headers["Content-Length"] = str(len(body))
        for last in (False, True):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(*self.owner._upstream, timeout=60)
                last = True
            try:
                self._connection.request(self.command, self.path, body or None, headers)
                return self._connection.getresponse()
            except (http.client.HTTPException, OSError):
                self._connection.close()
                self._connection = None
                if last:
                    raise OSError("the server does not answer") from None
        raise AssertionError("unreachable")

    def _pass_on(self, answer: http.client.HTTPResponse, fault: str | None, decide: random.Random) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length")
        empty = self.command == "HEAD" or answer.status in (204, 304) or answer.status < 200
        if length is None and not empty:
            content = answer.read()
            length = str(len(content))
            self.send_header("Content-Length", length)
            blocks: Iterator[bytes] = iter((content,))
        else:
            blocks = iter(lambda: answer.read(_BLOCK_BYTES), b"")
        self.end_headers()
        size = 0 if empty else int(length or 0)
        broken_at = decide.randrange(size) if size else 0
        passed = 0
        for block in blocks:
            if fault in ("reset", "truncate") and passed + len(block) > broken_at:
                self.wfile.write(block[: broken_at - passed])
                self._reset() if fault == "reset" else self._close()
                answer.close()
                self._drop_connection()
                return
            if fault == "flip" and passed <= broken_at < passed + len(block):
                at = broken_at - passed
                block = block[:at] + bytes([block[at] ^ (1 << decide.randrange(8))]) + block[at + 1 :]
            self.wfile.write(block)
            passed += len(block)

    def _answer_error(self, status: int) -> None:
        content = b'{"error": {"code": %d, "message": "a fault of the test"}}' % status
        self.send_response_only(status, http.client.responses[status])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        """Close with a reset: the other side's read fails instead of ending."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(shutdown=False)

    def _close(self, *, shutdown: bool = True) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            if shutdown:
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                # The reset is sent when the last reference to the socket is closed.
                self.rfile.close()
                self.connection.close()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _flipped(content: bytes, decide: random.Random) -> bytes:
    at = decide.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << decide.randrange(8))]) + content[at + 1 :]
