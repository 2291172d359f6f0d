"""Quantised sources: converting one is converting what the published formulas dequantise it to, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from buckets import Bucket
from checkpoints import BFLOAT16, CONFIGS, Tensors, random_tensors, write_folder, write_tiny
from quantising import (
    E4M3,
    E8M0,
    FLOAT32,
    LINEAR,
    Quantised,
    deepseek4,
    dequantised_eight_bits,
    dequantised_four_bits,
    e4m3,
    eight_bits,
    fused,
    mxfp4,
    random_codes,
    source,
    to_bfloat16,
)
from reading import arrays
from running import Run, convert, files_below, to_maxtext

from converter.cli import main
from converter.hf.decoding import decode
from converter.hf.quantised import open_weights
from converter.hf.repository import Repository, locate, open_repository
from converter.mapping import View

FLOAT16 = np.dtype(np.float16)


def fp8(block: tuple[int, int], **more: Any) -> dict[str, Any]:
    """As in DeepSeek-V3's config.json."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
        **more,
    }


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    """As in a repository of llm-compressor's FP8."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {}}},
    }


INVERSE = "{}.weight_scale_inv"
SCALE = "{}.weight_scale"

SOURCES: Mapping[str, Callable[[], Quantised]] = {
    "fp8-deepseek3": lambda: eight_bits(source("deepseek3"), fp8((128, 128)), (128, 128), INVERSE),
    "fp8-small-blocks": lambda: eight_bits(source("deepseek3"), fp8((24, 20)), (24, 20), INVERSE),
    "fp8-bfloat16-scales": lambda: eight_bits(source("qwen3-moe"), fp8((32, 32)), (32, 32), INVERSE, BFLOAT16),
    "fp8-ue8m0": lambda: eight_bits(
        source("mixtral"), fp8((32, 16), scale_fmt="ue8m0"), (32, 16), "{}.scale", E8M0
    ),
    "fp8-one-scale": lambda: eight_bits(
        source("mixtral"), {**fp8((1, 1)), "weight_block_size": None}, (0, 0), INVERSE, BFLOAT16, scale_shape=()
    ),
    "fp8-fused": lambda: eight_bits(fused(source("qwen3-moe")), fp8((24, 24)), (24, 24), "{}_scale_inv"),
    "fp8-qwen3.5": lambda: eight_bits(
        ("qwen3.5-35b-a3b-fp8", *source("qwen3.5")[1:]), fp8((32, 32)), (32, 32), "{}_scale_inv", BFLOAT16,
        chosen=lambda name: LINEAR.fullmatch(name) or name.endswith(("in_proj_qkv.weight", "in_proj_z.weight")),
    ),
    "channels": lambda: eight_bits(source("qwen3-moe"), compressed("channel"), (1, 0), SCALE),
    "channels-bfloat16": lambda: eight_bits(
        source("mixtral"), compressed("channel"), (1, 0), SCALE, BFLOAT16, through=True
    ),
    "tensors": lambda: eight_bits(
        source("mixtral"), compressed("tensor"), (0, 0), SCALE, FLOAT16, through=True, scale_shape=(1,)
    ),
    "blocks": lambda: eight_bits(
        source("mixtral"), compressed("block", block_structure=[24, 40]), (24, 40), SCALE
    ),
    "mxfp4": mxfp4,
    "deepseek4": deepseek4,
}  # fmt: skip


@pytest.fixture(scope="module")
def quantised() -> Callable[[str], Quantised]:
    made: dict[str, Quantised] = {}

    def get(kind: str) -> Quantised:
        if kind not in made:
            made[kind] = SOURCES[kind]()
            if kind in ("fp8-fused", "fp8-qwen3.5"):
                # Without ".weight" in the codes' names the scales of the others have it.
                for name in list(made[kind].tensors):
                    if name.endswith("_scale_inv") and ".experts." not in name:
                        tensors = made[kind].tensors
                        tensors[name.replace("_scale_inv", ".weight_scale_inv")] = tensors.pop(name)
        return made[kind]

    return get


def same_arrays(first: Path, second: Path) -> None:
    """Two checkpoints hold the same, in the same chunks."""
    left, right = arrays(first), arrays(second)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].values.dtype == right[name].values.dtype, name
        assert left[name].chunk_shape == right[name].chunk_shape, name
        assert left[name].values.tobytes() == right[name].values.tobytes(), name


_WAYS = (("true", "bfloat16"), ("false", "bfloat16"), ("true", "float32"))


@pytest.mark.parametrize(
    ("kind", "scan", "save_dtype"),
    [
        # Of DeepSeek's hundreds of arrays once is enough for every day.
        pytest.param(kind, *way, marks=[pytest.mark.slow] if kind == "deepseek4" and way != _WAYS[0] else [])
        for kind in SOURCES
        for way in _WAYS
    ],
)
def test_equals_the_dequantised(
    kind: str, scan: str, save_dtype: str, quantised: Callable[[str], Quantised], tmp_path: Path
) -> None:
    made = quantised(kind)
    words = (f"scan_layers={scan}", f"save_dtype={save_dtype}", "--chunk_byte_size=3000")
    folder = made.write(tmp_path / "quantised")
    step = convert(made.model_name, folder, tmp_path / "out", *words)
    plain = made.write_plain(tmp_path / "plain", save_dtype)
    same_arrays(step, convert(made.model_name, plain, tmp_path / "expected", *words))
    assert main(["verify", str(tmp_path / "expected"), "--source", str(folder)]) == 0


@pytest.mark.parametrize(
    ("kind", "scan", "words"),
    [
        ("mxfp4", "true", ()),
        ("mxfp4", "true", ("--memory_budget=1",)),
        ("mxfp4", "false", ("--memory_budget=1", "--spool_dir=none")),
        ("fp8-small-blocks", "true", ("--memory_budget=1",)),
        ("fp8-fused", "false", ()),
        pytest.param("channels", "true", ("--memory_budget=1",), marks=pytest.mark.slow),
        pytest.param("tensors", "true", ("--memory_budget=1", "--spool_dir=none"), marks=pytest.mark.slow),
        pytest.param("deepseek4", "false", ("--memory_budget=1",), marks=pytest.mark.slow),
    ],
)
def test_equals_the_dequantised_by_ranges(
    kind: str,
    scan: str,
    words: tuple[str, ...],
    quantised: Callable[[str], Quantised],
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes and scales come over the network, once or in passes, as they come from a folder."""
    for key, value in bucket.environment().items():
        monkeypatch.setenv(key, value)
    made = quantised(kind)
    words = (f"scan_layers={scan}", *words)
    folder = made.write(tmp_path / "quantised")
    bucket.add(folder, kind)
    done = to_maxtext(
        f"model_name={made.model_name}",
        f"hf_model_path={bucket.url(kind)}",
        f"base_output_directory={tmp_path / 'out'}",
        *words,
    )
    assert done.code == 0, done.stderr
    same_arrays(tmp_path / "out" / "0", convert(made.model_name, folder, tmp_path / "expected", *words))
    if "--spool_dir=none" not in words:
        assert main(["verify", str(tmp_path / "out"), "--source", bucket.url(kind), f"--spool_dir={tmp_path}"]) == 0


def test_verify_finds_a_difference(quantised: Callable[[str], Quantised], tmp_path: Path) -> None:
    made = quantised("channels")
    step = convert(made.model_name, made.write(tmp_path / "hf"), tmp_path / "out")
    name = "model.layers.2.self_attn.o_proj.weight"
    codes = made.tensors[name].view(np.uint8).copy()
    codes[5, 3] ^= 0x80
    other = write_folder(tmp_path / "other", made.config, {**made.tensors, name: codes.view(E4M3)})
    assert main(["verify", str(step), "--source", str(other)]) == 4


@pytest.mark.parametrize("names", [["{}.input_scale"], ["{}.output_scale"], ["{0}.k_scale", "{0}.v_scale"]])
def test_activation_scales_are_left_out(
    names: list[str], quantised: Callable[[str], Quantised], tmp_path: Path
) -> None:
    """llm-compressor's of inputs, of outputs, and (kv_cache_scheme) of keys and values, which an attention has."""
    made = quantised("tensors")
    modules = {name.removesuffix(".weight_scale") for name in made.tensors if name.endswith(".weight_scale")}
    if len(names) > 1:
        modules = {module.rpartition(".")[0] for module in modules if "self_attn" in module}
    more = {name.format(module): np.ones(1, BFLOAT16) for module in modules for name in names}
    assert more
    folder = write_folder(tmp_path / "hf", made.config, {**made.tensors, **more})
    same_arrays(
        convert(made.model_name, folder, tmp_path / "out"),
        convert(made.model_name, made.write(tmp_path / "without"), tmp_path / "expected"),
    )


# Decoding boxes


def repository(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], **config: Any) -> Repository:
    write_folder(folder, {**config, "quantization_config": dict(quantization)}, tensors)
    return open_repository(locate(str(folder), revision=None, token=None))


def check_boxes(opened: Repository, name: str, expected: np.ndarray, boxes: Sequence[tuple[slice, ...]]) -> None:
    """Boxes of a tensor decode to those of `expected`, float32, and to what it rounds to."""
    for dtype, whole in ((FLOAT32, expected), (BFLOAT16, to_bfloat16(expected))):
        weights = open_weights(opened, dtype)
        assert weights.tensors[name].shape == expected.shape
        assert weights.tensors[name].dtype == ("F32" if dtype == FLOAT32 else "BF16")
        for box in boxes:
            found = decode(opened, weights.encodings[name], box, dtype)
            assert found.dtype == dtype
            assert found.tobytes() == np.ascontiguousarray(whole[box]).tobytes(), (dtype, box)


def slices(size: int) -> list[slice]:
    """Of an axis: all of it, ends, parts across blocks, every other element."""
    middle = slice(size // 3, max(size // 3 + 1, size - size // 5))
    return [slice(0, size), slice(0, 1), slice(size - 1, size), middle, slice(1, size, 2), slice(size // 2, size, 3)]


@pytest.mark.parametrize("shape", [(300, 260), (128, 1), (1, 130), (2, 130, 257), (2, 3, 40, 300)], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, 0), (0, 0), (7, 300)], ids=str)
def test_boxes_of_eight_bits(shape: tuple[int, ...], block: tuple[int, int], tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    codes = random_codes(generator, shape)
    *outer, rows, columns = shape
    size = (block[0] or rows, block[1] or columns)
    scales = generator.uniform(1e-4, 1e-2, (*outer, -(-rows // size[0]), -(-columns // size[1]))).astype(np.float32)
    expected = dequantised_eight_bits(codes, scales, size)
    opened = repository(tmp_path, {"w": codes.view(E4M3), "w_scale_inv": scales}, fp8(size))
    lead = tuple(slice(i % n, n) for i, n in enumerate(outer))
    boxes = [(*lead, down, across) for down in slices(rows) for across in slices(columns) if down.start < rows]
    check_boxes(opened, "w", expected, [box for box in boxes if all(part.start < part.stop for part in box)])


@pytest.mark.parametrize("shape", [(5, 64), (3, 40, 96), (2, 2, 7, 32)], ids=str)
def test_boxes_of_blocks(shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    *outer, rows, columns = shape
    codes = generator.integers(0, 256, (*outer, rows, columns // 2), np.uint8)
    exponents = generator.integers(100, 140, (*outer, rows, columns // 32), np.uint8)
    blocks = codes.reshape(*outer, rows, columns // 32, 16)
    opened = repository(tmp_path, {"w_blocks": blocks, "w_scales": exponents}, {"quant_method": "mxfp4"})
    lead = tuple(slice(i % n, n) for i, n in enumerate(outer))
    boxes = [(*lead, down, across) for down in slices(rows) for across in slices(columns)]
    check_boxes(opened, "w_blocks", dequantised_four_bits(codes, exponents), boxes)


@pytest.mark.parametrize("place", ["config", "quantization_config"])
def test_experts_of_deepseek4(place: str, tmp_path: Path) -> None:
    """E2M1 in int8, two to a byte, beside matrices in E4M3, exponents as scales."""
    generator = np.random.default_rng(3)
    packed = generator.integers(0, 256, (48, 64), np.uint8)
    small = generator.integers(100, 140, (48, 4), np.uint8)
    codes = random_codes(generator, (150, 128))
    large = generator.integers(100, 140, (2, 1), np.uint8).view(E8M0)
    tensors = {
        "layers.0.ffn.experts.0.w1.weight": packed.view(np.int8),
        "layers.0.ffn.experts.0.w1.scale": small.view(E8M0),
        "layers.0.attn.wq_a.weight": codes.view(E4M3),
        "layers.0.attn.wq_a.scale": large,
        "layers.0.hc_attn_scale": np.ones(3, np.float32),
        "layers.0.attn_norm.weight": np.ones(3, BFLOAT16),
    }
    four = {"expert_dtype": "fp4"}
    quantization = {**fp8((128, 128), scale_fmt="ue8m0"), **(four if place == "quantization_config" else {})}
    opened = repository(tmp_path, tensors, quantization, **(four if place == "config" else {}))
    assert open_weights(opened, BFLOAT16).tensors.keys() == {name for name in tensors if not name.endswith(".scale")}
    boxes = [(down, across) for down in slices(48) for across in slices(128)]
    check_boxes(opened, "layers.0.ffn.experts.0.w1.weight", dequantised_four_bits(packed, small), boxes)
    expected = dequantised_eight_bits(codes, large, (128, 128))
    check_boxes(opened, "layers.0.attn.wq_a.weight", expected, [(slice(100, 150), slice(3, 128))])


def test_every_code(tmp_path: Path) -> None:
    """The tables of the specification: E4M3 has no infinities and one code that is none, for each sign."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    tensors = {"w": codes.view(E4M3), "w_scale_inv": np.ones((1, 1), np.float32)}
    opened = repository(tmp_path, tensors, fp8((128, 256)))
    found = decode(opened, open_weights(opened, FLOAT32).encodings["w"], (slice(0, 1), slice(0, 256)), FLOAT32)[0]
    assert (found[0x00], found[0x01], found[0x07]) == (0, 2**-9, 7 * 2**-9)
    assert (found[0x08], found[0x38], found[0x7E], found[0xFE]) == (2**-6, 1, 448, -448)
    assert np.isnan(found[[0x7F, 0xFF]]).all()
    assert np.signbit(found[0x80])
    assert found[0x80] == 0
    assert np.array_equal(found, [e4m3(code) for code in range(256)], equal_nan=True)


@pytest.mark.parametrize(
    ("exponent", "scale"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (128, 2.0), (254, 2.0**127)], ids=str
)
def test_every_pair(exponent: int, scale: float, tmp_path: Path) -> None:
    """The lower half of a byte is the first number; 2 ** -127 is no zero, and 6 * 2 ** 127 is too large."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16)
    tensors = {"w_blocks": blocks, "w_scales": np.full((1, 16, 1), exponent, np.uint8)}
    opened = repository(tmp_path, tensors, {"quant_method": "mxfp4"})
    box = (slice(0, 1), slice(0, 16), slice(0, 32))
    found = decode(opened, open_weights(opened, BFLOAT16).encodings["w_blocks"], box, BFLOAT16).reshape(256, 2)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    with np.errstate(over="ignore"):
        wide = (values * scale).astype(np.float32)
    for byte in range(256):
        expected = to_bfloat16(wide[[byte & 15, byte >> 4]])
        assert found[byte].tobytes() == expected.tobytes(), byte


@pytest.mark.parametrize(
    ("dtype", "pair"), [(np.dtype(np.uint8), (2.0**127, np.inf)), (E8M0, (np.nan, np.nan))], ids=["u8", "e8m0"]
)
def test_exponent_of_ones(dtype: np.dtype, pair: tuple[float, float], tmp_path: Path) -> None:
    """No published weights have it: not a number in E8M0, 2 ** 128 where it is an exponent like others."""
    tensors = {
        "w_blocks": np.full((1, 1, 1, 16), 0x71, np.uint8),
        "w_scales": np.full((1, 1, 1), 255, np.uint8).view(dtype),
    }
    opened = repository(tmp_path, tensors, {"quant_method": "mxfp4"})
    box = (slice(0, 1), slice(0, 1), slice(0, 32))
    found = decode(opened, open_weights(opened, FLOAT32).encodings["w_blocks"], box, FLOAT32)
    assert np.array_equal(found.reshape(16, 2), [pair] * 16, equal_nan=True)


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (View((6, 4, 5), (2, 0, 1)), (24, 5)),
        (View((4, 5), (1, 0), offset=60), (24, 5)),
        (View((3, 8, 2, 5), (0, 3, 1), picked=((2, 1),)), (3, 16, 5)),
        (View((3, 2, 8, 5), (0, 3, 2), picked=((1, 1),)), (3, 16, 5)),
        (View((8, 5), (1, 0), stacked=(0, 2), offset=2 * 80 + 40), (3, 16, 5)),
        (View((3, 4, 2, 2, 5), (4, 0, 1, 3), picked=((2, 1),)), (3, 16, 5)),
        (View((2, 3, 4, 5), (3, 2, 1, 0)), (2, 12, 5)),
    ],
    ids=str,
)
def test_bounding_boxes(view: View, shape: tuple[int, ...]) -> None:
    """The box of the stored tensor, looked at as said, is the box of the view."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    size = int(np.prod(view.split))
    seen = view.of(whole.reshape(-1)[view.offset : view.offset + size])
    generator = np.random.default_rng(4)
    for _ in range(300):
        starts = [int(generator.integers(0, n)) for n in seen.shape]
        box = tuple(
            slice(start, int(generator.integers(start + 1, n + 1))) for start, n in zip(starts, seen.shape, strict=True)
        )
        stored, inner, within = view.bounded(box, shape)
        part = np.ascontiguousarray(whole[stored])
        assert np.array_equal(inner.of(part.reshape(-1))[within], seen[box]), box
        assert part.size <= 12 * seen[box].size


# Refusals

MODEL = "qwen3-8b"
NAME = "model.layers.1.mlp.down_proj.weight"
PLAIN = random_tensors(CONFIGS[MODEL])


def with_codes(**more: np.ndarray | None) -> Tensors:
    """The tiny model with one matrix of [32, 48] in E4M3 and its scales; None takes a tensor out."""
    tensors = {**PLAIN, NAME: np.zeros((32, 48), E4M3), f"{NAME}_scale_inv": np.ones((1, 1), np.float32)}
    tensors |= {name.replace("NAME", NAME): values for name, values in more.items() if values is not None}
    return {name: values for name, values in tensors.items() if more.get(name.replace(NAME, "NAME"), 0) is not None}


def check_refused(tensors: Tensors, quantization: object, tmp_path: Path, *parts: str) -> None:
    """One line with these parts and exit code 2, and nothing written."""
    config = dict(CONFIGS[MODEL])
    if quantization is not None:
        config["quantization_config"] = quantization
    write_folder(tmp_path / "hf", config, tensors)
    refused(run(tmp_path), *parts)
    assert files_below(tmp_path / "empty") == set()


def run(tmp_path: Path) -> Run:
    (tmp_path / "empty").mkdir()
    return to_maxtext(
        f"model_name={MODEL}", f"base_output_directory={tmp_path / 'empty' / 'out'}", f"hf_model_path={tmp_path / 'hf'}"
    )


def refused(done: Run, *parts: str) -> None:
    assert done.code == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("quantization", "part"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "made up\nhere"}, "made up"),
        ({"quant_method": 5}, "5"),
        ({}, "unknown method"),
        ("gptq", "gptq"),
        ([], "unknown method"),
        (fp8((128, 128), fmt="e5m2"), "e5m2"),
        (fp8((128, 128), expert_dtype="int4"), "int4"),
        ({**fp8((1, 1)), "weight_block_size": [128]}, "[128]"),
        ({**fp8((1, 1)), "weight_block_size": [0, 128]}, "[0, 128]"),
        ({**fp8((1, 1)), "weight_block_size": ["128", 128]}, "128"),
        ({**fp8((1, 1)), "weight_block_size": 128}, "128"),
        ({**compressed("channel"), "format": "pack-quantized"}, "pack-quantized"),
        ({**compressed("channel"), "format": "int-quantized"}, "int-quantized"),
        ({**compressed("channel"), "format": None}, "compressed-tensors"),
        (compressed("group", group_size=128), "group"),
        (compressed("block", block_structure=None), "block"),
        (compressed("channel", symmetric=False), "not symmetric"),
        (compressed("channel", num_bits=4), "4-bit float"),
        (compressed("channel", type="int"), "8-bit int"),
        ({**compressed("channel"), "config_groups": {}}, "0 kinds"),
        ({**compressed("channel"), "config_groups": {"a": 5}}, "config_groups"),
        (
            {**compressed("channel"), "config_groups": {
                str(i): compressed(kind)["config_groups"]["group_0"] for i, kind in enumerate(("channel", "tensor"))
            }},
            "2 kinds",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_other_methods(quantization: object, part: str, tmp_path: Path) -> None:
    check_refused(with_codes(), quantization, tmp_path, "quantised (", part, "cannot be read")


def test_method_of_the_text_model(tmp_path: Path) -> None:
    config = {**CONFIGS[MODEL], "text_config": {"quantization_config": {"quant_method": "awq"}}}
    write_folder(tmp_path / "hf", config, PLAIN)
    refused(run(tmp_path), "quantised (awq)")


@pytest.mark.parametrize("names", [["model-Q4_K_M.gguf"], ["a.gguf", "b-00001-of-00002.gguf", "README.md"]])
def test_only_gguf(names: list[str], tmp_path: Path) -> None:
    write_tiny(tmp_path / "hf", MODEL)
    (tmp_path / "hf" / "model.safetensors").unlink()
    for name in names:
        (tmp_path / "hf" / name).write_bytes(b"GGUF")
    refused(run(tmp_path), "GGUF")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"NAME_scale_inv": None}, (NAME, "scale", "missing")),
        ({"NAME_scale_inv": np.ones((1, 2), np.float32)}, (f"{NAME}_scale_inv", "[1, 2]", "[1, 1]")),
        ({"NAME_scale_inv": np.ones((32, 48), np.float32)}, (f"{NAME}_scale_inv", "[32, 48]", "[1, 1]")),
        ({"NAME_scale_inv": np.ones((1, 1), np.float64)}, (f"{NAME}_scale_inv", "F64")),
        ({"NAME_scale_inv": np.ones((1, 1), np.uint8)}, (f"{NAME}_scale_inv", "U8")),
        ({"NAME": PLAIN[NAME]}, ("fp8", "none of its tensors")),
        ({"NAME": None}, ("fp8", "none of its tensors")),
        ({"model.norm.weight_scale_inv": np.ones((1, 1), np.float32)}, ("model.norm.weight_scale_inv", "scale")),
        ({"other.scale": np.ones((1, 1), E8M0)}, ("other.scale", "scale")),
        ({"other.weight_scale_inv": np.ones((1, 1), np.float32)}, ("other.weight_scale_inv", "scale")),
        ({"NAME": np.zeros((32, 47), E4M3)}, (NAME, "[32, 47]", "[32, 48]")),
        ({"NAME": np.zeros((48, 32), E4M3)}, (NAME, "transposed")),
        ({"model.norm.weight": np.zeros(32, E4M3)}, ("model.norm.weight", "scale", "missing")),
        (
            {"model.norm.weight": np.zeros(32, E4M3), "model.norm.weight_scale_inv": np.ones(1, np.float32)},
            ("model.norm.weight", "no matrix"),
        ),
        ({"lm_head.weight": np.zeros((64, 32), np.int8)}, ("lm_head.weight", "I8")),
        ({"lm_head.weight": np.zeros((64, 32), np.uint8)}, ("lm_head.weight", "U8")),
        ({"lm_head.weight": np.zeros((64, 32), ml_dtypes.float8_e5m2)}, ("lm_head.weight", "F8_E5M2")),
        ({"extra.weight": np.zeros((64, 32), np.uint8)}, ("extra.weight", "no place")),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(changes: Any, parts: tuple[str, ...], tmp_path: Path) -> None:
    check_refused(with_codes(**changes), fp8((128, 128)), tmp_path, *parts)


def test_blocks_smaller_than_config_says(tmp_path: Path) -> None:
    check_refused(with_codes(), fp8((16, 16)), tmp_path, f"{NAME}_scale_inv", "[1, 1]", "[2, 3]")


def test_scales_of_another_method(tmp_path: Path) -> None:
    check_refused(with_codes(), compressed("channel"), tmp_path, NAME, f"{NAME}_scale", "missing")


@pytest.mark.parametrize(
    ("scale", "parts"),
    [
        (np.ones((1, 48), BFLOAT16), ("[1, 48]", "[32, 1]")),
        (np.ones(32, BFLOAT16), ("[32]", "[32, 1]")),
        (np.ones((), BFLOAT16), ("[]", "[32, 1]")),
        (np.ones((32, 1), np.int8), ("I8",)),
    ],
    ids=str,
)
def test_scales_of_rows(scale: np.ndarray, parts: tuple[str, ...], tmp_path: Path) -> None:
    tensors = with_codes(**{"NAME_scale_inv": None, "NAME_scale": scale})
    check_refused(tensors, compressed("channel"), tmp_path, f"{NAME}_scale", *parts)


def test_scale_of_rows_without_its_codes(tmp_path: Path) -> None:
    tensors = with_codes(NAME_scale_inv=None, NAME_scale=np.ones((32, 1), BFLOAT16))
    tensors["lm_head.weight_scale"] = np.ones((64, 1), BFLOAT16)
    check_refused(tensors, compressed("channel"), tmp_path, "lm_head.weight_scale", "scale")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_without_a_method(dtype: str, tmp_path: Path) -> None:
    tensors = {**PLAIN, NAME: np.zeros((32, 48), getattr(ml_dtypes, dtype))}
    check_refused(tensors, None, tmp_path, NAME, "dtype F8_", "quantization_config")


BLOCKS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(f"{BLOCKS}_scales"), (f"{BLOCKS}_blocks", f"{BLOCKS}_scales", "missing")),
        (lambda t: t.pop(f"{BLOCKS}_blocks"), (f"{BLOCKS}_scales", "missing")),
        (lambda t: t.update({f"{BLOCKS}_scales": np.ones((4, 64, 3), np.uint8)}), ("_scales", "[4, 64, 3]")),
        (lambda t: t.update({f"{BLOCKS}_scales": np.ones((4, 64, 2), BFLOAT16)}), ("_scales", "BF16")),
        (lambda t: t.update({f"{BLOCKS}_blocks": np.ones((4, 64, 2, 8), np.uint8)}), ("_blocks", "[4, 64, 2, 8]")),
        (lambda t: t.update({f"{BLOCKS}_blocks": np.ones((4, 64, 2, 16), np.int8)}), ("_blocks", "I8")),
        (
            lambda t: t.update(
                {
                    f"{BLOCKS}_blocks": np.ones((4, 64, 4, 16), np.uint8),
                    f"{BLOCKS}_scales": np.ones((4, 64, 4), np.uint8),
                }
            ),
            (f"{BLOCKS}_blocks", "[4, 64, 128]", "[4, 64, 64]"),
        ),
        (lambda t: t.update({f"{BLOCKS}": np.ones((4, 64, 64), BFLOAT16)}), (BLOCKS, "twice")),
    ],
    ids=range(8),
)  # fmt: skip
@pytest.mark.parametrize("method", [True, False], ids=["mxfp4", "none"])
def test_blocks_that_do_not_fit(
    change: Callable[[Tensors], Any],
    parts: tuple[str, ...],
    method: bool,
    quantised: Callable[[str], Quantised],
    tmp_path: Path,
) -> None:
    made = quantised("mxfp4")
    tensors = dict(made.tensors)
    change(tensors)
    write_folder(tmp_path / "hf", made.config if method else made.plain_config, tensors)
    (tmp_path / "empty").mkdir()
    done = to_maxtext(
        f"model_name={made.model_name}",
        f"base_output_directory={tmp_path / 'empty' / 'out'}",
        f"hf_model_path={tmp_path / 'hf'}",
    )
    refused(done, *(parts if method else ("quantization_config",)))
    assert files_below(tmp_path / "empty") == set()


def test_tied_output_that_is_quantised(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen3-0.6b"], "quantization_config": fp8((128, 128))}
    tensors = random_tensors(config)
    tensors |= {"lm_head.weight": np.zeros((64, 32), E4M3), "lm_head.weight_scale_inv": np.ones((1, 1), np.float32)}
    write_folder(tmp_path / "hf", config, tensors)
    done = to_maxtext(
        "model_name=qwen3-0.6b", f"base_output_directory={tmp_path / 'out'}", f"hf_model_path={tmp_path / 'hf'}"
    )
    refused(done, "lm_head.weight", "tie")
