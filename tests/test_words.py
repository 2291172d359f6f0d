"""The command line takes what MaxText's converter takes, and says in one line what it cannot do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import (
    BFLOAT16,
    CONFIGS,
    DATA,
    planned_arrays,
    random_tensors,
    write_folder,
    write_sparse,
    write_tiny,
)
from reading import array_names, arrays, source_tensors, step_metadata, values
from running import DEVICES, ROOT, Run, convert, files_below, to_maxtext, to_maxtext_process

Tiny = Callable[[str], Path]

TOKEN = "hf_doNotPrintThisToken"


def refused(run: Run, *parts: str) -> None:
    """One error line, exit code 2, and these parts in it."""
    assert run.code == 2, run.stderr
    assert len(run.errors) == 1, run.stderr
    for part in parts:
        assert part in run.errors[0], run.errors[0]


def plan(source: Path, *words: object, model_name: str = "qwen3-0.6b") -> Run:
    """A dry run."""
    return to_maxtext(
        f"model_name={model_name}", f"--hf_model_path={source}", "base_output_directory=/nowhere", "--dry_run", *words
    )


@pytest.mark.parametrize(
    "text",
    [
        "configs/base.yml model_name=qwen3-0.6b base_output_directory=OUT scan_layers=false --hf_model_path=HF",
        "model_name=qwen3-0.6b base_output_directory=OUT scan_layers=false hf_model_path=HF",
        "--model_name=qwen3-0.6b --base_output_directory=OUT --scan_layers=False --hf_model_path=HF",
        "--model_name qwen3-0.6b --base_output_directory OUT --scan_layers 0 --hf_model_path HF",
        "--hf_model_path=HF scan_layers=FALSE base_output_directory=OUT model_name=qwen3-0.6b",
        "scan_layers=true scan_layers=false model_name=qwen3-0.6b base_output_directory=OUT hf_model_path=HF",
    ],
    ids=["base.yml", "words", "flags", "flags-and-values", "any-order", "last-wins"],
)
def test_forms_of_the_command_line(text: str, tiny: Tiny, tmp_path: Path) -> None:
    places = {"OUT": str(tmp_path / "out"), "HF": str(tiny("qwen3-0.6b"))}
    run = to_maxtext(*re.sub("OUT|HF", lambda found: places[found[0]], text).split())
    assert run.code == 0, run.stderr
    assert step_metadata(tmp_path / "out" / "0")["custom_metadata"] == {"scan_layers": False}
    assert "params.params.decoder.layers_1.mlp.wo.kernel" in array_names(tmp_path / "out" / "0")


def test_base_yml_anywhere_else_is_refused(tiny: Tiny) -> None:
    refused(plan(tiny("qwen3-0.6b"), "src/maxtext/configs/base.yml"), "base.yml")


def test_a_maxtext_script_needs_one_word_changed(tiny: Tiny, tmp_path: Path) -> None:
    run = to_maxtext_process(
        *("src/maxtext/configs/base.yml", "model_name=qwen3-0.6b", f"base_output_directory={tmp_path / 'out'}"),
        *("use_multimodal=false", "hardware=cpu", "skip_jax_distributed_system=True", "scan_layers=true"),
        *("checkpoint_storage_use_ocdbt=True", "checkpoint_storage_use_zarr3=True", "run_name=mine"),
        *("--lazy_load_tensors=False", "--eager_load_method=transformers", "--save_dtype=bfloat16"),
        *("--simulated_cpu_devices_count=16", f"--hf_model_path={tiny('qwen3-0.6b')}"),
    )
    assert run.code == 0, run.stderr
    assert run.stderr.count("eager_load_method") == 1
    assert run.stderr.count("lazy_load_tensors") == 1
    assert re.search(r"^Peak memory: \d+\.\d+ GB", run.stderr, re.MULTILINE)
    assert f"load_parameters_path={tmp_path / 'out'}/0/items" in run.stdout


def test_both_entry_points(tiny: Tiny) -> None:
    from converter.cli import main

    assert main(["to-maxtext", "model_name=qwen3-0.6b", f"--hf_model_path={tiny('qwen3-0.6b')}", "--dry_run"]) == 0


def test_every_maxtext_key_is_accepted_and_named_once(tiny: Tiny) -> None:
    keys = (ROOT / "converter" / "maxtext" / "base_yml_keys.txt").read_text().split()
    assert len(keys) > 700
    effective = {
        # Keys that matter to a conversion, tested on their own.
        *("model_name", "base_output_directory", "run_name", "scan_layers", "param_scan_axis", "use_multimodal"),
        *("hf_access_token", "hardware", "skip_jax_distributed_system", "checkpoint_storage_use_ocdbt"),
        *("checkpoint_storage_use_zarr3", "vocab_size", "base_num_decoder_layers", "base_emb_dim", "base_mlp_dim"),
        *("base_num_query_heads", "base_num_kv_heads", "head_dim", "logits_via_embedding", "fused_qkv", "fused_mlp"),
        *("use_audio", "share_kv_projections", "load_parameters_path", "hf_lora_adapter_path", "quantization"),
        *("decoder_block", "rope_type"),
    }
    others = [key for key in keys if key not in effective]
    run = plan(tiny("qwen3-0.6b"), *(f"{key}=1" for key in others))
    assert run.code == 0, run.stderr
    named = re.findall(r"[A-Za-z_0-9]+", run.stderr)
    assert {key: named.count(key) for key in others} == dict.fromkeys(others, 1)


@pytest.mark.parametrize("word", ["fused_qkv=false", "decoder_block=qwen3", "rope_type=default", "quantization="])
def test_words_that_agree_are_accepted(word: str, tiny: Tiny) -> None:
    assert plan(tiny("qwen3-0.6b"), word).code == 0


@pytest.mark.parametrize(
    "word",
    [
        "fused_qkv=true",
        "fused_mlp=true",
        "decoder_block=llama2",
        "rope_type=llama3.1",
        "quantization=int8",
        "load_parameters_path=/x",
        "hf_lora_adapter_path=/x",
    ],
)
def test_words_that_ask_for_another_result_are_refused(word: str, tiny: Tiny) -> None:
    refused(plan(tiny("qwen3-0.6b"), word), word.split("=")[0])


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("scan_layer=true", "scan_layers"),
        ("--save_dtypes=float32", "save_dtype"),
        ("--hf_model_pth", "hf_model_path"),
        ("chekpoint_storage_use_ocdbt=true", "checkpoint_storage_use_ocdbt"),
        ("per_device_batch_sze=1", "per_device_batch_size"),
        ("--simulated_cpu_device_count=8", "simulated_cpu_devices_count"),
        ("--if_exist=skip", "if_exists"),
    ],
)
def test_near_misses(word: str, suggestion: str, tiny: Tiny) -> None:
    refused(plan(tiny("qwen3-0.6b"), word), word.removeprefix("--").split("=")[0], suggestion)


@pytest.mark.parametrize("word", ["zzqq=1", "--zzqq", "zzqq", "--=1", "=1", "-x"])
def test_words_nobody_knows(word: str, tiny: Tiny) -> None:
    run = plan(tiny("qwen3-0.6b"), word)
    refused(run)
    assert "did you mean" not in run.errors[0]


@pytest.mark.parametrize(
    ("model_name", "suggestion"),
    [("qwen3-06b", "qwen3-0.6b"), ("llama3.1-8", "llama3.1-8b"), ("gemma-2b", "gemma2-2b"), ("Qwen3-4B", "qwen3-4b")],
)
def test_unknown_model_suggests(model_name: str, suggestion: str) -> None:
    refused(to_maxtext(f"model_name={model_name}"), model_name, suggestion)


def test_unknown_model_without_a_near_one() -> None:
    refused(to_maxtext("model_name=xyz"), "xyz", "python -m converter models")


@pytest.mark.parametrize(
    "words",
    [
        ["hardware=tpu"],
        ["hardware=gpu"],
        ["skip_jax_distributed_system=False"],
        ["use_multimodal=true"],
        ["--save_dtype=float8_e4m3fn"],
        ["--save_dtype=float64"],
        ["--simulated_cpu_devices_count=0"],
        ["--simulated_cpu_devices_count=4096"],
        ["--simulated_cpu_devices_count=1025"],
        ["--simulated_cpu_devices_count=-1"],
        ["--simulated_cpu_devices_count=many"],
        ["--simulated_cpu_devices_count="],
        ["scan_layers=maybe"],
        ["scan_layers"],
        ["--scan_layers"],
        ["--memory_budget=lots"],
        ["--memory_budget=0"],
        ["--memory_budget=-1"],
        ["--memory_budget=5 apples"],
        ["--memory_budget"],
        ["--threads=0"],
        ["--threads=two"],
        ["--chunk_byte_size=0"],
        ["--compression=gzip"],
        ["--if_exists=maybe"],
        ["--dry_run=perhaps"],
        ["base_num_decoder_layers=0"],
        ["base_num_decoder_layers=3"],
        ["base_num_decoder_layers=all"],
        ["vocab_size=0"],
        ["vocab_size=-5"],
        ["base_output_directory=s3://bucket/x"],
        ["base_output_directory=gs:/bucket/x"],
        ["base_output_directory=GS:/bucket/x"],
        ["base_output_directory=some/run[1]"],
        ["base_output_directory=some/*/run"],
        ["base_output_directory=gs://B/x"],
        ["base_output_directory=gs://bucket/a//b"],
        ["base_output_directory=gs://bucket/a/../b"],
        ["base_output_directory=gs://bucket/a?b"],
        ["--hf_model_path=/no/such/folder"],
        ["--hf_model_path=no such folder"],
    ],
    ids="_".join,
)
def test_values_that_cannot_be(words: list[str], tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "out" / "deep"
    run = to_maxtext(
        "model_name=qwen3-0.6b", f"base_output_directory={output}", f"--hf_model_path={tiny('qwen3-0.6b')}", *words
    )
    refused(run, words[0].removeprefix("--").split("=")[0] if "path" not in words[0] else "folder")
    assert files_below(tmp_path) == set()


def test_chunks_too_small_for_an_element_are_refused(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 4,
        "intermediate_size": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
    }
    source = write_tiny(tmp_path / "source", "qwen3-0.6b", vocab_size=4, num_hidden_layers=1, **sizes)
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={source}",
        "--chunk_byte_size=2",
    )
    refused(run, "chunk_byte_size")
    assert not (tmp_path / "out").exists()


def test_no_model_name() -> None:
    refused(to_maxtext(), "model_name")
    refused(to_maxtext("base.yml"), "model_name")


@pytest.mark.parametrize("size", ["1000000", "256MB", "256mb", "2GiB", "0.5GB", "64M", "64Mi", "1T"])
def test_memory_sizes(size: str, tiny: Tiny) -> None:
    run = plan(tiny("qwen3-0.6b"), f"--memory_budget={size}")
    assert run.code == 0, run.stderr
    assert "warning" not in run.stderr.lower()


def test_memory_budget_is_what_was_asked_for(tiny: Tiny) -> None:
    for size, nbytes in (("2MB", 2_000_000), ("2MiB", 2 << 20), ("3000000", 3_000_000), ("1.5M", 1_500_000)):
        assert f"chunks in flight: {nbytes:,} bytes" in plan(tiny("qwen3-0.6b"), f"--memory_budget={size}").stdout


def test_memory_budget_below_a_chunk_is_raised(tmp_path: Path) -> None:
    run = plan(DATA / "qwen3" / "hf_bf16", "--memory_budget=1")
    assert run.code == 0, run.stderr
    assert "memory_budget" in run.stderr
    largest = max(
        np.prod(array["chunk_shape"]) * 2
        for name, array in json.loads((DATA / "qwen3" / "expected_bf16_scan.json").read_bytes())["arrays"].items()
        if name != "step"
    )
    assert f"chunks in flight: {largest:,} bytes" in run.stdout


@pytest.mark.parametrize("devices", [1, 2, 1024])
def test_device_counts(devices: int, tiny: Tiny) -> None:
    run = plan(tiny("qwen3-0.6b"), f"--simulated_cpu_devices_count={devices}")
    assert run.code == 0, run.stderr
    row = planned_arrays(run.stdout)["params.params.token_embedder.embedding"]
    assert row["sharding"] == {1: "none", 2: "axis 0", 1024: "replicated"}[devices]


def test_running_jax_with_other_devices_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    assert len(jax.devices()) == DEVICES
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={tiny('qwen3-0.6b')}",
        "--simulated_cpu_devices_count=8",
    )
    refused(run, "16", "8")
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize("family", sorted(path.parent.name for path in DATA.glob("*/oracle.json")))
def test_dry_run_of_every_family(family: str, tmp_path: Path) -> None:
    """Of arrays that come from no tensor too."""
    oracle = json.loads((DATA / family / "oracle.json").read_bytes())
    words = {"scan_layers": False, "use_multimodal": False, **oracle["words"]}
    run = to_maxtext(
        f"model_name={oracle['model_name']}",
        f"--hf_model_path={DATA / family / 'hf_bf16'}",
        f"base_output_directory={tmp_path / 'out'}",
        "--dry_run",
        *(f"{word}={value}" for word, value in words.items()),
    )
    assert run.code == 0, run.stderr
    wanted = json.loads((DATA / family / "expected_bf16_unscan.json").read_bytes())["arrays"]
    assert planned_arrays(run.stdout).keys() == wanted.keys() - {"step"}


def test_dry_run_tells_everything_and_writes_nothing(tmp_path: Path) -> None:
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={DATA / 'qwen3' / 'hf_bf16'}",
        f"--report={tmp_path / 'report.json'}",
        "--dry_run",
    )
    assert run.code == 0, run.stderr
    assert files_below(tmp_path) == set()
    expected = json.loads((DATA / "qwen3" / "expected_bf16_scan.json").read_bytes())["arrays"]
    rows = planned_arrays(run.stdout)
    assert rows.keys() == expected.keys() - {"step"}
    for name, row in rows.items():
        for column, key in (("shape", "shape"), ("chunk", "chunk_shape")):
            assert row[column] == "(" + ", ".join(map(str, expected[name][key])) + ")", name
        assert row["dtype"] == expected[name]["dtype"]
        spec = expected[name]["partition_spec"]
        cut = spec.index("checkpoint_sharding_axis") if "checkpoint_sharding_axis" in spec else None
        assert row["sharding"] == ("replicated" if cut is None else f"axis {cut}")
    assert "model.layers.0.mlp.down_proj.weight" in rows["params.params.decoder.layers.mlp.wo.kernel"]["sources"]
    total = sum(2 * int(np.prod(expected[name]["shape"])) for name in rows)
    assert f"{total:,} bytes" in run.stdout
    assert "peak memory" in run.stdout
    assert "disk" in run.stdout


def test_default_output_is_maxtexts(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = to_maxtext("model_name=qwen3-0.6b", "run_name=mine", f"--hf_model_path={tiny('qwen3-0.6b')}")
    assert run.code == 0, run.stderr
    assert (tmp_path / "tmp" / "mine" / "0" / "items" / "_METADATA").is_file()


def test_keys_from_the_environment(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M_SCAN_LAYERS", "false")
    step = convert("qwen3-0.6b", tiny("qwen3-0.6b"), tmp_path / "out")
    assert step_metadata(step)["custom_metadata"] == {"scan_layers": False}
    refused(plan(tiny("qwen3-0.6b"), "scan_layers=true"), "scan_layers", "M_SCAN_LAYERS")


@pytest.mark.parametrize(
    "words",
    [
        [f"hf_access_token={TOKEN}", "--dry_run"],
        [f"--hf_access_token={TOKEN}"],
        ["--hf_access_token", TOKEN],
        [f"hf_access_token={TOKEN}", "scan_layers=maybe"],
        [f"hf_acces_token={TOKEN}"],
        [f"--hf_acces_token={TOKEN}"],
        ["--hf_acces_token", TOKEN],
        ["hf_access_token", TOKEN],
        [f"hf_access_token={TOKEN}", "model_name=nope"],
    ],
    ids=lambda words: " ".join(words).replace(TOKEN, "T"),
)
def test_the_token_is_never_printed(words: list[str], tiny: Tiny, tmp_path: Path) -> None:
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path / 'out'}",
        f"--hf_model_path={tiny('qwen3-0.6b')}",
        f"--report={tmp_path / 'report.json'}",
        f"--termination_message={tmp_path / 'message.json'}",
        *words,
    )
    assert TOKEN not in run.stdout + run.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "message.json" in written
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "word",
    [
        "base_emb_dim=32",
        "base_mlp_dim=48",
        "base_num_query_heads=4",
        "base_num_kv_heads=2",
        "head_dim=8",
        "base_num_decoder_layers=2",
        "vocab_size=64",
        "logits_via_embedding=true",
    ],
)
def test_geometry_words_that_agree(word: str, tiny: Tiny) -> None:
    assert plan(tiny("qwen3-0.6b"), word).code == 0


@pytest.mark.parametrize(
    ("word", "actual"),
    [
        ("base_emb_dim=64", "32"),
        ("base_mlp_dim=96", "48"),
        ("base_num_query_heads=8", "4"),
        ("base_num_kv_heads=4", "2"),
        ("head_dim=128", "8"),
        ("head_dim=x", "head_dim"),
        ("base_num_decoder_layers=28", "2"),
        ("logits_via_embedding=false", "true"),
    ],
)
def test_geometry_words_that_disagree(word: str, actual: str, tiny: Tiny) -> None:
    refused(plan(tiny("qwen3-0.6b"), word), word.split("=")[0], actual)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize(("family", "model_name", "layers"), [("qwen3", "qwen3-0.6b", 3), ("gemma2", "gemma2-2b", 2)])
def test_fewer_layers(family: str, model_name: str, layers: int, scan: bool, tmp_path: Path) -> None:
    """The first layers of the whole result; gemma2 counts pairs."""
    source = DATA / family / "hf_bf16"
    whole = values(convert(model_name, source, tmp_path / "whole", f"scan_layers={scan}"))
    words = [f"scan_layers={scan}", f"base_num_decoder_layers={layers}"]
    part = values(convert(model_name, source, tmp_path / "part", *words))
    if scan:
        assert part.keys() == whole.keys()
        for name, array in part.items():
            expected = whole[name][:, :layers] if ".layers." in name else whole[name]
            assert np.array_equal(array, expected), name
            assert ".layers." not in name or array.shape[1] == layers
    else:
        numbers = {int(found[1]) for name in part if (found := re.search(r"\.layers_(\d+)\.", name))}
        assert numbers == set(range(layers))
        assert part.keys() < whole.keys()
        for name, array in part.items():
            assert np.array_equal(array, whole[name]), name


@pytest.mark.parametrize("vocab_size", [80, 63, 1, 64])
def test_vocabulary_size(vocab_size: int, tiny: Tiny, tmp_path: Path) -> None:
    """Rows beyond the repository's are zero, fewer are cut; of the output embedding too."""
    step = convert("qwen3-8b", tiny("qwen3-8b"), tmp_path / "out", f"vocab_size={vocab_size}")
    found, source = values(step), source_tensors(tiny("qwen3-8b") / "model.safetensors")
    for name, rows in (
        ("token_embedder.embedding", source["model.embed_tokens.weight"]),
        ("decoder.logits_dense.kernel", source["lm_head.weight"]),
    ):
        array = found[name] if name.startswith("token") else found[name].T
        assert array.shape == (vocab_size, 32)
        kept = min(vocab_size, 64)
        assert np.array_equal(array[:kept].view(np.uint16), rows[:kept].view(np.uint16)), name
        assert not array[kept:].view(np.uint16).any(), name


@pytest.mark.parametrize(("words", "rows"), [([], 256128), (["vocab_size=256000"], 256000)], ids=["own", "asked"])
def test_gemma2_vocabulary_is_maxtexts(words: list[str], rows: int, tmp_path: Path) -> None:
    source = write_sparse(tmp_path / "source", {**CONFIGS["gemma2-2b"], "vocab_size": 256000})
    run = plan(source, *words, model_name="gemma2-2b")
    assert planned_arrays(run.stdout)["params.params.token_embedder.embedding"]["shape"] == f"({rows}, 32)"


def test_scan_axis(tiny: Tiny, tmp_path: Path) -> None:
    first = values(convert("qwen3-8b", tiny("qwen3-8b"), tmp_path / "first", "param_scan_axis=0"))
    second = values(convert("qwen3-8b", tiny("qwen3-8b"), tmp_path / "second", "param_scan_axis=1"))
    for name, array in first.items():
        assert np.array_equal(np.moveaxis(array, 0, 1) if ".layers." in name else array, second[name]), name
    refused(plan(tiny("qwen3-8b"), "param_scan_axis=2", model_name="qwen3-8b"), "param_scan_axis")


@pytest.mark.parametrize("model_name", ["llama2-7b", "mistral-7b"])
def test_rotary_halves_stay_where_they_are(model_name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Llama 2 and Mistral: kernels are plain transpositions, the query scaled by 1/sqrt(head_dim)."""
    step = convert(model_name, tiny(model_name), tmp_path / "out", "scan_layers=false")
    found, source = values(step), source_tensors(tiny(model_name) / "model.safetensors")
    assert len(found) == len(source)
    for i in range(2):
        layer = {name.removeprefix(f"decoder.layers_{i}."): array for name, array in found.items()}
        weights = {name.removeprefix(f"model.layers.{i}."): array for name, array in source.items()}
        query = weights["self_attn.q_proj.weight"].T.reshape(32, 4, 8).astype(np.float32) * np.float32(8**-0.5)
        expected = {
            "self_attention.query.kernel": query.astype(BFLOAT16),
            "self_attention.key.kernel": weights["self_attn.k_proj.weight"].T.reshape(32, 2, 8),
            "self_attention.value.kernel": weights["self_attn.v_proj.weight"].T.reshape(32, 2, 8),
            "self_attention.out.kernel": weights["self_attn.o_proj.weight"].T.reshape(4, 8, 32),
            "mlp.wi_0.kernel": weights["mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": weights["mlp.up_proj.weight"].T,
            "mlp.wo.kernel": weights["mlp.down_proj.weight"].T,
            "pre_self_attention_layer_norm.scale": weights["input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": weights["post_attention_layernorm.weight"],
        }
        for name, array in expected.items():
            assert np.array_equal(layer[name].view(np.uint16), array.view(np.uint16)), name


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("save_dtype", ["bfloat16", "float32"])
def test_sources_are_cast(dtype: type, save_dtype: str, tmp_path: Path) -> None:
    config = CONFIGS["qwen3-0.6b"]
    tensors = random_tensors(config, np.dtype(dtype))
    source = write_folder(tmp_path / "source", config, tensors)
    step = convert("qwen3-0.6b", source, tmp_path / "out", f"--save_dtype={save_dtype}")
    found = values(step)
    assert {array.dtype.name for array in found.values()} == {save_dtype}
    kernel, embedding = found["decoder.layers.mlp.wo.kernel"][:, 1], found["token_embedder.embedding"]
    for array, tensor in (
        (kernel, tensors["model.layers.1.mlp.down_proj.weight"].T),
        (embedding, tensors["model.embed_tokens.weight"]),
    ):
        assert np.array_equal(array, tensor.astype(np.float32).astype(array.dtype))


def test_gemma2_norms_are_float32(tiny: Tiny, tmp_path: Path) -> None:
    found = values(convert("gemma2-2b", tiny("gemma2-2b"), tmp_path / "out"))
    for name, array in found.items():
        assert array.dtype.name == ("float32" if name.endswith(".scale") else "bfloat16"), name
    norm = source_tensors(tiny("gemma2-2b") / "model.safetensors")["model.norm.weight"]
    assert np.array_equal(found["decoder.decoder_norm.scale"], norm.astype(np.float32) + np.float32(1))


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("words", [[], ["--threads=1"], ["--threads=5", "--memory_budget=20000"]], ids="_".join)
def test_shards_threads_and_budget_do_not_change_the_result(shards: int, words: list[str], tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen2.5-7b", shards=shards)
    found = arrays(convert("qwen2.5-7b", source, tmp_path / "out", *words))
    whole = write_tiny(tmp_path / "whole", "qwen2.5-7b")
    expected = arrays(convert("qwen2.5-7b", whole, tmp_path / "expected"))
    assert {name: array.sha256 for name, array in found.items()} == {
        name: array.sha256 for name, array in expected.items()
    }
