"""Lets these tests import the flows, and runs commands as the other tests of Jobs do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "jobs"), str(Path(__file__).parents[2])]
pytest.register_assert_rewrite("flows")

from commands import jobs  # noqa: E402, F401 - a fixture

# Pulumi's and Airflow's environments lack one of these.
if not all(importlib.util.find_spec(name) for name in ("kmock", "kubernetes")):
    collect_ignore_glob = ["test_*.py"]
