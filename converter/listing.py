"""`models`: what can be converted."""

from __future__ import annotations

import math
from typing import Any

from converter.mapping import stored_shapes
from converter.models import FAMILIES
from converter.rules import Family
from converter.show import table
from converter.words import MAXTEXT_VERSION

_MAXTEXT = {"converter": "converts", "model": "model only", "": "no"}


def parameter_count(family: Family, name: str) -> int:
    """Parameters in the repository that a name stands for, by its published geometry; tied ones once."""
    config = family.fill(family.models[name].config)
    return sum(math.prod(shape) for shape in stored_shapes(family, config).values())


def entries() -> list[dict[str, Any]]:
    """Every name with what is known of it."""
    return [
        {
            "model_name": name,
            "hub": model.hub,
            "family": family.name,
            "parameters": parameter_count(family, name),
            "to_maxtext": ["unscanned"] if family.unscannable else ["scanned", "unscanned"],
            "multimodal": family.tower is not None,
            "to_huggingface": False,
            "maxtext": model.maxtext,
            "note": model.note,
        }
        for family in FAMILIES
        for name, model in family.models.items()
    ]


def show() -> str:
    """The table."""
    rows = [
        (
            entry["model_name"],
            entry["hub"],
            f"{entry['parameters'] / 1e9:.2f}B",
            ", ".join(entry["to_maxtext"]),
            _MAXTEXT[entry["maxtext"]],
            entry["note"],
        )
        for entry in entries()
    ]
    header = ("model_name", "repository", "size", "to MaxText", f"MaxText {MAXTEXT_VERSION}", "note")
    return (
        f"{table(header, rows)}\n\n"
        f"The last but one column: whether MaxText {MAXTEXT_VERSION} knows the name and converts it itself.\n"
        "A fine-tune converts under its base model's name with hf_model_path=<folder or hub id>."
    )
