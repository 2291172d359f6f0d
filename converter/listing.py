"""`models`: what can be converted."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

from converter.mapping import stored_shapes
from converter.models import FAMILIES
from converter.rules import Family, Model
from converter.show import table
from converter.words import MAXTEXT_VERSION

_WAYS = ("scanned", "unscanned", "multimodal")
_MAXTEXT = {"converter": "converts", "model": "model only", "": "no"}


def parameter_count(family: Family, name: str) -> int:
    """Parameters in the repository that a name stands for, by its published geometry; tied ones once."""
    return _count(family.name, json.dumps(family.models[name].config, sort_keys=True))


@cache
def _count(family: str, published: str) -> int:
    """Names of one size share a geometry, and the largest takes a second."""
    found = next(each for each in FAMILIES if each.name == family)
    return sum(math.prod(shape) for shape in stored_shapes(found, found.fill(json.loads(published))).values())


def conversions(family: Family, model: Model) -> list[str]:
    """The ways in which a name's repository can be converted."""
    scanned = [] if family.unscannable else ["scanned"]
    return [*scanned, "unscanned", *(["multimodal"] if family.tower and not model.text_only else [])]


def entries() -> list[dict[str, Any]]:
    """Every name with what is known of it."""
    return [
        {
            "model_name": name,
            "hub": model.hub,
            "family": family.name,
            "parameters": parameter_count(family, name),
            "to_maxtext": conversions(family, model),
            "checked": [way for way in conversions(family, model) if way in family.checked],
            "unscanned_multimodal_only": bool(family.tower and family.tower.scans),
            "to_huggingface": False,
            "maxtext": model.maxtext,
            "note": model.note,
        }
        for family in FAMILIES
        for name, model in family.models.items()
    ]


def _cell(entry: dict[str, Any], way: str) -> str:
    if way not in entry["to_maxtext"]:
        return "-"
    known = "equal" if way in entry["checked"] else "yes"
    return f"{known}, unscanned" if way == "multimodal" and entry["unscanned_multimodal_only"] else known


def show() -> str:
    """The table."""
    rows = [
        (
            entry["model_name"],
            entry["hub"],
            f"{entry['parameters'] / 1e9:.2f}B",
            *(_cell(entry, way) for way in _WAYS),
            "yes" if entry["to_huggingface"] else "no",
            _MAXTEXT[entry["maxtext"]],
            entry["note"],
        )
        for entry in entries()
    ]
    header = ("model_name", "repository", "size", *_WAYS, "back", f"MaxText {MAXTEXT_VERSION}", "note")
    return (
        f"{table(header, rows)}\n\n"
        "size: parameters of the text model, tied ones once. back: to Hugging Face.\n"
        "equal: what MaxText's own converter makes of a small model is made here to the bit; yes: derived from\n"
        "MaxText's model, whose own converter gave nothing to compare with; -: MaxText, or the repository, has no\n"
        "such form; unscanned: with its towers MaxText has it unscanned only.\n"
        f"MaxText {MAXTEXT_VERSION}: whether it knows the name and converts it itself.\n"
        "A fine-tune converts under its base model's name with hf_model_path=<folder or hub id>."
    )
