"""Runs the DAG for one model with Airflow's own `dag.test` against the stand-in, and prints what became of it as JSON.

Run by a test in a process of its own: `python whole_run.py FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]


def main(folder: Path) -> None:
    """Run and print."""
    import standin
    from airflow.dag_processing.dagbag import DagBag
    from airflow.utils import db
    from test_dags import IMAGE, OUTPUTS, STACK

    from jobs.airflow import operators
    from jobs.airflow.connection import Connection
    from jobs.airflow.conversion_dag import DAG_ID

    os.environ["AIRFLOW_VAR_CONVERSION_STACK"] = json.dumps(OUTPUTS)
    db.initdb()
    with standin.serving(folder, {"objects": dict(enumerate(STACK))}) as (server, kubeconfig):
        operators.connection_of = lambda outputs, **options: Connection(config_file=str(kubeconfig))

        def finish() -> None:
            while not server.all(standin.PODS):
                time.sleep(0.2)
            time.sleep(1)
            server.end(server.all(standin.JOBS)[0]["metadata"]["name"], "check", 0)

        threading.Thread(target=finish, daemon=True).start()
        dag = DagBag(ROOT / "jobs" / "airflow").dags[DAG_ID]
        for task in dag.tasks:
            # A failure is to be seen at once.
            task.poll_interval, task.retries = 0.5, 0
        run = dag.test(run_conf={"docker_image": IMAGE, "models": ["qwen3-0.6b"]})
        told = {
            "state": run.state,
            "tasks": {each.task_id: each.state for each in run.get_task_instances()},
            "runs": [job["metadata"]["labels"]["conversion-run"] for job in server.all(standin.JOBS)],
            "logical_date": f"{run.logical_date:%Y%m%dT%H%M%S}",
        }
    print()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
