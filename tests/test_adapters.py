"""LoRA adapters, alone and merged: what MaxText's converter makes of them, but for what it ignores."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from buckets import Bucket
from checkpoints import BFLOAT16, CONFIGS, DATA, random_tensors, shapes, write_folder
from hub import running
from reading import array_names, arrays, shardings, source_tensors, step_metadata
from running import DEVICES, Run, convert, environment, files_below, to_maxtext, to_maxtext_process
from safetensors.numpy import save_file
from test_oracles import facts

from converter import convert as converting

MODELS = {"llama3.1": "llama3.1-8b", "qwen3": "qwen3-0.6b"}

SAVE_DTYPES = {"bf16": "bfloat16", "f32": "float32"}

ALONE = {
    # Expected result -> adapter, dtype of the result.
    "f32": ("adapter_f32", "float32"),
    "bf16": ("adapter_bf16", "bfloat16"),
    "f32src_bf16": ("adapter_f32", "bfloat16"),
    "bf16src_f32": ("adapter_bf16", "float32"),
    "partial_f32": ("adapter_partial_f32", "float32"),
}

MERGED = {
    # Expected result -> adapter, base; the dtype of the result is the base's.
    "f32": ("adapter_f32", "hf_f32"),
    "bf16": ("adapter_bf16", "hf_bf16"),
    "f32adapter_bf16": ("adapter_f32", "hf_bf16"),
    "partial_f32": ("adapter_partial_f32", "hf_f32"),
}


def expected(family: str, kind: str, variant: str, scan: bool) -> dict[str, Any]:
    """A reference: the arrays and the step's metadata."""
    path = DATA / f"lora-{family}" / f"expected_{kind}_{variant}_{'scan' if scan else 'unscan'}.json"
    return json.loads(path.read_bytes())


def alone(family: str, adapter: Path, output: Path, *words: object) -> Run:
    """Convert an adapter without its base's weights."""
    return to_maxtext(
        f"model_name={MODELS[family]}",
        f"base_output_directory={output}",
        f"hf_lora_adapter_path={adapter}",
        f"--hf_model_path={DATA / family / 'hf_f32'}",
        *words,
    )


def step_of(family: str, adapter: Path, output: Path) -> Path:
    return output / MODELS[family] / adapter.name / "0"


def described(step: Path) -> dict[str, dict[str, Any]]:
    sharded = shardings(step)
    return {name: facts(name, array, sharded.get(name)) for name, array in arrays(step).items()}


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("variant", ALONE)
@pytest.mark.parametrize("family", MODELS)
def test_alone_equals_maxtext(family: str, variant: str, scan: bool, tmp_path: Path) -> None:
    name, dtype = ALONE[variant]
    adapter = DATA / f"lora-{family}" / name
    run = alone(family, adapter, tmp_path, f"scan_layers={scan}", f"--save_dtype={dtype}", "--adapter_layout=converter")
    assert run.code == 0, run.stderr
    step = step_of(family, adapter, tmp_path)
    wanted = expected(family, "adapter", variant, scan)
    found = described(step)
    assert found.keys() == wanted["arrays"].keys()
    differing = {name for name in found if found[name] != wanted["arrays"][name]}
    assert not differing, {name: (found[name], wanted["arrays"][name]) for name in sorted(differing)[:3]}
    metadata = step_metadata(step)["custom_metadata"]
    assert metadata.items() >= wanted["checkpoint_metadata"]["custom_metadata"].items()


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("variant", MERGED)
@pytest.mark.parametrize("family", MODELS)
def test_merged_equals_maxtext(family: str, variant: str, scan: bool, tmp_path: Path) -> None:
    adapter, base = MERGED[variant]
    run = to_maxtext(
        f"model_name={MODELS[family]}",
        f"base_output_directory={tmp_path}",
        f"scan_layers={scan}",
        f"hf_lora_adapter_path={DATA / f'lora-{family}' / adapter}",
        "load_parameters_path=merge",
        f"--hf_model_path={DATA / family / base}",
        f"--save_dtype={SAVE_DTYPES[base.removeprefix('hf_')]}",
        *(["vocab_size=" + str(v)] if (v := vocabulary(family)) else []),
    )
    assert run.code == 0, run.stderr
    wanted = expected(family, "merged", variant, scan)
    found = described(tmp_path / "0")
    assert found.keys() == wanted["arrays"].keys()
    differing = {name for name in found if found[name] != wanted["arrays"][name]}
    assert not differing, {name: (found[name], wanted["arrays"][name]) for name in sorted(differing)[:3]}
    assert step_metadata(tmp_path / "0")["custom_metadata"] == wanted["checkpoint_metadata"]["custom_metadata"]


def vocabulary(family: str) -> int | None:
    return json.loads((DATA / family / "oracle.json").read_bytes())["words"].get("vocab_size")


# What MaxText's own loader takes


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_default_layout_is_the_same_arrays_at_the_root(scan: bool, tmp_path: Path) -> None:
    """MaxText's restore_lora_from_path looks for `decoder` there, and for rank and alpha in the step's metadata."""
    adapter = DATA / "lora-llama3.1" / "adapter_f32"
    run = alone("llama3.1", adapter, tmp_path, f"scan_layers={scan}", "--save_dtype=float32")
    assert run.code == 0, run.stderr
    step = step_of("llama3.1", adapter, tmp_path)
    wanted = expected("llama3.1", "adapter", "f32", scan)["arrays"]
    del wanted["step"]
    assert described(step) == {name.removeprefix("params.params."): array for name, array in wanted.items()}
    lora = step_metadata(step)["custom_metadata"]["lora"]
    assert (lora["lora_rank"], lora["lora_alpha"]) == (4, 8.0)
    assert f"lora.lora_restore_path={step}/items" in run.stdout
    assert "lora.lora_rank=4 lora.lora_alpha=8.0" in run.stdout


def test_module_path_names_what_is_adapted(tmp_path: Path) -> None:
    import re

    adapter = DATA / "lora-qwen3" / "adapter_partial_f32"
    for scan in (True, False):
        assert alone("qwen3", adapter, tmp_path / str(scan), f"scan_layers={scan}").code == 0
        step = step_of("qwen3", adapter, tmp_path / str(scan))
        pattern = re.compile(step_metadata(step)["custom_metadata"]["lora"]["lora_module_path"])
        modules = {name.rpartition(".kernel_lora")[0].replace(".", "/") for name in array_names(step)}
        assert modules
        assert all(pattern.fullmatch(module) for module in modules)
        assert pattern.fullmatch("decoder/layers/self_attention/query")
        assert pattern.fullmatch("decoder/layers/3/self_attention/value")
        assert not pattern.search("decoder/layers/self_attention/key")
        assert not pattern.search("decoder/layers/mlp/wi_0")


def test_base_of_the_published_size(tmp_path: Path) -> None:
    """Without hf_model_path the geometry is the one that is published under the model's name."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    name = "base_model.model.model.layers.27.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": np.ones((2, 1024), np.float32),
        f"{name}.lora_B.weight": np.ones((2048, 2), np.float32),
    }
    folder = write_adapter(tmp_path / "adapter", config, tensors)
    run = to_maxtext(
        "model_name=qwen3-0.6b", f"base_output_directory={tmp_path / 'out'}", f"hf_lora_adapter_path={folder}"
    )
    assert run.code == 0, run.stderr
    found = arrays(tmp_path / "out" / "qwen3-0.6b" / "adapter" / "0")
    assert found["decoder.layers.self_attention.query.kernel_lora_a.value"].values.shape == (1024, 28, 2)
    b = found["decoder.layers.self_attention.query.kernel_lora_b.value"].values
    assert b.shape == (2, 28, 2048)
    assert (b[:, 27] == 1).all()
    assert (b[:, :27] == 0).all()


# Made-up adapters


Matrices = dict[str, np.ndarray]


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def matrices(config: Mapping[str, Any], rank: int, modules: Callable[[str], bool] = bool, seed: int = 1) -> Matrices:
    """Random A and B for every linear layer inside the layers of a model."""
    generator = np.random.default_rng(seed)
    found: Matrices = {}
    for name, shape in shapes(config).items():
        if "_proj.weight" not in name or not modules(name):
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        found[f"{module}.lora_A.weight"] = generator.standard_normal((rank, shape[1]), np.float32)
        found[f"{module}.lora_B.weight"] = generator.standard_normal((shape[0], rank), np.float32)
    return found


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("model", CONFIGS)
def test_alone_and_merged_agree(model: str, scan: bool, tmp_path: Path) -> None:
    """Merged into nothing, an adapter is alpha / rank times the product of what it is on its own, in every family."""
    config = CONFIGS[model] | {"dtype": "float32"}
    zeros = {name: np.zeros_like(tensor) for name, tensor in random_tensors(config, np.dtype(np.float32)).items()}
    base = write_folder(tmp_path / "hf", config, zeros)
    adapter = write_adapter(tmp_path / "adapter", PLAIN, matrices(config, 4))
    words = (f"hf_lora_adapter_path={adapter}", "--save_dtype=float32", f"scan_layers={scan}")
    merged = arrays(convert(model, base, tmp_path / "merged", *words, "load_parameters_path=merge"))
    run = to_maxtext(f"model_name={model}", f"base_output_directory={tmp_path}", f"--hf_model_path={base}", *words)
    assert run.code == 0, run.stderr
    found = arrays(tmp_path / model / "adapter" / "0")
    modules = {name.rpartition("_lora_")[0] for name in found}
    kernels = {name for name in merged if name.endswith(".kernel") and "layers" in name}
    assert {f"params.params.{module}" for module in modules} == kernels
    for module in modules:
        a, b = (found[f"{module}_lora_{side}.value"].values.astype(np.float64) for side in "ab")
        kernel = merged[f"params.params.{module}"].values
        if scan:
            kernel = np.moveaxis(kernel, 1, 0)
            product = np.einsum("ilr,rlo->lio", a, b)
        else:
            product = a @ b
        assert np.abs(kernel).max() > 0
        np.testing.assert_allclose(kernel.reshape(product.shape), 2 * product, rtol=2e-5, atol=2e-5)


# Honoured where MaxText ignores


def odd(family: str, folder: Path) -> tuple[Path, dict[str, tuple[np.ndarray, np.ndarray, float]]]:
    """The odd adapter without what cannot be converted; and by module its A, B and scale, as peft defines them."""
    source = DATA / f"lora-{family}" / "adapter_odd_f32"
    config = json.loads((source / "adapter_config.json").read_bytes()) | {"modules_to_save": None}
    tensors = source_tensors(source / "adapter_model.safetensors")
    kept = {
        name: tensor for name, tensor in tensors.items() if "lora_" in name and "layers.0.self_attn.k_proj" not in name
    }
    assert any(".default." in name for name in kept)
    write_adapter(folder, config, kept)
    plain = {name.replace(".default", "").removeprefix("base_model.model."): tensor for name, tensor in kept.items()}
    pairs = {}
    for module in {name.partition(".lora_")[0] for name in plain}:
        a, b = plain[f"{module}.lora_A.weight"], plain[f"{module}.lora_B.weight"]
        special = module.endswith("layers.0.self_attn.o_proj")
        rank, alpha = (2, 16) if special else (4, 8)
        assert a.shape[0] == b.shape[1] == rank
        pairs[module] = (a, b, alpha / math.sqrt(rank))
    return folder, pairs


def pairs_of_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a matrix in the order that MaxText's Llama 3.1 rotary embedding wants."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("family", MODELS)
def test_odd_adapter_is_honoured_when_merged(family: str, scan: bool, tmp_path: Path) -> None:
    """rsLoRA, rank_pattern, alpha_pattern and `.default.`: the same as converting a base that numpy merged."""
    adapter, pairs = odd(family, tmp_path / "odd")
    source = DATA / family / "hf_f32"
    tensors = source_tensors(source / "model.safetensors")
    merged = dict(tensors)
    for module, (a, b, scale) in pairs.items():
        merged[f"{module}.weight"] = tensors[f"{module}.weight"] + np.float32(scale) * (b @ a)
    reference = write_folder(tmp_path / "hf", json.loads((source / "config.json").read_bytes()), merged)
    words = ("--save_dtype=float32", f"scan_layers={scan}")
    wanted = arrays(convert(MODELS[family], reference, tmp_path / "wanted", *words))
    step = convert(
        MODELS[family], source, tmp_path / "out", *words, f"hf_lora_adapter_path={adapter}", "load_parameters_path=x"
    )
    found = arrays(step)
    assert {name: array.sha256 for name, array in found.items()} == {
        name: array.sha256 for name, array in wanted.items()
    }
    ignored = expected(family, "merged", "odd_f32", scan)["arrays"]
    assert any(array.sha256 != ignored[name]["sha256"] for name, array in found.items())


@pytest.mark.parametrize("family", MODELS)
def test_odd_adapter_is_honoured_alone(family: str, tmp_path: Path) -> None:
    """One rank and one alpha are recorded; with them each module is what peft makes of it."""
    adapter, pairs = odd(family, tmp_path / "odd")
    run = alone(family, adapter, tmp_path, "scan_layers=true", "--save_dtype=float32")
    assert run.code == 0, run.stderr
    step = step_of(family, adapter, tmp_path)
    lora = step_metadata(step)["custom_metadata"]["lora"]
    assert lora["lora_rank"] == 4
    assert lora["lora_alpha"] == 16
    config = json.loads((DATA / family / "hf_f32" / "config.json").read_bytes())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = {"q_proj": "query", "v_proj": "value", "o_proj": "out"}
    found = arrays(step)
    assert {name.split(".")[3] for name in found} == set(names.values())
    for hf, maxtext in names.items():
        prefix = f"decoder.layers.self_attention.{maxtext}.kernel_lora"
        a, b = found[f"{prefix}_a.value"].values, found[f"{prefix}_b.value"].values
        for layer in range(config["num_hidden_layers"]):
            pair = pairs.get(f"model.layers.{layer}.self_attn.{hf}")
            if pair is None:
                assert not a[:, layer].any()
                assert not b[:, layer].any()
                continue
            first, second, scale = pair
            rank = len(first)
            rows = second.astype(np.float64) * (scale / 4.0)
            if family == "llama3.1" and hf == "q_proj":
                rows = pairs_of_neighbours(rows, heads[hf]) * config["head_dim"] ** -0.5
            assert np.array_equal(a[:, layer, :rank], first.T)
            assert np.array_equal(b[:rank, layer], rows.astype(np.float32).T)
            assert not a[:, layer, rank:].any()
            assert not b[rank:, layer].any()


def test_patterns_are_those_of_peft(tmp_path: Path) -> None:
    """An entry is the end of a module's name, whole parts of it, or a regular expression of that; the first counts."""
    model = "qwen3-8b"
    config = CONFIGS[model] | {"dtype": "float32"}
    zeros = {name: np.zeros_like(tensor) for name, tensor in random_tensors(config, np.dtype(np.float32)).items()}
    base = write_folder(tmp_path / "hf", config, zeros)
    tensors = matrices(config, 4, lambda name: "self_attn" in name)
    patterns = {"1.self_attn.q_proj": 4, r"self_attn\.[kv]_proj": 16, "v_proj": 1, "proj": 1, "layers.0.self_attn.o": 1}
    adapter = write_adapter(tmp_path / "adapter", {**PLAIN, "alpha_pattern": patterns}, tensors)
    step = convert(
        *(model, base, tmp_path / "out", "scan_layers=false", "--save_dtype=float32"),
        *(f"hf_lora_adapter_path={adapter}", "load_parameters_path=x"),
    )
    found = arrays(step)
    for layer in range(2):
        scales = {"q_proj": 1 if layer else 2, "k_proj": 4, "v_proj": 4, "o_proj": 2}
        for name, scale in scales.items():
            maxtext = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}[name]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            product = tensors[f"{prefix}_B.weight"] @ tensors[f"{prefix}_A.weight"] * np.float32(scale)
            kernel = found[f"params.params.decoder.layers_{layer}.self_attention.{maxtext}.kernel"].values
            assert np.array_equal(kernel.reshape(product.T.shape), product.T), (layer, name)


# Streaming


@dataclass(frozen=True)
class Large:
    """A model of several tiles each way, an adapter for it, and what becomes of both.

    Attributes:
      numpys: a repository of what numpy makes of both.
      digests: of what a merging conversion gives, by `scan_layers`.
    """

    base: Path
    adapter: Path
    numpys: Path
    digests: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 208, "intermediate_size": 400, "head_dim": 80, "num_attention_heads": 4, "vocab_size": 64}
    config = CONFIGS["llama3.1-8b"] | sizes
    tensors = random_tensors(config)
    base = write_folder(folder / "hf", config, tensors)
    lora = matrices(config, 20)
    adapter = write_adapter(folder / "adapter", PLAIN | {"r": 20, "lora_alpha": 7}, lora)
    merged = dict(tensors)
    for name in lora:
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            product = lora[name.replace("lora_A", "lora_B")] @ lora[name] * np.float32(7 / 20)
            merged[weight] = (tensors[weight].astype(np.float32) + product).astype(BFLOAT16)
    numpys = write_folder(folder / "merged", config, merged)
    digests = {
        scan: digests_of(merge(base, adapter, folder / scan, f"scan_layers={scan}")) for scan in ("true", "false")
    }
    return Large(base, adapter, numpys, digests)


def merge(base: Path, adapter: Path, output: Path, *words: str) -> Path:
    merging = (f"hf_lora_adapter_path={adapter}", "load_parameters_path=merge")
    return convert("llama3.1-8b", base, output, *words, *merging)


def digests_of(step: Path) -> dict[str, str]:
    return {name: array.sha256 for name, array in arrays(step).items()}


@pytest.mark.parametrize("scan", ["true", "false"])
def test_merged_values_are_numpys(scan: str, large: Large, tmp_path: Path) -> None:
    """But for the order in which BLAS sums, which is its own for every processor and shape."""
    expected = arrays(convert("llama3.1-8b", large.numpys, tmp_path / "numpys", f"scan_layers={scan}"))
    found = arrays(merge(large.base, large.adapter, tmp_path / "merged", f"scan_layers={scan}"))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        ours, numpys = array.values.astype(np.float32), expected[name].values.astype(np.float32)
        np.testing.assert_allclose(ours, numpys, rtol=2**-7, atol=1e-5, err_msg=name)
        assert np.mean(ours != numpys) < 1e-3, name


@pytest.mark.parametrize("scan", ["true", "false"])
@pytest.mark.parametrize(
    "words",
    [["--memory_budget=1"], ["--memory_budget=100KB", "--threads=1"], ["--threads=5", "--chunk_byte_size=3000"]],
    ids=["least", "one-thread", "small-chunks"],
)
def test_merged_values_do_not_depend_on_how_they_are_read(
    words: list[str], scan: str, large: Large, tmp_path: Path
) -> None:
    step = merge(large.base, large.adapter, tmp_path, f"scan_layers={scan}", *words)
    assert digests_of(step) == large.digests[scan]


@pytest.mark.parametrize("devices", [1, 8])
def test_merged_values_do_not_depend_on_devices(devices: int, large: Large, tmp_path: Path) -> None:
    assert devices != DEVICES
    run = to_maxtext_process(
        *("model_name=llama3.1-8b", f"base_output_directory={tmp_path}", f"--hf_model_path={large.base}"),
        f"--simulated_cpu_devices_count={devices}",
        *(f"hf_lora_adapter_path={large.adapter}", "load_parameters_path=merge"),
    )
    assert run.code == 0, run.stderr
    assert digests_of(tmp_path / "0") == large.digests["true"]


@pytest.mark.parametrize("devices", [1, 8])
def test_adapter_alone_over_other_devices(devices: int, tmp_path: Path) -> None:
    adapter = DATA / "lora-llama3.1" / "adapter_f32"
    run = to_maxtext_process(
        *("model_name=llama3.1-8b", f"base_output_directory={tmp_path}", f"hf_lora_adapter_path={adapter}"),
        *(f"--hf_model_path={DATA / 'llama3.1' / 'hf_f32'}", "--save_dtype=float32"),
        *(f"--simulated_cpu_devices_count={devices}", "--memory_budget=1", "--adapter_layout=converter"),
    )
    assert run.code == 0, run.stderr
    wanted = expected("llama3.1", "adapter", "f32", scan=True)["arrays"]
    found = arrays(step_of("llama3.1", adapter, tmp_path))
    assert {n: a.sha256 for n, a in found.items()} == {n: a["sha256"] for n, a in wanted.items()}


@dataclass(frozen=True)
class _BoxOf:
    """Reads boxes of an array, whatever the piece."""

    seen: np.ndarray

    def __call__(self, piece: object, box: tuple[slice, ...]) -> np.ndarray:
        return self.seen[box]


def test_any_box_is_a_box_of_the_whole() -> None:
    """To the bit, at any shape of tile; and the whole is what numpy gives, but for the order in which BLAS sums."""
    from converter.hf.adapter import Pair
    from converter.mapping import Piece, View
    from converter.merging import merging_reader

    class Matrices:
        def __init__(self, **tensors: np.ndarray) -> None:
            self.tensors = tensors

        def elements(self, name: str, part: slice) -> np.ndarray:
            return self.tensors[name].reshape(-1)[part]

    generator = np.random.default_rng(3)
    for rank in (1, 3, 16, 17, 64, 100):
        a = generator.standard_normal((rank, 300), np.float32)
        b = generator.standard_normal((12 * 30, rank), np.float32).astype(ml_dtypes.bfloat16)
        base = generator.standard_normal((12 * 30, 300), np.float32)
        numpys = (base + b.astype(np.float32) @ a * np.float32(0.3)).reshape(12, 30, 300).transpose(2, 0, 1)
        view = View((12, 30, 300), (2, 0, 1))
        adapter: Any = type("Adapter", (), {"repository": Matrices(a=a, b=b)})
        seen = view.of(base)
        read = merging_reader(_BoxOf(seen), adapter, {"w": Pair("a", "b", rank, 300, 360, 0.3)})
        whole = read(Piece("w", view, (), ()), np.s_[0:300, 0:12, 0:30])
        np.testing.assert_allclose(whole, numpys, rtol=0, atol=rank * 2**-20)
        for box in [np.s_[0:1, 3:4, 7:8], np.s_[37:290, 2:9, 15:30], np.s_[299:300, 0:12, 0:15]]:
            assert np.array_equal(read(Piece("w", view, (), ()), box), whole[box]), (rank, box)


# Resuming, reporting, checking


def test_skip_knows_the_adapter(tmp_path: Path) -> None:
    adapter = shutil.copytree(DATA / "lora-qwen3" / "adapter_f32", tmp_path / "adapter")
    words = ("--if_exists=skip", f"--hf_model_path={DATA / 'qwen3' / 'hf_bf16'}", "model_name=qwen3-0.6b")
    for more in ([], ["load_parameters_path=merge"]):
        run = to_maxtext(*words, f"base_output_directory={tmp_path / 'out'}", f"hf_lora_adapter_path={adapter}", *more)
        assert run.code == 0, run.stderr
        run = to_maxtext(*words, f"base_output_directory={tmp_path / 'out'}", f"hf_lora_adapter_path={adapter}", *more)
        assert run.code == 0, run.stderr
        assert "nothing to do" in run.stderr
    run = to_maxtext(*words, f"base_output_directory={tmp_path / 'out'}")
    assert run.code == 2
    (adapter / "adapter_config.json").write_text(json.dumps(PLAIN))
    for more in ([], ["load_parameters_path=merge"]):
        run = to_maxtext(*words, f"base_output_directory={tmp_path / 'out'}", f"hf_lora_adapter_path={adapter}", *more)
        assert run.code == 2
        assert "not the complete result" in run.stderr


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "alone"])
def test_report_names_both_sources(merge: bool, tmp_path: Path) -> None:
    adapter, path = DATA / "lora-qwen3" / "adapter_f32", tmp_path / "report.json"
    run = alone("qwen3", adapter, tmp_path, f"--report={path}", *(["load_parameters_path=x"] if merge else []))
    assert run.code == 0, run.stderr
    report = json.loads(path.read_bytes())
    assert report["request"]["adapter"] == ("merged" if merge else "maxtext")
    entry = report["adapter" if merge else "source"]
    assert entry["repository"] == str(adapter)
    assert [file["name"] for file in entry["files"]] == ["adapter_model.safetensors"]
    assert len(report["arrays"]) == (13 if merge else 14)


def verify(*arguments: object) -> int:
    from converter.cli import main

    return main(["verify", *map(str, arguments)])


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_verify(scan: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder = DATA / "llama3.1" / "hf_bf16", DATA / "lora-llama3.1"
    words = (f"scan_layers={scan}", f"hf_lora_adapter_path={folder / 'adapter_f32'}")
    merged = convert(MODELS["llama3.1"], base, tmp_path / "merged", *words, "load_parameters_path=x")
    steps = [merged]
    for layout in ("maxtext", "converter"):
        run = alone("llama3.1", folder / "adapter_f32", tmp_path / layout, *words, f"--adapter_layout={layout}")
        assert run.code == 0, run.stderr
        steps.append(step_of("llama3.1", folder / "adapter_f32", tmp_path / layout))
    for step in steps:
        assert verify(step, "--source", base, "--hf_lora_adapter_path", folder / "adapter_f32") == 0
        assert "all equal" in capsys.readouterr().out
        assert verify(step, "--source", base, "--hf_lora_adapter_path", folder / "adapter_partial_f32") == 4
        assert verify(step, "--source", base) == 2
        assert "--hf_lora_adapter_path" in capsys.readouterr().err


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    run = alone("qwen3", DATA / "lora-qwen3" / "adapter_f32", tmp_path, "--dry_run")
    assert run.code == 0, run.stderr
    assert "decoder.layers.mlp.wo.kernel_lora_a.value" in run.stdout
    assert files_below(tmp_path) == set()


# Refused, by name


def check_refused(family: str, adapter: Path, tmp_path: Path, *parts: str, words: tuple[str, ...] = ()) -> None:
    """Alone and merged: one line with these parts, exit code 2, nothing written."""
    for more in ((), ("load_parameters_path=merge",)):
        run = alone(family, adapter, tmp_path / "out", *words, *more)
        assert run.code == 2, run.stderr
        assert len(run.errors) == 1, run.stderr
        assert run.stderr.count("\n") == 1, run.stderr
        for part in parts:
            assert part in run.errors[0], run.errors[0]
        assert not (tmp_path / "out").exists()


def changed(folder: Path, *, drop: str = "-", add: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A copy of a good adapter with changes."""
    source = DATA / "lora-qwen3" / "adapter_f32"
    good = json.loads((source / "adapter_config.json").read_bytes())
    tensors = source_tensors(source / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if drop not in name}
    return write_adapter(folder, {**good, **config}, kept | dict(add or {}))


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"peft_type": None}, "peft_type"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"r": 0}, "rank"),
        ({"r": "8"}, "rank"),
        ({"r": 8}, "rank 4"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 4"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"lora_alpha": None}, "alpha"),
        ({"lora_alpha": 0}, "alpha"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha"),
        ({"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}, "meta-llama/Llama-3.1-8B"),
        ({"auto_mapping": {"base_model_class": "LlamaForCausalLM"}}, "LlamaForCausalLM"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(config: dict[str, Any], part: str, tmp_path: Path) -> None:
    check_refused("qwen3", changed(tmp_path / "adapter", **config), tmp_path, part)


L = "base_model.model.model.layers"
Q = f"{L}.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("drop", "add", "parts"),
    [
        ("layers.0.self_attn.q_proj.lora_B", {}, ("layers.0.self_attn.q_proj.lora_A.weight", "no lora_B.weight")),
        ("layers.0.self_attn.q_proj.lora_A", {}, ("layers.0.self_attn.q_proj.lora_B.weight", "no lora_A.weight")),
        ("-", {f"{Q}.lora_magnitude_vector": (128,)}, ("DoRA",)),
        ("-", {f"{Q}.lora_magnitude_vector.weight": (128,)}, ("DoRA",)),
        ("-", {"base_model.model.model.embed_tokens.lora_embedding_A": (4, 320)}, ("embedding",)),
        ("-", {"base_model.model.lm_head.weight": (320, 72)}, ("lm_head", "modules_to_save")),
        ("-", {"base_model.model.lm_head.modules_to_save.weight": (320, 72)}, ("modules_to_save",)),
        ("-", {f"{Q}.lora_B.bias": (128,)}, ("bias",)),
        ("-", {f"{Q}.lora_A.other.weight": (4, 72)}, ("more than one adapter",)),
        ("-", {f"{Q}.lora_A.weight": (4, 72, 1)}, ("linear",)),
        ("q_proj", {f"{Q}.lora_A.weight": (4, 80), f"{Q}.lora_B.weight": (128, 4)}, ("another model", "q_proj")),
        ("q_proj", {f"{Q}.lora_A.weight": (4, 72), f"{Q}.lora_B.weight": (64, 4)}, ("another model", "q_proj")),
        ("q_proj", {f"{Q}.lora_A.weight": (4, 72), f"{Q}.lora_B.weight": (128, 8)}, ("rank",)),
        ("base_model", {f"{L}.9.mlp.up_proj.lora_A.weight": (4, 72), f"{L}.9.mlp.up_proj.lora_B.weight": (96, 4)},
         ("layers.9", "no place")),
        ("base_model", {f"{L}.0.mlp.fc1.lora_A.weight": (4, 72), f"{L}.0.mlp.fc1.lora_B.weight": (96, 4)},
         ("fc1", "no place")),
        ("base_model", {}, ("holds no adapter",)),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(
    drop: str, add: dict[str, tuple[int, ...]], parts: tuple[str, ...], tmp_path: Path
) -> None:
    tensors = {name: np.ones(shape, np.float32) for name, shape in add.items()}
    check_refused("qwen3", changed(tmp_path / "adapter", drop=drop, add=tensors), tmp_path, *parts)


def test_odd_adapter_is_refused_for_what_is_left_out(tmp_path: Path) -> None:
    check_refused("llama3.1", DATA / "lora-llama3.1" / "adapter_odd_f32", tmp_path, "modules_to_save")


def test_fields_of_later_versions_are_named(tmp_path: Path) -> None:
    """fan_in_fan_out has no effect on linear layers, in peft either."""
    adapter = changed(tmp_path / "adapter", fan_in_fan_out=True, something_new=1, something_off=False)
    run = alone("qwen3", adapter, tmp_path / "out", "--save_dtype=float32", "--adapter_layout=converter")
    assert run.code == 0, run.stderr
    assert run.stderr.count("something_new") == 1
    assert "something_off" not in run.stderr
    wanted = expected("qwen3", "adapter", "f32", scan=True)["arrays"]
    found = arrays(step_of("qwen3", adapter, tmp_path / "out"))
    assert {n: a.sha256 for n, a in found.items()} == {n: a["sha256"] for n, a in wanted.items()}


def test_dtypes_that_are_refused(tmp_path: Path) -> None:
    adapter = changed(tmp_path / "adapter", add={f"{Q}.lora_A.weight": np.ones((4, 72), np.int32)})
    check_refused("qwen3", adapter, tmp_path, "I32")


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    check_refused("llama3.1", DATA / "lora-qwen3" / "adapter_f32", tmp_path, "another model")
    run = to_maxtext(
        "model_name=qwen3-0.6b",
        f"base_output_directory={tmp_path}",
        f"hf_lora_adapter_path={DATA / 'lora-qwen3' / 'adapter_f32'}",
    )
    assert run.code == 2
    assert "hf_model_path" in run.errors[0]


def test_folders_that_are_refused(tmp_path: Path) -> None:
    check_refused("qwen3", tmp_path / "nothing", tmp_path, "hf_lora_adapter_path", "nothing")
    folder = tmp_path / "adapter"
    folder.mkdir()
    check_refused("qwen3", folder, tmp_path, "adapter_config.json")
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN))
    check_refused("qwen3", folder, tmp_path, "adapter_model.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"x")
    check_refused("qwen3", folder, tmp_path, "adapter_model.safetensors", "pickles")
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    check_refused("qwen3", folder, tmp_path, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{")
    check_refused("qwen3", folder, tmp_path, "adapter_config.json", "JSON")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["load_parameters_path=/x"], "load_parameters_path"),
        (["--adapter_layout=converter"], "adapter_layout"),
        (["--adapter_revision=main"], "adapter_revision"),
        (["hf_lora_adapter_path=ADAPTER", "load_parameters_path=x", "--adapter_layout=converter"], "adapter_layout"),
        (["hf_lora_adapter_path=ADAPTER", "--adapter_layout=other"], "adapter_layout"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], part: str, tmp_path: Path) -> None:
    adapter = str(DATA / "lora-qwen3" / "adapter_f32")
    run = to_maxtext(
        *("model_name=qwen3-0.6b", f"base_output_directory={tmp_path}", f"--hf_model_path={DATA / 'qwen3' / 'hf_f32'}"),
        *(word.replace("ADAPTER", adapter) for word in words),
    )
    assert run.code == 2
    assert part in run.errors[0]
    assert files_below(tmp_path) == set()


def test_empty_words_are_as_if_not_given(tmp_path: Path) -> None:
    run = to_maxtext(
        *("model_name=qwen3-0.6b", f"base_output_directory={tmp_path}", f"--hf_model_path={DATA / 'qwen3' / 'hf_f32'}"),
        *("hf_lora_adapter_path=", "load_parameters_path=''", "--dry_run"),
    )
    assert run.code == 0, run.stderr


def test_layers_beyond_a_cut_are_left_out(tmp_path: Path) -> None:
    adapter = DATA / "lora-qwen3" / "adapter_partial_f32"
    assert alone("qwen3", adapter, tmp_path / "two", "base_num_decoder_layers=2").code == 0
    shape = arrays(step_of("qwen3", adapter, tmp_path / "two"))[
        "decoder.layers.self_attention.query.kernel_lora_a.value"
    ]
    assert shape.values.shape == (72, 2, 4)
    run = alone("qwen3", adapter, tmp_path / "one", "base_num_decoder_layers=1")
    assert run.code == 2
    assert "layers" in run.errors[0]


def test_from_the_hub(tmp_path: Path) -> None:
    """An adapter has no config.json of its own. Offline it comes from the cache."""
    folder = shutil.copytree(DATA / "lora-qwen3" / "adapter_f32", tmp_path / "adapter")
    (folder / "tokenizer.json").write_text("{}")
    words = ("model_name=qwen3-0.6b", "hf_lora_adapter_path=me/my-lora", "revision=v1", "--save_dtype=float32")
    base = f"--hf_model_path={DATA / 'qwen3' / 'hf_f32'}"
    with running("me/my-lora") as hub:
        commit = hub.add(folder, "v1")
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        run = to_maxtext_process(
            *words, base, f"base_output_directory={tmp_path / 'out'}", "--report=r", env=env, cwd=tmp_path
        )
        assert run.code == 0, run.stderr
        assert not hub.asked_for("tokenizer.json")
        offline = to_maxtext_process(
            *words, base, f"base_output_directory={tmp_path / 'off'}", env={**env, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path
        )
        assert offline.code == 0, offline.stderr
        run = to_maxtext_process(*words, base, "load_parameters_path=x", "--adapter_revision=v2", env=env, cwd=tmp_path)
        assert run.code == 2
        assert "v2" in run.errors[0]
    step = tmp_path / "out" / "qwen3-0.6b" / "my-lora" / "0"
    wanted = expected("qwen3", "adapter", "f32", scan=True)["arrays"]
    digests = {f"params.params.{name}": array.sha256 for name, array in arrays(step).items()}
    assert digests == {name: array["sha256"] for name, array in wanted.items() if name != "step"}
    source = json.loads((tmp_path / "r").read_bytes())["source"]
    assert (source["repository"], source["revision"]) == ("me/my-lora", commit)
    assert source["files"][0]["sha256"]


# Adapters that are elsewhere


def wanted_of(kind: str) -> dict[str, str]:
    """What MaxText makes of the qwen3 adapter in float32, scanned, by the names that are used here."""
    found = expected("qwen3", kind, "f32", scan=True)["arrays"]
    prefix = "params.params." if kind == "adapter" else ""
    return {name.removeprefix(prefix): array["sha256"] for name, array in found.items() if name != "step"}


def found_in(output: Path, kind: str, name: str) -> dict[str, str]:
    step = output / "qwen3-0.6b" / name / "0" if kind == "adapter" else output / "0"
    return {name: array.sha256 for name, array in arrays(step).items() if name != "step"}


REMOTE = ("model_name=qwen3-0.6b", "--save_dtype=float32", f"hf_model_path={DATA / 'qwen3' / 'hf_f32'}")


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_from_the_hub_by_ranges(kind: str, tmp_path: Path) -> None:
    """Nothing of the adapter is kept on disk."""
    words = (*REMOTE, "hf_lora_adapter_path=me/my-lora", "--cache_dir=none", f"base_output_directory={tmp_path / 'o'}")
    merge = ["load_parameters_path=merge"] if kind == "merged" else []
    with running("me/my-lora") as hub:
        hub.add(DATA / "lora-qwen3" / "adapter_f32", "main")
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        planned = to_maxtext_process(*words, *merge, "--dry_run", env=env)
        assert planned.code == 0, planned.stderr
        run = to_maxtext_process(*words, *merge, env=env)
        assert run.code == 0, run.stderr
        assert all(request.range for request in hub.asked_for("adapter_model.safetensors"))
    assert found_in(tmp_path / "o", kind, "my-lora") == wanted_of(kind)
    assert {path.name for path in tmp_path.iterdir()} == {"o"}


def test_by_ranges_without_a_place_for_them(tmp_path: Path) -> None:
    """Two words that do not go together, found before anything is fetched; an adapter alone needs no place."""
    words = (*REMOTE, "hf_lora_adapter_path=me/my-lora", "--cache_dir=none", "--spool_dir=none")
    with running("me/my-lora") as hub:
        hub.add(DATA / "lora-qwen3" / "adapter_f32", "main")
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        for more in ((), ("--dry_run",)):
            run = to_maxtext_process(
                *words, "load_parameters_path=merge", f"base_output_directory={tmp_path / 'o'}", *more, env=env
            )
            assert run.code == 2, run.stderr
            assert "spool_dir=none" in run.errors[0]
            assert not hub.asked_for("adapter_model.safetensors")
        run = to_maxtext_process(*words, f"base_output_directory={tmp_path / 'o'}", env=env)
        assert run.code == 0, run.stderr


def test_an_adapter_from_afar_is_part_of_the_predicted_memory(tmp_path: Path) -> None:
    """The base is a folder; what HTTP takes is needed all the same."""
    predicted = []
    with running("me/my-lora") as hub:
        hub.add(DATA / "lora-qwen3" / "adapter_f32", "main")
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        for adapter in ("me/my-lora", DATA / "lora-qwen3" / "adapter_f32"):
            run = to_maxtext_process(
                *(*REMOTE, f"hf_lora_adapter_path={adapter}", "load_parameters_path=merge", "--memory_budget=1MB"),
                *("--dry_run", "--cache_dir=none", f"base_output_directory={tmp_path / 'o'}"),
                env=env,
            )
            assert run.code == 0, run.stderr
            found = re.search(r"predicted peak memory \(anonymous\): ([\d,]+) bytes", run.stdout)
            assert found is not None
            predicted.append(int(found[1].replace(",", "")))
    assert predicted[0] - predicted[1] == converting._REMOTE_BYTES


def test_verify_with_an_adapters_revision(tmp_path: Path) -> None:
    with running("me/my-lora") as hub:
        hub.add(DATA / "lora-qwen3" / "adapter_partial_f32", "main")
        hub.add(DATA / "lora-qwen3" / "adapter_f32", "v1")
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        words = (*REMOTE, "hf_lora_adapter_path=me/my-lora", "load_parameters_path=merge", "adapter_revision=v1")
        run = to_maxtext_process(*words, f"base_output_directory={tmp_path / 'o'}", env=env)
        assert run.code == 0, run.stderr
        base = ("--source", str(DATA / "qwen3" / "hf_f32"))
        codes = [
            subprocess.run(
                [sys.executable, "-m", "converter", "verify", str(tmp_path / "o"), *base, *more],
                env=environment(env),
                capture_output=True,
                check=False,
            ).returncode
            for more in (
                ("--hf_lora_adapter_path=me/my-lora", "--adapter_revision=v1"),
                ("--hf_lora_adapter_path=me/my-lora",),
                ("--adapter_revision=v1",),
            )
        ]
    assert codes == [0, 4, 2]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_from_a_bucket(kind: str, cached: bool, bucket: Bucket, tmp_path: Path) -> None:
    """Adapter and base, or its config.json alone; what is merged and what is alone can be verified from there."""
    merge = ["load_parameters_path=merge"] if kind == "merged" else []
    cache = [f"--cache_dir={tmp_path / 'cache'}"] if cached else []
    base = bucket.add(DATA / "qwen3" / "hf_f32", "base")
    adapter = bucket.add(DATA / "lora-qwen3" / "adapter_f32", "adapters/my lora")
    env = {**bucket.environment(), "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    run = to_maxtext_process(
        *(*REMOTE[:2], f"hf_model_path={base}", f"hf_lora_adapter_path={adapter}/", *merge, *cache),
        *(f"base_output_directory={tmp_path / 'o'}", f"--report={tmp_path / 'r'}"),
        env=env,
    )
    assert run.code == 0, run.stderr
    assert found_in(tmp_path / "o", kind, "my lora") == wanted_of(kind)
    entry = json.loads((tmp_path / "r").read_bytes())["source" if kind == "adapter" else "adapter"]
    assert entry["files"][0]["crc32c"]
    at = tmp_path / "o" if kind == "merged" else tmp_path / "o" / "qwen3-0.6b" / "my lora"
    words = ("--source", base, "--hf_lora_adapter_path", adapter, *cache, f"--report={tmp_path / 'v'}")
    check = subprocess.run(
        [sys.executable, "-m", "converter", "verify", at, *words],
        env=environment(env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
    checked = json.loads((tmp_path / "v").read_bytes())
    assert checked["source" if kind == "adapter" else "adapter"] == {**entry, "repository": adapter}
    if not cached:
        # Damage is found by the object's checksum, before anything is published.
        weights = bucket.folder / "adapters" / "my lora" / "adapter_model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        run = to_maxtext_process(
            *(*REMOTE[:2], f"hf_model_path={base}", f"hf_lora_adapter_path={adapter}", *merge),
            f"base_output_directory={tmp_path / 'damaged'}",
            env=env,
        )
        assert run.code == 3, run.stderr
        assert "CRC-32C" in run.errors[0]
        assert not [name for name in files_below(tmp_path / "damaged") if name.endswith("0")]


def test_damaged_on_its_way_into_the_hubs_cache(tmp_path: Path) -> None:
    """As a model's weights are: found by the hub's sha256 and fetched again."""
    damaged: list[str] = []

    def damage(path: str, body: bytes) -> bytes:
        if path.startswith("/storage/") and not damaged:
            damaged.append(path)
            return body[:-5] + bytes([body[-5] ^ 1]) + body[-4:]
        return body

    with running("me/my-lora") as hub:
        hub.add(DATA / "lora-qwen3" / "adapter_f32", "main")
        hub.change = damage
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        words = (*REMOTE, "hf_lora_adapter_path=me/my-lora", f"base_output_directory={tmp_path / 'o'}")
        run = to_maxtext_process(*words, env=env)
    assert run.code == 0, run.stderr
    assert damaged
    assert found_in(tmp_path / "o", "adapter", "my-lora") == wanted_of("adapter")


# Adapters of towers


def adapter_of(folder: Path, module: str, shape: tuple[int, ...]) -> Path:
    """A PEFT folder that adapts one linear layer of that shape, with rank 2."""
    generator, name = np.random.default_rng(3), f"base_model.model.{module}.lora_"
    a, b = generator.standard_normal((2, shape[1])), generator.standard_normal((shape[0], 2))
    tensors = {f"{name}A.weight": a.astype(np.float32), f"{name}B.weight": b.astype(np.float32)}
    return write_adapter(folder, {"peft_type": "LORA", "r": 2, "lora_alpha": 4}, tensors)


@pytest.mark.parametrize(
    ("family", "module", "kernel"),
    [
        ("qwen3-vl", "model.visual.blocks.0.mlp.linear_fc1", "vision_encoder.Qwen3VLVisionEncoder_0.blocks_0.mlp"),
        ("gemma3-mm", "vision_tower.encoder.layers.0.mlp.fc1", "MlpBlockViT_0.Dense_0"),
    ],
)
def test_of_a_tower(family: str, module: str, kernel: str, tmp_path: Path) -> None:
    """A tower's matrices are [out, in] too; MaxText's kernels, hence A and B, are the other way round."""
    base = DATA / family / "hf_bf16"
    shape = source_tensors(base / "model.safetensors")[f"{module}.weight"].shape
    adapter = adapter_of(tmp_path / "adapter", module, shape)
    name = json.loads((DATA / family / "oracle.json").read_bytes())["model_name"]
    words = [f"model_name={name}", f"hf_model_path={base}", f"hf_lora_adapter_path={adapter}", "scan_layers=false"]
    words += ["--save_dtype=float32", f"base_output_directory={tmp_path / 'out'}"]
    refused = to_maxtext(*words)
    assert refused.code == 2
    assert "give use_multimodal=true" in refused.errors[0]
    run = to_maxtext(*words, "use_multimodal=true")
    assert run.code == 0, run.stderr
    step = tmp_path / "out" / name / "adapter" / "0"
    stored = source_tensors(adapter / "adapter_model.safetensors")
    found = {name: array.values for name, array in arrays(step).items() if "lora" in name}
    assert len(found) == 2
    for side in "ab":
        (at,) = (name for name in found if name.endswith(f"kernel_lora_{side}.value"))
        assert kernel in at
        wanted = stored[f"base_model.model.{module}.lora_{side.upper()}.weight"].T
        assert np.array_equal(found[at], wanted)
    assert verify(step, "--source", base, "--hf_lora_adapter_path", adapter) == 0


@pytest.mark.parametrize("scan", [True, False])
def test_verify_of_fewer_layers(scan: bool, tmp_path: Path) -> None:
    adapter = DATA / "lora-qwen3" / "adapter_f32"
    run = alone("qwen3", adapter, tmp_path, f"scan_layers={scan}", "base_num_decoder_layers=2")
    assert run.code == 0, run.stderr
    step = step_of("qwen3", adapter, tmp_path)
    assert verify(step, "--source", DATA / "qwen3" / "hf_f32", "--hf_lora_adapter_path", adapter) == 0


def test_verify_against_another_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = DATA / "lora-qwen3" / "adapter_f32"
    assert alone("qwen3", adapter, tmp_path).code == 0
    (tmp_path / "base").mkdir()
    config = json.loads((DATA / "qwen3" / "hf_f32" / "config.json").read_bytes())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    step = step_of("qwen3", adapter, tmp_path)
    assert verify(step, "--source", tmp_path / "base", "--hf_lora_adapter_path", adapter) == 2
    assert "another model" in capsys.readouterr().err
