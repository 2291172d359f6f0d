"""The flows against the stand-in, and what only a stand-in can be made to do."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kmock
import pytest
import standin
from commands import IMAGE, Command
from flows import *  # noqa: F403 - its tests are run here
from flows import MODEL, World
from standin import Server


@pytest.fixture
def serving(stack: dict[str, Any], tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    with standin.serving(tmp_path, stack) as served:
        yield served


@pytest.fixture
def server(serving: tuple[Server, Path]) -> Server:
    return serving[0]


@pytest.fixture
def world(serving: tuple[Server, Path], jobs: Command, tmp_path: Path) -> World:
    server, kubeconfig = serving
    # An output that this machine can read, so that reports can be there or not.
    (tmp_path / "out").mkdir()
    words = ("--stack-outputs", str(tmp_path / "outputs.json"), "--kubeconfig", str(kubeconfig))
    output = ("--output-root", str(tmp_path / "out"), "--output-claim", "results")

    def finish(job: str) -> None:
        server.end(job, "check", 0)

    @contextmanager
    def quota(cpus: str) -> Iterator[None]:
        (group,) = server.cluster_queues["shardpool-prod-conversion"]["spec"]["resourceGroups"]
        group["flavors"][0]["resources"][0]["nominalQuota"] = cpus
        yield

    return World(jobs, (*words, *output), 10, finish, quota, 5)


def test_nothing_is_made_before_the_server_has_taken_all(world: World, server: Server) -> None:
    def refuse(request: kmock.Request) -> kmock.KubernetesError | None:
        if request.method.value == "POST" and request.data["metadata"]["name"].startswith("qwen3-8b"):
            return kmock.KubernetesError(status=422, reason="Invalid", message='Job "x" is invalid:\n spec', details={})
        return None

    server.fault = refuse
    ran = world.run("submit", MODEL, "qwen3-8b", "--image", IMAGE, "--run-name", "r", "--skip-access-check")
    assert ran.code == 2
    assert 'Job "x" is invalid: spec' in ran.error
    assert server.all(standin.JOBS) == []
    posted = [url for method, url in server.asked if method == "POST"]
    assert posted
    assert all("dryRun=All" in url and "fieldValidation=Strict" in url for url in posted)


@pytest.mark.parametrize(
    ("status", "message", "code", "told"),
    [
        (403, 'jobs.batch is forbidden: User "ann" cannot list', 2, "no permission in namespace shardpool-prod"),
        (401, "Unauthorized", 2, "not authenticated"),
        (429, "too many requests", 3, "try again"),
        (500, "etcdserver: leader changed", 3, "try again"),
        (503, "apiserver not ready", 3, "try again"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "status", "wait", "logs", "cancel"])
def test_the_servers_refusals(
    world: World, server: Server, command: str, status: int, message: str, code: int, told: str
) -> None:
    server.fault = lambda request: kmock.KubernetesError(status=status, reason="x", message=message, details={})
    words = {
        "submit": (MODEL, "--image", IMAGE, "--run-name", "r", "--skip-access-check"),
        "wait": (MODEL, "--run-name", "r"),
        "logs": (MODEL, "--run-name", "r"),
        "cancel": (MODEL, "--run-name", "r"),
        "status": (),
    }[command]
    ran = world.run(command, *words)
    assert ran.code == code
    assert message in ran.error
    assert told in ran.error
    assert "secret-token" not in ran.err


def test_a_server_that_is_no_kubernetes(world: World, server: Server) -> None:
    server.strange = b"<html>login</html>"
    ran = world.run("status")
    assert ran.code == 3
    assert "did not answer in JSON" in ran.error


def test_an_unreachable_cluster(world: World, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "elsewhere"
    text = (tmp_path / "kubeconfig").read_text()
    kubeconfig.write_text(re.sub(r"server: .*", "server: http://127.0.0.1:9", text))
    started = time.monotonic()
    ran = world.run("status", "--kubeconfig", str(kubeconfig))
    # The last --kubeconfig is the stand-in's.
    assert ran.code == 0
    ran = world.jobs("status", "--kubeconfig", str(kubeconfig))
    assert ran.code == 3
    assert "127.0.0.1:9 cannot be reached" in ran.error
    assert time.monotonic() - started < 10


def test_no_cluster_to_talk_to(jobs: Command) -> None:
    ran = jobs("status")
    assert ran.code == 2
    assert "no cluster to talk to" in ran.error


def test_a_kubeconfig_without_that_context(world: World) -> None:
    ran = world.run("status", "--context", "other")
    assert ran.code == 2
    assert "other" in ran.error


def _write_report(root: Path, variant: str, run: str, model: str = MODEL) -> None:
    folder = root / "out" / MODEL / "to_maxtext" / variant / run
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"version": 1, "request": {"model_name": model}}))


def test_a_finished_output_needs_no_job(world: World, server: Server, tmp_path: Path) -> None:
    _write_report(tmp_path, "unscanned", "old")
    assert "created" in world.submit("old").out, "one of two is not all"
    world.run("cancel", MODEL, "--run-name", "old")
    _write_report(tmp_path, "scanned", "old")
    ran = world.submit("old")
    assert ran.code == 0
    assert "finished" in ran.out
    assert server.all(standin.JOBS) == []
    # What has no Job any more is waited for no longer.
    assert world.run("wait", MODEL, "--run-name", "old").code == 0
    assert world.submit("old", "--wait").code == 0


def test_the_report_of_another_model_finishes_nothing(world: World, tmp_path: Path) -> None:
    for variant in ("unscanned", "scanned"):
        _write_report(tmp_path, variant, "old", "qwen3-8b")
    assert "created" in world.submit("old").out


def test_waiting_for_what_never_was(world: World) -> None:
    ran = world.run("wait", MODEL, "--run-name", "never")
    assert ran.code == 2
    assert "no Job qwen3-0-6b-never" in ran.error


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (4, 4)])
def test_a_failure_ends_the_job_at_once(world: World, server: Server, code: int, expected: int) -> None:
    world.submit("bad")
    message = json.dumps({"version": 1, "exit_code": code, "error": "what went wrong", "bytes": 0})
    server.end("qwen3-0-6b-bad", "convert-scanned", code, message)
    ran = world.run("wait", "--run-name", "bad", "--interval", "0.1")
    assert ran.code == expected
    assert "what went wrong" in ran.out
    assert len(server.pods_of("qwen3-0-6b-bad")) == 1


def test_failures_that_may_go_away_are_tried_four_times(world: World, server: Server) -> None:
    world.submit("flaky")
    for tries in range(1, 5):
        assert len(server.pods_of("qwen3-0-6b-flaky")) == tries
        server.end("qwen3-0-6b-flaky", "convert-unscanned", 3)
    ran = world.run("wait", "--run-name", "flaky", "--interval", "0.1")
    assert ran.code == 3
    assert "BackoffLimitExceeded" in ran.out
    assert len(server.pods_of("qwen3-0-6b-flaky")) == 4


def test_disruptions_do_not_count(world: World, server: Server) -> None:
    world.submit("drained")
    for _ in range(6):
        server.disrupt("qwen3-0-6b-drained")
    status = world.status("--run-name", "drained")["drained"]
    assert status["state"] == "running"
    assert "try 7" in status["reason"]
    assert "NoExecute" in status["reason"] or "143" in status["reason"]
    server.end("qwen3-0-6b-drained", "check", 0)
    assert world.run("wait", "--run-name", "drained", "--interval", "0.1").code == 0


def test_submit_and_wait_in_one(world: World, server: Server) -> None:
    def end_it() -> None:
        deadline = time.monotonic() + 5
        while not server.all(standin.PODS):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.end("qwen3-0-6b-both", "check", 4, json.dumps({"exit_code": 4, "error": "3 arrays differ"}))

    thread = threading.Thread(target=end_it)
    thread.start()
    ran = world.submit("both", "--wait", "--interval", "0.1", "--markdown")
    thread.join()
    assert ran.code == 4
    assert "| qwen3-0.6b | both | failed (check) |" in ran.out
    assert "3 arrays differ" in ran.out


def test_a_job_cancelled_meanwhile_ends_the_wait(world: World, server: Server) -> None:
    world.submit("lost")

    def lose() -> None:
        time.sleep(0.4)
        server.objects[standin.JOBS, "shardpool-prod", "qwen3-0-6b-lost"].delete()

    thread = threading.Thread(target=lose)
    thread.start()
    ran = world.run("wait", "--run-name", "lost", "--interval", "0.1", "--timeout", "5")
    thread.join()
    assert ran.code == 3
    assert "is gone" in ran.error


def test_waiting_outlives_a_server_that_fails_for_a_while(world: World, server: Server) -> None:
    world.submit("patient")
    server.end("qwen3-0-6b-patient", "check", 0)
    failures = iter([True] * 3)

    def fail(request: kmock.Request) -> kmock.KubernetesError | None:
        # The first look, that tells what there is to wait for, is the user's.
        if len(server.asked) > before + 8 and next(failures, False):
            return kmock.KubernetesError(status=503, reason="x", message="not ready", details={})
        return None

    before = len(server.asked)
    server.fault = fail
    ran = world.run("wait", "--run-name", "patient", "--interval", "0.1")
    assert ran.code == 0, ran.err


def test_logs_in_the_order_of_the_containers(world: World, server: Server) -> None:
    world.submit("talk")
    server.run_to("qwen3-0-6b-talk", "convert-scanned")
    pod = server.pods_of("qwen3-0-6b-talk")[0]["metadata"]["name"]
    server.texts[pod, "convert-unscanned"] = "one\n"
    server.texts[pod, "convert-scanned"] = (
        '{"time": "T", "severity": "INFO", "message": "two", "phase": "plan"}\n{"odd": 2}'
    )
    shown = 'T INFO two\n{"odd": 2}\n'
    ran = world.run("logs", MODEL, "--run-name", "talk")
    assert ran.code == 0
    assert ran.out == f"==> {pod} convert-unscanned <==\none\n==> {pod} convert-scanned <==\n{shown}"
    ran = world.run("logs", MODEL, "--run-name", "talk", "--container", "convert-scanned")
    assert ran.out == f"==> {pod} convert-scanned <==\n{shown}"
    ran = world.run("logs", MODEL, "--run-name", "talk", "--container", "nope")
    assert ran.code == 2
    assert "convert-unscanned, convert-scanned, check" in ran.error


def test_logs_are_followed_to_the_end(world: World, server: Server) -> None:
    world.submit("talk")
    pod = server.pods_of("qwen3-0-6b-talk")[0]["metadata"]["name"]
    for container in ("convert-unscanned", "convert-scanned", "check"):
        server.texts[pod, container] = f"of {container}\nlast"
    server.end("qwen3-0-6b-talk", "check", 0)
    ran = world.run("logs", MODEL, "--run-name", "talk", "--follow")
    assert ran.code == 0
    assert [line for line in ran.out.splitlines() if line.startswith("of ")] == [
        "of convert-unscanned",
        "of convert-scanned",
        "of check",
    ]


def test_logs_of_a_job_that_waits_say_why(world: World, server: Server) -> None:
    world.submit("dumb", "--queue", "nowhere")
    ran = world.run("logs", MODEL, "--run-name", "dumb")
    assert ran.code == 2
    assert "doesn't exist" in ran.error


def test_without_kueue_a_job_waits_and_says_so(world: World, server: Server) -> None:
    server.kueue = False
    world.submit("alone")
    status = world.status()["alone"]
    assert status["state"] == "queued"
    assert "Kueue" in status["reason"]


def test_no_node_image_pull_and_oom_are_told(world: World, server: Server) -> None:
    server.scheduling = False
    world.submit("stuck")
    pod = server.pods_of("qwen3-0-6b-stuck")[0]
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    server.change(standin.PODS, pod, status={"phase": "Pending", "conditions": [unscheduled]})
    server.put(
        standin.EVENTS,
        {
            "metadata": {"name": "e", "namespace": "shardpool-prod"},
            "involvedObject": {"uid": pod["metadata"]["uid"]},
            "reason": "NotTriggerScaleUp",
            "message": "pod didn't trigger scale-up: 1 max node group size reached",
        },
    )
    assert "max node group size reached" in world.status()["stuck"]["reason"]
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    status = {"phase": "Pending", "conditions": [], "initContainerStatuses": [{"name": "a", "state": waiting}]}
    server.change(standin.PODS, pod, status={**status, "containerStatuses": []})
    assert world.status()["stuck"]["reason"] == "image pull: ImagePullBackOff: not found"


def test_status_without_jobs_is_an_empty_table(world: World) -> None:
    ran = world.run("status")
    assert ran.code == 0
    assert ran.out.splitlines() == ["MODEL  RUN  STATE  POSITION  NODE  ELAPSED  BYTES  PEAK MEMORY  CHECK  REASON"]


def test_status_by_model_run_and_name(world: World) -> None:
    world.submit("a")
    world.submit("b")
    assert set(world.status()) == {"a", "b"}
    assert set(world.status("--run-name", "a")) == {"a"}
    assert set(world.status("qwen3-0-6b-b")) == {"b"}
    assert set(world.status(MODEL, "--run-name", "b")) == {"b"}
    ran = world.run("status", MODEL)
    assert ran.code == 2
    assert "--run-name" in ran.error


def test_watch_ends_with_the_jobs(world: World, server: Server) -> None:
    world.submit("w")
    server.end("qwen3-0-6b-w", "check", 0)
    ran = world.run("status", "--watch", "--interval", "0.1")
    assert ran.code == 0
    assert "checked" in ran.out


def test_priorities_order_those_that_wait(world: World, server: Server) -> None:
    for number in range(10):
        world.submit(f"r{number}")
    world.submit("low", "--priority", "low")
    world.submit("high", "--priority", "very-high")
    status = world.status()
    assert (status["high"]["position"], status["low"]["position"]) == (1, 2)


def test_what_render_prints_and_submit_creates_are_the_same(world: World, server: Server) -> None:
    import yaml

    words = (MODEL, "--image", IMAGE, "--run-name", "same")
    stack = tuple(word for word in world.base if word != "--kubeconfig" and not word.endswith("kubeconfig"))
    (printed,) = yaml.safe_load_all(world.jobs("render", *words, *stack).out)
    world.run("submit", *words, "--skip-access-check")
    created = server.job("qwen3-0-6b-same")
    assert created["metadata"]["annotations"] == printed["metadata"]["annotations"]
    assert created["metadata"]["labels"] == printed["metadata"]["labels"]
    pod = printed["spec"]["template"]["spec"]
    assert created["spec"]["template"]["spec"]["containers"] == pod["containers"]
    assert created["spec"]["template"]["spec"]["initContainers"] == pod["initContainers"]
