"""Mixtral. Its query is scaled in the kernel, as Llama's is (llama.py)."""

from converter import sizes
from converter.families import common
from converter.families.llama import query_scale
from converter.rules import Scale

_LAYER = (
    *common.attention(query=(Scale(query_scale),)),
    common.router("MoeBlock_0", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
    *common.experts("MoeBlock_0", separate="block_sparse_moe.experts.{x}", names=("w1", "w3", "w2")),
    *common.NORMS,
)

MIXTRAL = common.family(
    "mixtral", "mixtral", "MixtralForCausalLM", "mixtral", _LAYER, words=sizes.EXPERT_WORDS,
    defaults={
        "head_dim": sizes.heads_share_width, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts": sizes.expert_count, "moe_intermediate_size": lambda c: c["intermediate_size"],
    },
)  # fmt: skip
