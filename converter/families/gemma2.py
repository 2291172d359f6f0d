"""Gemma 2. One MaxText layer holds two layers of the repository: local attention (even), then global (odd).

The embedding is stored multiplied by sqrt(hidden_size); norm scales are stored as 1 + w and stay float32, which
bfloat16 cannot hold. MaxText's attention multiplies the query by nothing, so the repository's
query_pre_attn_scalar**-0.5 goes into its kernel (MaxText's own script for Gemma 2 does the same; its generic
converter takes head_dim**-0.5, which is the same number in every size but 27b, where it is off by 6 %).
"""

from __future__ import annotations

from converter.families.common import DENSE_WORDS, DIMS, TIED, attention, geometry, mlp
from converter.rules import AddOne, Config, Family, Model, Rule, Scale, Stack


def embedding_scale(config: Config) -> float:
    return float(config["hidden_size"] ** 0.5)


def query_scale(config: Config) -> float:
    return float(config["query_pre_attn_scalar"] ** -0.5)


def _norm(target: str, source: str, at: int = 0) -> Rule:
    return Rule(target, source, "e -> e", (AddOne(),), at, dtype="float32")


def _layer(kind: str, at: int) -> tuple[Rule, ...]:
    return (
        *attention(f"self_attention_{kind}", query=(Scale(query_scale),), at=at),
        *mlp(f"mlp_{kind}", at=at),
        _norm(f"pre_self_attention_norm_{kind}.scale", "input_layernorm.weight", at),
        _norm(f"post_self_attention_norm_{kind}.scale", "post_attention_layernorm.weight", at),
        _norm(f"pre_ffw_norm_{kind}.scale", "pre_feedforward_layernorm.weight", at),
        _norm(f"post_ffw_norm_{kind}.scale", "post_feedforward_layernorm.weight", at),
    )


def _size(
    hidden: int, mlp_size: int, layers: int, heads: int, kv_heads: int, head_dim: int, query_scalar: int
) -> dict[str, int | bool]:
    sizes = geometry(hidden, mlp_size, layers, heads, kv_heads, vocab=256000, head_dim=head_dim, tied=True)
    return sizes | {"query_pre_attn_scalar": query_scalar}


GEMMA2 = Family(
    name="gemma2",
    decoder_block="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    dims=DIMS,
    rules=(
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
        _norm("decoder.decoder_norm.scale", "model.norm.weight"),
    ),
    stacks=(Stack("decoder.layers", "model.layers.", (*_layer("local", 0), *_layer("global", 1)), merged=2),),
    equal=TIED,
    # MaxText pads the vocabulary (configs/models/gemma2-*.yml).
    vocabulary={256000: 256128},
    words=DENSE_WORDS,
    models={
        "gemma2-2b": Model("google/gemma-2-2b", _size(2304, 9216, 26, 8, 4, 256, 256), "converter"),
        "gemma2-9b": Model("google/gemma-2-9b", _size(3584, 14336, 42, 16, 8, 256, 256), "converter"),
        "gemma2-27b": Model("google/gemma-2-27b", _size(4608, 36864, 46, 32, 16, 128, 144), "converter"),
    },
)
