"""Every architecture the converter knows, one file each: tables of rules and nothing else."""

from __future__ import annotations

from converter.families.gemma2 import GEMMA2
from converter.families.llama import LLAMA2, LLAMA31, MISTRAL
from converter.families.qwen import QWEN3, QWEN25
from converter.rules import Family

FAMILIES: tuple[Family, ...] = (LLAMA2, LLAMA31, MISTRAL, QWEN25, QWEN3, GEMMA2)

MODELS: dict[str, Family] = {name: family for family in FAMILIES for name in family.models}
"""Model name -> its family."""
