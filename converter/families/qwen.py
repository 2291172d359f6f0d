"""Qwen 2.5 and dense Qwen 3. MaxText scales their queries itself (models/qwen2.py, models/qwen3.py)."""

from __future__ import annotations

from converter.families.common import DECODER, DENSE_WORDS, DIMS, INV_FREQ, NORMS, TIED, attention, geometry, mlp
from converter.rules import Family, Model, Rule, Stack

_QKV_BIASES = (
    Rule("self_attention.query.bias", "self_attn.q_proj.bias", "(q d) -> q d"),
    Rule("self_attention.key.bias", "self_attn.k_proj.bias", "(k d) -> k d"),
    Rule("self_attention.value.bias", "self_attn.v_proj.bias", "(k d) -> k d"),
)
_QK_NORMS = (
    Rule("self_attention.query_norm.scale", "self_attn.q_norm.weight", "d -> d"),
    Rule("self_attention.key_norm.scale", "self_attn.k_norm.weight", "d -> d"),
)


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
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", (*attention(), *_QKV_BIASES, *mlp(), *NORMS)),),
    ignored=(INV_FREQ,),
    equal=TIED,
    words=DENSE_WORDS,
    models={
        "qwen2.5-0.5b": Model(
            "Qwen/Qwen2.5-0.5B-Instruct", geometry(896, 4864, 24, 14, 2, head_dim=64, vocab=151936, tied=True)
        ),
        "qwen2.5-1.5b": Model(
            "Qwen/Qwen2.5-1.5B-Instruct", geometry(1536, 8960, 28, 12, 2, vocab=151936, tied=True), "converter"
        ),
        "qwen2.5-3b": Model("Qwen/Qwen2.5-3B-Instruct", geometry(2048, 11008, 36, 16, 2, vocab=151936, tied=True)),
        "qwen2.5-7b": Model("Qwen/Qwen2.5-7B-Instruct", geometry(3584, 18944, 28, 28, 4, vocab=152064), "converter"),
        "qwen2.5-14b": Model("Qwen/Qwen2.5-14B-Instruct", geometry(5120, 13824, 48, 40, 8, vocab=152064), "converter"),
        "qwen2.5-32b": Model("Qwen/Qwen2.5-32B-Instruct", geometry(5120, 27648, 64, 40, 8, vocab=152064)),
        "qwen2.5-72b": Model("Qwen/Qwen2.5-72B-Instruct", geometry(8192, 29568, 80, 64, 8, vocab=152064)),
    },
)

_0_6B = geometry(1024, 3072, 28, 16, 8, vocab=151936, tied=True, head_dim=128)
_1_7B = geometry(2048, 6144, 28, 16, 8, vocab=151936, tied=True, head_dim=128)
_4B = geometry(2560, 9728, 36, 32, 8, vocab=151936, tied=True, head_dim=128)
_8B = geometry(4096, 12288, 36, 32, 8, vocab=151936, head_dim=128)
_14B = geometry(5120, 17408, 40, 40, 8, vocab=151936, head_dim=128)
_32B = geometry(5120, 25600, 64, 64, 8, vocab=151936, head_dim=128)

QWEN3 = Family(
    name="qwen3",
    decoder_block="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    defaults={"head_dim": 128, "num_key_value_heads": 32, "tie_word_embeddings": False},
    dims=DIMS,
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", (*attention(), *_QK_NORMS, *mlp(), *NORMS)),),
    ignored=(INV_FREQ,),
    equal=TIED,
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
