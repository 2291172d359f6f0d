"""Qwen 2.5 and Qwen 3, dense and with experts. MaxText scales their queries itself (models/qwen2.py, qwen3.py)."""

from __future__ import annotations

from converter.families.common import (
    DECODER,
    DENSE_WORDS,
    DIMS,
    EXPERT_DIMS,
    EXPERT_WORDS,
    INV_FREQ,
    NORMS,
    QK_NORMS,
    TIED,
    attention,
    expert_count,
    expert_geometry,
    experts,
    geometry,
    mlp,
    router,
)
from converter.rules import Family, Model, Rule, Stack

_QKV_BIASES = (
    Rule("self_attention.query.bias", "self_attn.q_proj.bias", "(q d) -> q d"),
    Rule("self_attention.key.bias", "self_attn.k_proj.bias", "(k d) -> k d"),
    Rule("self_attention.value.bias", "self_attn.v_proj.bias", "(k d) -> k d"),
)

QWEN25 = Family(
    name="qwen2.5",
    decoder_block="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
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

DENSE_LAYER = (*attention(), *QK_NORMS, *mlp(), *NORMS)

QWEN3 = Family(
    name="qwen3",
    decoder_block="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    defaults={"head_dim": 128, "num_key_value_heads": 32, "tie_word_embeddings": False},
    dims=DIMS,
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", DENSE_LAYER),),
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

_30B = expert_geometry(2048, 768, 48, 32, 4, 128, per_token=8, vocab=151936, head_dim=128)
_235B = expert_geometry(4096, 1536, 94, 64, 4, 128, per_token=8, vocab=151936, head_dim=128)
_480B = expert_geometry(6144, 2560, 62, 96, 8, 160, per_token=8, vocab=151936, head_dim=128)

MOE_LAYER = (*attention(), *QK_NORMS, router("moe_block"), *experts("moe_block"), *NORMS)

QWEN3_MOE = Family(
    name="qwen3-moe",
    decoder_block="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    defaults={"head_dim": 128, "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": expert_count},
    dims=EXPERT_DIMS,
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", MOE_LAYER),),
    ignored=(INV_FREQ,),
    words=EXPERT_WORDS,
    models={
        "qwen3-30b-a3b": Model("Qwen/Qwen3-30B-A3B-Thinking-2507", _30B, "converter"),
        "qwen3-30b-a3b-base": Model("Qwen/Qwen3-30B-A3B-Base", _30B, "converter"),
        "qwen3-30b-a3b-instruct-2507": Model("Qwen/Qwen3-30B-A3B-Instruct-2507", _30B),
        "qwen3-coder-30b-a3b": Model("Qwen/Qwen3-Coder-30B-A3B-Instruct", _30B),
        "qwen3-235b-a22b": Model("Qwen/Qwen3-235B-A22B-Thinking-2507", _235B, "converter"),
        "qwen3-235b-a22b-instruct-2507": Model("Qwen/Qwen3-235B-A22B-Instruct-2507", _235B),
        "qwen3-480b-a35b": Model("Qwen/Qwen3-Coder-480B-A35B-Instruct", _480B, "model"),
        "qwen3-coder-480b-a35b": Model("Qwen/Qwen3-Coder-480B-A35B-Instruct", _480B, "converter"),
    },
)
