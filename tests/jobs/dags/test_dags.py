"""The DAG as Airflow loads it, and its tasks against the stand-in: what they create, waiting, ends, retries."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import kmock
import pytest
import standin
import yaml
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import TaskGroup
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, TaskDeferred

from jobs.airflow import connection as connections
from jobs.airflow.connection import Connection, connection_of
from jobs.airflow.conversion_dag import DAG_ID
from jobs.airflow.operators import ConversionJobOperator
from jobs.airflow.triggers import ConversionTrigger
from jobs.catalogue import catalogue
from jobs.cli import main
from jobs.settings import defaults

ROOT = Path(__file__).resolve().parents[3]
IMAGE = "us-docker.pkg.dev/acme/images/converter@sha256:" + "0" * 64
RUN = "conv-20260813T123008"
OUTPUTS = {**defaults(), "bucket": "acme", "project": "p", "location": "us-central1", "cluster": "c"}
# A cluster as small as the tests need, with the names that the outputs above have.
STACK = [
    {"kind": "Namespace", "metadata": {"name": "shardpool-prod"}},
    {
        "kind": "LocalQueue",
        "metadata": {"name": "conversion", "namespace": "shardpool-prod"},
        "spec": {"clusterQueue": "q"},
    },
    {
        "kind": "ClusterQueue",
        "metadata": {"name": "q"},
        "spec": {
            "resourceGroups": [
                {
                    "flavors": [
                        {
                            "name": "f",
                            "resources": [
                                {"name": "cpu", "nominalQuota": "60"},
                                {"name": "memory", "nominalQuota": "460Gi"},
                                {"name": "ephemeral-storage", "nominalQuota": "690Gi"},
                            ],
                        }
                    ]
                }
            ]
        },
    },
    {"kind": "ResourceFlavor", "metadata": {"name": "f"}, "spec": {"nodeLabels": {}}},
]


@pytest.fixture(scope="module")
def dag() -> Any:
    bag = DagBag(ROOT / "jobs" / "airflow")
    assert bag.import_errors == {}
    return bag.dags[DAG_ID]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[standin.Server, Path]]:
    with standin.serving(tmp_path, {"objects": dict(enumerate(STACK))}) as serving:
        yield serving


@pytest.fixture
def server(served: tuple[standin.Server, Path]) -> standin.Server:
    return served[0]


@pytest.fixture
def kubeconfig(served: tuple[standin.Server, Path]) -> str:
    return str(served[1])


def operator(kubeconfig: str = "", model: str = "qwen3-0.6b", **options: Any) -> ConversionJobOperator:
    """A task as the DAG has it, its templates rendered."""
    given = {"image": IMAGE, "run_name": RUN, "stack_outputs": json.dumps(OUTPUTS), "poll_interval": 0.05, **options}
    return ConversionJobOperator(task_id="convert", model=model, config_file=kubeconfig, **given)


def deferred(task: ConversionJobOperator) -> TaskDeferred:
    """What a task defers on."""
    with pytest.raises(TaskDeferred) as caught:
        task.execute({})
    return caught.value


async def _first(trigger: ConversionTrigger) -> dict[str, Any]:
    async for event in trigger.run():
        payload: dict[str, Any] = event.payload
        return payload
    raise AssertionError("no event")


def fire(trigger: ConversionTrigger, seconds: float = 10) -> dict[str, Any]:
    """The trigger's event. As the triggerer does, from what `serialize` says."""
    path, values = trigger.serialize()
    assert path == f"{ConversionTrigger.__module__}.ConversionTrigger"
    rebuilt = ConversionTrigger(**json.loads(json.dumps(values)))
    return asyncio.run(asyncio.wait_for(_first(rebuilt), seconds))


# The DAG.


def test_the_documented_upload_is_all_that_airflow_needs(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    shutil.copytree(ROOT / "jobs", folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "infra").mkdir()
    for name in ("__init__", "pool", "config", "naming"):
        shutil.copy(ROOT / "infra" / f"{name}.py", folder / "infra")
    script = (
        "import json, sys\nfrom airflow.dag_processing.dagbag import DagBag\n"
        "bag = DagBag(sys.argv[1])\nprint(json.dumps([bag.import_errors, sorted(bag.dags)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [{}, [DAG_ID]]


def test_groups_are_those_that_sensors_wait_for(dag: Any) -> None:
    groups = [name for name, child in dag.task_group.children.items() if isinstance(child, TaskGroup)]
    # As the TPU pipeline calls them.
    assert groups[:6] == ["gemma3-4b", "gemma4-26b", "llama3_1-70b", "qwen3-30b", "qwen3-vl-2b", "gpt-oss-20b"]
    assert groups == [model.task_group for model in catalogue().values()]
    assert all(not task.upstream_list and not task.downstream_list for task in dag.tasks), "all in parallel"


def test_params_are_those_of_the_tpu_pipeline(dag: Any) -> None:
    assert dag.schedule is None
    assert dag.params.get_param("run_name").value == ""
    assert dag.params.get_param("run_name").schema["type"] == "string"
    image = dag.params.get_param("docker_image")
    assert image.schema["type"] == "string"
    with pytest.raises(Exception, match="No value passed"):
        image.resolve()


@pytest.mark.parametrize(
    ("given", "context", "expected"),
    [
        ("", {"ts_nodash": "20260813T123008"}, RUN),
        ("mine-1", {"ts_nodash": "20260813T123008"}, "mine-1"),
        ("", {}, "conv-20260102T030405"),
    ],
)
def test_the_run_name_is_the_param_or_the_time(dag: Any, given: str, context: dict[str, Any], expected: str) -> None:
    import datetime

    task = dag.task_dict["qwen3-0_6b.convert"].prepare_for_execution()
    run = Mock(run_after=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC))
    task.render_template_fields(
        {
            "params": {"docker_image": IMAGE, "run_name": given, "models": ["qwen3-0.6b", "qwen3-4b"]},
            "var": {"value": Mock(conversion_stack=json.dumps(OUTPUTS))},
            "dag_run": run,
            **context,
        }
    )
    assert task.run_name == expected
    assert task.image == IMAGE
    assert task.only == "qwen3-0.6b,qwen3-4b"
    assert task.manifest()["metadata"]["labels"]["conversion-run"] == expected


def test_every_task_would_create_the_clis_job(dag: Any, tmp_path: Path) -> None:
    outputs = {**OUTPUTS, "podRequest": {**OUTPUTS["podRequest"], "ephemeralStorage": "2280Gi"}}
    (tmp_path / "o.json").write_text(json.dumps(outputs))
    printed = StringIO()
    words = ["render", "--all", "--image", IMAGE, "--run-name", RUN, "--stack-outputs", str(tmp_path / "o.json")]
    with redirect_stdout(printed):
        assert main(words) == 0
    of_cli = {each["metadata"]["labels"]["conversion-model"]: each for each in yaml.safe_load_all(printed.getvalue())}
    supported = [model.name for model in catalogue().values() if model.supported]
    assert list(of_cli) == supported
    tasks = {task.model: task.prepare_for_execution() for task in dag.tasks}
    for name in supported:
        tasks[name].image, tasks[name].run_name, tasks[name].stack_outputs = IMAGE, RUN, json.dumps(outputs)
        assert tasks[name].manifest() == of_cli[name]


# A task, from its first try to its end.


def test_a_job_that_waits_for_long_holds_no_worker(server: standin.Server, kubeconfig: str) -> None:
    first = deferred(operator(kubeconfig, model="qwen3-8b"))
    second = deferred(operator(kubeconfig))
    job = server.job("qwen3-0-6b-conv-20260813t123008")
    assert job["spec"]["suspend"] is True, "the only node is taken"
    with pytest.raises(TimeoutError):
        fire(second.trigger, seconds=1)
    looks = [url for method, url in server.asked if method == "GET" and "/jobs/qwen3-0-6b" in url]
    assert len(looks) > 5
    assert not any("/pods" in url for _, url in server.asked), "no pod is looked for"
    server.end("qwen3-8b-conv-20260813t123008", "check", 0)
    assert fire(first.trigger)["end"] == "complete"
    assert server.job(job["metadata"]["name"])["spec"]["suspend"] is False
    server.end(job["metadata"]["name"], "check", 0)
    event = fire(second.trigger)
    assert event["end"] == "complete"
    assert second.method_name == "execute_complete"
    assert operator(kubeconfig).execute_complete({}, event) == {
        "unscanned": f"gs://acme/qwen3-0.6b/to_maxtext/unscanned/{RUN}/0/items",
        "scanned": f"gs://acme/qwen3-0.6b/to_maxtext/scanned/{RUN}/0/items",
    }


def test_the_job_is_created_as_it_was_rendered(server: standin.Server, kubeconfig: str) -> None:
    server.kueue = False
    task = operator(kubeconfig)
    rendered = json.loads(json.dumps(task.manifest()))
    deferred(task)
    created = server.job(rendered["metadata"]["name"])
    assert created["spec"] == rendered["spec"]
    assert rendered["metadata"].items() <= created["metadata"].items()


def test_a_retry_goes_on_waiting_for_the_same_job(server: standin.Server, kubeconfig: str) -> None:
    deferred(operator(kubeconfig))
    uid = server.job("qwen3-0-6b-conv-20260813t123008")["metadata"]["uid"]
    again = deferred(operator(kubeconfig))
    assert [job["metadata"]["uid"] for job in server.all(standin.JOBS)] == [uid]
    server.end("qwen3-0-6b-conv-20260813t123008", "check", 0)
    assert fire(again.trigger)["end"] == "complete"
    # Also once it is done.
    assert fire(deferred(operator(kubeconfig)).trigger)["end"] == "complete"
    assert [job["metadata"]["uid"] for job in server.all(standin.JOBS)] == [uid]


def test_a_retry_makes_a_failed_job_anew(server: standin.Server, kubeconfig: str) -> None:
    first = deferred(operator(kubeconfig))
    name = "qwen3-0-6b-conv-20260813t123008"
    uid = server.job(name)["metadata"]["uid"]
    for _ in range(4):
        server.end(name, "convert-unscanned", 3, json.dumps({"exit_code": 3, "error": "disk full"}))
    event = fire(first.trigger)
    assert event["end"] == "failed"
    with pytest.raises(AirflowException, match="disk full") as failed:
        operator(kubeconfig).execute_complete({}, event)
    assert not isinstance(failed.value, AirflowFailException), "another try can help"
    deferred(operator(kubeconfig))
    assert server.job(name)["metadata"]["uid"] != uid


@pytest.mark.parametrize("code", [1, 2, 4])
def test_what_would_fail_again_is_not_retried(server: standin.Server, kubeconfig: str, code: int) -> None:
    first = deferred(operator(kubeconfig))
    server.end("qwen3-0-6b-conv-20260813t123008", "check", code, json.dumps({"exit_code": code, "error": "it differs"}))
    event = fire(first.trigger)
    with pytest.raises(AirflowFailException, match="it differs"):
        operator(kubeconfig).execute_complete({}, event)


def test_a_failure_is_told_without_pods_too(server: standin.Server, kubeconfig: str) -> None:
    first = deferred(operator(kubeconfig))
    name = "qwen3-0-6b-conv-20260813t123008"
    server.end(name, "check", 4)
    server.lose_pods(name)
    with pytest.raises(AirflowFailException, match="failed with exit code 4"):
        operator(kubeconfig).execute_complete({}, fire(first.trigger))


def test_another_request_under_the_same_name_is_refused(server: standin.Server, kubeconfig: str) -> None:
    deferred(operator(kubeconfig))
    with pytest.raises(AirflowFailException, match="another request"):
        operator(kubeconfig, image=IMAGE.replace("0", "1")).execute({})


def test_the_trigger_outlives_a_control_plane_that_is_away(server: standin.Server, kubeconfig: str) -> None:
    first = deferred(operator(kubeconfig))
    server.end("qwen3-0-6b-conv-20260813t123008", "check", 0)
    away = iter([True] * 5)
    server.fault = lambda request: (
        kmock.KubernetesError(status=503, reason="x", message="upgrading", details={}) if next(away, False) else None
    )
    assert fire(first.trigger)["end"] == "complete"


def test_the_trigger_ends_where_it_may_not_look(server: standin.Server, kubeconfig: str) -> None:
    first = deferred(operator(kubeconfig))
    server.fault = lambda request: kmock.KubernetesError(status=403, reason="x", message="forbidden", details={})
    event = fire(first.trigger)
    assert event["end"] == "refused"
    with pytest.raises(AirflowFailException, match="no permission"):
        operator(kubeconfig).execute_complete({}, event)


def test_a_job_that_is_deleted_fails_the_task(server: standin.Server, kubeconfig: str) -> None:
    first = deferred(operator(kubeconfig))
    server.objects[standin.JOBS, "shardpool-prod", "qwen3-0-6b-conv-20260813t123008"].delete()
    event = fire(first.trigger)
    assert event["end"] == "gone"
    with pytest.raises(AirflowException, match="was deleted"):
        operator(kubeconfig).execute_complete({}, event)


def test_models_that_are_not_asked_for_are_skipped(server: standin.Server, kubeconfig: str) -> None:
    with pytest.raises(AirflowSkipException):
        operator(kubeconfig, only="qwen3-8b, qwen3-4b").execute({})
    assert server.asked == []
    deferred(operator(kubeconfig, only="qwen3-8b,qwen3-0.6b"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"run_name": "my run"}, "bad label"),
        ({"image": "x/c"}, "no tag"),
        ({"stack_outputs": "nonsense"}, "pulumi stack output --json"),
        ({"stack_outputs": "{}"}, "lack namespace"),
        ({"variants": ["scanned_multimodal"]}, "no variant"),
        ({"model": "gemma9-9b"}, "unknown model"),
    ],
)
def test_bad_requests_fail_without_retries(kubeconfig: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(AirflowFailException, match=told):
        operator(kubeconfig, **options).execute({})


# The way to a GKE cluster.


@pytest.mark.parametrize(
    ("credentials", "endpoint"),
    [
        ("gcloud container clusters get-credentials c --dns-endpoint", "https://gke-1.us-central1.gke.goog"),
        ("gcloud container clusters get-credentials c", "https://203.0.113.7"),
    ],
)
def test_a_gke_cluster_is_reached_as_the_stack_says(
    monkeypatch: pytest.MonkeyPatch, credentials: str, endpoint: str
) -> None:
    asked: list[dict[str, Any]] = []

    class Hook:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def get_cluster(self, **options: Any) -> Any:
            asked.append(options)
            cluster = Mock(endpoint="203.0.113.7")
            cluster.control_plane_endpoints_config.dns_endpoint_config.endpoint = "gke-1.us-central1.gke.goog"
            cluster.master_auth.cluster_ca_certificate = "Q0E="
            return cluster

    monkeypatch.setattr(connections, "GKEHook", Hook)
    found = connection_of(
        {**OUTPUTS, "getCredentials": credentials},
        gcp_conn_id="google_cloud_default",
        impersonation_chain=None,
        kubernetes_conn_id="",
        config_file="",
    )
    assert (found.cluster_url, found.ssl_ca_cert) == (endpoint, "Q0E=")
    assert asked[0]["location"] == "us-central1"
    assert asked[1] == {"name": "c", "project_id": "p"}
    assert Connection(**json.loads(json.dumps(found.values()))) == found


def test_gke_hears_the_accounts_email(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []

    def get_conn(self: Any) -> Any:
        hooks.append(self)
        return Mock()

    monkeypatch.setattr(connections._Hook, "get_conn", get_conn)
    Connection("https://203.0.113.7", "Q0E=").cluster("ns")
    assert set(hooks[0].scopes) == {
        "https://www.googleapis.com/auth/cloud-platform",
        "https://www.googleapis.com/auth/userinfo.email",
    }


# A whole run, as Airflow does it.


def test_a_run_from_its_trigger_to_its_checkpoints(tmp_path: Path) -> None:
    # In a process of its own: it keeps a database, and must be stopped if it does not end.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("whole_run.py")), str(tmp_path)],
        env={**os.environ, "AIRFLOW_HOME": str(tmp_path)}
        | {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["state"] == "success"
    assert told["tasks"].pop("qwen3-0_6b.convert") == "success"
    assert set(told["tasks"].values()) == {"skipped"}
    assert told["runs"] == [f"conv-{told['logical_date']}"]
