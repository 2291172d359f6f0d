"""Repositories made to do harm: whatever they hold, it is refused in one line, quickly, in little memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIGS, INDEX, shapes, write_tiny
from forking import Forks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import Run, files_below, to_maxtext

MODEL = "qwen3-8b"
SECONDS = 10
MEMORY = 1 << 30

FUZZ = settings(
    derandomize=True, database=None, deadline=None, max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def check(source: Path, output: Path) -> Run:
    """Plan a conversion: nothing may go wrong but in one line, and nothing may be written."""
    start = time.monotonic()
    run = to_maxtext(f"model_name={MODEL}", f"base_output_directory={output}", f"hf_model_path={source}", "--dry_run")
    assert time.monotonic() - start < SECONDS
    assert run.code in (0, 2), run.stderr
    assert "Traceback" not in run.stderr
    if run.code:
        assert len(run.errors) == 1, run.stderr
        assert len(run.errors[0]) < 4000, len(run.errors[0])
        assert "\0" not in run.errors[0]
    assert not output.exists()
    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "hf", MODEL)


SIZES = st.one_of(
    st.integers(-2, 100), st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
NAMES = st.one_of(
    st.sampled_from(
        [*shapes(CONFIGS[MODEL]), "../../x", "/etc/passwd", "a/b", "\0", "x" * 10_000, "", ".", "..", "__metadata__"]
    ),
    st.text(max_size=20),
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["BF16", "F32", "F4", "I64", "bf16", "Q"]), JSON),
        "shape": st.one_of(st.lists(SIZES, max_size=4), JSON),
        "data_offsets": st.one_of(st.lists(SIZES, min_size=2, max_size=2), JSON),
    },
)


@FUZZ
@given(
    header=st.one_of(st.dictionaries(NAMES, st.one_of(ENTRIES, JSON), max_size=5), JSON), data=st.binary(max_size=64)
)
def test_any_header(header: Any, data: bytes, source: Path, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    check(source, tmp_path / "out")


@FUZZ
@given(data=st.data())
def test_header_that_is_nearly_right(data: st.DataObject, source: Path, tmp_path: Path) -> None:
    """One value of a good header is another."""
    good = tmp_path / "good.safetensors"
    if not good.exists():
        shutil.copy(source / "model.safetensors", good)
    content = good.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = data.draw(st.sampled_from(sorted(header)))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
    header[name][key] = data.draw(st.one_of(st.lists(SIZES, max_size=4), JSON))
    if data.draw(st.booleans()):
        header[data.draw(NAMES)] = header.pop(name)
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    check(source, tmp_path / "out")


@FUZZ
@given(at=st.integers(0, 2000), patch=st.binary(min_size=1, max_size=8))
def test_any_bytes_in_a_file(at: int, patch: bytes, source: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    if not good.exists():
        shutil.copy(source / "model.safetensors", good)
    content = good.read_bytes()
    (source / "model.safetensors").write_bytes(content[:at] + patch + content[at + len(patch) :])
    check(source, tmp_path / "out")


@FUZZ
@given(index=st.one_of(st.fixed_dictionaries({"weight_map": st.dictionaries(NAMES, st.one_of(NAMES, JSON))}), JSON))
def test_any_index(index: Any, source: Path, tmp_path: Path) -> None:
    (source / INDEX).write_text(json.dumps(index))
    assert check(source, tmp_path / "out").code == 2


@FUZZ
@given(
    changes=st.dictionaries(st.one_of(st.sampled_from([*CONFIGS[MODEL], "rope_scaling", "rope_theta"]), NAMES), JSON)
)
def test_any_config(changes: dict[str, Any], source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(json.dumps({**CONFIGS[MODEL], **changes}))
    check(source, tmp_path / "out")


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_bytes_as_config(content: bytes, source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_bytes(content)
    assert check(source, tmp_path / "out").code == 2


# Single harms, each in a process of its own, whose memory is looked at


def refused(forks: Forks, source: Path, tmp_path: Path) -> Run:
    start = time.monotonic()
    message = tmp_path / "message.json"
    fork = forks.start(
        f"model_name={MODEL}", f"base_output_directory={tmp_path / 'out'}", f"hf_model_path={source}",
        f"--termination_message={message}", env={}, settings={},
    )  # fmt: skip
    try:
        fork.wait_until(lambda: fork.ended)
    finally:
        fork.send(signal.SIGKILL)
        run = fork.wait()
    assert time.monotonic() - start < SECONDS
    assert run.code == 2, run.stderr
    assert len(run.errors) == 1, run.stderr
    assert "Traceback" not in run.stderr
    peak = json.loads(message.read_bytes())["peak_memory_bytes"]["anonymous_and_shared"]
    assert peak < MEMORY, peak
    message.unlink()
    assert not (tmp_path / "out").exists()
    return run


def write_header(source: Path, text: bytes, data: bytes = b"") -> None:
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


BOMBS: dict[str, Callable[[Path], object]] = {
    "a-header-of-spaces": lambda source: write_header(source, b"{" + b" " * 99_000_000 + b"}"),
    "a-header-of-tensors": lambda source: write_header(
        source, b"{%s}" % b",".join(b'"%d":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}' % i for i in range(10**6))
    ),
    "a-header-of-lists": lambda source: write_header(source, b'{"a":[' + b"[]," * 30_000_000 + b"[]]}"),
    "a-header-of-digits": lambda source: write_header(source, b'{"a":' + b"1" * 90_000_000 + b"}"),
    "a-config-of-lists": lambda source: (source / "config.json").write_bytes(b'{"a":[' + b"[]," * 30_000_000 + b"[]]}"),
    "a-billion-layers": lambda source: (source / "config.json").write_text(
        json.dumps({**CONFIGS[MODEL], "num_hidden_layers": 10**9})
    ),
    "an-enormous-vocabulary": lambda source: (source / "config.json").write_text(
        json.dumps({**CONFIGS[MODEL], "vocab_size": 2**31 - 1})
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_bomb(kind: str, forks: Forks, source: Path, tmp_path: Path) -> None:
    BOMBS[kind](source)
    refused(forks, source, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["loop", "nowhere", "device", "endless", "fifo", "folder"])
def test_what_is_no_file(name: str, kind: str, forks: Forks, source: Path, tmp_path: Path) -> None:
    path = source / name
    path.unlink()
    match kind:
        case "loop":
            path.symlink_to(path)
        case "nowhere":
            path.symlink_to(tmp_path / "nothing")
        case "device":
            path.symlink_to("/dev/null")
        case "endless":
            path.symlink_to("/dev/zero")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    refused(forks, source, tmp_path)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\0b", "x" * 10_000, "..", "a/../../b", "\ud800"])
def test_name_of_a_tensor_stays_a_name(name: str, forks: Forks, source: Path, tmp_path: Path) -> None:
    """Nothing on disk is ever called as a tensor is."""
    content = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[name] = header.pop("model.norm.weight")
    before = files_below(tmp_path)
    write_header(source, json.dumps(header).encode(), content[8 + size :])
    refused(forks, source, tmp_path)
    assert files_below(tmp_path) == before
