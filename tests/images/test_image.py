"""What the image holds and says about itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from containers import ROOT, SECRET, SOURCE, USER, Containers, make_image

import converter

pytestmark = pytest.mark.slow

LIMIT = 1.1e9


def inspect(containers: Containers) -> dict[str, Any]:
    inspected: dict[str, Any] = json.loads(containers.podman("image", "inspect", containers.image))[0]
    return inspected


@pytest.fixture(scope="module")
def config(containers: Containers) -> dict[str, Any]:
    return inspect(containers)


def test_size(config: dict[str, Any]) -> None:
    print(f"{config['Size'] / 1e6:.0f} MB")
    assert config["Size"] <= LIMIT


def test_labels(config: dict[str, Any]) -> None:
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["version"] == converter.__version__
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", labels["revision"])
    assert labels["source"] == os.environ.get("SOURCE", SOURCE)
    assert labels["licenses"] == "Apache-2.0"
    assert labels["title"]
    assert labels["description"]
    assert labels["base.name"]


@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_labels_are_of_this_build(builder: str, containers: Containers) -> None:
    """Also where all layers come from the cache."""
    if os.environ.get("IMAGE"):
        pytest.skip("needs the cache of a build: unset IMAGE")
    environment = {**containers.environment, "BUILDER": builder, "REVISION": f"by-{builder}"}
    again = make_image(Containers("localhost/converter:again", environment))
    assert inspect(again)["Labels"]["org.opencontainers.image.revision"] == f"by-{builder}"
    assert inspect(again)["RootFS"]["Layers"] == inspect(containers)["RootFS"]["Layers"]


def test_configuration(config: dict[str, Any]) -> None:
    config = config["Config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["python", "-m", "converter"]
    environment = dict(each.split("=", 1) for each in config["Env"])
    assert environment["HOME"] == "/home/converter"
    assert environment["HF_HOME"] == "/cache/huggingface"
    assert environment["TMPDIR"] == "/tmp"
    # containerd would make a volume of its own of each, on the node's disk.
    assert not config.get("Volumes")


def test_passwd(tree: Path) -> None:
    users = [line.split(":") for line in (tree / "etc/passwd").read_text().splitlines()]
    assert [user for user in users if user[2] == str(USER)] == [
        ["converter", "x", str(USER), str(USER), "", "/home/converter", "/usr/sbin/nologin"]
    ]
    for path in ("home/converter", "cache"):
        assert ((tree / path).stat().st_uid, (tree / path).stat().st_gid) == (USER, USER)


def test_nothing_of_the_build_is_left(containers: Containers, tree: Path) -> None:
    for path in ("build", "root/.cache", "etc/pip.conf", "home/converter/.cache", "var/cache/apt/pkgcache.bin"):
        assert not (tree / path).exists()
    assert not list((tree / "tmp").iterdir())
    assert not [path.name for path in tree.glob("opt/converter/lib/*/site-packages/*") if path.name.startswith("pip")]
    found = subprocess.run(["grep", "-rlF", SECRET, tree], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert SECRET not in containers.podman("history", "--no-trunc", containers.image)


def test_the_converter_is_this_one(tree: Path) -> None:
    """Every file of it, and none besides."""

    def files(folder: Path) -> dict[str, bytes]:
        found = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    assert files(tree / "app/converter") == files(ROOT / "converter")
    assert sorted(path.name for path in (tree / "app").iterdir()) == ["LICENSE", "converter"]


def test_everything_is_compiled(containers: Containers, tree: Path) -> None:
    """What is installed, and of the standard library what a conversion imports."""
    version = containers.python("import sys; print(sys.implementation.cache_tag)").stdout.strip()
    sources = [path for folder in ("app", "opt/converter") for path in (tree / folder).rglob("*.py")]
    assert len(sources) > 1000
    here = sys.implementation.cache_tag
    missing = [
        str(path)
        for path in sources
        if not Path(importlib.util.cache_from_source(path).replace(here, version)).exists()
    ]
    assert missing == []
    program = """
import pathlib, sys
import converter.cli, converter.run, converter.verification
for module in list(sys.modules.values()):
    cached = getattr(module, "__cached__", None)
    if cached and not pathlib.Path(cached).exists():
        print(module)
"""
    assert containers.python(program).stdout == ""


def test_nobody_but_root_can_change_the_program(tree: Path) -> None:
    for folder in ("app", "opt/converter"):
        for path in (tree / folder).rglob("*"):
            status = path.lstat()
            assert status.st_uid == 0, path
            assert path.is_symlink() or not status.st_mode & 0o022, path
