"""The benchmarks' checkpoints are what they claim to be, and the models' geometry is what others publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA
from safetensors import safe_open

from benchmarks import compare, reads
from benchmarks.checkpoints import FLOATS, make_config, tensor_shapes, total_bytes, write_checkpoint
from benchmarks.measure import Run, StartUp, markdown
from converter.cli import to_maxtext
from converter.hf.repository import Repository, locate, open_repository
from converter.listing import parameter_count
from converter.maxtext.chunks import ChunkFormat
from converter.models import FAMILIES, MODELS

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}

PUBLISHED_BYTES = {
    "gemma2-2b": 5_228_683_776,
    "llama3.1-8b": 16_060_522_496,
    "llama3.1-70b": 141_107_412_992,
    # Less 80 rotary_emb.inv_freq of 64 float32 each, which carry no weights.
    "llama2-70b": 137_953_316_864 - 80 * 64 * 4,
    "mistral-7b": 14_483_464_192,
    "qwen2.5-3b": 6_171_877_376,
    "qwen2.5-7b": 15_231_233_024,
    "qwen2.5-32b": 65_527_752_704,
    # Less the lm_head.weight that its single file carries beside the embedding it is tied to.
    "qwen3-0.6b": 1_192_099_840,
    "qwen3-4b": 8_044_936_192,
    "qwen3-8b": 16_381_470_720,
    "qwen3-14b": 29_536_614_400,
    "qwen3-32b": 65_524_246_528,
    "qwen3-30b-a3b": 61_064_245_248,
    "mixtral-8x7b": 93_405_585_408,
}
"""`total_size` in the repositories' model.safetensors.index.json on the Hugging Face hub, bfloat16 or float16."""

MAXTEXT_GEOMETRY: dict[str, dict[str, Any]] = json.loads((DATA / "maxtext_geometry.json").read_bytes())
"""What MaxText 0.2.5's configs/models/<name>.yml say of sizes; a name without "-Instruct" stands for both."""


def opened(folder: Path) -> Repository:
    return open_repository(locate(str(folder), revision=None, token=None))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_safetensors_library_reads_what_was_asked_for(tmp_path: Path, dtype: str) -> None:
    nbytes = write_checkpoint(tmp_path, "qwen3-0.6b", dtype=dtype, **TINY)
    shapes = tensor_shapes(MODELS["qwen3-0.6b"], make_config("qwen3-0.6b", **TINY))
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        dtypes = {file.get_slice(name).get_dtype() for name in found}
    assert found == shapes
    assert dtypes == {FLOATS[dtype].code}
    assert nbytes == total_bytes(shapes, dtype) == sum(t.nbytes for t in opened(tmp_path).tensors.values())


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_look_freshly_initialised(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(tmp_path, "qwen3-0.6b", dtype=dtype, **{**TINY, "vocab_size": 30_000})
    values = opened(tmp_path).array("model.embed_tokens.weight").astype(np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 1e-4
    assert values.std() == pytest.approx(0.02, rel=0.02)


def test_large_checkpoints_are_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    nbytes = write_checkpoint(tmp_path, "llama3.1-8b", file_bytes=100_000, **TINY)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == nbytes
    tensors = opened(tmp_path).tensors
    assert {name: tensor.file for name, tensor in tensors.items()} == index["weight_map"]
    assert "lm_head.weight" in tensors


def test_values_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("whole", "cut", "other")}
    write_checkpoint(folders["whole"], "qwen3-0.6b", file_bytes=50_000, **TINY)
    write_checkpoint(folders["cut"], "qwen3-0.6b", **{**TINY, "num_hidden_layers": 2})
    write_checkpoint(folders["other"], "qwen3-0.6b", seed=1, **TINY)
    whole, cut, other = (opened(folders[name]) for name in ("whole", "cut", "other"))
    assert len(cut.tensors) < len(whole.tensors)
    for name in cut.tensors:
        assert cut.array(name).tobytes() == whole.array(name).tobytes()
        assert cut.array(name).tobytes() != other.array(name).tobytes()


def test_weights_compress_as_real_ones_also_when_layers_are_stacked(tmp_path: Path) -> None:
    # zstd -3 leaves 0.78 of normal bfloat16 values; anything less would mean that it found repetitions.
    write_checkpoint(tmp_path, "qwen3-0.6b", **{**TINY, "hidden_size": 256, "intermediate_size": 4096})
    repository = opened(tmp_path)
    names = [f"model.layers.{i}.mlp.gate_proj.weight" for i in range(4)]
    stacked = np.ascontiguousarray(np.stack([repository.array(name).T for name in names], axis=1))
    whole = np.frombuffer((tmp_path / "model.safetensors").read_bytes(), np.uint8)
    for content in (stacked, whole):
        stored = sum(map(len, ChunkFormat(False, 3).encode(content, 1)))
        assert stored / content.nbytes == pytest.approx(0.78, abs=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_made(name: str) -> None:
    family = MODELS[name]
    shapes = tensor_shapes(family, make_config(name))
    assert total_bytes(shapes) == 2 * parameter_count(family, name)
    assert "embed" in next(iter(shapes))


@pytest.mark.parametrize("name", PUBLISHED_BYTES)
def test_sizes_are_those_on_the_hub(name: str) -> None:
    assert total_bytes(tensor_shapes(MODELS[name], make_config(name))) == PUBLISHED_BYTES[name]


@pytest.mark.parametrize("name", MAXTEXT_GEOMETRY)
def test_geometry_is_maxtexts(name: str) -> None:
    family = MODELS[name]
    config = family.fill(make_config(name))
    ours = {
        **{word: config[key] for word, key in family.words.items()},
        "base_num_decoder_layers": config["num_hidden_layers"] // family.merged,
        "vocab_size": family.vocabulary.get(config["vocab_size"], config["vocab_size"]),
        "decoder_block": family.decoder_block,
    }
    expected = MAXTEXT_GEOMETRY[name]
    assert len(expected) >= 6
    assert {key: ours[key] for key in expected} == expected


def test_all_names_that_maxtext_knows_are_compared() -> None:
    known = {name for family in FAMILIES for name, model in family.models.items() if model.maxtext}
    # MaxText's configs/pyconfig.py takes the configuration of a name without "-Instruct".
    assert {name.removesuffix("-Instruct") for name in known} == set(MAXTEXT_GEOMETRY)


def test_reads_understands_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "hf", "qwen3-0.6b", **TINY)
    words = ["model_name=qwen3-0.6b", f"hf_model_path={tmp_path / 'hf'}", f"base_output_directory={tmp_path / 'out'}"]
    assert to_maxtext([*words, "--dry_run", "--memory_budget=1GB"]) == 0
    assert reads.announced(capsys.readouterr().out) == (1, 1.0)
    assert to_maxtext([*words, "--dry_run", "--memory_budget=2560"]) == 0
    walks, most = reads.announced(capsys.readouterr().out)
    assert walks > 1
    assert 1 < most <= walks


def test_compare_relates_cases_to_zstd_and_cp() -> None:
    def result(wall: float, cpu: float, start: StartUp | None = None) -> list[compare.Result]:
        return [compare.Result(Run(wall, cpu, 10_000_000, 0, ""), 7_000_000, start)]

    results = {
        compare.CP: result(1.0, 0.5),
        compare.ZSTD: result(4.0, 8.0),
        compare.SCANNED: result(5.0, 11.0, StartUp(1.5, 1.0)),
        compare.UNSCANNED: result(6.0, 12.0, StartUp(1.5, 1.0)),
        compare.ONE_THREAD: result(9.0, 10.0, StartUp(1.5, 1.0)),
    }
    table = compare.results_table(results, 1_000_000_000)
    assert "| scanned | 11.0 | 10.0 | 1.25 | 5.0 | 1.25 | 5.00 | 200 | 1.50 | 10 | 7 |" in table.splitlines()
    targets = compare.targets_table(results)
    assert "1.25" in targets
    assert "1.20" in targets
    assert "1.80" in targets


def test_markdown() -> None:
    assert markdown(("a", "b"), [("x", "1")]) == "| a | b |\n| --- | --: |\n| x | 1 |"


@pytest.mark.slow
def test_the_scripts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "hf", "qwen3-0.6b", **TINY)
    common = [str(tmp_path / "hf"), "--model_name=qwen3-0.6b", f"--work={tmp_path / 'work'}"]
    assert compare.main([*common, "--rounds=1"]) == 0
    assert "| unscanned |" in capsys.readouterr().out
    assert reads.main(common) == 0
    assert "| scanned | 256MB | none | 1 |" in capsys.readouterr().out
    assert not any((tmp_path / "work").iterdir())
