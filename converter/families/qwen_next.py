"""Qwen3-Next and Qwen3.5: three layers of linear attention (gated delta net), then one of full attention.

Full attention's query projection holds a gate for every head beside its query. Qwen3.5 stores the projections of
linear attention apart and MaxText keeps them as Qwen3-Next does: for each key head its query, key, values and gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.families.common import (
    DECODER,
    EXPERT_DIMS,
    EXPERT_WORDS,
    expert_count,
    expert_geometry,
    experts,
    router,
)
from converter.families.qwen_vision import VISION_DEFAULTS, VISION_DIMS, vision_tower
from converter.rules import Config, Family, Model, Rule, Slot, Stack

_CYCLE = 4


def _full(config: Config, layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "full_attention")
    return (layer + 1) % int(config.get("full_attention_interval", _CYCLE)) == 0


def _linear(config: Config, layer: int) -> bool:
    return not _full(config, layer)


def _rules(when: Any, *rules: tuple[str, str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(f"attention.{target}", source, pattern, layers=when) for target, source, pattern in rules)


_SHARED = (
    Rule("input_layernorm.scale", "input_layernorm.weight", "e -> e"),
    Rule("post_attention_layernorm.scale", "post_attention_layernorm.weight", "e -> e"),
    router("mlp.routed_experts"),
    *experts("mlp.routed_experts"),
    Rule("mlp.shared_expert.wi_0.kernel", "mlp.shared_expert.gate_proj.weight", "sm e -> e sm"),
    Rule("mlp.shared_expert.wi_1.kernel", "mlp.shared_expert.up_proj.weight", "sm e -> e sm"),
    Rule("mlp.shared_expert.wo.kernel", "mlp.shared_expert.down_proj.weight", "e sm -> sm e"),
    Rule("mlp.shared_expert_gate.kernel", "mlp.shared_expert_gate.weight", "1 e -> e 1"),
    *_rules(
        _full,
        ("attention.query.kernel", "self_attn.q_proj.weight", "(q gd) e -> e q gd"),
        ("attention.key.kernel", "self_attn.k_proj.weight", "(k d) e -> e k d"),
        ("attention.value.kernel", "self_attn.v_proj.weight", "(k d) e -> e k d"),
        ("attention.out.kernel", "self_attn.o_proj.weight", "e qd -> qd e"),
        ("attention.query_norm.scale", "self_attn.q_norm.weight", "d -> d"),
        ("attention.key_norm.scale", "self_attn.k_norm.weight", "d -> d"),
    ),
    *_rules(
        _linear,
        ("conv1d.kernel", "linear_attn.conv1d.weight", "lc 1 lw -> lw 1 lc"),
        ("A_log", "linear_attn.A_log", "lv -> lv"),
        ("dt_bias", "linear_attn.dt_bias", "lv -> lv"),
        ("norm.rms_norm.scale", "linear_attn.norm.weight", "lb -> lb"),
        ("out_proj.kernel", "linear_attn.out_proj.weight", "e lo -> lo e"),
    ),
)

_JOINED = _rules(
    _linear,
    ("in_proj_qkvz.kernel", "linear_attn.in_proj_qkvz.weight", "lz e -> e lz"),
    ("in_proj_ba.kernel", "linear_attn.in_proj_ba.weight", "lba e -> e lba"),
)

_QKVZ, _QKV = "in_proj_qkvz.kernel", "linear_attn.in_proj_qkv.weight"

_APART = _rules(
    _linear,
    (_QKVZ, _QKV, "(<lk la> | lk la | lk lg) e -> e (lk: <la> | la | lg | lg)"),
    (_QKVZ, _QKV, "(lk la | <lk la> | lk lg) e -> e (lk: la | <la> | lg | lg)"),
    (_QKVZ, _QKV, "(lk la | lk la | <lk lg>) e -> e (lk: la | la | <lg> | lg)"),
    (_QKVZ, "linear_attn.in_proj_z.weight", "(lk lg) e -> e (lk: la | la | lg | <lg>)"),
    ("in_proj_ba.kernel", "linear_attn.in_proj_b.weight", "(lk lr) e -> e (lk: <lr> | lr)"),
    ("in_proj_ba.kernel", "linear_attn.in_proj_a.weight", "(lk lr) e -> e (lk: lr | <lr>)"),
)

_DIMS = {
    **EXPERT_DIMS,
    "sm": "shared_expert_intermediate_size",
    "gd": "gated_head_dim",
    "qd": "query_size",
    "lk": "linear_num_key_heads",
    "lv": "linear_num_value_heads",
    "la": "linear_key_head_dim",
    "lb": "linear_value_head_dim",
    "lw": "linear_conv_kernel_dim",
    "lr": "values_per_key",
    "lg": "value_size_per_key",
    "lo": "value_size",
    "lc": "conv_size",
    "lz": "qkvz_size",
    "lba": "ba_size",
}

_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "num_experts": expert_count,
    "linear_conv_kernel_dim": 4,
    "gated_head_dim": lambda c: 2 * c["head_dim"],
    "query_size": lambda c: c["num_attention_heads"] * c["head_dim"],
    "values_per_key": lambda c: c["linear_num_value_heads"] // c["linear_num_key_heads"],
    "value_size_per_key": lambda c: c["values_per_key"] * c["linear_value_head_dim"],
    "value_size": lambda c: c["linear_num_value_heads"] * c["linear_value_head_dim"],
    "conv_size": lambda c: 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + c["value_size"],
    "qkvz_size": lambda c: c["conv_size"] + c["value_size"],
    "ba_size": lambda c: 2 * c["linear_num_value_heads"],
}

_WORDS = {
    **EXPERT_WORDS,
    "gdn_conv_kernel_dim": "linear_conv_kernel_dim",
    "gdn_key_head_dim": "linear_key_head_dim",
    "gdn_value_head_dim": "linear_value_head_dim",
    "gdn_num_key_heads": "linear_num_key_heads",
    "gdn_num_value_heads": "linear_num_value_heads",
}

_NOT_MAXTEXTS = (r"mtp\..*",)
"""What predicts further tokens."""


def _size(
    hidden: int, expert_size: int, layers: int, heads: int, count: int, values: int, **more: int
) -> dict[str, Any]:
    return {
        **expert_geometry(hidden, expert_size, layers, heads, 2, count, head_dim=256, **more),
        "shared_expert_intermediate_size": expert_size,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }


QWEN3_NEXT = Family(
    name="qwen3-next",
    decoder_block="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    defaults=_DEFAULTS,
    dims=_DIMS,
    rules=DECODER,
    stacks=(
        Stack(
            "decoder.layers",
            "model.layers.",
            (*_SHARED, *_JOINED),
            slots=(Slot("local_layers", _CYCLE - 1), Slot("global_layer")),
        ),
    ),
    ignored=_NOT_MAXTEXTS,
    words=_WORDS,
    models={
        "qwen3-next-80b-a3b": Model(
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            _size(2048, 512, 48, 16, 512, 32, per_token=10, vocab=151936),
            "converter",
        ),
    },
)

_35B = _size(2048, 512, 40, 16, 256, 32, per_token=8, vocab=248320)
_397B = _size(4096, 1024, 60, 32, 512, 64, per_token=10, vocab=248320)

QWEN35 = Family(
    name="qwen3.5",
    decoder_block="qwen3_5",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    defaults={**_DEFAULTS, **VISION_DEFAULTS},
    dims={**_DIMS, **VISION_DIMS},
    rules=DECODER,
    stacks=(
        Stack(
            "decoder.layers",
            "model.layers.",
            (*_SHARED, *_APART),
            slots=tuple(Slot(f"layer_{i}") for i in range(_CYCLE)),
        ),
    ),
    text="text_config",
    tower=vision_tower("Qwen3_5Moe"),
    prefixes={"model.visual.": ("model.visual.", "visual."), "model.": ("model.language_model.", "model.")},
    ignored=_NOT_MAXTEXTS,
    beside=(r"(model\.)?visual\..*",),
    words=_WORDS,
    models={
        "qwen3.5-35b-a3b": Model("Qwen/Qwen3.5-35B-A3B", _35B, "converter"),
        "qwen3.5-35b-a3b-fp8": Model("Qwen/Qwen3.5-35B-A3B-FP8", _35B, "converter"),
        "qwen3.5-35b-fp8": Model("Qwen/Qwen3.5-35B-A3B-FP8", _35B),
        "qwen3.5-397b-a17b": Model("Qwen/Qwen3.5-397B-A17B", _397B, "converter"),
        "qwen3.5-397b-a17b-fp8": Model("Qwen/Qwen3.5-397B-A17B-FP8", _397B, "converter"),
    },
)
