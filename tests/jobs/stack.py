"""The stack that the tests submit to: what the Pulumi program makes, asked of Pulumi's own environment."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pulumi_python() -> Path:
    """The Python that has Pulumi: $SHARDPOOL_INFRA_PYTHON, else that of infra/.venv."""
    return Path(os.environ.get("SHARDPOOL_INFRA_PYTHON") or ROOT / "infra" / ".venv" / "bin" / "python")


@functools.cache
def dump(stack_name: str = "prod") -> dict[str, Any]:
    """{"objects": name -> Kubernetes object, "outputs": of the stack}; skips the test where there is no Pulumi."""
    python = pulumi_python()
    if not python.exists():
        pytest.skip(f"no Pulumi: {python} is not there; make setup, or set SHARDPOOL_INFRA_PYTHON")
    script = Path(__file__).with_name("dump_stack.py")
    done = subprocess.run([python, script, stack_name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded
