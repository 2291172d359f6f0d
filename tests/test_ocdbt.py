"""Databases written here are what TensorStore reads, finds and goes on with."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensorstore as ts

from converter import datafiles
from converter.datafiles import Buffer, Place, open_files
from converter.maxtext import ocdbt
from converter.maxtext.ocdbt import Database


def opened(directory: Path, context: ts.Context | None = None) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}
    return ts.KvStore.open(spec, context=context).result()


def write(directory: Path, values: Mapping[str, Sequence[Buffer]]) -> None:
    database = Database(open_files(directory, 0))
    for key, value in values.items():
        database.write(key, value)
    database.finish()


@pytest.mark.parametrize("entries", [2, 3, 4096])
@pytest.mark.parametrize("count", [1, 2, 9, 100])
def test_tensorstore_reads_it(entries: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every height, with keys that begin alike and keys that do not."""
    monkeypatch.setattr(ocdbt, "_NODE_ENTRIES", entries)
    data = np.random.default_rng(0).integers(0, 256, (count, 200), np.uint8)
    values: dict[str, list[Buffer]] = {
        f"{'array' * (i % 7)}{i}/c/{i}": [data[i].data, b"", bytes([i])] for i in range(count)
    }
    write(tmp_path, values)
    store = opened(tmp_path)
    assert {key.decode() for key in store.list().result()} == set(values)
    for i, key in enumerate(values):
        assert store.read(key).result().value == data[i].tobytes() + bytes([i])
    assert store.read("array").result().state == "missing"
    low, high = sorted(values)[count // 3], sorted(values)[-1]
    found = store.list(ts.KvStore.KeyRange(low, high)).result()
    assert sorted(key.decode() for key in found) == [key for key in sorted(values) if low <= key < high]


def test_tensorstore_goes_on_with_it(tmp_path: Path) -> None:
    write(tmp_path, {"a": [b"1"], "b": [b"2" * 1000]})
    store = opened(tmp_path)
    store.write("c", b"3" * 1000).result()
    store.delete_range(ts.KvStore.KeyRange("a", "b")).result()
    again = opened(tmp_path)
    assert {key: again.read(key).result().value for key in again.list().result()} == {
        b"b": b"2" * 1000,
        b"c": b"3" * 1000,
    }
    versions = ts.ocdbt.dump(ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()).result()["versions"]
    assert [version["generation_number"] for version in versions] == [1, 2, 3]
    assert versions[0]["root"]["statistics"]["num_keys"] == 2
    assert versions[0]["root"]["statistics"]["num_indirect_value_bytes"] == 1001


def test_it_is_copied_by_reference(tmp_path: Path) -> None:
    """As Orbax merges databases: no value is copied."""
    write(tmp_path / "one", {"a": [b"1" * 1000]})
    write(tmp_path / "two", {"b": [b"2" * 2000]})
    context = ts.Context()
    merged = opened(tmp_path, context)
    transaction = ts.Transaction(atomic=True)
    for part in ("one", "two"):
        opened(tmp_path / part, context).experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_sync()
    assert {key: merged.read(key).result().value for key in merged.list().result()} == {
        b"a": b"1" * 1000,
        b"b": b"2" * 2000,
    }
    own = sum(path.stat().st_size for path in (tmp_path / "d").iterdir())
    assert own < 1000


def test_a_damaged_index_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a": [b"1" * 1000]})
    manifest = tmp_path / "manifest.ocdbt"
    content = bytearray(manifest.read_bytes())
    content[14] ^= 1
    manifest.write_bytes(content)
    with pytest.raises(ValueError, match="CRC-32C"):
        opened(tmp_path).list().result()


def test_nothing_is_no_database(tmp_path: Path) -> None:
    write(tmp_path / "empty", {})
    assert not (tmp_path / "empty").exists()


def test_threads_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value stays in one piece, whoever writes beside it; full files are followed by others."""
    monkeypatch.setattr(datafiles, "DATA_FILE_BYTES", 100_000)
    monkeypatch.setattr(datafiles, "_SYNC_BYTES", 10_000)
    files = open_files(tmp_path, 0)
    found: dict[int, Place] = {}

    def work(number: int) -> None:
        for i in range(number, 400, 4):
            found[i] = files.append([bytes([i % 256]) * 500, memoryview(bytes([i % 251]) * 1000)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files.finish()
    assert sum(path.stat().st_size for path in (tmp_path / "d").iterdir()) == 400 * 1500
    assert all(path.stat().st_size < 101_500 for path in (tmp_path / "d").iterdir())
    for i, place in found.items():
        content = (tmp_path / place.file).read_bytes()[place.offset :][: place.length]
        assert content == bytes([i % 256]) * 500 + bytes([i % 251]) * 1000


@pytest.mark.parametrize("at_once", [True, False])
def test_a_disk_that_fails_to_store_is_noticed(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it says so, and at the end at the latest."""
    monkeypatch.setattr(datafiles, "_SYNC_BYTES", 1 if at_once else 1000)
    files = open_files(tmp_path, 0)
    files.append([b"1"])

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(datafiles.os, "fsync", fail)

    def go_on() -> None:
        for _ in range(1000):
            files.append([b"2"])
            time.sleep(0.001)

    with pytest.raises(OSError, match="Input/output error"):
        (go_on if at_once else files.finish)()
    files.abort()
    assert open_files_below(tmp_path) == []


def test_full_files_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model has more data files than a process may have open."""
    monkeypatch.setattr(datafiles, "DATA_FILE_BYTES", 1000)
    files = open_files(tmp_path, 0)
    for _ in range(50):
        files.append([bytes(1000)])
    files.append([bytes(999)])
    deadline = time.monotonic() + 10
    while len(open_files_below(tmp_path)) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    files.finish()
    assert open_files_below(tmp_path) == []
    assert len(list((tmp_path / "d").iterdir())) == 51


def open_files_below(folder: Path) -> list[str]:
    return [file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))]


def test_folders_are_stored_and_what_closing_says_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, a file whose folder was not stored may be gone; a quota may only be told of at the end."""
    stored = []
    fsync, close = os.fsync, os.close

    def noted(descriptor: int) -> None:
        stored.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    files = open_files(tmp_path / "db", 0)
    place = files.append([b"abc"])
    files.put("a/c/0", [b"def"])
    files.finish()
    assert {tmp_path / "db", tmp_path / "db/d", tmp_path / "db/a/c", tmp_path / "db/a"} <= set(stored)
    assert stored.index(tmp_path / "db" / place.file) < stored.index(tmp_path / "db/d")
    monkeypatch.setattr(os, "fsync", fsync)

    def over_quota(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    files = open_files(tmp_path / "full", 0)
    files.append([b"abc"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", over_quota)
        with pytest.raises(OSError, match="quota"):
            files.finish()
