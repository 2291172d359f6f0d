"""What an image is made of, as a Markdown table: `podman run --rm -i --entrypoint python IMAGE - < images/contents.py`.

Runs inside the image and needs nothing but Python there.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

LEAST = 10e6
"""Smaller packages are one line."""


def size(folder: Path) -> int:
    """Bytes of the files under `folder`, on its own file system; what may not be read does not count."""
    total = 0
    device = folder.lstat().st_dev
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if (Path(parent) / name).lstat().st_dev == device]
        total += sum((Path(parent) / name).lstat().st_size for name in files)
    return total


def packages(environment: Path) -> dict[str, int]:
    """Name and version -> bytes, of the packages installed in an environment."""
    (site,) = environment.glob("lib/python3*/site-packages")
    found = {}
    for distribution in metadata.distributions(path=[str(site)]):
        files = [site / file for file in distribution.files or () if not str(file).startswith("..")]
        # A package's record has no compiled modules, so count the folders of its files; not what is above them, which
        # packages may share, as all of Google's do.
        folders = {file.parent for file in files} - {site}
        inside = {each for folder in folders for each in (*folder.iterdir(), *folder.glob("__pycache__/*"))}
        inside |= {file for file in files if file.parent == site}
        found[f"{distribution.name} {distribution.version}"] = sum(
            each.lstat().st_size for each in inside if not each.is_dir()
        )
    return found


def main() -> None:
    """Print the table."""
    environment = Path(sys.prefix)
    found = packages(environment)
    large = sorted((name for name in found if found[name] >= LEAST), key=lambda name: -found[name])
    dependencies, converter = size(environment), size(Path("/app"))
    rows = [
        ("base image and the compiled standard library", size(Path("/")) - dependencies - converter),
        *((name, found[name]) for name in large),
        (f"{len(found) - len(large)} smaller packages", dependencies - sum(found[name] for name in large)),
        ("the converter", converter),
    ]
    print("| Part | MB |\n| --- | ---: |")
    for name, nbytes in [*rows, ("**all**", sum(nbytes for _, nbytes in rows))]:
        print(f"| {name} | {nbytes / 1e6:.1f} |")


if __name__ == "__main__":
    main()
