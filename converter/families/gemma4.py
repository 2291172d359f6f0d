"""Gemma 4. Global layers have heads of their own size and number, and in the large models no value projection.

The large models scan five local layers and a global one as a block. In the small ones later layers take keys and
values from earlier ones and every layer has embeddings of its own, so MaxText does not scan them.
"""

from collections.abc import Mapping
from typing import Any

from converter import sizes
from converter.families import common
from converter.families.gemma2 import embedding_scale
from converter.rules import Config, Family, Rule, Scale, Slot, rules


def _everywhere(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "full_attention")


def _kinds(config: Config, layer: int) -> set[str]:
    """Own: with keys and values of its own; valued: with a projection of values; wide: of twice the hidden units."""
    everywhere = _everywhere(config, layer)
    own = layer < int(config["num_hidden_layers"]) - int(config["num_kv_shared_layers"])
    valued, wide = not (everywhere and config["attention_k_eq_v"]), config["use_double_wide_mlp"] and not own
    tests = {"global": everywhere, "own": own, "valued": valued, "wide": wide}
    return {kind for kind, holds in tests.items() if holds}


_KEY, _VALUE = ("key.kernel", "k_proj.weight"), ("value.kernel", "v_proj.weight")
_WHERE = {"prefix": "self_attention.", "source": "self_attn."}

_ATTENTION = (
    *rules(
        ("query.kernel", "q_proj.weight", "(q d) e -> e q d"),
        ("out.kernel", "o_proj.weight", "e (q d) -> q d e"),
        ("query_norm.scale", "q_norm.weight", "d -> d"),
        layers="!global", **_WHERE,
    ),
    *rules(
        ("query.kernel", "q_proj.weight", "(q gd) e -> e q gd"),
        ("out.kernel", "o_proj.weight", "e (q gd) -> q gd e"),
        ("query_norm.scale", "q_norm.weight", "gd -> gd"),
        layers="global", **_WHERE,
    ),
    *rules((*_KEY, "(k d) e -> e k d"), (*_VALUE, "(k d) e -> e k d"), layers="own !global", **_WHERE),
    *rules(("key_norm.scale", "k_norm.weight", "d -> d"), layers="own !global", **_WHERE),
    *rules(
        (*_KEY, "(gk gd) e -> e gk gd"), ("key_norm.scale", "k_norm.weight", "gd -> gd"), layers="own global", **_WHERE
    ),
    *rules((*_VALUE, "(gk gd) e -> e gk gd"), layers="own global valued", **_WHERE),
)  # fmt: skip

_NORMS = rules(
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
    *rules(
        (f"{_BLOCK}.per_expert_scale", "router.per_expert_scale", "x -> x"),
        ("mlp.pre_feedforward_layernorm_2.scale", "pre_feedforward_layernorm_2.weight", "e -> e"),
        ("mlp.post_feedforward_layernorm_1.scale", "post_feedforward_layernorm_1.weight", "e -> e"),
        ("mlp.post_feedforward_layernorm_2.scale", "post_feedforward_layernorm_2.weight", "e -> e"),
        ("mlp.pre_forward_scale_2", "router.scale", "e -> e"),
    ),
)

_SMALL = (
    *common.mlp(layers="!wide"),
    *common.mlp(dim="f*2", layers="wide"),
    *rules(
        ("per_layer_input_gate.kernel", "per_layer_input_gate.weight", "pe e -> e pe"),
        ("per_layer_projection.kernel", "per_layer_projection.weight", "e pe -> pe e"),
        ("post_per_layer_input_norm.scale", "post_per_layer_input_norm.weight", "e -> e"),
    ),
)

_PER_LAYER = rules(
    ("embed_tokens_per_layer", "embed_tokens_per_layer.weight", "pv n*pe -> pv n*pe"),
    ("per_layer_model_projection.kernel", "per_layer_model_projection.weight", "n*pe e -> e n*pe"),
    ("per_layer_projection_norm.scale", "per_layer_projection_norm.weight", "pe -> pe"),
    prefix="decoder.per_layer_embedder.", source="model.",
)  # fmt: skip


def _of_global(key: str) -> Any:
    """A size of global layers, which config.json may say layer by layer (transformers since 5.24)."""

    def size(config: Config) -> Any:
        own = [its for layer, its in (config.get("per_layer_config") or {}).items() if _everywhere(config, int(layer))]
        return own[0].get(key, config[key]) if own else config[key]

    return size


def _five_to_one(config: Config) -> list[str]:
    return ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(config["num_hidden_layers"])]


_SLOTS = (Slot("local_layers", 5), Slot("global_layer"))


def _family(
    name: str, layer: tuple[Rule, ...], words: Mapping[str, str], rules: tuple[Rule, ...] = (), unscannable: str = ""
) -> Family:
    return common.family(
        name, "gemma4_small" if unscannable else "gemma4", "Gemma4ForConditionalGeneration Gemma4ForCausalLM",
        "gemma4 gemma4_text", (*_ATTENTION, *_NORMS, *layer), text="text_config", kinds=_kinds,
        unscannable=unscannable,
        scanned="" if unscannable else "decoder.scanned_blocks", slots=() if unscannable else _SLOTS,
        defaults={
            "head_dim": 256, "tie_word_embeddings": True, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False, "layer_types": _five_to_one, "global_head_dim": _of_global("head_dim"),
            "num_global_key_value_heads": _of_global("num_key_value_heads"),
        },
        rules=(
            Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
            Rule("decoder.decoder_norm.scale", "model.norm.weight", "e -> e"),
            *rules,
        ),
        prefixes={"model.": ("model.language_model.", "model.")},
        # Nothing uses what layers carry that take keys and values from others.
        ignored=(r".*\.self_attn\.(k_proj|v_proj|k_norm)\.weight",) if unscannable else (),
        beside=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",),
        words=sizes.words(sizes.WORDS, "global_head_dim", share_kv_projections="attention_k_eq_v", **words),
    )  # fmt: skip


_HEADS = {"global_num_kv_heads": "num_global_key_value_heads"}
_MOE_WORDS = {
    "base_moe_mlp_dim": "moe_intermediate_size", "num_experts": "num_experts", "num_experts_per_tok": "top_k_experts",
}  # fmt: skip
_SMALL_WORDS = sizes.words(
    {}, "num_kv_shared_layers hidden_size_per_layer_input vocab_size_per_layer_input use_double_wide_mlp"
)

GEMMA4 = _family("gemma4", common.mlp(), _HEADS)
GEMMA4_MOE = _family("gemma4-moe", _EXPERTS, _HEADS | _MOE_WORDS)
GEMMA4_SMALL = _family(
    "gemma4-small", _SMALL, _SMALL_WORDS, _PER_LAYER,
    unscannable="later layers of this model take keys and values from earlier ones, so MaxText does not scan them",
)  # fmt: skip
