"""Mixtral. Its query is scaled in the kernel, as Llama's is (llama.py)."""

from __future__ import annotations

from converter.families import common
from converter.families.llama import query_scale
from converter.rules import Family, Scale, Stack

_LAYER = (
    *common.attention(query=(Scale(query_scale),)),
    common.router("MoeBlock_0", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
    *common.experts("MoeBlock_0", separate="block_sparse_moe.experts.{x}", names=("w1", "w3", "w2")),
    *common.NORMS,
)

MIXTRAL = Family(
    name="mixtral",
    decoder_block="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    defaults={
        "head_dim": common.heads_share_width,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts": common.expert_count,
        "moe_intermediate_size": lambda c: c["intermediate_size"],
    },
    dims=common.EXPERT_DIMS,
    rules=common.DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", _LAYER),),
    ignored=(common.INV_FREQ,),
    words=common.EXPERT_WORDS,
)
