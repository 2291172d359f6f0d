"""The DAG: one TaskGroup per model of the catalogue, converted in parallel, each on a node of the pool.

It takes the params of the TPU pipeline that it replaces and keeps its TaskGroups' ids, so that an ExternalTaskSensor
changes the DAG's id only. Without `models` it converts those of the nightly pipeline that the converter supports; the
other groups are skipped.

The Airflow Variable `conversion_stack` holds what `pulumi stack output --json` prints.
"""

from __future__ import annotations

import datetime

from airflow.sdk import DAG, Param, TaskGroup

from jobs.airflow.operators import ConversionJobOperator
from jobs.catalogue import catalogue

DAG_ID = "maxtext_e2e_cpu_checkpoint_conversion"
# A run that was triggered without a logical date has no ts_nodash.
RUN_NAME = (
    "{{ params.run_name if params.run_name else "
    "'conv-' ~ (ts_nodash | default(dag_run.run_after.strftime('%Y%m%dT%H%M%S'))) }}"
)

with DAG(
    dag_id=DAG_ID,
    schedule=None,
    start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    catchup=False,
    tags=["maxtext", "conversion", "checkpoint", "CPU"],
    doc_md=__doc__,
    params={
        "docker_image": Param(type="string", description="The converter's image, best as NAME@sha256:..."),
        "run_name": Param(
            default="", type="string", description="Name of the run and its checkpoints (default: conv-<ts_nodash>)"
        ),
        "models": Param(
            default=[model.name for model in catalogue().values() if model.nightly and model.supported],
            type="array",
            items={"type": "string", "enum": list(catalogue())},
            description="Models to convert",
        ),
    },
) as dag:
    for model in catalogue().values():
        with TaskGroup(group_id=model.task_group):
            ConversionJobOperator(
                task_id="convert",
                model=model.name,
                image="{{ params.docker_image }}",
                run_name=RUN_NAME,
                stack_outputs="{{ var.value.conversion_stack }}",
                only="{{ params.models | join(',') }}",
                retries=2,
                retry_delay=datetime.timedelta(minutes=5),
            )
