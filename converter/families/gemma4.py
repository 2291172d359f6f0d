"""Gemma 4. Global layers have heads of their own size and number, and in the large models no value projection.

The large models scan five local layers and a global one as a block. In the small ones later layers take keys and
values from earlier ones and every layer has embeddings of its own, so MaxText does not scan them.
"""

from __future__ import annotations

from typing import Any

from converter.families.common import DENSE_WORDS, EXPERT_DIMS, TIED, experts, geometry, router
from converter.families.gemma2 import embedding_scale
from converter.rules import Config, Family, Model, Rule, Scale, Slot, Stack


def _global(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "full_attention")


def _local(config: Config, layer: int) -> bool:
    return not _global(config, layer)


def _own(config: Config, layer: int) -> bool:
    """Whether a layer has keys and values of its own."""
    return layer < int(config["num_hidden_layers"]) - int(config["num_kv_shared_layers"])


def _wide(config: Config, layer: int) -> bool:
    return bool(config["use_double_wide_mlp"]) and not _own(config, layer)


def _narrow(config: Config, layer: int) -> bool:
    return not _wide(config, layer)


def _own_local(config: Config, layer: int) -> bool:
    return _own(config, layer) and _local(config, layer)


def _own_global(config: Config, layer: int) -> bool:
    return _own(config, layer) and _global(config, layer)


def _values(config: Config) -> bool:
    """Whether global layers project values too."""
    return not config["attention_k_eq_v"]


def _moe(config: Config) -> bool:
    return bool(config["enable_moe_block"])


def _dense(config: Config) -> bool:
    return not _moe(config)


def _small(config: Config) -> bool:
    """Whether layers have embeddings of their own."""
    return bool(config["hidden_size_per_layer_input"])


def _norm(target: str, source: str, dim: str = "e", **more: Any) -> Rule:
    return Rule(f"{target}.scale", f"{source}.weight", f"{dim} -> {dim}", **more)


_ATTENTION = (
    Rule("self_attention.query.kernel", "self_attn.q_proj.weight", "(q d) e -> e q d", layers=_local),
    Rule("self_attention.query.kernel", "self_attn.q_proj.weight", "(q gd) e -> e q gd", layers=_global),
    Rule("self_attention.key.kernel", "self_attn.k_proj.weight", "(k d) e -> e k d", layers=_own_local),
    Rule("self_attention.key.kernel", "self_attn.k_proj.weight", "(gk gd) e -> e gk gd", layers=_own_global),
    Rule("self_attention.value.kernel", "self_attn.v_proj.weight", "(k d) e -> e k d", layers=_own_local),
    Rule(
        "self_attention.value.kernel",
        "self_attn.v_proj.weight",
        "(gk gd) e -> e gk gd",
        layers=_own_global,
        when=_values,
    ),
    Rule("self_attention.out.kernel", "self_attn.o_proj.weight", "e (q d) -> q d e", layers=_local),
    Rule("self_attention.out.kernel", "self_attn.o_proj.weight", "e (q gd) -> q gd e", layers=_global),
    _norm("self_attention.query_norm", "self_attn.q_norm", "d", layers=_local),
    _norm("self_attention.query_norm", "self_attn.q_norm", "gd", layers=_global),
    _norm("self_attention.key_norm", "self_attn.k_norm", "d", layers=_own_local),
    _norm("self_attention.key_norm", "self_attn.k_norm", "gd", layers=_own_global),
)

_NORMS = (
    _norm("pre_self_attention_norm", "input_layernorm"),
    _norm("post_self_attention_norm", "post_attention_layernorm"),
    _norm("pre_ffw_norm", "pre_feedforward_layernorm"),
    _norm("post_ffw_norm", "post_feedforward_layernorm"),
    Rule("layer_scalar", "layer_scalar", "1 -> 1"),
)


def _mlp(target: str, dim: str, **more: Any) -> tuple[Rule, ...]:
    return (
        Rule(f"{target}.wi_0.kernel", "mlp.gate_proj.weight", f"{dim} e -> e {dim}", **more),
        Rule(f"{target}.wi_1.kernel", "mlp.up_proj.weight", f"{dim} e -> e {dim}", **more),
        Rule(f"{target}.wo.kernel", "mlp.down_proj.weight", f"e {dim} -> {dim} e", **more),
    )


_EXPERTS = (
    router("mlp.moe_block.MoeBlock_0", "router.proj.weight"),
    Rule("mlp.moe_block.MoeBlock_0.per_expert_scale", "router.per_expert_scale", "x -> x"),
    *experts("mlp.moe_block.MoeBlock_0", separate="experts.{x}", fused="experts"),
    *_mlp("mlp.moe_block.shared_experts", "f"),
    _norm("mlp.pre_feedforward_layernorm_2", "pre_feedforward_layernorm_2"),
    _norm("mlp.post_feedforward_layernorm_1", "post_feedforward_layernorm_1"),
    _norm("mlp.post_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    Rule("mlp.pre_forward_scale_2", "router.scale", "e -> e"),
)

_PER_LAYER = (
    Rule("per_layer_input_gate.kernel", "per_layer_input_gate.weight", "pe e -> e pe"),
    Rule("per_layer_projection.kernel", "per_layer_projection.weight", "e pe -> pe e"),
    _norm("post_per_layer_input_norm", "post_per_layer_input_norm"),
)

_EMBEDDER = "decoder.per_layer_embedder"

_RULES = (
    Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
    _norm("decoder.decoder_norm", "model.norm"),
)


def _per_layer(config: Config, key: str) -> Any:
    """A size of global layers where config.json says it layer by layer (transformers since 5.24)."""
    for layer, sizes in (config.get("per_layer_config") or {}).items():
        if config["layer_types"][int(layer)] == "full_attention" and key in sizes:
            return sizes[key]
    return config[key]


_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "layer_types": lambda c: [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(c["num_hidden_layers"])
    ],
    "global_head_dim": lambda c: _per_layer(c, "head_dim"),
    "num_global_key_value_heads": lambda c: _per_layer(c, "num_key_value_heads"),
    "double_size": lambda c: 2 * c["intermediate_size"],
    "per_layer_size": lambda c: c["num_hidden_layers"] * c["hidden_size_per_layer_input"],
}

_DIMS = {
    **EXPERT_DIMS,
    "gd": "global_head_dim",
    "gk": "num_global_key_value_heads",
    "w": "double_size",
    "pv": "vocab_size_per_layer_input",
    "pe": "hidden_size_per_layer_input",
    "pl": "per_layer_size",
}

_WORDS = {
    **DENSE_WORDS,
    "global_head_dim": "global_head_dim",
    "share_kv_projections": "attention_k_eq_v",
}

_PREFIXES = {"model.": ("model.language_model.", "model.")}

_BESIDE = (r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",)

_SHARED_KV = r".*\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
"""Of layers that take keys and values from others; nothing uses them."""


def _size(hidden: int, mlp_size: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = geometry(hidden, mlp_size, layers, heads, kv_heads, vocab=262144, head_dim=256, tied=True)
    return {**sizes, "global_head_dim": 512, **more}


_26B = _size(
    2816, 2112, 30, 16, 8, num_global_key_value_heads=2, attention_k_eq_v=True,
    enable_moe_block=True, moe_intermediate_size=704, num_experts=128, top_k_experts=8,
)  # fmt: skip
_31B = _size(5376, 21504, 60, 32, 16, num_global_key_value_heads=4, attention_k_eq_v=True)


def _large(name: str, words: dict[str, str], models: dict[str, Model], layer: tuple[Rule, ...]) -> Family:
    return Family(
        name=name,
        decoder_block="gemma4",
        architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        model_types=("gemma4", "gemma4_text"),
        defaults=_DEFAULTS,
        dims=_DIMS,
        rules=_RULES,
        stacks=(
            Stack(
                "decoder.layers",
                "model.layers.",
                (*_ATTENTION, *_NORMS, *layer),
                scanned="decoder.scanned_blocks",
                slots=(Slot("local_layers", 5), Slot("global_layer")),
            ),
        ),
        text="text_config",
        prefixes=_PREFIXES,
        beside=_BESIDE,
        equal=TIED,
        words={**_WORDS, "global_num_kv_heads": "num_global_key_value_heads", **words},
        models=models,
    )


GEMMA4_MOE = _large(
    "gemma4-moe",
    {
        "base_moe_mlp_dim": "moe_intermediate_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "top_k_experts",
    },
    {"gemma4-26b": Model("google/gemma-4-26b-a4b-it", _26B, "converter")},
    _EXPERTS,
)

GEMMA4 = _large(
    "gemma4",
    {},
    {"gemma4-31b": Model("google/gemma-4-31b-it", _31B, "converter")},
    _mlp("mlp", "f"),
)


def _pattern(layers: int, cycle: int) -> list[str]:
    return ["full_attention" if (i + 1) % cycle == 0 else "sliding_attention" for i in range(layers)]


_PER_LAYER_SIZES = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_E2B = _size(
    1536, 6144, 35, 8, 1, layer_types=_pattern(35, 5), num_kv_shared_layers=20, use_double_wide_mlp=True,
    **_PER_LAYER_SIZES,
)  # fmt: skip
_E4B = _size(2560, 10240, 42, 8, 2, layer_types=_pattern(42, 6), num_kv_shared_layers=18, **_PER_LAYER_SIZES)

GEMMA4_SMALL = Family(
    name="gemma4-small",
    decoder_block="gemma4_small",
    architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
    model_types=("gemma4", "gemma4_text"),
    defaults=_DEFAULTS,
    dims=_DIMS,
    rules=(
        *_RULES,
        Rule(f"{_EMBEDDER}.embed_tokens_per_layer", "model.embed_tokens_per_layer.weight", "pv pl -> pv pl"),
        Rule(
            f"{_EMBEDDER}.per_layer_model_projection.kernel", "model.per_layer_model_projection.weight", "pl e -> e pl"
        ),
        _norm(f"{_EMBEDDER}.per_layer_projection_norm", "model.per_layer_projection_norm", "pe"),
    ),
    stacks=(
        Stack(
            "decoder.layers",
            "model.layers.",
            (
                *_ATTENTION,
                *_NORMS,
                *_mlp("mlp", "f", layers=_narrow),
                *_mlp("mlp", "w", layers=_wide),
                *_PER_LAYER,
            ),
            scanned="",
        ),
    ),
    text="text_config",
    prefixes=_PREFIXES,
    ignored=(_SHARED_KV,),
    beside=_BESIDE,
    equal=TIED,
    unscannable="later layers of this model take keys and values from earlier ones, so MaxText does not scan them",
    words={
        **_WORDS,
        "num_kv_shared_layers": "num_kv_shared_layers",
        "hidden_size_per_layer_input": "hidden_size_per_layer_input",
        "vocab_size_per_layer_input": "vocab_size_per_layer_input",
        "use_double_wide_mlp": "use_double_wide_mlp",
    },
    models={
        "gemma4-e2b": Model("google/gemma-4-E2B-it", _E2B, "converter"),
        "gemma4-e4b": Model("google/gemma-4-E4B-it", _E4B, "converter"),
    },
)
