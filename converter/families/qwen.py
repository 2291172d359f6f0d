"""Qwen 2.5 and dense Qwen 3. MaxText scales their queries itself (models/qwen2.py, models/qwen3.py)."""

from __future__ import annotations

from converter.families.common import DENSE_WORDS, DIMS, untied
from converter.rules import Family, Model, Rule, Stack

_RULES = (
    Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e"),
    Rule("decoder.decoder_norm.scale", "model.norm.weight", "e -> e"),
    Rule("decoder.logits_dense.kernel", "lm_head.weight", "v e -> e v", when=untied),
)
_LAYER = (
    Rule("self_attention.query.kernel", "self_attn.q_proj.weight", "(q d) e -> e q d"),
    Rule("self_attention.key.kernel", "self_attn.k_proj.weight", "(k d) e -> e k d"),
    Rule("self_attention.value.kernel", "self_attn.v_proj.weight", "(k d) e -> e k d"),
    Rule("self_attention.out.kernel", "self_attn.o_proj.weight", "e (q d) -> q d e"),
    Rule("mlp.wi_0.kernel", "mlp.gate_proj.weight", "f e -> e f"),
    Rule("mlp.wi_1.kernel", "mlp.up_proj.weight", "f e -> e f"),
    Rule("mlp.wo.kernel", "mlp.down_proj.weight", "e f -> f e"),
    Rule("pre_self_attention_layer_norm.scale", "input_layernorm.weight", "e -> e"),
    Rule("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "e -> e"),
)
_QKV_BIASES = (
    Rule("self_attention.query.bias", "self_attn.q_proj.bias", "(q d) -> q d"),
    Rule("self_attention.key.bias", "self_attn.k_proj.bias", "(k d) -> k d"),
    Rule("self_attention.value.bias", "self_attn.v_proj.bias", "(k d) -> k d"),
)
_QK_NORMS = (
    Rule("self_attention.query_norm.scale", "self_attn.q_norm.weight", "d -> d"),
    Rule("self_attention.key_norm.scale", "self_attn.k_norm.weight", "d -> d"),
)


def _config(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 151936,
    head_dim: int = 128,
    tied: bool = False,
) -> dict[str, int | bool]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


QWEN25 = Family(
    name="qwen2.5",
    decoder_block="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    defaults={
        "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"],
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    },
    dims=DIMS,
    rules=_RULES,
    stacks=(Stack("decoder.layers", "model.layers.", (*_LAYER, *_QKV_BIASES)),),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    equal={"lm_head.weight": "model.embed_tokens.weight"},
    words=DENSE_WORDS,
    models={
        "qwen2.5-0.5b": Model("Qwen/Qwen2.5-0.5B-Instruct", _config(896, 4864, 24, 14, 2, head_dim=64, tied=True)),
        "qwen2.5-1.5b": Model("Qwen/Qwen2.5-1.5B-Instruct", _config(1536, 8960, 28, 12, 2, tied=True), "converter"),
        "qwen2.5-3b": Model("Qwen/Qwen2.5-3B-Instruct", _config(2048, 11008, 36, 16, 2, tied=True)),
        "qwen2.5-7b": Model("Qwen/Qwen2.5-7B-Instruct", _config(3584, 18944, 28, 28, 4, vocab=152064), "converter"),
        "qwen2.5-14b": Model("Qwen/Qwen2.5-14B-Instruct", _config(5120, 13824, 48, 40, 8, vocab=152064), "converter"),
        "qwen2.5-32b": Model("Qwen/Qwen2.5-32B-Instruct", _config(5120, 27648, 64, 40, 8, vocab=152064)),
        "qwen2.5-72b": Model("Qwen/Qwen2.5-72B-Instruct", _config(8192, 29568, 80, 64, 8, vocab=152064)),
    },
)

_0_6B = _config(1024, 3072, 28, 16, 8, tied=True)
_1_7B = _config(2048, 6144, 28, 16, 8, tied=True)
_4B = _config(2560, 9728, 36, 32, 8, tied=True)
_8B = _config(4096, 12288, 36, 32, 8)
_14B = _config(5120, 17408, 40, 40, 8)
_32B = _config(5120, 25600, 64, 64, 8)

QWEN3 = Family(
    name="qwen3",
    decoder_block="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    defaults={"head_dim": 128, "num_key_value_heads": 32, "tie_word_embeddings": False},
    dims=DIMS,
    rules=_RULES,
    stacks=(Stack("decoder.layers", "model.layers.", (*_LAYER, *_QK_NORMS)),),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    equal={"lm_head.weight": "model.embed_tokens.weight"},
    words=DENSE_WORDS,
    models={
        "qwen3-0.6b": Model("Qwen/Qwen3-0.6B", _0_6B, "converter"),
        "qwen3-0.6b-base": Model("Qwen/Qwen3-0.6B-Base", _0_6B),
        "qwen3-1.7b": Model("Qwen/Qwen3-1.7B", _1_7B, "model"),
        "qwen3-1.7b-base": Model("Qwen/Qwen3-1.7B-Base", _1_7B, "model"),
        "qwen3-4b": Model("Qwen/Qwen3-4B", _4B, "converter"),
        "qwen3-4b-base": Model("Qwen/Qwen3-4B-Base", _4B, "model"),
        "qwen3-4b-instruct-2507": Model("Qwen/Qwen3-4B-Instruct-2507", _4B),
        "qwen3-4b-thinking-2507": Model("Qwen/Qwen3-4B-Thinking-2507", _4B, "converter"),
        "qwen3-8b": Model("Qwen/Qwen3-8B", _8B, "converter"),
        "qwen3-8b-base": Model("Qwen/Qwen3-8B-Base", _8B, "model"),
        "qwen3-14b": Model("Qwen/Qwen3-14B", _14B, "converter"),
        "qwen3-14b-base": Model("Qwen/Qwen3-14B-Base", _14B, "model"),
        "qwen3-32b": Model("Qwen/Qwen3-32B", _32B, "converter"),
    },
)
