"""Mixtral. Its query is scaled in the kernel, as Llama's is (llama.py)."""

from __future__ import annotations

from converter.families.common import (
    DECODER,
    EXPERT_DIMS,
    EXPERT_WORDS,
    INV_FREQ,
    NORMS,
    attention,
    expert_geometry,
    experts,
    router,
)
from converter.families.llama import query_scale
from converter.rules import Family, Model, Scale, Stack

_LAYER = (
    *attention(query=(Scale(query_scale),)),
    router("MoeBlock_0", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
    *experts("MoeBlock_0", separate="block_sparse_moe.experts.{x}", names=("w1", "w3", "w2")),
    *NORMS,
)

_8X7B = expert_geometry(4096, 14336, 32, 32, 8, 8, per_token=2, vocab=32000)
_8X22B = expert_geometry(6144, 16384, 56, 48, 8, 8, per_token=2, vocab=32768)

MIXTRAL = Family(
    name="mixtral",
    decoder_block="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    defaults={
        "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"],
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts": lambda c: c["num_local_experts"],
        "moe_intermediate_size": lambda c: c["intermediate_size"],
    },
    dims=EXPERT_DIMS,
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", _LAYER),),
    ignored=(INV_FREQ,),
    words=EXPERT_WORDS,
    models={
        "mixtral-8x7b": Model("mistralai/Mixtral-8x7B-Instruct-v0.1", _8X7B, "converter"),
        "mixtral-8x22b": Model("mistralai/Mixtral-8x22B-Instruct-v0.1", _8X22B, "converter"),
    },
)
