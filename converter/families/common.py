"""What families share: dimension names, MaxText's geometry words, the rules of a common decoder."""

from __future__ import annotations

from typing import Any

from converter.rules import Config, Form, Op, Rule

DIMS = {
    "v": "vocab_size", "e": "hidden_size", "f": "intermediate_size", "q": "num_attention_heads",
    "k": "num_key_value_heads", "d": "head_dim",
}  # fmt: skip
"""Dimensions of the patterns -> keys of config.json."""

EXPERT_DIMS = {**DIMS, "x": "num_experts", "m": "moe_intermediate_size"}
"""With a mixture of `x` experts of `m` hidden units each."""

WORDS = {
    "base_emb_dim": "hidden_size", "base_mlp_dim": "intermediate_size", "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "logits_via_embedding": "tie_word_embeddings",
}  # fmt: skip
"""MaxText's words (configs/base.yml) -> keys of config.json that say the same."""

EXPERT_WORDS = {
    **WORDS, "base_mlp_dim": "moe_intermediate_size", "base_moe_mlp_dim": "moe_intermediate_size",
    "num_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
}  # fmt: skip

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Repositories of tied models may carry the output matrix all the same."""

INV_FREQ = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""A constant that older repositories store with the weights."""


def expert_count(config: Config) -> int:
    """transformers calls the number of experts by several names."""
    return int(config.get("num_local_experts") or config["n_routed_experts"])


def heads_share_width(config: Config) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def query_heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def product(*keys: str) -> Any:
    """A size that is the product of others; none where one of them is not there."""

    def size(config: Config) -> int | None:
        if any(key not in config for key in keys):
            return None
        result = 1
        for key in keys:
            result *= int(config[key])
        return result

    return size


def quotient(key: str, by: str) -> Any:
    """A size that is the quotient of two others; none where one of them is not there."""
    return lambda config: int(config[key] // config[by]) if key in config and by in config else None


def untied(config: Config) -> bool:
    return not config["tie_word_embeddings"]


def rules(*table: tuple[str, str, str], prefix: str = "", source: str = "", **options: Any) -> tuple[Rule, ...]:
    """Rules from rows of target, source and pattern; the rest is the same for all of them."""
    return tuple(Rule(f"{prefix}{target}", f"{source}{name}", pattern, **options) for target, name, pattern in table)


def affine(target: str, source: str, pattern: str, bias: str, name: str = "kernel") -> tuple[Rule, ...]:
    """A matrix, or with name="scale" a norm, and its bias."""
    return rules((f"{target}.{name}", f"{source}.weight", pattern), (f"{target}.bias", f"{source}.bias", bias))


DECODER = (
    *rules(
        ("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e"),
        ("decoder.decoder_norm.scale", "model.norm.weight", "e -> e"),
    ),
    Rule("decoder.logits_dense.kernel", "lm_head.weight", "v e -> e v", when=untied),
)
"""What is outside the layers."""

NORMS = rules(
    ("pre_self_attention_layer_norm.scale", "input_layernorm.weight", "e -> e"),
    ("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "e -> e"),
)

QK_NORMS = rules(
    ("self_attention.query_norm.scale", "self_attn.q_norm.weight", "d -> d"),
    ("self_attention.key_norm.scale", "self_attn.k_norm.weight", "d -> d"),
)


def biases(target: str = "self_attention") -> tuple[Rule, ...]:
    """Of query, key and value."""
    return rules(
        ("query.bias", "q_proj.bias", "(q d) -> q d"),
        ("key.bias", "k_proj.bias", "(k d) -> k d"),
        ("value.bias", "v_proj.bias", "(k d) -> k d"),
        prefix=f"{target}.", source="self_attn.",
    )  # fmt: skip


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


def mlp(target: str = "mlp", source: str = "mlp", dim: str = "f", **options: Any) -> tuple[Rule, ...]:
    """The three matrices of a gated feed-forward block of `dim` hidden units."""
    return rules(
        ("wi_0.kernel", "gate_proj.weight", f"{dim} e -> e {dim}"),
        ("wi_1.kernel", "up_proj.weight", f"{dim} e -> e {dim}"),
        ("wo.kernel", "down_proj.weight", f"e {dim} -> {dim} e"),
        prefix=f"{target}.", source=f"{source}.", **options,
    )  # fmt: skip


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

    downs = (
        Form(fused_down, "x e m -> x m e", (gate_up, "x (0/2 m) e")),
        Form(fused_down, "x m e -> x m e", (gate_up, "x e (0/2 m)")),
    )
    return (
        Rule(f"{target}.wi_0", gate, "m e -> x e m", forms=halves("0/2")),
        Rule(f"{target}.wi_1", up, "m e -> x e m", forms=halves("1/2")),
        Rule(f"{target}.wo", down, "e m -> x m e", forms=downs),
    )


def router(target: str, *sources: str) -> Rule:
    """What chooses the experts, under any of these names."""
    first, *others = sources or ("mlp.gate.weight",)
    return Rule(f"{target}.gate.kernel", first, "x e -> e x", forms=tuple(Form(name, "x e -> e x") for name in others))
