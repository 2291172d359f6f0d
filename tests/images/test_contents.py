"""The table of what an image is made of counts packages that share a folder once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from containers import ROOT


def test_packages_are_what_lies_in_their_folder() -> None:
    contents = runpy.run_path(str(ROOT / "images" / "contents.py"))
    environment = Path(sys.prefix)
    found = contents["packages"](environment)
    (site,) = environment.glob("lib/python3*/site-packages")
    assert sum(found.values()) == pytest.approx(contents["size"](site), rel=0.01)
