"""Sizes as people read them."""

from __future__ import annotations

import pytest

from converter import units


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 kB"),
        (12, "0.01 kB"),
        (99_999, "100.00 kB"),
        (100_000, "0.10 MB"),
        (4_660_000, "4.66 MB"),
        (2**30, "1.07 GB"),
        (470e9, "470.00 GB"),
    ],
)
def test_size(nbytes: float, text: str) -> None:
    assert units.size(nbytes) == text
