"""What is uploaded to a bucket carries its checksum, and what arrives damaged is sent again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import buckets as servers
import pytest
from etils import epath

from converter import buckets, datafiles, retrying
from converter.errors import WorldError

CONTENT, CRC32C = b"123456789", "4waSgw=="
"""The check value of CRC-32C in every catalogue, 0xe3069283."""

REFUSAL = {
    "error": {"code": 400, "message": f'Provided CRC32C "{CRC32C}" doesn\'t match calculated CRC32C "AAAAAA==".'}
}


class Service:
    """Answers uploads as told; notes what it got."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers: list[tuple[int, Any]] = []
        self.addresses: list[str] = []
        self.conditions: list[str | None] = []
        self.described: dict[str, Any] | None = None
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(404 if service.described is None else 200, service.described or {})

            def do_POST(self) -> None:
                service.addresses.append(self.path)
                service.conditions += parse_qs(urlsplit(self.path).query).get("ifGenerationMatch", [None])
                service.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*service.answers.pop(0))

            def _answer(self, status: int, answer: Any) -> None:
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Location", "/elsewhere")
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
    return 200, {"name": "x", "bucket": "models", "generation": "5", "size": "9", "crc32c": checksum}


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


@pytest.mark.parametrize(
    "answer",
    [
        *(
            (503, "unavailable"),
            (503, {"error": "backend"}),
            (503, {"error": None}),
            (429, {"error": {"details": None}}),
        ),
        *(
            (302, {}),
            (307, {}),
            (204, {}),
            (201, []),
            (200, []),
            (200, {}),
            (200, {"crc32c": "zz"}),
            (200, {"crc32c": 5}),
        ),
    ],
)
def test_answers_of_something_else_than_the_service(
    answer: tuple[int, Any], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a company's proxy, say: nothing is stored by them, and they may go away."""
    service.answers = [answer, answer, stored(CRC32C)]
    buckets.send("gs://models/x", [CONTENT])
    assert len(service.bodies) == 3
    monkeypatch.setattr(buckets, "DEADLINE_SECONDS", 0.05)
    service.answers = [answer] * 5_000
    with pytest.raises(buckets.Unreachable):
        buckets.send("gs://models/x", [CONTENT])


def test_only_what_an_own_try_has_made_is_replaced(service: Service) -> None:
    """After one that came damaged; and after one whose answer got lost, once its damage is seen."""
    service.answers = [stored("AAAAAA=="), stored(CRC32C)]
    buckets.send("gs://models/x", [CONTENT])
    assert service.conditions == ["0", "5"]
    service.conditions.clear()
    service.described = stored("AAAAAA==")[1] | {"generation": "7"}
    service.answers = [(503, {}), (412, {}), stored(CRC32C)]
    buckets.send("gs://models/x", [CONTENT])
    assert service.conditions == ["0", "0", "7"]


def test_what_a_lost_answer_was_about_is_there(service: Service) -> None:
    service.described = stored(CRC32C)[1]
    service.answers = [(503, {}), (412, {})]
    buckets.send("gs://models/x", [CONTENT])
    assert service.conditions == ["0", "0"]


@pytest.mark.parametrize(
    "write", [lambda path: buckets.send(path, [CONTENT]), lambda path: buckets._Upload(path).close()]
)
def test_every_try_asks_whether_it_may_write(
    write: Callable[[str], None], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converter that slept for long finds out that another one has taken over before its next try."""
    answers = iter([None, WorldError("another converter has taken over")])

    def check() -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(buckets, "before_write", [check])
    service.answers = [(503, {}), stored(CRC32C)]
    with pytest.raises(WorldError, match="taken over"):
        write("gs://models/x")
    assert len(service.bodies) == 1


def test_proxies_of_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", os.environ["STORAGE_EMULATOR_HOST"])
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.example")
    monkeypatch.setattr(buckets, "DEADLINE_SECONDS", 1.0)
    service.answers = [stored(CRC32C)]
    buckets.send("gs://models/x", [CONTENT])
    assert [urlsplit(address).netloc for address in service.addresses] == ["storage.example"]


def test_no_more_is_on_its_way_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever arrives first makes room, and what is appended is whole in the objects."""
    lock, under_way, most, sent = threading.Lock(), 0, 0, {}

    def send(path: Path, pieces: list[bytes]) -> None:
        nonlocal under_way, most
        content = b"".join(pieces)
        with lock:
            under_way += len(content)
            most = max(most, under_way)
        time.sleep(0.001 * (len(content) % 7))
        with lock:
            under_way -= len(content)
            sent[path.name] = content

    monkeypatch.setattr(buckets, "send", send)
    monkeypatch.setattr(datafiles, "OBJECT_BYTES", 1000)
    files = datafiles.open_files(cast(Path, epath.Path("gs://models/x")), 4000)
    values = [bytes([i % 256]) * (100 + 37 * i % 900) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda value: files.append([value]), values))
    files.finish()
    assert 2000 < most <= 4000
    for value, place in zip(values, places, strict=True):
        content = sent[place.file.removeprefix("d/")]
        assert content[place.offset : place.offset + place.length] == value
