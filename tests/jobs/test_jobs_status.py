"""What `status` makes of the objects a cluster has: every state, and every way to be stuck or to fail."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from commands import IMAGE, RUN

from jobs.catalogue import catalogue
from jobs.render import Request, render
from jobs.settings import Overrides, make
from jobs.status import Objects, Status, describe
from jobs.waiting import exit_code

NOW = datetime.datetime(2026, 8, 13, 14, 0, 0, tzinfo=datetime.UTC)
Object = dict[str, Any]


def job(*conditions: Object, suspended: bool = False, started: str = "2026-08-13T13:00:00Z") -> Object:
    """The Job of a small model as the server has it."""
    made = render(Request(catalogue()["qwen3-0.6b"], RUN, IMAGE), make(None, Overrides(bucket="acme")))
    made["metadata"] |= {"uid": "job-1", "creationTimestamp": "2026-08-13T12:30:08Z"}
    made["spec"]["suspend"] = suspended
    made["status"] = {"conditions": list(conditions)} | ({} if suspended else {"startTime": started})
    return made


def workload(*conditions: Object) -> Object:
    return {
        "metadata": {"name": "job-x", "ownerReferences": [{"kind": "Job", "uid": "job-1"}]},
        "status": {"conditions": list(conditions)},
    }


def pod(
    states: Sequence[Mapping[str, Any]] = (),
    *,
    number: int = 1,
    phase: str = "Running",
    node: str = "gke-node-1",
    conditions: Sequence[Object] = (),
) -> Object:
    """A pod whose containers are in these states, the rest waiting."""
    names = ["convert-unscanned", "convert-scanned", "check"]
    padded = [*states, *[{"waiting": {"reason": "PodInitializing"}}] * (len(names) - len(states))]
    statuses = [{"name": name, "state": state} for name, state in zip(names, padded, strict=True)]
    return {
        "metadata": {
            "name": f"pod-{number}",
            "uid": f"pod-{number}",
            "creationTimestamp": f"2026-08-13T13:0{number}:00Z",
            "ownerReferences": [{"kind": "Job", "name": "j", "uid": "job-1"}],
        },
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": phase,
            "conditions": list(conditions),
            "initContainerStatuses": statuses[:2],
            "containerStatuses": statuses[2:],
        },
    }


def condition(kind: str, status: str = "True", reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def ended(code: int, message: str = "", reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


def event(reason: str, message: str, uid: str, at: str = "2026-08-13T13:30:00Z") -> Object:
    return {
        "metadata": {"creationTimestamp": at},
        "involvedObject": {"uid": uid},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


def message(**fields: Any) -> str:
    """A termination message of the converter."""
    peak = {"resident": 9, "anonymous_and_shared": fields.pop("peak", 0), "cgroup": None}
    return json.dumps({"version": 1, "exit_code": 0, "error": None, "bytes": 0, "peak_memory_bytes": peak, **fields})


def seen(
    job: Object, *pods: Object, load: Object | None = None, events: Sequence[Object] = (), position: int | None = None
) -> Status:
    positions = {"job-x": position} if position else {}
    loads = [load] if load else []
    (status,) = describe(Objects([job], loads, list(pods), list(events), positions), NOW)
    return status


RUNNING: Object = {"running": {"startedAt": "2026-08-13T13:01:00Z"}}


def test_queued_with_kueues_reason_and_position() -> None:
    told = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor p, 60 more needed"
    load = workload(condition("QuotaReserved", "False", "WaitingForQuota", told))
    status = seen(job(suspended=True), load=load, position=3)
    assert (status.state, status.position) == ("queued", 3)
    assert status.reason == f"WaitingForQuota: {told}"
    # From its creation, as it has not started: 12:30:08 to 14:00.
    assert status.elapsed_seconds == 89 * 60 + 52


def test_queued_without_kueue_says_so() -> None:
    assert "Kueue" in seen(job(suspended=True)).reason


def test_queued_after_its_node_did_not_come() -> None:
    load = workload(
        condition("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout"),
        condition("QuotaReserved", "False", "Pending", "The workload is requeued"),
        condition("Admitted", "False", "NoReservation", ""),
    )
    status = seen(job(suspended=True), load=load)
    assert status.state == "queued"
    assert "PodsReadyTimeout" in status.reason
    assert "requeued" in status.reason


def test_admitted_until_a_container_runs() -> None:
    admitted = workload(condition("QuotaReserved"), condition("Admitted"))
    assert seen(job(suspended=True), load=admitted).state == "admitted"
    assert seen(job(), load=admitted).state == "admitted"
    assert seen(job(), pod(phase="Pending"), load=admitted).state == "admitted"


def test_no_node_tells_what_the_autoscaler_says() -> None:
    waiting = pod(
        phase="Pending",
        node="",
        conditions=[condition("PodScheduled", "False", "Unschedulable", "0/3 nodes are available")],
    )
    assert seen(job(), waiting).reason == "no node yet: 0/3 nodes are available"
    events = [
        event("FailedScheduling", "0/3 nodes are available", "pod-1", "2026-08-13T13:30:00Z"),
        event("FailedScaleUp", "GCE out of resources", "pod-1", "2026-08-13T13:31:00Z"),
    ]
    status = seen(job(), waiting, events=events)
    assert status.state == "admitted"
    assert status.reason == "no node yet: FailedScaleUp: GCE out of resources"


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
def test_image_pull(reason: str) -> None:
    stuck = pod([{"waiting": {"reason": reason, "message": 'Back-off pulling image "x"'}}], phase="Pending")
    assert seen(job(), stuck).reason == f'image pull: {reason}: Back-off pulling image "x"'


def test_a_container_that_cannot_be_made() -> None:
    stuck = pod([{"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}}])
    assert seen(job(), stuck).reason == 'CreateContainerConfigError: secret "x" not found'


def test_pods_that_cannot_be_made() -> None:
    events = [event("FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', "job-1")]
    status = seen(job(), events=events)
    assert status.state == "admitted"
    assert 'violates PodSecurity "restricted:latest"' in status.reason


def test_running_names_the_container() -> None:
    status = seen(job(), pod([ended(0, message(bytes=10, peak=4)), RUNNING]))
    assert (status.state, status.step, status.node) == ("running", "convert-scanned", "gke-node-1")
    assert (status.bytes, status.peak_memory_bytes) == (10, 4)
    assert status.elapsed_seconds == 3600
    assert status.reason == ""


def test_converted_while_it_is_checked() -> None:
    done = [ended(0, message(bytes=10, peak=7)), ended(0, message(bytes=11, peak=4))]
    status = seen(job(), pod([*done, RUNNING]))
    assert (status.state, status.step) == ("converted", "check")
    assert (status.bytes, status.peak_memory_bytes) == (21, 7)
    assert seen(job(), pod(done)).state == "converted"


def test_checked() -> None:
    complete = job(condition("Complete", reason="CompletionsReached"))
    complete["status"]["completionTime"] = "2026-08-13T13:10:00Z"
    check = message(bytes=10, result="equal", checked={"arrays": 311, "differences": 0})
    status = seen(complete, pod([ended(0, message(bytes=10)), ended(0), ended(0, check)], phase="Succeeded"))
    assert (status.state, status.exit_code, status.reason) == ("checked", None, "")
    # What the check read is nothing that was written.
    assert (status.check, status.bytes) == ("311 arrays equal", 10)
    assert status.elapsed_seconds == 600
    assert exit_code([status]) == 0


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (4, 4)])
def test_failed_for_good(code: int, expected: int) -> None:
    failure = pod([ended(0), ended(code, message(exit_code=code, error="no such bucket"))], phase="Failed")
    status = seen(job(condition("Failed", reason="PodFailurePolicy", message="Container ...")), failure)
    assert (status.state, status.step, status.exit_code) == ("failed", "convert-scanned", code)
    assert status.reason == f"PodFailurePolicy: convert-scanned: exit code {code}: no such bucket"
    assert exit_code([status]) == expected


def test_a_difference() -> None:
    told = message(exit_code=4, error="2 of 311 arrays of x differ from y", checked={"arrays": 311, "differences": 2})
    failure = pod([ended(0), ended(0), ended(4, told)], phase="Failed")
    status = seen(job(condition("Failed", reason="PodFailurePolicy", message="Container ...")), failure)
    assert (status.step, status.exit_code, status.check) == ("check", 4, "2 of 311 arrays differ")
    assert status.reason == "PodFailurePolicy: check: exit code 4: 2 of 311 arrays of x differ from y"


def test_failed_and_the_pods_are_gone_with_their_node() -> None:
    told = "Container check for pod ns/x failed with exit code 4 matching FailJob rule at index 1"
    status = seen(job(condition("Failed", reason="PodFailurePolicy", message=told)))
    assert (status.step, status.exit_code) == ("check", 4)
    assert exit_code([status]) == 4


def test_out_of_memory() -> None:
    killed = pod([ended(137, reason="OOMKilled")], phase="Failed")
    failed = seen(job(condition("Failed", reason="BackoffLimitExceeded")), killed)
    assert failed.reason == "BackoffLimitExceeded: convert-unscanned: out of memory (OOM), exit code 137"
    assert exit_code([failed]) == 3


def test_too_late() -> None:
    late = job(condition("Failed", reason="DeadlineExceeded", message="Job was active longer than specified deadline"))
    status = seen(late)
    assert status.reason.startswith("DeadlineExceeded: ")
    assert exit_code([status]) == 3


def test_a_second_try_tells_why_the_first_ended() -> None:
    drained = [condition("DisruptionTarget", "True", "DeletionByTaintManager", "node drained")]
    first = pod([ended(143)], number=1, phase="Failed", conditions=drained)
    status = seen(job(), first, pod([RUNNING], number=2, node="gke-node-2"))
    assert (status.state, status.node) == ("running", "gke-node-2")
    assert status.reason.startswith("try 2; before: ")
    gone = pod(number=1, phase="Failed", conditions=drained)
    assert "DeletionByTaintManager: node drained" in seen(job(), gone, pod([RUNNING], number=2)).reason


def test_the_worst_failure_decides() -> None:
    def failed(code: int) -> Status:
        return seen(job(condition("Failed", reason="x")), pod([ended(code)], phase="Failed"))

    good = seen(job(condition("Complete")))
    assert exit_code([good, failed(3), failed(4)]) == 4
    assert exit_code([failed(4), failed(2)]) == 2
    assert exit_code([failed(4), failed(2), failed(1)]) == 1
    assert exit_code([good, failed(137)]) == 3


def test_a_message_that_is_no_message_is_told_as_text() -> None:
    status = seen(
        job(condition("Failed", reason="PodFailurePolicy")), pod([ended(2, "Traceback\n  boom")], phase="Failed")
    )
    assert status.reason.endswith("exit code 2: Traceback boom")
    assert (status.bytes, status.peak_memory_bytes) == (None, None)


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "null", '"x"', "{}", '{"exit_code": 2, "peak_memory_bytes": 3}', '{"exit_code": 4, "checked": 4}'],
)
def test_odd_messages_do_no_harm(text: str) -> None:
    assert seen(job(), pod([ended(0, text), RUNNING])).state == "running"


def test_two_jobs_do_not_mix() -> None:
    other = copy.deepcopy(job())
    other["metadata"] |= {"uid": "job-2", "name": "other"}
    statuses = describe(Objects([job(), other], [], [pod([RUNNING])], [], {}), NOW)
    assert [each.state for each in statuses] == ["running", "admitted"]
