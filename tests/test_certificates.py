"""Servers with certificates that are not trusted: said in one line, at once, and what to do about it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub as stand_in
import pytest
from buckets import Bucket
from checkpoints import write_tiny
from hub import Hub
from reading import arrays
from running import Run, convert, files_below, to_maxtext_process
from tls import Front, certificate

MODEL = "qwen3-0.6b"
REPO = "Qwen/Qwen3-0.6B"

CERTIFICATES: dict[str, tuple[dict[str, Any], str]] = {
    "self-signed": ({}, "self-signed certificate"),
    "another host's": ({"host": "example.com"}, "self-signed certificate"),
    "expired": ({"days": -1}, "self-signed certificate"),
    "known, another host's": ({"host": "example.com"}, "localhost"),
    "known, expired": ({"days": -1}, "certificate has expired"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("repository") / "hf", MODEL)


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with stand_in.running(REPO) as made:
        made.add(folder, "main")
        yield made


def run(source: object, output: object, tmp_path: Path, *words: object, env: dict[str, str]) -> Run:
    return to_maxtext_process(
        f"model_name={MODEL}", f"base_output_directory={output}", f"hf_model_path={source}", *words,
        env={"HF_HOME": str(tmp_path / "home"), **env},
    )  # fmt: skip


def trusting(path: Path) -> dict[str, str]:
    """What the message says to set."""
    return {"SSL_CERT_FILE": str(path), "REQUESTS_CA_BUNDLE": str(path)}


def check(run: Run, front: Front, why: str) -> None:
    assert run.code == 3, run.stderr
    assert len(run.errors) == 1, run.stderr
    line = run.errors[0]
    assert front.url.removeprefix("https://") in line
    assert why in line
    assert "SSL_CERT_FILE" in line
    assert "REQUESTS_CA_BUNDLE" in line
    assert "Traceback" not in run.stderr
    assert "for now" not in run.stderr


@pytest.mark.parametrize("kind", CERTIFICATES)
def test_hub(kind: str, hub: Hub, tmp_path: Path) -> None:
    options, why = CERTIFICATES[kind]
    path = certificate(tmp_path / "c.pem", **options)
    before = files_below(tmp_path)
    with Front(hub.endpoint, path) as front:
        env = {"HF_ENDPOINT": front.url, **(trusting(path) if kind.startswith("known") else {})}
        check(run(REPO, tmp_path / "out", tmp_path, env=env), front, why)
        assert front.connections <= 2
    assert not hub.requests
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("cached", [True, False])
def test_where_the_hub_sends_us(cached: bool, hub: Hub, tmp_path: Path) -> None:
    """The hub is trusted, the storage of its large files is not."""
    with Front(hub.endpoint, certificate(tmp_path / "c.pem")) as front:
        hub.storage = front.url
        words = [] if cached else ["--cache_dir=none"]
        check(run(REPO, tmp_path / "out", tmp_path, *words, env={"HF_ENDPOINT": hub.endpoint}), front, "self-signed")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reading", [True, False])
def test_bucket(reading: bool, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    before = bucket.objects()
    with Front(bucket.server, certificate(tmp_path / "c.pem")) as front:
        source, output = (bucket.url("x"), tmp_path / "out") if reading else (folder, bucket.url("out"))
        check(run(source, output, tmp_path, env=dict(bucket.environment(front.url))), front, "self-signed")
        assert front.connections <= 2
    assert bucket.objects() == before
    assert not (tmp_path / "out").exists()


def test_what_the_line_says_helps(hub: Hub, bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    """From the hub into a bucket, both behind certificates of one's own; TensorStore's connections too."""
    path = certificate(tmp_path / "c.pem")
    with Front(hub.endpoint, path) as front, Front(bucket.server, path) as other:
        hub.storage = front.url
        env = {"HF_ENDPOINT": front.url, **bucket.environment(other.url), **trusting(path)}
        done = run(REPO, bucket.url("trusted"), tmp_path, "--cache_dir=none", env=env)
    assert done.code == 0, done.stderr
    expected = arrays(convert(MODEL, folder, tmp_path / "expected"))
    found = arrays(bucket.folder / "trusted" / "0")
    assert {name: array.sha256 for name, array in found.items()} == {n: a.sha256 for n, a in expected.items()}


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_file_of_certificates_that_is_none(content: bytes | None, bucket: Bucket, tmp_path: Path) -> None:
    path = tmp_path / "bundle.pem"
    if content is not None:
        path.write_bytes(content)
    with Front(bucket.server, certificate(tmp_path / "c.pem")) as front:
        env = {**bucket.environment(front.url), "REQUESTS_CA_BUNDLE": str(path)}
        start = time.monotonic()
        done = run(bucket.url("x"), tmp_path / "out", tmp_path, env=env)
    assert time.monotonic() - start < 30
    assert done.code == 2, done.stderr
    assert len(done.errors) == 1, done.stderr
    assert re.search(f"REQUESTS_CA_BUNDLE={path}", done.errors[0])
