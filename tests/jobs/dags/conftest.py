"""Airflow for these tests: a home of its own, made once. They run in Airflow's environment (`make test-airflow`)."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

if importlib.util.find_spec("airflow") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Before the first import of Airflow, which reads them.
    home = tempfile.mkdtemp(prefix="airflow-")
    os.environ |= {
        "AIRFLOW_HOME": home,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "jobs" / "airflow"),
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "PYTHONPATH": str(ROOT),
    }

sys.path[:0] = [str(Path(__file__).parents[1]), str(ROOT)]
