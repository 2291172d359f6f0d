"""What differs between families: forms in which repositories are stored, what is left out, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, Tensors, write_folder
from reading import Stored, arrays, source_tensors
from running import ROOT, files_below, to_maxtext
from test_oracles import CASES

from converter.listing import show
from converter.models import FAMILIES, MODELS

Config = dict[str, Any]


def oracle(family: str) -> Config:
    found: Config = json.loads((DATA / family / "oracle.json").read_bytes())
    return found


def source(family: str, folder: str = "hf_bf16") -> tuple[Config, Tensors]:
    config = json.loads((DATA / family / folder / "config.json").read_bytes())
    return config, source_tensors(DATA / family / folder / "model.safetensors")


def words(family: str, **changes: Any) -> list[str]:
    """What MaxText was given."""
    found = oracle(family)
    given = {"use_multimodal": False, **found["words"], **changes}
    return [f"model_name={found['model_name']}", *(f"{word}={value}" for word, value in given.items())]


def expected(family: str, scan: bool) -> Mapping[str, Any]:
    path = DATA / family / f"expected_bf16_{'scan' if scan else 'unscan'}.json"
    found: Mapping[str, Any] = json.loads(path.read_bytes())["arrays"]
    return found


def converted(folder: Path, output: Path, *given: str, scan: bool) -> dict[str, Stored]:
    run = to_maxtext(*given, f"hf_model_path={folder}", f"base_output_directory={output}", f"scan_layers={scan}")
    assert run.code == 0, run.stderr
    return arrays(output / "0")


def assert_equal(found: Mapping[str, Stored], wanted: Mapping[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert {name: array.sha256 for name, array in found.items()} == {n: a["sha256"] for n, a in wanted.items()}


def refused(folder: Path, output: Path, *given: str) -> str:
    """The one line that says why."""
    run = to_maxtext(*given, f"hf_model_path={folder}", f"base_output_directory={output}")
    assert run.code == 2, run.stderr
    assert len(run.errors) == 1
    assert not output.exists() or not files_below(output)
    return run.errors[0]


def test_the_models_table_claims_what_is_compared() -> None:
    """A conversion is called equal where, and only where, a reference of MaxText's is compared with."""
    compared: dict[str, set[str]] = {family.name: set() for family in FAMILIES}
    for case in CASES:
        found = oracle(case.family)
        ways = compared[MODELS[found["model_name"]].name]
        ways.add("multimodal" if found["words"].get("use_multimodal") else "scanned" if case.scan else "unscanned")
        if found["words"].get("use_multimodal"):
            ways.add("scanned" if case.scan else "unscanned")
    assert {family.name: set(family.checked) for family in FAMILIES} == compared


def test_the_models_table_tells_what_each_repository_has() -> None:
    lines = {line.split()[0]: re.split(r"\s{2,}", line) for line in show().splitlines() if "/" in line}
    assert lines.keys() - MODELS.keys() == set()
    ways = {name: cells[3:7] for name, cells in lines.items()}
    assert ways["gemma3-4b"] == ["equal", "equal", "equal", "no"]
    # The one size that is text only.
    assert ways["gemma3-1b"] == ["equal", "equal", "-", "no"]
    assert ways["qwen3-vl-2b"] == ["equal", "equal", "equal, unscanned", "no"]
    assert ways["qwen3-vl-30b-a3b"] == ["yes", "equal", "equal, unscanned", "no"]
    assert ways["gemma4-e2b"] == ["-", "equal", "-", "no"]
    assert ways["deepseek3.2-671b"] == ["yes", "yes", "-", "no"]


def test_families_stay_tables() -> None:
    """All of them together take at most a quarter of the 4,300 lines of MaxText's param_mapping.py."""
    files = (ROOT / "converter" / "families").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= 4300 // 4


def test_a_repository_without_its_familys_tower(tmp_path: Path) -> None:
    found = refused(DATA / "gemma3" / "hf_bf16", tmp_path / "out", "model_name=gemma3-1b", "use_multimodal=true")
    assert "no vision tower" in found


def _renamed(tensors: Tensors, *names: tuple[str, str]) -> Tensors:
    """Every name with the first beginning that fits put in the place of another."""

    def new(name: str) -> str:
        for old, beginning in names:
            if name.startswith(old):
                return beginning + name.removeprefix(old)
        return name

    return {new(name): tensor for name, tensor in tensors.items()}


_GEMMA3_TEXT, _GEMMA3_VISION = "language_model.model.", "vision_tower."
_LAYOUTS = {
    "gemma3-mm-old": ("gemma3-mm", [(_GEMMA3_VISION, "vision_tower.vision_model.")]),
    "gemma3-mm-new": (
        "gemma3-mm",
        [
            (_GEMMA3_TEXT, "model.language_model."),
            (_GEMMA3_VISION, "model.vision_tower.vision_model."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ],
    ),
    "gemma3-text": ("gemma3", [(_GEMMA3_TEXT, "model.")]),
    "gemma4-text": ("gemma4-31b", [("model.language_model.", "model.")]),
    "qwen3-vl-old": ("qwen3-vl-text", [("model.language_model.", "model."), ("model.visual.", "visual.")]),
    "qwen3.5-text": ("qwen3.5", [("model.language_model.", "model.")]),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_names_of_other_versions_of_transformers(layout: str, tmp_path: Path) -> None:
    family, names = _LAYOUTS[layout]
    config, tensors = source(family)
    write_folder(tmp_path / "hf", config, _renamed(tensors, *names))
    assert_equal(converted(tmp_path / "hf", tmp_path / "out", *words(family), scan=False), expected(family, False))


def test_text_only_repository_of_a_multimodal_family(tmp_path: Path) -> None:
    """As google/gemma-3-1b-it is: the text model's keys at the root of config.json, no vision tower."""
    config, tensors = source("gemma3")
    text = {name: tensor for name, tensor in tensors.items() if name.startswith(_GEMMA3_TEXT)}
    flat = {**config["text_config"], "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    write_folder(tmp_path / "hf", flat, _renamed(text, (_GEMMA3_TEXT, "model.")))
    for scan in (True, False):
        found = converted(tmp_path / "hf", tmp_path / f"out-{scan}", *words("gemma3"), scan=scan)
        assert_equal(found, expected("gemma3", scan))


def _fused(tensors: Tensors, experts: int, *, transposed: bool) -> Tensors:
    """Separate experts joined, as [out, in] or transposed as [in, out]."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in tensors.keys() - kept.keys()}):

        def stacked(part: str, prefix: str = prefix) -> np.ndarray:
            matrices = [tensors[f"{prefix}.experts.{i}.{part}.weight"] for i in range(experts)]
            return np.ascontiguousarray(np.stack([matrix.T if transposed else matrix for matrix in matrices]))

        joined = [stacked("gate_proj"), stacked("up_proj")]
        kept[f"{prefix}.experts.gate_up_proj"] = np.ascontiguousarray(
            np.concatenate(joined, axis=2 if transposed else 1)
        )
        kept[f"{prefix}.experts.down_proj"] = stacked("down_proj")
    return kept


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("size", [20, 32, 64])
def test_fused_experts_of_both_orientations(size: int, transposed: bool, tmp_path: Path) -> None:
    """Also where one of the two tensors has the same shape in both: 2 x 32 and 64 are the model's 64."""
    config, tensors = source("qwen3-moe")
    config["moe_intermediate_size"] = size
    generator = np.random.default_rng(size)
    dtype = tensors["model.norm.weight"].dtype
    for name in [name for name in tensors if ".experts." in name]:
        shape = (64, size) if "down_proj" in name else (size, 64)
        tensors[name] = generator.standard_normal(shape).astype(dtype)
    write_folder(tmp_path / "separate", config, tensors)
    write_folder(tmp_path / "fused", config, _fused(tensors, 8, transposed=transposed))
    given = ["model_name=qwen3-30b-a3b"]
    one = converted(tmp_path / "separate", tmp_path / "one", *given, scan=True)
    two = converted(tmp_path / "fused", tmp_path / "two", *given, scan=True)
    assert {name: array.sha256 for name, array in one.items()} == {name: array.sha256 for name, array in two.items()}


def test_scanned_where_maxtext_converts_unscanned_only(tmp_path: Path) -> None:
    """Scanned is unscanned, stacked: on axis 1, experts before layers."""
    given = [*words("qwen3-vl-moe-text"), "deepstack_visual_indexes_for_vit=[]"]
    folder = DATA / "qwen3-vl-moe-text" / "hf_bf16"
    apart = converted(folder, tmp_path / "apart", *given, scan=False)
    assert_equal(apart, expected("qwen3-vl-moe-text", False))
    together = converted(folder, tmp_path / "together", *given, scan=True)
    for name, array in together.items():
        if ".layers." in name:
            layers = [apart[name.replace(".layers.", f".layers_{i}.")].values for i in range(4)]
            assert np.array_equal(array.values, np.stack(layers, axis=1)), name
        else:
            assert array.sha256 == apart[name].sha256


def test_joined_matrices_are_llamas(tmp_path: Path) -> None:
    """Phi 4 is a Llama whose query, key and value, and gate and up projection, are stored one after the other."""
    config, tensors = source("llama3.1")
    write_folder(tmp_path / "llama", config, tensors)
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith(_PARTS)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        joined[f"{attention}.qkv_proj.weight"] = np.concatenate(
            [tensors[f"{attention}.{p}_proj.weight"] for p in "qkv"]
        )
        joined[f"{mlp}.gate_up_proj.weight"] = np.concatenate(
            [tensors[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
        )
    write_folder(tmp_path / "phi", {**config, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, joined)
    for scan in (True, False):
        llama = converted(tmp_path / "llama", tmp_path / f"one-{scan}", "model_name=llama2-7b", scan=scan)
        phi = converted(tmp_path / "phi", tmp_path / f"two-{scan}", "model_name=phi-4", scan=scan)
        assert {name: array.sha256 for name, array in phi.items()} == {n: a.sha256 for n, a in llama.items()}


_PARTS = tuple(f"{part}_proj.weight" for part in ("q", "k", "v", "gate", "up"))


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_deepseek_v32_adds_an_indexer_to_v3(scan: bool, tmp_path: Path) -> None:
    config, tensors = source("deepseek3")
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    config |= {"index_n_heads": 4, "index_head_dim": 16}
    shapes = {
        "k_norm.weight": (16,), "k_norm.bias": (16,), "weights_proj.weight": (4, 64), "wk.weight": (16, 64),
        "wq_b.weight": (4 * 16, 24),
    }  # fmt: skip
    generator = np.random.default_rng(0)
    dtype = tensors["model.norm.weight"].dtype
    indexers = {
        f"model.layers.{i}.self_attn.indexer.{name}": generator.standard_normal(shape).astype(dtype)
        for i in range(5)
        for name, shape in shapes.items()
    }
    write_folder(tmp_path / "hf", config, tensors | indexers)
    given = [*words("deepseek3")[1:], "model_name=deepseek3.2-671b"]
    found = converted(tmp_path / "hf", tmp_path / "out", *given, scan=scan)
    assert_equal({n: a for n, a in found.items() if ".indexer." not in n}, expected("deepseek3", scan))

    def layers(name: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[int, np.ndarray]:
        return {i: change(indexers[f"model.layers.{i}.self_attn.indexer.{name}"]) for i in range(5)}

    wanted = {
        "k_norm.scale": layers("k_norm.weight", lambda x: x),
        "k_norm.bias": layers("k_norm.bias", lambda x: x),
        "weights_proj.kernel": layers("weights_proj.weight", np.transpose),
        "wk.kernel": layers("wk.weight", np.transpose),
        "wq_b.kernel": layers("wq_b.weight", lambda x: x.T.reshape(24, 4, 16)),
    }
    for name, values in wanted.items():
        for stack, numbers in (("dense_layers", (0, 1)), ("moe_layers", (2, 3, 4))):
            path = f"params.params.decoder.{stack}{{}}.self_attention.indexer.{name}"
            if scan:
                assert np.array_equal(found[path.format("")].values, np.stack([values[i] for i in numbers], axis=1))
            else:
                for position, i in enumerate(numbers):
                    assert np.array_equal(found[path.format(f"_{position}")].values, values[i])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    config, tensors = source("deepseek3")
    extra = {
        f"model.layers.5.{name}": tensors[f"model.layers.4.{name}"]
        for name in ("input_layernorm.weight", "self_attn.o_proj.weight")
    }
    extra["model.layers.5.eh_proj.weight"] = extra["model.layers.5.self_attn.o_proj.weight"]
    write_folder(tmp_path / "hf", config, tensors | extra)
    found = converted(tmp_path / "hf", tmp_path / "out", *words("deepseek3"), scan=True)
    assert_equal(found, expected("deepseek3", True))
    write_folder(tmp_path / "none", {**config, "num_nextn_predict_layers": 0}, tensors | extra)
    assert "model.layers.5." in refused(tmp_path / "none", tmp_path / "no", *words("deepseek3"))


@pytest.mark.parametrize(("family", "name"), [("qwen3-next", "mtp.fc.weight"), ("qwen3-omni-text", "talker.x.weight")])
def test_what_maxtext_has_no_place_for_is_left_out(family: str, name: str, tmp_path: Path) -> None:
    config, tensors = source(family)
    write_folder(tmp_path / "hf", config, tensors | {name: np.ones((4, 4), np.float32)})
    assert_equal(converted(tmp_path / "hf", tmp_path / "out", *words(family), scan=False), expected(family, False))


def test_fewer_layers_of_several_stacks(tmp_path: Path) -> None:
    """base_num_decoder_layers cuts from the end: two dense layers and the first with experts are left."""
    found = converted(
        DATA / "deepseek3" / "hf_bf16", tmp_path / "out", *words("deepseek3", base_num_decoder_layers=3), scan=False
    )
    wanted = expected("deepseek3", False)
    kept = {n: a for n, a in wanted.items() if ".moe_layers_1." not in n and ".moe_layers_2." not in n}
    assert_equal(found, kept)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("qwen3-moe", {"use_multimodal": True}, "no vision tower"),
        ("gemma4-e2b", {"scan_layers": True}, "does not scan"),
        ("qwen3-vl", {"scan_layers": True}, "does not scan"),
        ("qwen3-omni", {"scan_layers": False, "use_audio": False}, "use_audio"),
        ("olmo3", {"base_num_decoder_layers": 6, "scan_layers": True}, "cycles of 4"),
        ("qwen3-moe", {"num_experts": 16}, "num_experts=16"),
    ],
)
def test_requests_that_a_family_cannot_meet(family: str, changes: Config, why: str, tmp_path: Path) -> None:
    assert why in refused(DATA / family / "hf_bf16", tmp_path / "out", *words(family, **changes))


@pytest.mark.parametrize("family", ["gemma3-mm", "qwen3-vl", "qwen3.5-mm", "qwen3-omni"])
def test_towers_of_a_repository_without_them(family: str, tmp_path: Path) -> None:
    config, tensors = source(family)
    sections = [key for key in ("vision_config", "thinker_config") if key in config]
    without: Config = {key: value for key, value in config.items() if key not in sections}
    if "thinker_config" in sections:
        without["thinker_config"] = {"text_config": config["thinker_config"]["text_config"]}
    write_folder(tmp_path / "hf", without, tensors)
    why = refused(tmp_path / "hf", tmp_path / "out", *words(family, scan_layers=False))
    assert "drop use_multimodal" in why


@pytest.mark.parametrize("value", ["x", [], ["full_attention"], {"a": 1}, 10**9, -1], ids=str)
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3.5", "layer_types"),
        ("gemma4-31b", "num_kv_shared_layers"),
        ("gemma4-e2b", "per_layer_config"),
        ("deepseek3", "first_k_dense_replace"),
        ("deepseek3", "num_nextn_predict_layers"),
    ],
)
def test_spoiled_kinds_of_layers(family: str, key: str, value: Any, tmp_path: Path) -> None:
    """What says which layers are alike may be anything: it is carried out or refused, at once."""
    config, tensors = source(family)
    config.get("text_config", config)[key] = value
    write_folder(tmp_path / "hf", config, tensors)
    given = [*words(family, scan_layers=False), f"hf_model_path={tmp_path / 'hf'}", "--dry_run"]
    run = to_maxtext(*given, f"base_output_directory={tmp_path / 'out'}")
    assert run.code in (0, 2), run.stderr
    assert len(run.errors) == (run.code == 2)


def test_output_embedding_of_its_own_where_maxtext_has_none(tmp_path: Path) -> None:
    config, tensors = source("gemma3")
    config["text_config"]["tie_word_embeddings"] = False
    tensors["lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"] + 1
    write_folder(tmp_path / "hf", config, tensors)
    why = refused(tmp_path / "hf", tmp_path / "out", "model_name=gemma3-4b")
    assert "MaxText has them as one" in why


def test_missing_size_of_another_model(tmp_path: Path) -> None:
    why = refused(DATA / "gemma4-31b" / "hf_bf16", tmp_path / "out", "model_name=gemma4-26b")
    assert "gemma4-26b" in why
    assert "another model" in why


@pytest.mark.parametrize("count", [7, 9])
@pytest.mark.parametrize("folder", ["hf_bf16", "hf_bf16_sd"])
def test_expert_count_that_disagrees_with_the_tensors(folder: str, count: int, tmp_path: Path) -> None:
    config, tensors = source("qwen3-moe", folder)
    write_folder(tmp_path / "hf", {**config, "num_local_experts": count}, tensors)
    assert f"asks for [{count}, 64]" in refused(tmp_path / "hf", tmp_path / "out", "model_name=qwen3-30b-a3b")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-next-80b-a3b", "gemma3-4b", "deepseek2-16b", "gpt-oss-20b"])
def test_family_of_another_model(name: str, tmp_path: Path) -> None:
    assert "Qwen3Moe" in refused(DATA / "qwen3-moe" / "hf_bf16", tmp_path / "out", f"model_name={name}")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
def test_absurd_counts_end_at_once(key: str, tmp_path: Path) -> None:
    config, tensors = source("qwen3-moe")
    write_folder(tmp_path / "hf", {**config, key: 10**9}, tensors)
    refused(tmp_path / "hf", tmp_path / "out", "model_name=qwen3-30b-a3b")
