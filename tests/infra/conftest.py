"""Lets these tests import their harness and the program, wherever pytest starts.

They run in Pulumi's environment (`make test` does); where there is no Pulumi none of them is collected.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("pulumi") is None:
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
