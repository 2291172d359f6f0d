"""What the dense families share: dimension letters, MaxText's geometry words, the rules of a common decoder."""

from __future__ import annotations

from typing import Any

from converter.rules import Config, Form, Op, Rule

DIMS = {
    "v": "vocab_size",
    "e": "hidden_size",
    "f": "intermediate_size",
    "q": "num_attention_heads",
    "k": "num_key_value_heads",
    "d": "head_dim",
}
"""Dimension letters of the patterns -> keys of config.json."""

DENSE_WORDS = {
    "base_emb_dim": "hidden_size",
    "base_mlp_dim": "intermediate_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "logits_via_embedding": "tie_word_embeddings",
}
"""MaxText's words (configs/base.yml) -> keys of config.json that say the same."""

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Repositories of tied models may carry the output matrix all the same."""

INV_FREQ = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""A constant that older repositories store with the weights."""


def untied(config: Config) -> bool:
    return not config["tie_word_embeddings"]


DECODER = (
    Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e"),
    Rule("decoder.decoder_norm.scale", "model.norm.weight", "e -> e"),
    Rule("decoder.logits_dense.kernel", "lm_head.weight", "v e -> e v", when=untied),
)
"""What is outside the layers."""

NORMS = (
    Rule("pre_self_attention_layer_norm.scale", "input_layernorm.weight", "e -> e"),
    Rule("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "e -> e"),
)


QK_NORMS = (
    Rule("self_attention.query_norm.scale", "self_attn.q_norm.weight", "d -> d"),
    Rule("self_attention.key_norm.scale", "self_attn.k_norm.weight", "d -> d"),
)


def attention(
    target: str = "self_attention", *, query: tuple[Op, ...] = (), key: tuple[Op, ...] = (), at: int = 0
) -> tuple[Rule, ...]:
    """The four matrices of grouped-query attention; `query` and `key` are what else happens to those."""
    return (
        Rule(f"{target}.query.kernel", "self_attn.q_proj.weight", "(q d) e -> e q d", query, at),
        Rule(f"{target}.key.kernel", "self_attn.k_proj.weight", "(k d) e -> e k d", key, at),
        Rule(f"{target}.value.kernel", "self_attn.v_proj.weight", "(k d) e -> e k d", at=at),
        Rule(f"{target}.out.kernel", "self_attn.o_proj.weight", "e (q d) -> q d e", at=at),
    )


def mlp(target: str = "mlp", *, at: int = 0) -> tuple[Rule, ...]:
    """The three matrices of a gated feed-forward block."""
    return (
        Rule(f"{target}.wi_0.kernel", "mlp.gate_proj.weight", "f e -> e f", at=at),
        Rule(f"{target}.wi_1.kernel", "mlp.up_proj.weight", "f e -> e f", at=at),
        Rule(f"{target}.wo.kernel", "mlp.down_proj.weight", "e f -> f e", at=at),
    )


EXPERT_DIMS = {**DIMS, "x": "num_experts", "m": "moe_intermediate_size"}
"""With a mixture of `x` experts of `m` hidden units each."""

EXPERT_WORDS = {
    **DENSE_WORDS,
    "base_mlp_dim": "moe_intermediate_size",
    "base_moe_mlp_dim": "moe_intermediate_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}


def expert_count(config: Config) -> int:
    """transformers calls the number of experts by several names."""
    return int(config.get("num_local_experts") or config["n_routed_experts"])


def experts(
    target: str,
    *,
    separate: str = "mlp.experts.{x}",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused: str = "mlp.experts",
) -> tuple[Rule, ...]:
    """The three matrices of every expert: one tensor each, or fused for all experts of a layer.

    Fused ones come in two orientations: as a linear layer's [out, in] (transformers since 5), or [in, out] (before).
    """
    gate, up, down = (f"{separate}.{name}.weight" for name in names)
    gate_up, fused_down = f"{fused}.gate_up_proj", f"{fused}.down_proj"

    def halves(which: str) -> tuple[Form, ...]:
        return (
            Form(gate_up, f"x ({which} m) e -> x e m", (fused_down, "x e m")),
            Form(gate_up, f"x e ({which} m) -> x e m", (fused_down, "x m e")),
        )

    return (
        Rule(f"{target}.wi_0", gate, "m e -> x e m", forms=halves("0/2")),
        Rule(f"{target}.wi_1", up, "m e -> x e m", forms=halves("1/2")),
        Rule(
            f"{target}.wo",
            down,
            "e m -> x m e",
            forms=(
                Form(fused_down, "x e m -> x m e", (gate_up, "x (0/2 m) e")),
                Form(fused_down, "x m e -> x m e", (gate_up, "x e (0/2 m)")),
            ),
        ),
    )


def router(target: str, *sources: str) -> Rule:
    """What chooses the experts, under any of these names."""
    first, *others = sources or ("mlp.gate.weight",)
    return Rule(f"{target}.gate.kernel", first, "x e -> e x", forms=tuple(Form(name, "x e -> e x") for name in others))


def expert_geometry(
    hidden: int, expert_size: int, layers: int, heads: int, kv_heads: int, experts: int, **more: Any
) -> dict[str, Any]:
    """The keys of a config.json that give the sizes of a model whose every layer has experts."""
    sizes = geometry(
        hidden, expert_size, layers, heads, kv_heads, vocab=more.pop("vocab"), head_dim=more.pop("head_dim", None)
    )
    per_token = more.pop("per_token")
    return {
        **sizes,
        "moe_intermediate_size": expert_size,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        **more,
    }


def geometry(
    hidden: int,
    mlp_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int,
    head_dim: int | None = None,
    tied: bool = False,
) -> dict[str, int | bool]:
    """The keys of a config.json that give a dense model's sizes."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
