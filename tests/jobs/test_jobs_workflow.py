"""The example workflow: its steps are this CLI's, it holds no key, and rendering in it really renders."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import IMAGE, RUN

from jobs.cli import _parser
from jobs.settings import defaults

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "convert.yml").read_text())
    return loaded


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow["jobs"]["convert"]["steps"]
    return found


def test_it_holds_no_key(workflow: dict[Any, Any]) -> None:
    text = (ROOT / ".github" / "workflows" / "convert.yml").read_text()
    assert "secrets." not in text
    assert "credentials_json" not in text
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    (auth,) = (step for step in steps(workflow) if step.get("uses", "").startswith("google-github-actions/auth@"))
    assert set(auth["with"]) == {"workload_identity_provider", "service_account"}


def test_input_reaches_shells_through_the_environment_only(workflow: dict[Any, Any]) -> None:
    for step in steps(workflow):
        assert "${{" not in step.get("run", "")


def test_every_script_is_bash(workflow: dict[Any, Any]) -> None:
    for step in steps(workflow):
        if "run" in step:
            subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)


def test_its_commands_are_this_command_line(workflow: dict[Any, Any]) -> None:
    scripts = "\n".join(step.get("run", "") for step in steps(workflow)).replace("\\\n", " ")
    commands = re.findall(r"python -m jobs (.*?)(?:>|$)", scripts, flags=re.MULTILINE)
    names = []
    for command in commands:
        words = shlex.split(command.replace('"${models[@]}"', "llama3.1-70b qwen3-4b"))
        names.append(words[0])
        _parser().parse_args(words)
    assert names == ["render", "submit", "status"]
    assert "--wait" in commands[1]
    assert "--markdown" in commands[2]


def test_the_render_step_renders(workflow: dict[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(json.dumps({**defaults(), "bucket": "acme"}))
    (step,) = (step for step in steps(workflow) if step.get("name") == "Render")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "MODELS": "llama3.1-70b qwen3-4b",
            "IMAGE": IMAGE,
            "RUN_NAME": RUN,
        },
        check=True,
        timeout=60,
    )
    names = [each["metadata"]["name"] for each in yaml.safe_load_all((tmp_path / "jobs.yaml").read_text())]
    assert names == ["llama3-1-70b-conv-20260813t123008", "qwen3-4b-conv-20260813t123008"]
