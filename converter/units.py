"""Sizes as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes with a unit in which the number is no zero, as "0.42 GB", "12.30 MB" or "0.80 kB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit / 10:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes / 1e3:.2f} kB"
