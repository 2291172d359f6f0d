"""Servers made to do harm, read by ranges: whatever they say, it is refused in one line, quickly, in little memory."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hub as stand_in
import pytest
import requests
from checkpoints import CONFIGS, INDEX, shapes, write_tiny
from forking import Forks
from hub import Answer, Hub
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import arrays
from running import Run, convert, files_below, to_maxtext
from test_hostile import ENTRIES, FUZZ, JSON, MEMORY, NAMES, SECONDS, SIZES

from converter import gcs, retrying
from converter.errors import RequestError
from converter.hf import bucket as buckets
from converter.hf import remote
from converter.hf.remote import Ranges, RemoteFile, Server

MODEL = "qwen3-8b"
REPO = "Some/Model"
TOKEN = "hf_secretTokenThatNobodySees"
WEIGHTS = "model.safetensors"

FEWER = settings(FUZZ, max_examples=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("repository") / "hf", MODEL)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests(convert(MODEL, folder, tmp_path_factory.mktemp("expected") / "out"))


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("said")) as found:
        # The imports are nobody's time.
        found.run("--help", env={}, settings={})
        yield found


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process talks to; nothing is waited for between tries."""
    from huggingface_hub import constants

    with stand_in.running(REPO) as made:
        made.add(folder, "main")
        # huggingface_hub looks at HF_ENDPOINT once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", made.endpoint)
        template = f"{made.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(retrying, "FIRST_WAIT", 0.001)
        monkeypatch.setattr(retrying, "LONGEST_WAIT", 0.002)
        yield made


def digests(step: Path) -> dict[str, str]:
    return {name: array.sha256 for name, array in arrays(step).items()}


def check(output: Path, *words: object, source: str = REPO) -> Run:
    """Convert: it succeeds, or fails in one line and leaves nothing."""
    start = time.monotonic()
    run = to_maxtext(
        f"model_name={MODEL}", f"base_output_directory={output}", f"hf_model_path={source}", "--cache_dir=none",
        "--retry_seconds=0", "--threads=1", *words,
    )  # fmt: skip
    assert time.monotonic() - start < SECONDS
    check_one_line(run)
    if run.code:
        assert not output.exists()
    return run


def check_one_line(run: Run) -> None:
    assert run.code in (0, 2, 3), run.stderr
    assert "Traceback" not in run.stderr
    if run.code:
        assert len(run.errors) == 1, run.stderr
        assert len(run.errors[0]) < 4000
        assert run.errors[0].isprintable()


def replace(hub: Hub, name: str, content: bytes) -> None:
    """Another content of a file; what the hub knows it by follows."""
    for files in hub.files.values():
        files[name] = content


# What the files hold


@FEWER
@given(
    header=st.one_of(st.dictionaries(NAMES, st.one_of(ENTRIES, JSON), max_size=5), JSON),
    data=st.binary(max_size=64),
    length=st.one_of(st.none(), st.sampled_from([0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])),
)
def test_any_header(header: Any, data: bytes, length: int | None, hub: Hub, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    replace(hub, WEIGHTS, struct.pack("<Q", len(text) if length is None else length) + text + data)
    assert check(tmp_path / "out").code == 2


@FEWER
@given(at=st.integers(0, 2000), patch=st.binary(min_size=1, max_size=8))
def test_any_bytes_in_a_file(at: int, patch: bytes, hub: Hub, folder: Path, tmp_path: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    replace(hub, WEIGHTS, content[:at] + patch + content[at + len(patch) :])
    check(tmp_path / "out", "--dry_run")


ODD = [
    *("../x", "/etc/passwd", "a\0b", "x" * 10_000, "..", "", "a?b.safetensors", "%2e%2e.safetensors"),
    *("../x.safetensors", "a/b.safetensors", "/etc/x.safetensors", "a\0.safetensors", "\ud800.safetensors"),
    f"{'x' * 10_000}.safetensors",
]


@FEWER
@given(name=st.one_of(st.sampled_from(ODD), NAMES), known=st.booleans())
def test_index_that_names_odd_files(name: str, known: bool, hub: Hub, folder: Path, tmp_path: Path) -> None:
    replace(hub, INDEX, json.dumps({"weight_map": {"model.norm.weight": name}}).encode())
    before = files_below(tmp_path)
    if known and "\ud800" not in name:
        # The hub says that it has such a file.
        replace(hub, name, (folder / WEIGHTS).read_bytes())
    try:
        assert check(tmp_path / "out").code == 2
    finally:
        for files in hub.files.values():
            files.pop(name, None)
    assert files_below(tmp_path) == before


# What the answers say of themselves

LOCATIONS = [
    *(
        "file:///etc/passwd",
        "ftp://localhost/x",
        "gopher:x",
        "data:,x",
        "//",
        "/",
        "http://",
        "http://[",
        "x" * 5000,
        "",
    ),
    *(
        "http://a\u00e9..b/",
        "http://localhost:99999/",
        "http://localhost:x/",
        "http://user:word@/",
        "http:///etc/passwd",
    ),
    f"http://{'a' * 300}.example/",
]
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Content-Range": st.one_of(
            st.builds("bytes {}-{}/{}".format, SIZES, SIZES, st.one_of(SIZES, st.just("*"))),
            st.sampled_from(["", "bytes", "bytes */5", f"bytes {'9' * 5000}-1/1", "items 0-7/8"]),
        ),
        "Content-Length": st.one_of(
            st.integers(-2, 20000).map(str), st.sampled_from(["", "x", "1, 2", str(2**63), str(2**64), "9" * 5000])
        ),
        "Content-Encoding": st.sampled_from(["gzip", "br", "deflate", "identity", "zstd", "x", "gzip, gzip"]),
        "Transfer-Encoding": st.sampled_from(["chunked", "gzip, chunked", "x"]),
        "Retry-After": st.one_of(
            st.sampled_from(["0", "-1", "1e999", "nan", "Fri, 21 Oct 99999999999 07:28:00 GMT", "9" * 5000]),
            st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=8),
        ),
        "Location": st.sampled_from(LOCATIONS),
    },
)  # fmt: skip
STATUSES = st.sampled_from(
    [200, 200, 206, 206, 206, 204, 300, 301, 302, 304, 307, 400, 401, 404, 416, 418, 429, 500, 600, 999]
)


@FEWER
@given(
    status=st.one_of(st.none(), STATUSES),
    headers=HEADERS,
    change=st.sampled_from(["", "longer", "shorter", "gzip", "empty"]),
    what=st.sampled_from(["/storage/", "/resolve/", WEIGHTS, "config.json", "/api/"]),
    first=st.integers(0, 3),
)
def test_lying_answers(
    status: int | None, headers: dict[str, str], change: str, what: str, first: int, hub: Hub,
    expected: dict[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    """From a certain answer on. A run that succeeds all the same has read what is right."""
    asked = itertools.count()

    def lie(path: str, answer: Answer) -> Answer:
        if what not in path or next(asked) < first:
            return answer
        body = answer[2]
        body = {
            "": body, "longer": body + b"x" * 100_000, "shorter": body[:-1], "gzip": gzip.compress(body), "empty": b"",
        }[change]  # fmt: skip
        fitting = {"Content-Length": str(len(body))} if change in ("gzip", "empty") else {}
        # Then what is missing is not waited for.
        return status or answer[0], {**answer[1], **fitting, **headers, "Connection": "close"}, body

    hub.answer = lie
    if check(tmp_path / "out", "--if_exists=overwrite").code == 0:
        assert digests(tmp_path / "out" / "0") == expected
        for path in sorted((tmp_path / "out").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "out").rmdir()


@pytest.mark.parametrize("what", ["/api/", "/resolve/", "/storage/"])
def test_redirections_to_odd_places(what: str, hub: Hub, tmp_path: Path) -> None:
    for location in LOCATIONS:
        lie = (302, {"Location": location, "Content-Length": "0"}, b"")
        hub.answer = lambda path, usual, lie=lie: lie if what in path else usual
        run = check(tmp_path / "out")
        assert run.code in (2, 3), location
        if location.startswith(("file:", "ftp:", "data:", "gopher:")):
            assert run.code == 2, run.stderr
            assert "where nothing is read from" in run.stderr


@FEWER
@given(
    place=st.sampled_from(["", "siblings", "lfs"]),
    which=st.integers(0, 100),
    value=st.one_of(
        st.sampled_from(["../../../x", "0" * 40, "0" * 64, "", "main", "a?b", "\ud800"]),
        SIZES,
        st.integers(0, 30000),
        JSON,
    ),
)
def test_any_answer_about_a_model(place: str, which: int, value: Any, hub: Hub, tmp_path: Path) -> None:
    """One value of a good answer is another."""

    def lie(path: str, answer: Answer) -> Answer:
        if not path.startswith("/api/"):
            return answer
        info = json.loads(answer[2])
        described = info
        if place:
            described = next(entry for entry in info["siblings"] if place == "siblings" or "lfs" in entry)
            described = described["lfs"] if place == "lfs" else described
        described[sorted(described)[which % len(described)]] = value
        body = json.dumps(info).encode()
        return answer[0], {**answer[1], "Content-Length": str(len(body))}, body

    hub.answer = lie
    check(tmp_path / "out", "--dry_run")
    assert files_below(tmp_path) == set()


@FEWER
@given(
    text=st.one_of(st.text(max_size=40), st.from_regex(r"(Mon|Fri), \d{1,9} (Jan|Feb) \d{1,12} \d+:\d+:\d+ \S{0,9}"))
)
def test_any_retry_after(text: str) -> None:
    assert retrying.retry_after(text) >= 0


# Single harms, each in a process of its own, whose memory is looked at


def endless(head: bytes, block: bytes) -> Iterable[bytes]:
    """Until the other side has enough; 20 GB at most."""
    return itertools.chain([head], itertools.repeat(block, 20 * 10**9 // len(block)))


_SPACES = b" " * 99_000_000
_GZIPPED = gzip.compress(b" " * 10**8, 1) * 10


def where(part: str, answer: Callable[[Answer], Answer | Iterable[bytes]]) -> Callable[[Hub], None]:
    def arm(hub: Hub) -> None:
        hub.answer = lambda path, usual: answer(usual) if part in path else usual

    return arm


def many_headers(text: Callable[[int], bytes], shards: int) -> Callable[[Hub], None]:
    """Shards with large headers."""

    def arm(hub: Hub) -> None:
        names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(shards)]
        replace(hub, INDEX, json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}).encode())
        for i, name in enumerate(names):
            header = text(i)
            replace(hub, name, struct.pack("<Q", len(header)) + header)

    return arm


def _tensors(shard: int) -> bytes:
    entries = (b'"%d-%d":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}' % (shard, i) for i in range(50_000))
    return b"{%s}" % b",".join(entries)


def _huge(hub: Hub, rows: int) -> None:
    """A large vocabulary that is nowhere: config.json, header, sizes and answers agree on it."""
    config = {**CONFIGS[MODEL], "vocab_size": rows}
    entries, end = {}, 0
    for name, shape in shapes(config).items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    content = struct.pack("<Q", len(header)) + header
    for name in list(*hub.files.values()):
        if name.endswith(".safetensors") or name == INDEX:
            del next(iter(hub.files.values()))[name]
    replace(hub, "config.json", json.dumps(config).encode())
    replace(hub, WEIGHTS, content)
    size = len(content) + end
    hub.sizes = {WEIGHTS: size}

    def answer(path: str, usual: Answer) -> Answer:
        status, headers, body = usual
        if "/storage/" in path and "Content-Range" in headers:
            headers["Content-Range"] = f"{headers['Content-Range'].partition('/')[0]}/{size}"
        return status, headers, body

    hub.answer = answer


HARMS: dict[str, Callable[[Hub], None]] = {
    "an-answer-without-end": where("/api/", lambda _: endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 10**6)),
    "a-redirection-without-end": where(
        "/resolve/", lambda _: endless(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", b" " * 10**6)
    ),
    "an-error-without-end": where("/api/", lambda _: endless(b"HTTP/1.1 500 No\r\n\r\n", b" " * 10**6)),
    "headers-without-end": where("/api/", lambda _: endless(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 10**5)),
    "gzip-of-a-gigabyte": where(
        "/api/", lambda _: (200, {"Content-Encoding": "gzip", "Content-Length": str(len(_GZIPPED))}, _GZIPPED)
    ),
    "redirections-in-a-circle": where("/storage/", lambda _: (302, {"Location": "/storage/x"}, b"")),
    "large-headers": many_headers(lambda _: b"{" + _SPACES + b"}", 8),
    "many-tensors": many_headers(_tensors, 6),
    "a-vocabulary-that-is-prime": lambda hub: _huge(hub, 2**31 - 1),
    "a-vocabulary-of-petabytes": lambda hub: _huge(hub, 2**44),
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMS)
def test_harm(kind: str, folder: Path, forks: Forks, tmp_path: Path) -> None:
    message = tmp_path / "message.json"
    with stand_in.running(REPO) as hub:
        hub.add(folder, "main")
        HARMS[kind](hub)
        start = time.monotonic()
        run = forks.run(
            f"model_name={MODEL}", f"base_output_directory={tmp_path / 'out'}", f"hf_model_path={REPO}",
            "--cache_dir=none", "--retry_seconds=2", f"--termination_message={message}",
            env={"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")},
            # Enough to take long on a busy machine.
            settings={"hf.repository._MOST_TENSORS": 80_000},
        )  # fmt: skip
        assert time.monotonic() - start < SECONDS
    assert run.code in (2, 3), run.stderr
    check_one_line(run)
    peak = json.loads(message.read_bytes())["peak_memory_bytes"]["anonymous_and_shared"]
    assert peak < MEMORY, peak
    assert files_below(tmp_path) == {"message.json"}


@pytest.mark.parametrize("what", ["/api/", "/storage/"])
def test_a_server_that_drips(what: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, all of them never: that is no better than a server that does not answer."""
    monkeypatch.setattr(remote, "_TIMEOUT", (10.0, 0.3))

    def drip(status: int, headers: dict[str, str], body: bytes) -> Iterator[bytes]:
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        yield f"HTTP/1.1 {status} OK\r\n{told}\r\n".encode()
        for i in range(len(body)):
            time.sleep(0.1)
            yield body[i : i + 1]

    hub.answer = lambda path, usual: drip(*usual) if what in path else usual
    start = time.monotonic()
    run = check(tmp_path / "out", "--retry_seconds=1")
    assert 1 < time.monotonic() - start < 10
    assert run.code == 3
    assert re.search(r"only \d bytes came in 0 s; gave up after", run.stderr), run.stderr


# Where the token goes


class Other:
    """A server that nobody's token is meant for; it notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[str | None] = []
        other = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                other.shown.append(self.headers["Authorization"])
                self.send_response(200)
                self.send_header("Content-Length", "8")
                self.send_header("Content-Range", "bytes 0-7/100")
                self.end_headers()
                self.wfile.write(b"8 bytes.")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://localhost:{self._server.server_port}/x"

    def __enter__(self) -> Other:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("what", ["/api/", "/resolve/"])
def test_the_hubs_token_stays_with_the_hub(
    what: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Other() as other:
        hub.answer = lambda path, usual: (
            (302, {"Location": other.url, "Content-Length": "0"}, b"") if what in path else usual
        )
        run = check(tmp_path / "out")
    assert run.code
    assert TOKEN not in run.stderr
    assert other.shown, run.stderr
    assert set(other.shown) == {None}
    assert {request.authorization for request in hub.requests} == {f"Bearer {TOKEN}"}


def test_a_buckets_token_stays_with_the_service(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session authorises whatever it asks for, so it asks for nothing else."""
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr(gcs, "_credentials", lambda _: Credentials(TOKEN))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", hub.endpoint)
    listing = json.dumps({"items": [{"name": "f/config.json", "size": "100", "generation": "1"}]}).encode()
    with Other() as other:

        def answer(path: str, usual: Answer) -> Answer:
            if "alt=media" in path:
                return 302, {"Location": other.url, "Content-Length": "0"}, b""
            return 200, {"Content-Length": str(len(listing))}, listing

        hub.answer = answer
        ranges = Ranges(buckets.find(buckets.BucketFolder("models", "f/"), seconds=0.05))
        for _ in range(2):
            with pytest.raises(Exception, match="HTTP 302"):
                ranges.read("config.json", 0, memoryview(bytearray(8)))
    assert other.shown == []
    assert {request.authorization for request in hub.requests} == {f"Bearer {TOKEN}"}


# A bucket's listing


OBJECTS = st.fixed_dictionaries(
    {"name": st.one_of(NAMES.map("f/{}".format), st.sampled_from(["f/config.json", "f/model.safetensors"]), JSON)},
    optional={
        "size": st.one_of(SIZES.map(str), JSON),
        "generation": st.one_of(SIZES.map(str), st.just("../../../x"), JSON),
        "crc32c": st.one_of(st.sampled_from(["AAAAAA==", "AA", "\u00e9", ""]), JSON),
    },
)


@FEWER
@given(
    listing=st.one_of(
        JSON,
        st.fixed_dictionaries(
            {}, optional={"items": st.one_of(st.lists(OBJECTS, max_size=3), JSON), "nextPageToken": JSON}
        ),
    )
)
def test_any_listing(listing: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", hub.endpoint)
    gcs._credentials.cache_clear()
    body = json.dumps(listing).encode()
    hub.answer = lambda path, usual: (200, {"Content-Length": str(len(body))}, body)
    for cache in ("none", str(tmp_path / "cache" / "below")):
        assert check(tmp_path / "out", f"--cache_dir={cache}", source="gs://models/f").code in (2, 3)
    assert not {name for name in files_below(tmp_path) if not name.startswith("cache")}


def test_range_of_another_file_is_refused(hub: Hub) -> None:
    """The size in a range's answer is another than the hub's list says: it has changed."""
    content = b"0123456789"
    (commit,) = hub.files
    replace(hub, "config.json", content)
    file = RemoteFile("config.json", 11, f"{hub.endpoint}/{REPO}/resolve/{commit}/config.json")
    server = Server("it", {"config.json": file}, requests.Session, lambda name, status: RequestError(f"{status}"), 0.05)
    with pytest.raises(RequestError, match="10 bytes and not 11"):
        Ranges(server).read("config.json", 2, memoryview(bytearray(3)))
