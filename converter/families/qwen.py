"""Qwen 2.5 and Qwen 3, dense and with experts. MaxText scales their queries itself (models/qwen2.py, qwen3.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.families import common
from converter.rules import Family, Rule, Stack

DENSE_LAYER = (*common.attention(), *common.QK_NORMS, *common.mlp(), *common.NORMS)
MOE_LAYER = (
    *common.attention(), *common.QK_NORMS, common.router("moe_block"), *common.experts("moe_block"), *common.NORMS,
)  # fmt: skip
_BIASED_LAYER = (*common.attention(), *common.biases(), *common.mlp(), *common.NORMS)

DENSE_DEFAULTS: Mapping[str, Any] = {"head_dim": 128, "num_key_value_heads": 32, "tie_word_embeddings": False}
MOE_DEFAULTS: Mapping[str, Any] = {**DENSE_DEFAULTS, "num_key_value_heads": 4, "num_experts": common.expert_count}


def _family(name: str, block: str, architecture: str, layer: tuple[Rule, ...], **more: Any) -> Family:
    settings: dict[str, Any] = {"defaults": DENSE_DEFAULTS, "dims": common.DIMS, "words": common.WORDS}
    return Family(
        name=name,
        decoder_block=block,
        architectures=(f"{architecture}ForCausalLM",),
        model_types=(block,),
        rules=common.DECODER,
        stacks=(Stack("decoder.layers", "model.layers.", layer),),
        ignored=(common.INV_FREQ,),
        equal=common.TIED,
        **(settings | more),
    )


QWEN25 = _family(
    "qwen2.5", "qwen2", "Qwen2", _BIASED_LAYER, defaults={**DENSE_DEFAULTS, "head_dim": common.heads_share_width}
)
QWEN3 = _family("qwen3", "qwen3", "Qwen3", DENSE_LAYER)
QWEN3_MOE = _family(
    "qwen3-moe", "qwen3_moe", "Qwen3Moe", MOE_LAYER,
    defaults=MOE_DEFAULTS, dims=common.EXPERT_DIMS, words=common.EXPERT_WORDS,
)  # fmt: skip
