"""Gemma 4. Global layers have heads of their own size and number, and in the large models no value projection.

The large models scan five local layers and a global one as a block. In the small ones later layers take keys and
values from earlier ones and every layer has embeddings of its own, so MaxText does not scan them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.families import common
from converter.families.gemma2 import embedding_scale
from converter.rules import Config, Family, Rule, Scale, Slot, Stack


def _global(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "full_attention")


def _local(config: Config, layer: int) -> bool:
    return not _global(config, layer)


def _own(config: Config, layer: int) -> bool:
    """Whether a layer has keys and values of its own."""
    return layer < int(config["num_hidden_layers"]) - int(config["num_kv_shared_layers"])


def _own_local(config: Config, layer: int) -> bool:
    return _own(config, layer) and _local(config, layer)


def _own_global(config: Config, layer: int) -> bool:
    return _own(config, layer) and _global(config, layer)


def _wide(config: Config, layer: int) -> bool:
    return bool(config["use_double_wide_mlp"]) and not _own(config, layer)


def _narrow(config: Config, layer: int) -> bool:
    return not _wide(config, layer)


def _values(config: Config) -> bool:
    """Whether global layers project values too."""
    return not config["attention_k_eq_v"]


_KEY, _VALUE = ("key.kernel", "k_proj.weight"), ("value.kernel", "v_proj.weight")
_WHERE = {"prefix": "self_attention.", "source": "self_attn."}

_ATTENTION = (
    *common.rules(
        ("query.kernel", "q_proj.weight", "(q d) e -> e q d"),
        ("out.kernel", "o_proj.weight", "e (q d) -> q d e"),
        ("query_norm.scale", "q_norm.weight", "d -> d"),
        layers=_local, **_WHERE,
    ),
    *common.rules(
        ("query.kernel", "q_proj.weight", "(q gd) e -> e q gd"),
        ("out.kernel", "o_proj.weight", "e (q gd) -> q gd e"),
        ("query_norm.scale", "q_norm.weight", "gd -> gd"),
        layers=_global, **_WHERE,
    ),
    *common.rules(
        (*_KEY, "(k d) e -> e k d"), (*_VALUE, "(k d) e -> e k d"), ("key_norm.scale", "k_norm.weight", "d -> d"),
        layers=_own_local, **_WHERE,
    ),
    *common.rules(
        (*_KEY, "(gk gd) e -> e gk gd"), ("key_norm.scale", "k_norm.weight", "gd -> gd"), layers=_own_global, **_WHERE
    ),
    *common.rules((*_VALUE, "(gk gd) e -> e gk gd"), layers=_own_global, when=_values, **_WHERE),
)  # fmt: skip

_NORMS = common.rules(
    ("pre_self_attention_norm.scale", "input_layernorm.weight", "e -> e"),
    ("post_self_attention_norm.scale", "post_attention_layernorm.weight", "e -> e"),
    ("pre_ffw_norm.scale", "pre_feedforward_layernorm.weight", "e -> e"),
    ("post_ffw_norm.scale", "post_feedforward_layernorm.weight", "e -> e"),
    ("layer_scalar", "layer_scalar", "1 -> 1"),
)

_BLOCK = "mlp.moe_block.MoeBlock_0"

_EXPERTS = (
    common.router(_BLOCK, "router.proj.weight"),
    *common.experts(_BLOCK, separate="experts.{x}", fused="experts"),
    *common.mlp("mlp.moe_block.shared_experts"),
    *common.rules(
        (f"{_BLOCK}.per_expert_scale", "router.per_expert_scale", "x -> x"),
        ("mlp.pre_feedforward_layernorm_2.scale", "pre_feedforward_layernorm_2.weight", "e -> e"),
        ("mlp.post_feedforward_layernorm_1.scale", "post_feedforward_layernorm_1.weight", "e -> e"),
        ("mlp.post_feedforward_layernorm_2.scale", "post_feedforward_layernorm_2.weight", "e -> e"),
        ("mlp.pre_forward_scale_2", "router.scale", "e -> e"),
    ),
)

_SMALL = (
    *common.mlp(layers=_narrow),
    *common.mlp(dim="w", layers=_wide),
    *common.rules(
        ("per_layer_input_gate.kernel", "per_layer_input_gate.weight", "pe e -> e pe"),
        ("per_layer_projection.kernel", "per_layer_projection.weight", "e pe -> pe e"),
        ("post_per_layer_input_norm.scale", "post_per_layer_input_norm.weight", "e -> e"),
    ),
)

_PER_LAYER = common.rules(
    ("embed_tokens_per_layer", "embed_tokens_per_layer.weight", "pv pl -> pv pl"),
    ("per_layer_model_projection.kernel", "per_layer_model_projection.weight", "pl e -> e pl"),
    ("per_layer_projection_norm.scale", "per_layer_projection_norm.weight", "pe -> pe"),
    prefix="decoder.per_layer_embedder.", source="model.",
)  # fmt: skip


def _of_global(key: str) -> Any:
    """A size of global layers, which config.json may say layer by layer (transformers since 5.24)."""

    def size(config: Config) -> Any:
        for layer, sizes in (config.get("per_layer_config") or {}).items():
            if config["layer_types"][int(layer)] == "full_attention" and key in sizes:
                return sizes[key]
        return config[key]

    return size


def _five_to_one(config: Config) -> list[str]:
    return ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(config["num_hidden_layers"])]


_SLOTS = (Slot("local_layers", 5), Slot("global_layer"))


def _family(
    name: str, layer: tuple[Rule, ...], words: Mapping[str, str], rules: tuple[Rule, ...] = (), unscannable: str = ""
) -> Family:
    stack = Stack(
        "decoder.layers", "model.layers.", (*_ATTENTION, *_NORMS, *layer),
        scanned="" if unscannable else "decoder.scanned_blocks", slots=() if unscannable else _SLOTS,
    )  # fmt: skip
    return Family(
        name=name,
        decoder_block="gemma4_small" if unscannable else "gemma4",
        architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        model_types=("gemma4", "gemma4_text"),
        defaults={
            "head_dim": 256, "tie_word_embeddings": True, "enable_moe_block": False, "attention_k_eq_v": False,
            "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "layer_types": _five_to_one,
            "global_head_dim": _of_global("head_dim"),
            "num_global_key_value_heads": _of_global("num_key_value_heads"),
            "two": 2, "double_size": common.product("two", "intermediate_size"),
            "per_layer_size": common.product("num_hidden_layers", "hidden_size_per_layer_input"),
        },
        dims={
            **common.EXPERT_DIMS, "gd": "global_head_dim", "gk": "num_global_key_value_heads", "w": "double_size",
            "pv": "vocab_size_per_layer_input", "pe": "hidden_size_per_layer_input", "pl": "per_layer_size",
        },
        rules=(
            Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
            Rule("decoder.decoder_norm.scale", "model.norm.weight", "e -> e"),
            *rules,
        ),
        stacks=(stack,),
        text="text_config",
        prefixes={"model.": ("model.language_model.", "model.")},
        # Nothing uses what layers carry that take keys and values from others.
        ignored=(r".*\.self_attn\.(k_proj|v_proj|k_norm)\.weight",) if unscannable else (),
        beside=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",),
        equal=common.TIED,
        unscannable=unscannable,
        words={
            **common.WORDS, "global_head_dim": "global_head_dim", "share_kv_projections": "attention_k_eq_v", **words,
        },
    )  # fmt: skip


_GLOBAL_HEADS = {"global_num_kv_heads": "num_global_key_value_heads"}

GEMMA4 = _family("gemma4", common.mlp(), _GLOBAL_HEADS)
GEMMA4_MOE = _family(
    "gemma4-moe",
    _EXPERTS,
    {
        **_GLOBAL_HEADS, "base_moe_mlp_dim": "moe_intermediate_size", "num_experts": "num_experts",
        "num_experts_per_tok": "top_k_experts",
    },
)  # fmt: skip
GEMMA4_SMALL = _family(
    "gemma4-small",
    _SMALL,
    {
        key: key
        for key in (
            "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp",
        )
    },
    _PER_LAYER,
    unscannable="later layers of this model take keys and values from earlier ones, so MaxText does not scan them",
)  # fmt: skip
