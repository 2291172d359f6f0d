"""The image: $IMAGE, which podman has, or one built once for all tests here, on $BASE_IMAGE or on a small Debian.

docs/images.md tells what a machine needs for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import MODEL, SECRET, SOURCE, USER, Containers, build, make_image

from benchmarks.checkpoints import write_checkpoint
from benchmarks.demo import GEOMETRY

CA = Path("/etc/ssl/certs/ca-certificates.crt")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of podman's and buildah's files go."""
    tools = ["podman", "runc"]
    if not os.environ.get("IMAGE"):
        tools += ["make", "buildah"]
        if not os.environ.get("BASE_IMAGE"):
            tools.append("mmdebstrap")
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install buildah podman runc mmdebstrap")
    if os.geteuid() != 0:
        pytest.skip("needs root: for a base image of its own, another user's id and a memory limit")
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="session")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Of buildah and podman. What they make is kept apart from this machine's own images and removed in the end."""
    if os.environ.get("IMAGE"):
        yield dict(os.environ)
        return
    configuration = folder / "storage.conf"
    driver = os.environ.get("STORAGE_DRIVER", "overlay")
    configuration.write_text(
        f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
    )
    # Without the privileges of a daemon: chroot instead of containers for the build's own steps.
    environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(configuration), "BUILDAH_ISOLATION": "chroot"}
    yield environment
    for command in ("rm --all --force", "image umount --all --force"):
        subprocess.run(["podman", *command.split()], env=environment, check=False, capture_output=True)
    # The driver binds its folder to itself, and a build that failed leaves more below.
    subprocess.run(["umount", "--recursive", folder / "storage" / driver], check=False, capture_output=True)
    shutil.rmtree(folder / "storage", ignore_errors=True)


@pytest.fixture(scope="session")
def base(folder: Path, environment: dict[str, str]) -> str:
    """The image to build on, in place of the official one where no registry is at hand: as small, also without the
    standard library's compiled modules; Debian's own Python; and this machine's certificates, so that pip reaches its
    index from here.
    """
    if os.environ.get("BASE_IMAGE"):
        return os.environ["BASE_IMAGE"]
    archive, name = folder / "base.tar", "localhost/debian-python"
    nothing_of = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale")]
    hooks = ['--customize-hook=find "$1"/usr/lib/python3* -name __pycache__ -prune -exec rm -r {} +']
    if CA.exists():
        hooks.append(f"--customize-hook=copy-in {CA} {CA.parent}")
    packages = "python3,python3-venv,ca-certificates"
    command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={packages}"]
    build([*command, *nothing_of, *hooks, "bookworm", archive], environment)
    build(["podman", "import", "--quiet", archive, name], environment)
    archive.unlink()
    return name


@pytest.fixture(scope="session")
def containers(folder: Path, environment: dict[str, str], request: pytest.FixtureRequest) -> Containers:
    """The image, built by `make image`."""
    if os.environ.get("IMAGE"):
        return Containers(os.environ["IMAGE"], environment)
    configuration = folder / "pip.conf"
    configuration.write_text(f"[global]\n# {SECRET}\ntimeout = 180\n")
    environment = {
        **environment,
        "BUILDER": "buildah",
        "BASE_IMAGE": request.getfixturevalue("base"),
        "SOURCE": SOURCE,
        "PIP_CONF": os.environ.get("PIP_CONF", str(configuration)),
    }
    return make_image(Containers("localhost/converter:test", environment))


@pytest.fixture(scope="session")
def tree(containers: Containers) -> Iterator[Path]:
    """The image's files, as a folder here."""
    yield Path(containers.podman("image", "mount", containers.image).strip())
    containers.podman("image", "umount", containers.image)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face checkpoint: the demo's."""
    source = tmp_path_factory.mktemp("source") / "qwen3"  # pytest's own folder is closed to others
    write_checkpoint(source, MODEL, file_bytes=40_000_000, **GEOMETRY)
    return source


@pytest.fixture(scope="session")
def claim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Job's PersistentVolumeClaim: for its output, and the source, so large that converting it takes a while."""
    claim = tmp_path_factory.mktemp("claim") / "claim"
    write_checkpoint(claim / "source", MODEL, **{**GEOMETRY, "hidden_size": 1024, "vocab_size": 151936})
    os.chown(claim, USER, USER)
    yield claim
    shutil.rmtree(claim)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder that only the container's user may write."""
    output = tmp_path / "output"
    output.mkdir()
    os.chown(output, USER, USER)
    return output
