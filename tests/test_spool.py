"""What is kept of a remote source, on disk and in memory, against the bytes that were put there."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path

import numpy as np
import psutil
import pytest

from converter.errors import WorldError
from converter.hf.blocks import Blocks
from converter.hf.spool import Spool

MEGABYTE = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def open_files(folder: Path) -> list[Path]:
    """Descriptors of this process's files in a folder, those without a name too."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        # The one that lists the folder is closed by now.
        with contextlib.suppress(FileNotFoundError):
            if descriptor.readlink().is_relative_to(folder):
                found.append(descriptor)
    return found


def test_spool_gives_what_was_put(tmp_path: Path) -> None:
    """Ranges of two files, put in pieces and dropped in any order, as many as fit and more."""
    decide = random.Random(3)
    files = {name: decide.randbytes(300_000) for name in ("a", "b")}
    ranges = []
    for name, content in files.items():
        edges = sorted(decide.sample(range(len(content)), 41))
        ranges += [(name, begin, end) for begin, end in itertools.pairwise(edges)]
    spool = Spool(tmp_path, ranges)
    here: list[tuple[str, int, int]] = []
    decide.shuffle(ranges)
    for name, begin, end in ranges:
        middle = decide.randint(begin, end)
        parts = [(begin, middle), (middle, end)]
        for first, last in decide.sample(parts, 2):
            assert first == last or spool.view(name, begin, end) is None
            spool.put(name, first, memoryview(files[name])[first:last])
        here.append((name, begin, end))
        if len(here) > 5:
            gone = here.pop(decide.randrange(len(here)))
            spool.drop(*gone)
            assert spool.view(*gone) is None
        for kept, first, last in here:
            start = decide.randint(first, last - 1)
            found = spool.view(kept, start, last)
            assert found is not None
            assert found == files[kept][start:last]
    assert spool.view("a", 0, 300_000) is None
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    spool.close()


def test_spool_uses_space_again(tmp_path: Path) -> None:
    content = memoryview(bytes(range(256)) * 4096)
    spool = Spool(tmp_path, [("a", number * MEGABYTE, (number + 1) * MEGABYTE) for number in range(200)])
    for number in range(200):
        spool.put("a", number * MEGABYTE, content)
        if number >= 2:
            spool.drop("a", (number - 2) * MEGABYTE, (number - 1) * MEGABYTE)
    assert {file.stat().st_blocks * 512 // MEGABYTE for file in open_files(tmp_path)} == {3}
    spool.close()


def test_spool_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"keeping what was read in .*No such file or directory"):
        Spool(tmp_path / "none", [("a", 0, 1)])


def test_blocks_are_used_again_when_nobody_looks() -> None:
    blocks = Blocks(limit=8 * MEGABYTE)
    first = blocks.take(2 * MEGABYTE)
    place = address(first)
    first[:] = b"x" * len(first)
    part = first[100:200]
    del first
    other = blocks.take(2 * MEGABYTE)
    assert address(other) != place
    other[:] = b"y" * len(other)
    assert part == b"x" * 100
    del part
    assert address(blocks.take(2 * MEGABYTE)) == place


def test_blocks_do_not_pile_up() -> None:
    blocks = Blocks(limit=8 * MEGABYTE)
    process = psutil.Process()
    before = process.memory_info().rss
    for size in range(4 * MEGABYTE, 8 * MEGABYTE, MEGABYTE // 8):
        block = blocks.take(size)
        block[:] = bytes(size)
        del block
    assert process.memory_info().rss - before < 40 * MEGABYTE, "of 190"
