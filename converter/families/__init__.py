"""Every architecture the converter knows, one file each: tables of rules and nothing else."""

from __future__ import annotations

from converter.families.deepseek import DEEPSEEK2, DEEPSEEK3, DEEPSEEK32
from converter.families.deepseek4 import DEEPSEEK4
from converter.families.gemma2 import GEMMA2
from converter.families.gemma3 import GEMMA3
from converter.families.gemma4 import GEMMA4, GEMMA4_MOE, GEMMA4_SMALL
from converter.families.gpt_oss import GPT_OSS
from converter.families.llama import LLAMA2, LLAMA31, MISTRAL
from converter.families.mixtral import MIXTRAL
from converter.families.olmo3 import OLMO3
from converter.families.qwen import QWEN3, QWEN3_MOE, QWEN25
from converter.families.qwen_next import QWEN3_NEXT, QWEN35
from converter.families.qwen_vl import QWEN3_OMNI, QWEN3_VL, QWEN3_VL_MOE
from converter.rules import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA2,
    LLAMA31,
    MISTRAL,
    MIXTRAL,
    QWEN25,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN35,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_OMNI,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_MOE,
    GEMMA4_SMALL,
    GPT_OSS,
    DEEPSEEK2,
    DEEPSEEK3,
    DEEPSEEK32,
    DEEPSEEK4,
    OLMO3,
)

MODELS: dict[str, Family] = {name: family for family in FAMILIES for name in family.models}
"""Model name -> its family."""
