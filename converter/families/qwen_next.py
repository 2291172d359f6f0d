"""Qwen3-Next and Qwen3.5: three layers of linear attention (gated delta net), then one of full attention.

Full attention's query projection holds a gate for every head beside its query. Qwen3.5 stores the projections of
linear attention apart and MaxText keeps them as Qwen3-Next does: for each key head its query, key, values and gates.
"""

from __future__ import annotations

from typing import Any

from converter.families import common
from converter.families.qwen import MOE_DEFAULTS
from converter.families.qwen_vision import vision_defaults, vision_dims, vision_tower
from converter.rules import Config, Family, Rule, Slot, Stack

_CYCLE = 4


def _full(config: Config, layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "full_attention")
    return (layer + 1) % int(config.get("full_attention_interval", _CYCLE)) == 0


def _linear(config: Config, layer: int) -> bool:
    return not _full(config, layer)


_SHARED = (
    *common.rules(
        ("input_layernorm.scale", "input_layernorm.weight", "e -> e"),
        ("post_attention_layernorm.scale", "post_attention_layernorm.weight", "e -> e"),
        ("mlp.shared_expert_gate.kernel", "mlp.shared_expert_gate.weight", "1 e -> e 1"),
    ),
    common.router("mlp.routed_experts"),
    *common.experts("mlp.routed_experts"),
    *common.mlp("mlp.shared_expert", "mlp.shared_expert", "sm"),
    *common.rules(
        ("query.kernel", "q_proj.weight", "(q gd) e -> e q gd"),
        ("key.kernel", "k_proj.weight", "(k d) e -> e k d"),
        ("value.kernel", "v_proj.weight", "(k d) e -> e k d"),
        ("out.kernel", "o_proj.weight", "e qd -> qd e"),
        ("query_norm.scale", "q_norm.weight", "d -> d"),
        ("key_norm.scale", "k_norm.weight", "d -> d"),
        prefix="attention.attention.", source="self_attn.", layers=_full,
    ),
    *common.rules(
        ("conv1d.kernel", "conv1d.weight", "lc 1 lw -> lw 1 lc"),
        ("A_log", "A_log", "lv -> lv"),
        ("dt_bias", "dt_bias", "lv -> lv"),
        ("norm.rms_norm.scale", "norm.weight", "lb -> lb"),
        ("out_proj.kernel", "out_proj.weight", "e lo -> lo e"),
        prefix="attention.", source="linear_attn.", layers=_linear,
    ),
)  # fmt: skip

_JOINED = common.rules(
    ("in_proj_qkvz.kernel", "in_proj_qkvz.weight", "lz e -> e lz"),
    ("in_proj_ba.kernel", "in_proj_ba.weight", "lba e -> e lba"),
    prefix="attention.", source="linear_attn.", layers=_linear,
)  # fmt: skip

_APART = common.rules(
    ("in_proj_qkvz.kernel", "in_proj_qkv.weight", "(<lk la> | lk la | lk lg) e -> e (lk: <la> | la | lg | lg)"),
    ("in_proj_qkvz.kernel", "in_proj_qkv.weight", "(lk la | <lk la> | lk lg) e -> e (lk: la | <la> | lg | lg)"),
    ("in_proj_qkvz.kernel", "in_proj_qkv.weight", "(lk la | lk la | <lk lg>) e -> e (lk: la | la | <lg> | lg)"),
    ("in_proj_qkvz.kernel", "in_proj_z.weight", "(lk lg) e -> e (lk: la | la | lg | <lg>)"),
    ("in_proj_ba.kernel", "in_proj_b.weight", "(lk lr) e -> e (lk: <lr> | lr)"),
    ("in_proj_ba.kernel", "in_proj_a.weight", "(lk lr) e -> e (lk: lr | <lr>)"),
    prefix="attention.", source="linear_attn.", layers=_linear,
)  # fmt: skip

_DIMS = {
    **common.EXPERT_DIMS, "sm": "shared_expert_intermediate_size", "gd": "gated_head_dim", "qd": "query_size",
    "lk": "linear_num_key_heads", "lv": "linear_num_value_heads", "la": "linear_key_head_dim",
    "lb": "linear_value_head_dim", "lw": "linear_conv_kernel_dim", "lr": "values_per_key", "lg": "value_size_per_key",
    "lo": "value_size", "lc": "conv_size", "lz": "qkvz_size", "lba": "ba_size",
}  # fmt: skip

_DEFAULTS = {
    **MOE_DEFAULTS, "head_dim": 256, "num_key_value_heads": 2, "linear_conv_kernel_dim": 4, "two": 2,
    "gated_head_dim": common.product("two", "head_dim"),
    "query_size": common.product("num_attention_heads", "head_dim"),
    "values_per_key": common.quotient("linear_num_value_heads", "linear_num_key_heads"),
    "value_size_per_key": common.product("values_per_key", "linear_value_head_dim"),
    "value_size": common.product("linear_num_value_heads", "linear_value_head_dim"),
    "key_size": common.product("linear_num_key_heads", "linear_key_head_dim"),
    "conv_size": lambda c: 2 * c["key_size"] + c["value_size"],
    "qkvz_size": lambda c: c["conv_size"] + c["value_size"],
    "ba_size": common.product("two", "linear_num_value_heads"),
}  # fmt: skip

_WORDS = {
    **common.EXPERT_WORDS, "gdn_conv_kernel_dim": "linear_conv_kernel_dim", "gdn_key_head_dim": "linear_key_head_dim",
    "gdn_value_head_dim": "linear_value_head_dim", "gdn_num_key_heads": "linear_num_key_heads",
    "gdn_num_value_heads": "linear_num_value_heads",
}  # fmt: skip


def _stack(layer: tuple[Rule, ...], *slots: Slot) -> Stack:
    return Stack("decoder.layers", "model.layers.", (*_SHARED, *layer), slots=slots)


_PREDICTION = (r"mtp\..*",)
"""What predicts further tokens."""

_SETTINGS: dict[str, Any] = {"rules": common.DECODER, "ignored": _PREDICTION, "words": _WORDS}

QWEN3_NEXT = Family(
    name="qwen3-next",
    decoder_block="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    defaults=_DEFAULTS,
    dims=_DIMS,
    stacks=(_stack(_JOINED, Slot("local_layers", _CYCLE - 1), Slot("global_layer")),),
    **_SETTINGS,
)

QWEN35 = Family(
    name="qwen3.5",
    decoder_block="qwen3_5",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    defaults={**_DEFAULTS, **vision_defaults()},
    dims={**_DIMS, **vision_dims()},
    stacks=(_stack(_APART, *(Slot(f"layer_{i}") for i in range(_CYCLE))),),
    text="text_config",
    tower=vision_tower("Qwen3_5Moe"),
    prefixes={"model.visual.": ("model.visual.", "visual."), "model.": ("model.language_model.", "model.")},
    beside=(r"(model\.)?visual\..*",),
    **_SETTINGS,
)
