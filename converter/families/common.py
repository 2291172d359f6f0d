"""What families share: the rules of a common decoder, and the family that most are."""

from typing import Any

from converter.rules import Config, Family, Form, Op, Rule, Stack, rules
from converter.sizes import DIMS, WORDS

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Repositories of tied models may carry the output matrix all the same."""

_INV_FREQ = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""A constant that older repositories store with the weights."""


def untied(config: Config) -> bool:
    return not config["tie_word_embeddings"]


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


def family(name: str, block: str, architectures: str, model_types: str, layer: tuple[Rule, ...], **more: Any) -> Family:
    """A family as most are: common names and rules but for its layers; `more` are fields of `Family` that differ.

    Args:
      architectures, model_types: separated by spaces.
      layer: the rules of a decoder layer; with `slots` the places of a scanned cycle.
    """
    stack = Stack("decoder.layers", "model.layers.", layer, **{k: more.pop(k) for k in _OF_STACK if k in more})
    fields: dict[str, Any] = {"dims": DIMS, "rules": DECODER, "stacks": (stack,), "words": WORDS}
    fields |= {"ignored": (_INV_FREQ,), "equal": _TIED} | more
    fields["defaults"] = {"tie_word_embeddings": False, **fields["defaults"]}
    return Family(name, block, tuple(architectures.split()), tuple(model_types.split()), **fields)


_OF_STACK = ("slots", "scanned", "remainder", "merged", "kinds")
