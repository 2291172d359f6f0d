"""What `pulumi up` runs."""

import sys
from pathlib import Path

# Pulumi runs this folder with runpy, which puts the folder itself on sys.path, where its modules would pass
# for top-level ones; the packages lie one level up.
_FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(_FOLDER.parent), *(entry for entry in sys.path if Path(entry).resolve() != _FOLDER)]

from infra.program import main  # noqa: E402

main()
