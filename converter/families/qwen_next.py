"""Qwen3-Next and Qwen3.5: three layers of linear attention (gated delta net), then one of full attention.

Full attention's query projection holds a gate for every head beside its query. Qwen3.5 stores the projections of
linear attention apart and MaxText keeps them as Qwen3-Next does: for each key head its query, key, values and gates.
"""

from converter import sizes
from converter.families import common
from converter.families.qwen import MOE_DEFAULTS
from converter.families.qwen_vision import VISION_PREFIXES, vision_defaults, vision_dims, vision_tower
from converter.rules import Config, Slot, rules, slots

_CYCLE = 4


def _kinds(config: Config, layer: int) -> set[str]:
    kinds = config.get("layer_types")
    if kinds is not None:
        return {"full"} if kinds[layer] == "full_attention" else set()
    return set() if (layer + 1) % int(config.get("full_attention_interval", _CYCLE)) else {"full"}


_SHARED = (
    *rules(
        ("input_layernorm.scale", "input_layernorm.weight", "e -> e"),
        ("post_attention_layernorm.scale", "post_attention_layernorm.weight", "e -> e"),
        ("mlp.shared_expert_gate.kernel", "mlp.shared_expert_gate.weight", "1 e -> e 1"),
    ),
    common.router("mlp.routed_experts"),
    *common.experts("mlp.routed_experts"),
    *common.mlp("mlp.shared_expert", "mlp.shared_expert", "sm"),
    *rules(
        ("query.kernel", "q_proj.weight", "(q d*2) e -> e q d*2"),
        ("key.kernel", "k_proj.weight", "(k d) e -> e k d"),
        ("value.kernel", "v_proj.weight", "(k d) e -> e k d"),
        ("out.kernel", "o_proj.weight", "e q*d -> q*d e"),
        ("query_norm.scale", "q_norm.weight", "d -> d"),
        ("key_norm.scale", "k_norm.weight", "d -> d"),
        prefix="attention.attention.", source="self_attn.", layers="full",
    ),
    *rules(
        ("conv1d.kernel", "conv1d.weight", "lk*la*2+lv*lb 1 lw -> lw 1 lk*la*2+lv*lb"),
        ("A_log", "A_log", "lv -> lv"),
        ("dt_bias", "dt_bias", "lv -> lv"),
        ("norm.rms_norm.scale", "norm.weight", "lb -> lb"),
        ("out_proj.kernel", "out_proj.weight", "e lv*lb -> lv*lb e"),
        prefix="attention.", source="linear_attn.", layers="!full",
    ),
)  # fmt: skip

_JOINED = rules(
    ("in_proj_qkvz.kernel", "in_proj_qkvz.weight", "lk*la*2+lv*lb*2 e -> e lk*la*2+lv*lb*2"),
    ("in_proj_ba.kernel", "in_proj_ba.weight", "lv*2 e -> e lv*2"),
    prefix="attention.", source="linear_attn.", layers="!full",
)  # fmt: skip

_QKV, _Z = ("in_proj_qkvz.kernel", "in_proj_qkv.weight"), ("in_proj_qkvz.kernel", "in_proj_z.weight")

_APART = rules(
    (*_QKV, "(<lk la> | lk la | lk lv/lk*lb) e -> e (lk: <la> | la | lv/lk*lb | lv/lk*lb)"),
    (*_QKV, "(lk la | <lk la> | lk lv/lk*lb) e -> e (lk: la | <la> | lv/lk*lb | lv/lk*lb)"),
    (*_QKV, "(lk la | lk la | <lk lv/lk*lb>) e -> e (lk: la | la | <lv/lk*lb> | lv/lk*lb)"),
    (*_Z, "(lk lv/lk*lb) e -> e (lk: la | la | lv/lk*lb | <lv/lk*lb>)"),
    ("in_proj_ba.kernel", "in_proj_b.weight", "(lk lv/lk) e -> e (lk: <lv/lk> | lv/lk)"),
    ("in_proj_ba.kernel", "in_proj_a.weight", "(lk lv/lk) e -> e (lk: lv/lk | <lv/lk>)"),
    prefix="attention.", source="linear_attn.", layers="!full",
)  # fmt: skip

_DEFAULTS = {**MOE_DEFAULTS, "head_dim": 256, "num_key_value_heads": 2, "linear_conv_kernel_dim": 4}

_WORDS = sizes.words(
    sizes.EXPERT_WORDS, gdn_conv_kernel_dim="linear_conv_kernel_dim", gdn_key_head_dim="linear_key_head_dim",
    gdn_value_head_dim="linear_value_head_dim", gdn_num_key_heads="linear_num_key_heads",
    gdn_num_value_heads="linear_num_value_heads",
)  # fmt: skip

_PREDICTION = (r"mtp\..*",)
"""What predicts further tokens."""

QWEN3_NEXT = common.family(
    "qwen3-next", "qwen3_next", "Qwen3NextForCausalLM", "qwen3_next", (*_SHARED, *_JOINED), defaults=_DEFAULTS,
    kinds=_kinds,
    slots=(Slot("local_layers", _CYCLE - 1), Slot("global_layer")), ignored=_PREDICTION, words=_WORDS,
)  # fmt: skip
QWEN35 = common.family(
    "qwen3.5", "qwen3_5", "Qwen3_5MoeForConditionalGeneration Qwen3_5MoeForCausalLM", "qwen3_5_moe qwen3_5_moe_text",
    (*_SHARED, *_APART), slots=slots("layer", _CYCLE), kinds=_kinds, defaults={**_DEFAULTS, **vision_defaults()},
    dims=vision_dims(), text="text_config", tower=vision_tower("Qwen3_5Moe"), prefixes=VISION_PREFIXES,
    ignored=_PREDICTION, beside=(r"(model\.)?visual\..*",), words=_WORDS,
)  # fmt: skip
