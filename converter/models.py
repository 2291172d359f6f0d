"""Every name that users can give, from models.toml, with the family (families/*.py) that it belongs to."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files
from typing import Any

from converter.families.deepseek import DEEPSEEK2, DEEPSEEK3, DEEPSEEK32
from converter.families.deepseek4 import DEEPSEEK4
from converter.families.gemma2 import GEMMA2
from converter.families.gemma3 import GEMMA3
from converter.families.gemma4 import GEMMA4, GEMMA4_MOE, GEMMA4_SMALL
from converter.families.gpt_oss import GPT_OSS
from converter.families.llama import LLAMA2, LLAMA31, MISTRAL, PHI4
from converter.families.mixtral import MIXTRAL
from converter.families.olmo3 import OLMO3
from converter.families.qwen import QWEN3, QWEN3_MOE, QWEN25
from converter.families.qwen_next import QWEN3_NEXT, QWEN35
from converter.families.qwen_vl import QWEN3_OMNI, QWEN3_VL, QWEN3_VL_MOE
from converter.rules import Family, Model

_PUBLISHED: dict[str, Any] = tomllib.loads(files("converter").joinpath("models.toml").read_text())


def _named(family: Family) -> Family:
    """A family with the names it answers to."""
    published = _PUBLISHED[family.name]
    models = {
        name: Model(config=size["geometry"], **its)
        for size in published["sizes"]
        for name, its in size["names"].items()
    }
    return replace(family, models=models, checked=tuple(published["checked"]))


_TABLES = (
    LLAMA2, LLAMA31, MISTRAL, PHI4, MIXTRAL, QWEN25, QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN35, QWEN3_VL, QWEN3_VL_MOE,
    QWEN3_OMNI, GEMMA2, GEMMA3, GEMMA4, GEMMA4_MOE, GEMMA4_SMALL, GPT_OSS, DEEPSEEK2, DEEPSEEK3, DEEPSEEK32, DEEPSEEK4,
    OLMO3,
)  # fmt: skip

FAMILIES: tuple[Family, ...] = tuple(map(_named, _TABLES))

MODELS: dict[str, Family] = {name: family for family in FAMILIES for name in family.models}
"""Model name -> its family."""
