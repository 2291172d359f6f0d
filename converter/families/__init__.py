"""Every architecture the converter knows, one file each: tables of rules and nothing else."""

from __future__ import annotations

from converter.families.deepseek import DEEPSEEK2, DEEPSEEK3, DEEPSEEK32
from converter.families.gemma2 import GEMMA2
from converter.families.gpt_oss import GPT_OSS
from converter.families.llama import LLAMA2, LLAMA31, MISTRAL
from converter.families.mixtral import MIXTRAL
from converter.families.olmo3 import OLMO3
from converter.families.qwen import QWEN3, QWEN3_MOE, QWEN25
from converter.rules import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA2,
    LLAMA31,
    MISTRAL,
    MIXTRAL,
    QWEN25,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GPT_OSS,
    DEEPSEEK2,
    DEEPSEEK3,
    DEEPSEEK32,
    OLMO3,
)

MODELS: dict[str, Family] = {name: family for family in FAMILIES for name in family.models}
"""Model name -> its family."""
