"""Qwen 2.5 and Qwen 3, dense and with experts. MaxText scales their queries itself (models/qwen2.py, qwen3.py)."""

from collections.abc import Mapping
from typing import Any

from converter import sizes
from converter.families import common

DENSE_LAYER = (*common.attention(), *common.QK_NORMS, *common.mlp(), *common.NORMS)
MOE_LAYER = (
    *common.attention(), *common.QK_NORMS, common.router("moe_block"), *common.experts("moe_block"), *common.NORMS,
)  # fmt: skip
_BIASED_LAYER = (*common.attention(), *common.biases(), *common.mlp(), *common.NORMS)

DENSE_DEFAULTS: Mapping[str, Any] = {"head_dim": 128, "num_key_value_heads": 32}
MOE_DEFAULTS: Mapping[str, Any] = {"head_dim": 128, "num_key_value_heads": 4, "num_experts": sizes.expert_count}
_QWEN2_DEFAULTS = {**DENSE_DEFAULTS, "head_dim": sizes.heads_share_width}

QWEN25 = common.family("qwen2.5", "qwen2", "Qwen2ForCausalLM", "qwen2", _BIASED_LAYER, defaults=_QWEN2_DEFAULTS)
QWEN3 = common.family("qwen3", "qwen3", "Qwen3ForCausalLM", "qwen3", DENSE_LAYER, defaults=DENSE_DEFAULTS)
QWEN3_MOE = common.family(
    "qwen3-moe", "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", MOE_LAYER,
    defaults=MOE_DEFAULTS, words=sizes.EXPERT_WORDS,
)  # fmt: skip
