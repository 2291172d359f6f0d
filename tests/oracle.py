"""The tiny Qwen3 of tests/data: the words that convert it, and what MaxText's own converter made of it."""

from __future__ import annotations

import json

from checkpoints import DATA

SOURCE = DATA / "qwen3" / "hf_bf16"

_ORACLE = json.loads((DATA / "qwen3" / "oracle.json").read_bytes())

WORDS = (
    f"model_name={_ORACLE['model_name']}",
    *(f"{word}={value}" for word, value in _ORACLE["words"].items()),
    f"hf_model_path={SOURCE}",
)


def _digests(scan: str) -> dict[str, str]:
    arrays = json.loads((DATA / "qwen3" / f"expected_bf16_{scan}.json").read_bytes())["arrays"]
    return {name: entry["sha256"] for name, entry in arrays.items()}


SCANNED, UNSCANNED = _digests("scan"), _digests("unscan")
"""sha256 of every array, `step` included."""
