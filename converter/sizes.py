"""What a model's sizes are called: in the patterns of rules, in config.json and in MaxText's words."""

from __future__ import annotations

from converter.rules import Config

DIMS = {
    "v": "vocab_size", "n": "num_hidden_layers", "e": "hidden_size", "f": "intermediate_size",
    "q": "num_attention_heads", "k": "num_key_value_heads", "d": "head_dim",
    # A mixture of experts.
    "x": "num_experts", "m": "moe_intermediate_size", "xt": "num_experts_per_tok", "sn": "n_shared_experts",
    "sm": "shared_expert_intermediate_size",
    # Latent and compressed attention.
    "c": "kv_lora_rank", "qc": "q_lora_rank", "qn": "qk_nope_head_dim", "qr": "qk_rope_head_dim", "vd": "v_head_dim",
    "ih": "index_n_heads", "id": "index_head_dim", "og": "o_groups", "or": "o_lora_rank", "h": "hc_mult",
    "hr": "hc_mult", "cs": "sparse_ratio", "ch": "heavy_ratio",
    # Linear attention.
    "lk": "linear_num_key_heads", "lv": "linear_num_value_heads", "la": "linear_key_head_dim",
    "lb": "linear_value_head_dim", "lw": "linear_conv_kernel_dim",
    # Gemma 4's global layers and embeddings of single layers.
    "gd": "global_head_dim", "gk": "num_global_key_value_heads", "pv": "vocab_size_per_layer_input",
    "pe": "hidden_size_per_layer_input",
}  # fmt: skip
"""Dimensions of the patterns -> keys of config.json."""

WORDS = {
    "base_emb_dim": "hidden_size", "base_mlp_dim": "intermediate_size", "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "logits_via_embedding": "tie_word_embeddings",
}  # fmt: skip
"""MaxText's words (configs/base.yml) -> keys of config.json that say the same."""

EXPERT_WORDS = {
    **WORDS, "base_mlp_dim": "moe_intermediate_size", "base_moe_mlp_dim": "moe_intermediate_size",
    "num_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
}  # fmt: skip


def words(common: dict[str, str], same: str = "", **others: str) -> dict[str, str]:
    """Further words; `same` are those that config.json has too."""
    return {**common, **{word: word for word in same.split()}, **others}


def expert_count(config: Config) -> int:
    """transformers calls the number of experts by several names."""
    return int(config.get("num_local_experts") or config["n_routed_experts"])


def heads_share_width(config: Config) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def query_heads(config: Config) -> int:
    return int(config["num_attention_heads"])
