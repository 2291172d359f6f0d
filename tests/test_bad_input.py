"""Whatever is wrong is said in one line, with the exit code that Jobs rely on, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BFLOAT16, CONFIGS, INDEX, Config, Tensors, random_tensors, write_folder, write_tiny
from reading import arrays, values
from running import Run, convert, files_below, to_maxtext, to_maxtext_process
from safetensors.numpy import save_file

from converter import convert as converting

Tiny = Callable[[str], Path]

MODEL = "qwen3-8b"
KERNEL = "model.layers.1.mlp.down_proj.weight"


def convert_badly(source: Path, output: Path, *words: object, model_name: str = MODEL) -> Run:
    """Run a conversion that is to fail."""
    return to_maxtext(
        f"model_name={model_name}", f"base_output_directory={output}", f"--hf_model_path={source}", *words
    )


def refused(run: Run, code: int, *parts: str) -> None:
    """One error line with these parts, and this exit code."""
    assert run.code == code, run.stderr
    lines = run.stderr.splitlines()
    assert len(run.errors) == 1, run.stderr
    assert lines[-1] == run.errors[0]
    assert "Traceback" not in run.stderr
    for part in parts:
        assert part in run.errors[0], run.errors[0]


def check_refused(source: Path, tmp_path: Path, *parts: str, model_name: str = MODEL) -> None:
    """Converting the folder is refused for good, and nothing is written: not a file, not a directory."""
    root = tmp_path / "empty"
    root.mkdir()
    before = files_below(source) if source.is_dir() else None
    run = convert_badly(source, root / "new" / "out", f"--report={root / 'report.json'}", model_name=model_name)
    refused(run, 2, *parts)
    assert run.stderr.count("\n") == 1, run.stderr
    assert files_below(root) == set()
    assert before == (files_below(source) if source.is_dir() else None)


# Folders


def test_folder_does_not_exist(tmp_path: Path) -> None:
    check_refused(tmp_path / "nothing", tmp_path, "nothing")


def test_folder_is_a_file(tiny: Tiny, tmp_path: Path) -> None:
    check_refused(tiny(MODEL) / "model.safetensors", tmp_path, "model.safetensors", "is a file")


def test_folder_is_empty(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    check_refused(tmp_path / "hf", tmp_path, "config.json")


def test_no_config(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL)
    (source / "config.json").unlink()
    check_refused(source, tmp_path, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", '{"model_type": "qwen3"', "[" * 100_000])
def test_broken_config(text: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL)
    (source / "config.json").write_bytes(text.encode("latin-1"))
    check_refused(source, tmp_path, "config.json")


def test_no_weights(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL)
    (source / "model.safetensors").unlink()
    check_refused(source, tmp_path, "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_only_pickles(name: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL)
    (source / "model.safetensors").rename(source / name)
    check_refused(source, tmp_path, "safetensors", "save_pretrained")


def test_shards_without_an_index(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, shards=2)
    (source / INDEX).unlink()
    check_refused(source, tmp_path, INDEX)


# Indexes


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    check_refused(source, tmp_path, "model-00002-of-00003.safetensors")


def test_two_files_with_one_tensor(tmp_path: Path) -> None:
    config = CONFIGS[MODEL]
    tensors = random_tensors(config)
    source = write_folder(tmp_path / "hf", config, tensors, shards=2)
    second = "model-00002-of-00002.safetensors"
    weight_map = json.loads((source / INDEX).read_bytes())["weight_map"]
    part = {name: tensors[name] for name, file in weight_map.items() if file == second}
    save_file({**part, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}, source / second)
    check_refused(source, tmp_path, "model.embed_tokens.weight", "model-00001-of-00002.safetensors", second)


def change_index(source: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((source / INDEX).read_bytes())
    change(index)
    (source / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda index: index.pop("weight_map"), "weight_map"),
        (lambda index: index.update(weight_map={}), "weight_map"),
        (lambda index: index.update(weight_map=[1]), "weight_map"),
        (lambda index: index["weight_map"].update({KERNEL: "../../etc/passwd"}), "passwd"),
        (lambda index: index["weight_map"].update({KERNEL: "/etc/passwd"}), "passwd"),
        (lambda index: index["weight_map"].update({KERNEL: 5}), KERNEL),
        (lambda index: index["weight_map"].update({KERNEL: "model-00001-of-00002.safetensors"}), KERNEL),
        (lambda index: index["weight_map"].update({"other": "model-00001-of-00002.safetensors"}), "other"),
    ],
    ids=["no-map", "empty-map", "list", "parent", "absolute", "number", "wrong-file", "unknown-tensor"],
)
def test_broken_index(change: Callable[[dict[str, Any]], Any], part: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, shards=2)
    change_index(source, change)
    check_refused(source, tmp_path, part)


# Files


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def change_entry(content: bytes, **changes: Any) -> bytes:
    header, data = header_of(content)
    header[KERNEL] = {**header[KERNEL], **changes}
    return with_header(header, data)


def shift_entry(content: bytes) -> bytes:
    header, data = header_of(content)
    header[KERNEL]["data_offsets"] = [offset + 2 for offset in header[KERNEL]["data_offsets"]]
    return with_header(header, data)


def duplicate_entry(content: bytes) -> bytes:
    header, data = header_of(content)
    entry = f"{json.dumps('model.norm.weight')}: {json.dumps(header['model.norm.weight'])}"
    return with_header((json.dumps(header)[:-1] + ", " + entry + "}").encode(), data)


BROKEN_FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "seven-bytes": lambda content: content[:7],
    "only-the-length": lambda content: content[:8],
    "half-a-header": lambda content: content[:200],
    "truncated": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "trailing-bytes": lambda content: content + b"\0",
    "header-longer-than-the-file": lambda content: (len(content)).to_bytes(8, "little") + content[8:],
    "huge-header": lambda content: b"\xff" * 8 + content[8:],
    "header-no-json": lambda content: with_header(b"{" * 64, header_of(content)[1]),
    "header-a-list": lambda content: with_header(b"[]", b""),
    "header-deep": lambda content: with_header(b'{"a":' * 50_000, b""),
    "header-no-utf8": lambda content: with_header(b'{"\xff": 1}', b""),
    "no-tensors": lambda content: with_header({}, b""),
    "only-metadata": lambda content: with_header({"__metadata__": {"format": "pt"}}, b""),
    "unknown-dtype": lambda content: change_entry(content, dtype="Q7"),
    "no-dtype": lambda content: change_entry(content, dtype=None),
    "negative-shape": lambda content: change_entry(content, shape=[-32, -48]),
    "shape-no-list": lambda content: change_entry(content, shape="32x48"),
    "shape-too-large": lambda content: change_entry(content, shape=[32, 49]),
    "huge-shape": lambda content: change_entry(content, shape=[2**62, 2**62]),
    "no-offsets": lambda content: change_entry(content, data_offsets=None),
    "backward-offsets": lambda content: change_entry(content, data_offsets=[3072, 0]),
    "float-offsets": lambda content: change_entry(content, data_offsets=[0.0, 3072.0]),
    "overlapping": shift_entry,
    "a-name-twice": duplicate_entry,
    "a-web-page": lambda content: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "an-lfs-pointer": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_broken_file(kind: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL)
    file = source / "model.safetensors"
    file.write_bytes(BROKEN_FILES[kind](file.read_bytes()))
    part = "model.embed_tokens.weight" if kind in ("no-tensors", "only-metadata") else str(file)
    check_refused(source, tmp_path, part)


def test_broken_file_among_shards(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, shards=3)
    file = source / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    check_refused(source, tmp_path, str(file), "truncated")


# Tensors


def changed(change: Callable[[Tensors], Any], tmp_path: Path, model_name: str = MODEL, **config: Any) -> Path:
    """The tiny model with other tensors than its config.json asks for."""
    whole: Config = {**CONFIGS[model_name], **config}
    tensors = random_tensors(whole)
    change(tensors)
    return write_folder(tmp_path / "hf", whole, tensors)


@pytest.mark.parametrize(
    ("name", "model_name"),
    [
        (KERNEL, MODEL),
        ("model.embed_tokens.weight", MODEL),
        ("model.norm.weight", MODEL),
        ("lm_head.weight", MODEL),
        ("model.layers.0.self_attn.q_norm.weight", MODEL),
        ("model.layers.0.self_attn.k_proj.bias", "qwen2.5-7b"),
        ("model.layers.3.pre_feedforward_layernorm.weight", "gemma2-2b"),
    ],
)
def test_missing_tensor(name: str, model_name: str, tmp_path: Path) -> None:
    source = changed(lambda tensors: tensors.pop(name), tmp_path, model_name)
    hint = "tie_word_embeddings" if name == "lm_head.weight" else "is it a complete checkpoint"
    check_refused(source, tmp_path, name, "missing", hint, model_name=model_name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "visual.patch_embed.proj.weight",
        "odd\nname",
    ],
)
def test_extra_tensor(name: str, tmp_path: Path) -> None:
    source = changed(lambda tensors: tensors.update({name: np.zeros((4, 4), BFLOAT16)}), tmp_path)
    check_refused(source, tmp_path, " ".join(name.split()))


def test_layer_beyond_config(tmp_path: Path) -> None:
    """A config.json that says fewer layers than the weights have is no wish to cut them."""
    tensors = random_tensors(CONFIGS[MODEL])
    source = write_folder(tmp_path / "hf", {**CONFIGS[MODEL], "num_hidden_layers": 1}, tensors)
    check_refused(source, tmp_path, "model.layers.1.")


@pytest.mark.parametrize("model_name", ["llama2-7b", "llama3.1-8b", "qwen2.5-7b", MODEL])
def test_rotary_frequencies_are_ignored(model_name: str, tmp_path: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    source = changed(lambda tensors: tensors.update(frequencies), tmp_path, model_name)
    plain = changed(lambda tensors: None, tmp_path / "plain", model_name)
    found = values(convert(model_name, source, tmp_path / "out"))
    expected = values(convert(model_name, plain, tmp_path / "expected"))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (KERNEL, (48, 32)),
        (KERNEL, (32, 49)),
        (KERNEL, (31, 48)),
        (KERNEL, (32 * 48,)),
        (KERNEL, (1, 32, 48)),
        (KERNEL, (0, 48)),
        (KERNEL, ()),
        ("model.embed_tokens.weight", (65, 32)),
        ("model.embed_tokens.weight", (32, 64)),
        ("model.norm.weight", (1, 32)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 32)),
        ("lm_head.weight", (32, 64)),
    ],
    ids=str,
)
def test_shape(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    source = changed(lambda tensors: tensors.update({name: np.zeros(shape, BFLOAT16)}), tmp_path)
    check_refused(source, tmp_path, name, str(list(shape)))


def test_transposed_tensor_is_recognised(tmp_path: Path) -> None:
    source = changed(lambda tensors: tensors.update({KERNEL: tensors[KERNEL].T.copy()}), tmp_path)
    check_refused(source, tmp_path, KERNEL, "transposed")


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "int32", "int64", "bool", "float8_e4m3fn"])
def test_unsupported_dtype(dtype: str, tmp_path: Path) -> None:
    import ml_dtypes

    made = np.dtype(getattr(ml_dtypes, dtype)) if dtype.startswith("float8") else np.dtype(dtype)
    source = changed(lambda tensors: tensors.update({KERNEL: np.zeros((32, 48), made)}), tmp_path)
    check_refused(source, tmp_path, KERNEL, "dtype")


# Tied embeddings


def test_untied_config_without_output_embedding(tmp_path: Path) -> None:
    source = changed(lambda tensors: None, tmp_path, "qwen3-0.6b")
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    check_refused(source, tmp_path, "lm_head.weight", model_name="qwen3-0.6b")


@pytest.mark.parametrize("model_name", ["qwen3-0.6b", "gemma2-2b"])
def test_tied_with_an_equal_output_embedding(model_name: str, tmp_path: Path) -> None:
    def tie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    source = changed(tie, tmp_path, model_name)
    found = values(convert(model_name, source, tmp_path / "out"))
    assert "decoder.logits_dense.kernel" not in found


@pytest.mark.parametrize(
    "head",
    [
        lambda embedding: np.where(np.arange(embedding.size).reshape(embedding.shape) == 5, 9, embedding),
        lambda embedding: embedding[:-1],
        lambda embedding: embedding.astype(np.float32),
    ],
    ids=["one-element", "shape", "dtype"],
)
@pytest.mark.parametrize("model_name", ["qwen3-0.6b", "gemma2-2b"])
def test_tied_with_another_output_embedding(
    head: Callable[[np.ndarray], np.ndarray], model_name: str, tmp_path: Path
) -> None:
    def add(tensors: Tensors) -> None:
        made = head(tensors["model.embed_tokens.weight"])
        tensors["lm_head.weight"] = np.ascontiguousarray(made if made.dtype == np.float32 else made.astype(BFLOAT16))

    check_refused(changed(add, tmp_path, model_name), tmp_path, "lm_head.weight", "tie", model_name=model_name)


# config.json


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        {"architectures": ["BertModel"]},
        {"architectures": None, "model_type": "qwen2"},
        {"architectures": [], "model_type": None},
        {"architectures": "Qwen2ForCausalLM"},
        {"architectures": [None]},
    ],
    ids=str,
)
def test_other_architecture(changes: Config, tmp_path: Path) -> None:
    check_refused(write_tiny(tmp_path / "hf", MODEL, **changes), tmp_path, MODEL)


@pytest.mark.parametrize(
    "quantisation",
    [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}, {}, "gptq"],
    ids=str,
)
def test_quantised(quantisation: Any, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, quantization_config=quantisation)
    method = quantisation.get("quant_method", "") if isinstance(quantisation, dict) else ""
    check_refused(source, tmp_path, "quantised", method)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -4, "32", 32.5, True, [32], 2**40])
def test_unusable_size(key: str, value: Any, tmp_path: Path) -> None:
    source = changed(lambda tensors: None, tmp_path)
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, key: value}))
    check_refused(source, tmp_path, key)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_missing_size(key: str, tmp_path: Path) -> None:
    source = changed(lambda tensors: None, tmp_path)
    config = json.loads((source / "config.json").read_bytes())
    del config[key]
    (source / "config.json").write_text(json.dumps(config))
    check_refused(source, tmp_path, key)


def test_odd_number_of_gemma2_layers(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", "gemma2-2b", num_hidden_layers=3)
    check_refused(source, tmp_path, "3 layers", model_name="gemma2-2b")


# An output that exists


@pytest.fixture
def existing(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A source and a finished checkpoint of it."""
    source = shutil.copytree(tiny(MODEL), tmp_path / "hf")
    return source, convert(MODEL, source, tmp_path / "out")


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a folder: inode, time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("words", [[], ["--if_exists=refuse"]], ids=["default", "refuse"])
def test_existing_output_is_refused(words: list[str], existing: tuple[Path, Path]) -> None:
    source, step = existing
    before = snapshot(step.parent)
    refused(convert_badly(source, step.parent, *words), 2, str(step), "--if_exists")
    assert snapshot(step.parent) == before


@pytest.mark.parametrize("words", [[], ["--threads=1"], ["--memory_budget=1MB"], ["run_name=other"]], ids=str)
def test_existing_output_of_the_same_request_is_skipped(words: list[str], existing: tuple[Path, Path]) -> None:
    source, step = existing
    before = snapshot(step.parent)
    run = convert_badly(source, step.parent, "--if_exists=skip", *words)
    assert run.code == 0, run.stderr
    assert not run.errors
    assert snapshot(step.parent) == before


def test_missing_output_is_made_with_skip(tiny: Tiny, tmp_path: Path) -> None:
    step = convert(MODEL, tiny(MODEL), tmp_path / "out", "--if_exists=skip")
    assert (step / "items" / "_METADATA").exists()


@pytest.mark.parametrize(
    "word",
    [
        "scan_layers=false",
        "--save_dtype=float32",
        "vocab_size=65",
        "base_num_decoder_layers=1",
        "--compression=none",
        "--chunk_byte_size=1000",
        "checkpoint_storage_use_zarr3=false",
        "checkpoint_storage_use_ocdbt=false",
        "--simulated_cpu_devices_count=8",
        "param_scan_axis=0",
    ],
)
def test_existing_output_of_another_request_is_not_skipped(word: str, existing: tuple[Path, Path]) -> None:
    source, step = existing
    before = snapshot(step.parent)
    refused(convert_badly(source, step.parent, "--if_exists=skip", word), 2, str(step))
    assert snapshot(step.parent) == before


def test_existing_output_of_another_source_is_not_skipped(existing: tuple[Path, Path]) -> None:
    source, step = existing
    before = snapshot(step.parent)
    write_tiny(source, MODEL, seed=1)
    refused(convert_badly(source, step.parent, "--if_exists=skip"), 2, str(step))
    assert snapshot(step.parent) == before


@pytest.mark.parametrize(
    "name", ["_CHECKPOINT_METADATA", "items/_METADATA", "items/manifest.ocdbt", "items/d", "items"]
)
def test_incomplete_output_is_not_skipped(name: str, existing: tuple[Path, Path]) -> None:
    source, step = existing
    if (step / name).is_dir():
        shutil.rmtree(step / name)
    else:
        (step / name).unlink()
    refused(convert_badly(source, step.parent, "--if_exists=skip"), 2, str(step))


def test_foreign_checkpoint_is_not_skipped(existing: tuple[Path, Path]) -> None:
    """One that MaxText made says nothing of its request."""
    source, step = existing
    for path in step.iterdir():
        if path.name not in ("items", "_CHECKPOINT_METADATA", "commit_success.txt"):
            path.unlink()
    refused(convert_badly(source, step.parent, "--if_exists=skip"), 2, str(step))


def test_overwrite_replaces(existing: tuple[Path, Path], tmp_path: Path) -> None:
    source, step = existing
    write_tiny(source, MODEL, seed=1)
    assert convert(MODEL, source, step.parent, "--if_exists=overwrite", "scan_layers=false") == step
    assert {path.name for path in step.parent.iterdir()} == {"0"}
    expected = arrays(convert(MODEL, source, tmp_path / "expected", "scan_layers=false"))
    found = arrays(step)
    assert {name: array.sha256 for name, array in found.items()} == {
        name: array.sha256 for name, array in expected.items()
    }


def test_failed_overwrite_keeps_what_was_there(existing: tuple[Path, Path]) -> None:
    source, step = existing
    before = snapshot(step.parent)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(convert_badly(source, step.parent, "--if_exists=overwrite"), 2, "truncated")
    assert snapshot(step.parent) == before


def test_what_is_no_checkpoint_is_not_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    precious = tmp_path / "out" / "0" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    refused(convert_badly(tiny(MODEL), tmp_path / "out", "--if_exists=overwrite"), 2, str(precious.parent))
    assert files_below(tmp_path / "out") == {"0", "0/thesis.tex"}


@pytest.mark.parametrize("mode", ["refuse", "skip", "overwrite"])
def test_output_step_is_a_file(mode: str, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0").write_text("")
    refused(convert_badly(tiny(MODEL), tmp_path / "out", f"--if_exists={mode}"), 2, str(tmp_path / "out" / "0"))
    assert files_below(tmp_path / "out") == {"0"}


def test_neighbours_are_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("1", "notes.txt", "tensorboard/events"):
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    convert(MODEL, tiny(MODEL), tmp_path / "out")
    for name in ("1", "notes.txt", "tensorboard/events"):
        assert (tmp_path / "out" / name).read_text() == "mine"


# Disks


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory of its own; skips where mounting is not permitted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_is_too_small(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, vocab_size=16384)
    with mounted(tmp_path / "disk", "size=1m") as disk:
        run = convert_badly(source, disk / "new" / "out")
        refused(run, 3, "space", str(disk))
        assert files_below(disk) == set()


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """Enough by the estimate, for weights compress by a third, but these do not."""
    config = {**CONFIGS[MODEL], "vocab_size": 32768}
    generator = np.random.default_rng(0)
    tensors = random_tensors(config)
    tensors |= {
        name: generator.integers(0, 1 << 15, tensors[name].shape, np.uint16).view(BFLOAT16)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    source = write_folder(tmp_path / "hf", config, tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    with mounted(tmp_path / "disk", f"size={int(size * 0.8)}") as disk:
        (disk / "mine").mkdir()
        run = convert_badly(source, disk / "mine" / "new")
        refused(run, 3, "space", str(disk))
        assert files_below(disk) == {"mine"}


def test_read_only_disk(tiny: Tiny, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64m") as disk:
        (disk / "there").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for output in (disk / "new" / "out", disk / "there", disk):
            refused(convert_badly(tiny(MODEL), output), 2, str(output))
        assert files_below(disk) == {"there"}


def test_output_below_a_file(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(convert_badly(tiny(MODEL), tmp_path / "file" / "out"), 2, str(tmp_path / "file"))
    assert files_below(tmp_path) == {"file"}


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not stop root")
def test_output_without_permission(tiny: Tiny, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    refused(convert_badly(tiny(MODEL), locked / "out"), 2, str(locked))


def test_output_in_use(tiny: Tiny, tmp_path: Path) -> None:
    import fcntl

    output = tmp_path / "out"
    output.mkdir()
    descriptor = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(convert_badly(tiny(MODEL), output), 3, str(output))
    finally:
        os.close(descriptor)
    assert files_below(output) == set()


# Paths


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path / "hf", MODEL)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    run = to_maxtext(
        f"model_name={MODEL}",
        "base_output_directory=some/out",
        "--hf_model_path=../hf",
        "--report=report.json",
        "--termination_message=message.json",
    )
    assert run.code == 0, run.stderr
    assert {"some/out/0/items/_METADATA", "report.json", "message.json"} <= files_below(tmp_path / "work")


ODD_NAMES = [
    *("with space", "ünïcödé-模型", "quo'te\"s", "new\nline", "per%cent", "a=b", "-dash", "dot.", "#hash?", "a\\b")
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_source_path(name: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / name / "hf", MODEL)
    step = convert(MODEL, source, tmp_path / "out", f"--report={tmp_path / name / 'report.json'}")
    report = json.loads((tmp_path / name / "report.json").read_bytes())
    assert report["source"]["repository"] == str(source)
    assert "step" in arrays(step)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_output_path(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """A checkpoint there is whole, or the path is refused (TensorStore takes a backslash for a slash)."""
    run = convert_badly(tiny(MODEL), tmp_path / name / "out")
    if run.code == 0:
        moved = (tmp_path / name / "out").rename(tmp_path / "moved")
        assert "params.params.decoder.decoder_norm.scale" in arrays(moved / "0")
    else:
        assert "\\" in name
        refused(run, 2, name)
        assert files_below(tmp_path) == set()


def test_odd_path_in_an_error_stays_one_line(tmp_path: Path) -> None:
    check_refused(tmp_path / "no such\nfolder", tmp_path, "no such folder")


def test_link_to_a_folder_and_to_files(tmp_path: Path) -> None:
    """As in the hub's cache, where every file is a link."""
    real = write_tiny(tmp_path / "real", MODEL)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in real.iterdir():
        (folder / path.name).symlink_to(path)
    (tmp_path / "link").symlink_to(folder)
    assert "step" in arrays(convert(MODEL, tmp_path / "link", tmp_path / "out"))


def test_output_through_a_link(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(MODEL, tiny(MODEL), tmp_path / "link")
    assert (tmp_path / "real" / "0" / "items" / "_METADATA").is_file()


# What programs read


def message_of(path: Path) -> dict[str, Any]:
    """A termination message, which Kubernetes would keep whole."""
    content = path.read_bytes()
    assert len(content) <= 4096
    return json.loads(content)


MESSAGE_KEYS = {"version", "result", "exit_code", "error", "seconds", "bytes", "peak_memory_bytes", "output"}


def check_message(path: Path, *, result: str, code: int, output: Path | None) -> dict[str, Any]:
    message = message_of(path)
    assert message.keys() >= MESSAGE_KEYS
    assert message["version"] == 1
    assert (message["result"], message["exit_code"]) == (result, code)
    assert message["output"] == (None if output is None else str(output))
    assert message["seconds"] > 0
    peak = message["peak_memory_bytes"]
    assert peak["anonymous_and_shared"] > 10_000_000
    assert peak["resident"] > 10_000_000
    return message


def test_message_of_every_way_to_end_well(tiny: Tiny, tmp_path: Path) -> None:
    output, path = tmp_path / "out", tmp_path / "message.json"
    total = sum(tensor.nbytes for tensor in random_tensors(CONFIGS[MODEL]).values())
    for words, result, nbytes in (
        (["--dry_run"], "planned", 0),
        ([], "converted", total),
        (["--if_exists=skip"], "skipped", 0),
        (["--if_exists=overwrite"], "converted", total),
    ):
        run = convert_badly(tiny(MODEL), output, f"--termination_message={path}", *words)
        assert run.code == 0, run.stderr
        message = check_message(path, result=result, code=0, output=output / "0")
        assert message["error"] is None
        assert message["bytes"] == nbytes
        path.unlink()
    assert {entry.name for entry in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("form", ["--termination_message={}", "--termination_message {}", "termination_message={}"])
@pytest.mark.parametrize(
    ("words", "known_output"),
    [
        (["zzqq=1"], False),
        (["model_name=nope"], False),
        (["--threads=x"], False),
        (["--hf_model_path=/no/such/folder"], True),
    ],
    ids=str,
)
def test_message_of_a_refused_request(
    words: list[str], known_output: bool, form: str, tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "message.json"
    run = convert_badly(tiny(MODEL), tmp_path / "out", *form.format(path).split(), *words)
    refused(run, 2)
    message = check_message(path, result="failed", code=2, output=tmp_path / "out" / "0" if known_output else None)
    assert f"converter: error: {message['error']}" == run.errors[0]
    assert "\n" not in message["error"]
    assert files_below(tmp_path) == {"message.json"}


def test_message_of_a_failing_world(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", MODEL, vocab_size=16384)
    path = tmp_path / "message.json"
    with mounted(tmp_path / "disk", "size=1m") as disk:
        refused(convert_badly(source, disk / "out", f"--termination_message={path}"), 3)
        check_message(path, result="failed", code=3, output=disk / "out" / "0")


@pytest.mark.parametrize("letter", ["x", "ü", "模", '"', "\x01"])
@pytest.mark.parametrize("long_output", [False, True], ids=["long-error", "long-error-and-output"])
def test_message_fits_whatever_the_error(letter: str, long_output: bool, tmp_path: Path) -> None:
    """It never grows beyond what Kubernetes keeps, and still says what went wrong."""
    path = tmp_path / "message.json"
    # As long as a path can be: 4096 bytes.
    part = letter * 60
    output = "/".join(["/nowhere", *[part] * (4000 // (len(part.encode()) + 1))]) if long_output else tmp_path / "out"
    run = to_maxtext(
        "model_name=qwen3-8b",
        f"base_output_directory={output}",
        f"--hf_model_path=no/such/{(letter * 60 + '/') * 20}",
        f"--termination_message={path}",
    )
    assert run.code == 2, run.stderr[-3000:]
    message = message_of(path)
    assert (message["result"], message["exit_code"]) == ("failed", 2)
    assert message["error"].startswith("no such folder: no/such/")


@pytest.mark.parametrize("key", ["hf_model_path", "base_output_directory", "report", "termination_message"])
def test_path_that_is_too_long(key: str, tiny: Tiny, tmp_path: Path) -> None:
    """A name of more than 255 bytes exists nowhere."""
    run = convert_badly(tiny(MODEL), tmp_path / "out", f"{key}={tmp_path}/{'x' * 300}/y")
    refused(run, 2)
    assert files_below(tmp_path) == set()


def test_message_to_a_device_and_over_an_old_one(tiny: Tiny, tmp_path: Path) -> None:
    run = convert_badly(tiny(MODEL), tmp_path / "out", "--termination_message=/dev/null", "--dry_run")
    assert run.code == 0, run.stderr
    path = tmp_path / "message.json"
    path.write_text("x" * 100_000)
    assert convert_badly(tiny(MODEL), tmp_path / "out", f"--termination_message={path}", "--dry_run").code == 0
    assert message_of(path)["result"] == "planned"


def test_message_into_a_missing_folder(tiny: Tiny, tmp_path: Path) -> None:
    run = convert_badly(tiny(MODEL), tmp_path / "out", f"--termination_message={tmp_path / 'no' / 'message.json'}")
    refused(run, 2, "termination_message")
    assert files_below(tmp_path) == set()


def test_report(tmp_path: Path) -> None:
    import hashlib

    source = write_tiny(tmp_path / "hf", MODEL, shards=2)
    path = tmp_path / "report.json"
    step = convert(MODEL, source, tmp_path / "out", f"--report={path}", "--chunk_byte_size=700", "run_name=mine")
    report = json.loads(path.read_bytes())
    assert report["version"] == 1
    assert report["request"]["model_name"] == MODEL
    assert report["request"]["chunk_byte_size"] == 700
    assert report["source"]["repository"] == str(source)
    assert report["source"]["files"] == [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": None}
        for file in sorted(source.glob("*.safetensors"))
    ]
    assert report["versions"].keys() >= {"converter", "jax", "orbax-checkpoint", "tensorstore", "numpy"}
    assert report["seconds"].keys() >= {"start", "plan", "write"}
    assert report["peak_memory_bytes"]["resident"] > 10_000_000
    stored = arrays(step)
    del stored["step"]
    assert report["bytes"]["arrays"] == sum(array.values.nbytes for array in stored.values())
    assert {entry["name"] for entry in report["arrays"]} == stored.keys()
    for entry in report["arrays"]:
        array = stored[entry["name"]]
        assert entry["shape"] == list(array.values.shape)
        assert entry["dtype"] == array.values.dtype.name
        assert entry["chunk_shape"] == list(array.chunk_shape)
        grid = [n // size for n, size in zip(array.values.shape, array.chunk_shape, strict=True)]
        assert entry["grid"] == grid
        digests = [
            hashlib.sha256(
                np.ascontiguousarray(
                    array.values[
                        tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, array.chunk_shape, strict=True))
                    ]
                ).tobytes()
            ).digest()
            for index in np.ndindex(*grid)
        ]
        assert entry["digest"] == hashlib.sha256(b"".join(digests)).hexdigest(), entry["name"]


def test_report_that_cannot_be_written_stops_the_run_early(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = convert_badly(tiny(MODEL), tmp_path / "out", f"--report={tmp_path / 'file' / 'report.json'}")
    refused(run, 2, "report.json" if "report.json" in run.stderr else str(tmp_path / "file"))
    assert files_below(tmp_path) == {"file"}


def test_report_in_a_new_folder(tiny: Tiny, tmp_path: Path) -> None:
    """Made like the output's own parents, or refused before anything is written."""
    run = convert_badly(tiny(MODEL), tmp_path / "out", f"--report={tmp_path / 'new' / 'report.json'}")
    if run.code == 0:
        assert (tmp_path / "new" / "report.json").is_file()
    else:
        refused(run, 2, "report")
        assert files_below(tmp_path) == set()


def test_process_of_its_own(tmp_path: Path) -> None:
    """The same from outside: exit code, one line, nothing on stdout."""
    run = to_maxtext_process("model_name=nope", f"base_output_directory={tmp_path / 'out'}")
    refused(run, 2, "nope")
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize("word", ["report", "termination_message"])
def test_a_file_that_is_a_directory(word: str, tmp_path: Path) -> None:
    """It is found before the conversion and not after it."""
    run = to_maxtext(
        f"model_name={MODEL}",
        f"hf_model_path={write_tiny(tmp_path / 'hf', MODEL)}",
        f"base_output_directory={tmp_path / 'out'}",
        f"--{word}={tmp_path}",
    )
    assert run.code == 2, run.stderr
    assert "it is a directory" in run.errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("mode", "code"), [("refuse", 2), ("skip", 0), ("overwrite", 0)])
def test_another_converter_was_faster(mode: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It completes the same checkpoint between this one's first look and its turn to write."""
    words = (f"model_name={MODEL}", f"hf_model_path={write_tiny(tmp_path / 'hf', MODEL)}")
    output, opened = tmp_path / "out", converting.output.opened

    def late(directory: Path) -> Any:
        monkeypatch.setattr(converting.output, "opened", opened)
        assert to_maxtext(*words, f"base_output_directory={output}").code == 0
        return opened(directory)

    monkeypatch.setattr(converting.output, "opened", late)
    run = to_maxtext(*words, f"base_output_directory={output}", f"--if_exists={mode}")
    assert run.code == code, run.stderr
    assert "Traceback" not in run.stderr
    if code:
        assert "exists" in run.errors[0]
    assert {path.name for path in output.iterdir()} == {"0"}


@pytest.mark.parametrize("below", ["", "further/down"])
def test_an_output_that_is_a_link_to_nowhere(below: str, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    run = convert_badly(tiny(MODEL), tmp_path / "link" / below)
    refused(run, 2, str(tmp_path / "link"), "leads nowhere")
    assert not (tmp_path / "nowhere").exists()
