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


environment = Path(sys.prefix)
packages = {}
for distribution in metadata.distributions(path=[p for p in sys.path if p.startswith(sys.prefix)]):
    # A package's record has no compiled modules, so count the folders that it names.
    tops = {str(file).split("/")[0] for file in distribution.files or () if not str(file).startswith("..")}
    root = Path(str(distribution.locate_file("")))
    packages[f"{distribution.name} {distribution.version}"] = sum(
        size(root / top) if (root / top).is_dir() else (root / top).stat().st_size for top in tops
    )
large = sorted((name for name in packages if packages[name] >= LEAST), key=lambda name: -packages[name])
dependencies, converter = size(environment), size(Path("/app"))
rows = [
    ("base image and the compiled standard library", size(Path("/")) - dependencies - converter),
    *((name, packages[name]) for name in large),
    (f"{len(packages) - len(large)} smaller packages", dependencies - sum(packages[name] for name in large)),
    ("the converter", converter),
]
print("| Part | MB |\n| --- | ---: |")
for name, nbytes in [*rows, ("**all**", sum(nbytes for _, nbytes in rows))]:
    print(f"| {name} | {nbytes / 1e6:.1f} |")
