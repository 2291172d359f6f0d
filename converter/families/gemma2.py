"""Gemma 2. One MaxText layer holds two layers of the repository: local attention (even), then global (odd).

The embedding is stored multiplied by sqrt(hidden_size); norm scales are stored as 1 + w and stay float32, which
bfloat16 cannot hold. MaxText's attention multiplies the query by nothing, so the repository's
query_pre_attn_scalar**-0.5 goes into its kernel (MaxText's own script for Gemma 2 does the same; its generic
converter takes head_dim**-0.5, which is the same number in every size but 27b, where it is off by 6 %).
"""

from converter.families import common
from converter.rules import AddOne, Config, Rule, Scale


def embedding_scale(config: Config) -> float:
    return float(config["hidden_size"] ** 0.5)


def query_scale(config: Config) -> float:
    return float(config["query_pre_attn_scalar"] ** -0.5)


def norm(target: str, source: str, at: int = 0, dim: str = "e") -> Rule:
    return Rule(f"{target}.scale", f"{source}.weight", f"{dim} -> {dim}", (AddOne(),), at, dtype="float32")


def _layer(kind: str, at: int) -> tuple[Rule, ...]:
    return (
        *common.attention(f"self_attention_{kind}", query=(Scale(query_scale),), at=at),
        *common.mlp(f"mlp_{kind}", at=at),
        norm(f"pre_self_attention_norm_{kind}", "input_layernorm", at),
        norm(f"post_self_attention_norm_{kind}", "post_attention_layernorm", at),
        norm(f"pre_ffw_norm_{kind}", "pre_feedforward_layernorm", at),
        norm(f"post_ffw_norm_{kind}", "post_feedforward_layernorm", at),
    )


GEMMA2 = common.family(
    "gemma2", "gemma2", "Gemma2ForCausalLM", "gemma2", (*_layer("local", 0), *_layer("global", 1)), merged=2,
    defaults={"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    rules=(
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
        norm("decoder.decoder_norm", "model.norm"),
    ),
    # MaxText pads the vocabulary (configs/models/gemma2-*.yml).
    vocabulary={256000: 256128},
)  # fmt: skip
