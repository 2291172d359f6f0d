"""What is uploaded to a bucket carries its checksum, and what arrives damaged is sent again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import buckets as servers
import pytest

from converter import buckets, retrying

CONTENT, CRC32C = b"123456789", "4waSgw=="
"""The check value of CRC-32C in every catalogue, 0xe3069283."""

REFUSAL = {
    "error": {"code": 400, "message": f'Provided CRC32C "{CRC32C}" doesn\'t match calculated CRC32C "AAAAAA==".'}
}


class Service:
    """Answers uploads as told; notes what it got."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                service.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = service.answers.pop(0)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service()
    threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True).start()
    for name, value in servers.environment(f"http://127.0.0.1:{made.server.server_port}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retrying, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(retrying, "LONGEST_WAIT", 0.002)
    buckets._client.cache_clear()
    yield made
    made.server.shutdown()
    made.server.server_close()
    buckets._client.cache_clear()


def stored(checksum: str) -> tuple[int, dict[str, Any]]:
    return 200, {"name": "x", "bucket": "models", "generation": "1", "size": "9", "crc32c": checksum}


@pytest.mark.parametrize("first", [[], [(400, REFUSAL)], [stored("AAAAAA==")], [(400, REFUSAL), stored("AAAAAA==")]])
def test_checksum_is_sent_and_compared(first: list[tuple[int, dict[str, Any]]], service: Service) -> None:
    service.answers = [*first, stored(CRC32C)]
    buckets.write("gs://models/x", CONTENT)
    assert len(service.bodies) == len(first) + 1
    for body in service.bodies:
        assert f'"crc32c": "{CRC32C}"'.encode() in body


@pytest.mark.parametrize("first", [[], [stored("AAAAAA==")], [(503, {}), stored("AAAAAA==")]])
def test_pieces_are_sent_as_one_object(first: list[tuple[int, dict[str, Any]]], service: Service) -> None:
    service.answers = [*first, stored(CRC32C)]
    buckets.send("gs://models/x", [CONTENT[:4], b"", CONTENT[4:]])
    assert service.bodies == [CONTENT] * (len(first) + 1)


@pytest.mark.parametrize("write", [buckets.write, lambda path, content: buckets.send(path, [content])])
def test_always_damaged(write: Callable[[str, bytes], None], service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "DEADLINE_SECONDS", 0.2)
    service.answers = [(400, REFUSAL), stored("AAAAAA==")] * 5_000
    with pytest.raises(buckets.Unreachable):
        write("gs://models/x", CONTENT)
    assert len(service.bodies) > 2


@pytest.mark.parametrize("write", [buckets.write, lambda path, content: buckets.send(path, [content])])
def test_other_requests_that_are_wrong_are_not_tried_again(
    write: Callable[[str, bytes], None], service: Service
) -> None:
    service.answers = [(400, {"error": {"code": 400, "message": "Invalid argument"}})] * 10
    with pytest.raises(buckets.Refused):
        write("gs://models/x", CONTENT)
    assert len(service.bodies) == 1
