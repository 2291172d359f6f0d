"""Orbax's private modules are used in one file, for one version of Orbax."""

from __future__ import annotations

import ast
import importlib
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from running import ROOT

ONLY = Path("converter/maxtext/orbax.py")
PRIVATE = "orbax.checkpoint._src"

ADVICE = (
    f"{ONLY} uses private helpers of orbax-checkpoint, which change without notice. After an upgrade: read the "
    f"docstring of {ONLY}, which names what to compare in Orbax's source (the imported names, "
    "_async_serialize_replica_slices and ArrayHandler.serialize in _src/serialization/jax_array_handlers.py, "
    "ArrayWriteSpec in _src/serialization/tensorstore_utils.py); make tests/test_oracles.py, tests/test_chunks.py and "
    "tests/test_orbax_reads.py pass; then move the pin in pyproject.toml and run `make lock`."
)


def pinned_version() -> str:
    """The version in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = [text for text in project["dependencies"] if text.startswith("orbax-checkpoint")]
    name, equals, version = pin.partition("==")
    assert (name, equals) == ("orbax-checkpoint", "=="), f"orbax-checkpoint must be pinned exactly, not {pin!r}"
    return version


def imported_modules(path: Path) -> set[str]:
    """Every module a file imports, `from a import b` as both a and a.b, and every string that names one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("orbax."):
            found.add(node.value)
    return found


def private_attributes(path: Path) -> set[str]:
    """Attributes reached through a private package, as in `orbax.checkpoint._src` or `ocp._src`."""
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Attribute) and node.attr == "_src"
    }


def project_files() -> list[Path]:
    """The project's Python files, tests excepted; environments lie in folders that begin with a dot."""
    return [
        path
        for folder in ("converter", "benchmarks", "jobs", "infra", "images")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def test_installed_version_is_the_pinned_one() -> None:
    assert metadata.version("orbax-checkpoint") == pinned_version(), ADVICE


def test_locked_version_is_the_pinned_one() -> None:
    for name in ("converter.txt", "dev.txt"):
        assert f"orbax-checkpoint=={pinned_version()} " in (ROOT / "requirements" / name).read_text(), name


def test_docstring_names_the_version() -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / ONLY).read_text())) or ""
    assert f"orbax-checkpoint {pinned_version()}" in docstring, (
        f"{ONLY} was last compared with another version. {ADVICE}"
    )


@pytest.mark.parametrize("path", project_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_private_modules_are_imported_in_one_file_only(path: Path) -> None:
    if path.relative_to(ROOT) == ONLY:
        return
    private = {name for name in imported_modules(path) if name.startswith("orbax") and "._" in name}
    assert not private | private_attributes(path), f"move this into {ONLY}: orbax's private modules belong there alone"


def test_private_names_exist() -> None:
    """Each private name on its own, so that a failure says which one an upgrade took away."""
    tree = ast.parse((ROOT / ONLY).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    private = [node for node in imports if (node.module or "").startswith(PRIVATE)]
    assert private, f"{ONLY} imports nothing private any more: this test and the exact pin can go"
    local = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in private for alias in node.names}
    missing = set()
    for name, module in local.items():
        try:
            imported = importlib.import_module(module)
        except ImportError:
            missing.add(module)
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id != name:
                continue
            if not hasattr(imported, node.attr):
                missing.add(f"{module}.{node.attr}")
    assert not missing, f"gone from orbax-checkpoint {metadata.version('orbax-checkpoint')}: {missing}. {ADVICE}"
