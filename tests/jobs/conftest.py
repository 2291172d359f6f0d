"""Lets these tests import their helpers and the program, wherever pytest starts, and what they share."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

# Only Pulumi's and Airflow's environments lack these; each has tests of its own.
if not all(importlib.util.find_spec(name) for name in ("kmock", "kubernetes_validate", "converter")):
    collect_ignore_glob = ["test_*.py"]

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
pytest.register_assert_rewrite("flows")

from commands import jobs  # noqa: E402, F401 - a fixture


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster, token or storage of whoever runs the tests."""
    for name in ("KUBECONFIG", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def settings() -> Any:
    """Those that --bucket acme alone gives."""
    from jobs.settings import Overrides, make

    return make(None, Overrides(bucket="acme"))


@pytest.fixture
def stack(tmp_path: Path) -> dict[str, Any]:
    """The stack `prod`, its outputs in `outputs.json`."""
    from stack import dump

    dumped = dump()
    (tmp_path / "outputs.json").write_text(json.dumps(dumped["outputs"]))
    return dumped
