"""What the dense families share: dimension letters, MaxText's geometry words, one condition."""

from __future__ import annotations

from converter.rules import Config

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


def untied(config: Config) -> bool:
    return not config["tie_word_embeddings"]
