"""Gemma 2. One MaxText layer holds two layers of the repository: local attention (even), then global (odd).

The embedding is stored multiplied by sqrt(hidden_size); norm scales are stored as 1 + w and stay float32, which
bfloat16 cannot hold. MaxText's attention multiplies the query by nothing, so the repository's
query_pre_attn_scalar**-0.5 goes into its kernel (MaxText's own script for Gemma 2 does the same; its generic
converter takes head_dim**-0.5, which is the same number in every size but 27b, where it is off by 6 %).
"""

from __future__ import annotations

from converter.families.common import DENSE_WORDS, DIMS
from converter.rules import AddOne, Config, Family, Model, Rule, Scale, Stack


def embedding_scale(config: Config) -> float:
    return float(config["hidden_size"] ** 0.5)


def query_scale(config: Config) -> float:
    return float(config["query_pre_attn_scalar"] ** -0.5)


def _norm(target: str, source: str, at: int = 0) -> Rule:
    return Rule(target, source, "e -> e", (AddOne(),), at, dtype="float32")


def _layer(kind: str, at: int) -> tuple[Rule, ...]:
    attention, mlp = f"self_attention_{kind}", f"mlp_{kind}"
    return (
        Rule(
            f"{attention}.query.kernel",
            "self_attn.q_proj.weight",
            "(q d) e -> e q d",
            (Scale(query_scale),),
            at,
        ),
        Rule(f"{attention}.key.kernel", "self_attn.k_proj.weight", "(k d) e -> e k d", at=at),
        Rule(f"{attention}.value.kernel", "self_attn.v_proj.weight", "(k d) e -> e k d", at=at),
        Rule(f"{attention}.out.kernel", "self_attn.o_proj.weight", "e (q d) -> q d e", at=at),
        Rule(f"{mlp}.wi_0.kernel", "mlp.gate_proj.weight", "f e -> e f", at=at),
        Rule(f"{mlp}.wi_1.kernel", "mlp.up_proj.weight", "f e -> e f", at=at),
        Rule(f"{mlp}.wo.kernel", "mlp.down_proj.weight", "e f -> f e", at=at),
        _norm(f"pre_self_attention_norm_{kind}.scale", "input_layernorm.weight", at),
        _norm(f"post_self_attention_norm_{kind}.scale", "post_attention_layernorm.weight", at),
        _norm(f"pre_ffw_norm_{kind}.scale", "pre_feedforward_layernorm.weight", at),
        _norm(f"post_ffw_norm_{kind}.scale", "post_feedforward_layernorm.weight", at),
    )


def _config(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, query_scalar: int
) -> dict[str, int | bool]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": query_scalar,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    }


GEMMA2 = Family(
    name="gemma2",
    decoder_block="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
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
    stacks=(Stack("decoder.layers", "model.layers.", (*_layer("local", 0), *_layer("global", 1)), cycle=2),),
    equal={"lm_head.weight": "model.embed_tokens.weight"},
    # MaxText pads the vocabulary (configs/models/gemma2-*.yml).
    vocabulary={256000: 256128},
    words=DENSE_WORDS,
    models={
        "gemma2-2b": Model("google/gemma-2-2b", _config(2304, 9216, 26, 8, 4, 256, 256), "converter"),
        "gemma2-9b": Model("google/gemma-2-9b", _config(3584, 14336, 42, 16, 8, 256, 256), "converter"),
        "gemma2-27b": Model("google/gemma-2-27b", _config(4608, 36864, 46, 32, 16, 128, 144), "converter"),
    },
)
