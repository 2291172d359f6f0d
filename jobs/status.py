"""What became of each Job, from the Job, Kueue's Workload, the pods and their events.

`describe` is a function of those objects alone; `observe` fetches them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs import cluster as api
from jobs.cluster import Cluster, Object
from jobs.render import MODEL_LABEL, QUEUE_LABEL, RUN_LABEL, outputs

# In the order a Job goes through them; a Job ends as checked or failed.
QUEUED, ADMITTED, RUNNING, CONVERTED, CHECKED, FAILED = (
    "queued",
    "admitted",
    "running",
    "converted",
    "checked",
    "failed",
)
DONE = (CHECKED, FAILED)

_OOM_EXIT_CODE = 137
_IMAGE_TROUBLE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
_START_TROUBLE = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_POD_TROUBLE = (
    "FailedScheduling",
    "NotTriggerScaleUp",
    "FailedScaleUp",
    "FailedMount",
    "FailedAttachVolume",
    "Evicted",
)
_JOB_TROUBLE = ("FailedCreate", "ErrWorkload", "UpdateFailed")
# "Container check for pod ns/name failed with exit code 4 matching FailJob rule at index 1", as the Job controller
# writes it into the condition: the only trace once the node, and its pods with it, are gone.
_POLICY_MESSAGE = re.compile(r"Container (\S+) for pod \S+ failed with exit code (\d+)")


@dataclass(frozen=True)
class Objects:
    """What a cluster holds of the Jobs.

    Attributes:
      positions: workload -> position in the ClusterQueue, 1 being next.
    """

    jobs: Sequence[Object]
    workloads: Sequence[Object]
    pods: Sequence[Object]
    events: Sequence[Object]
    positions: Mapping[str, int]


@dataclass(frozen=True)
class Status:
    """One Job.

    Attributes:
      state: queued, admitted, running, converted, checked or failed.
      step: the container that runs, or that failed.
      position: in the ClusterQueue, 1 being next; None when it is not waiting.
      elapsed_seconds: since its latest start; since it was made while it waits.
      bytes: of the arrays its conversions wrote; None where no message says.
      peak_memory_bytes: the largest of its containers; None where no message says.
      exit_code: of the container that failed; None otherwise.
      reason: why it waits, is stuck or failed; "".
      check: what the check found; "" while it has found nothing.
      outputs: variant -> directory.
    """

    job: str
    model: str
    run: str
    state: str
    step: str
    position: int | None
    node: str
    elapsed_seconds: int
    bytes: int | None
    peak_memory_bytes: int | None
    exit_code: int | None
    reason: str
    check: str
    outputs: Mapping[str, str]

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in DONE


def observe(cluster: Cluster, labels: Mapping[str, str] | None = None, names: Iterable[str] = ()) -> list[Status]:
    """The state of this program's Jobs: those with these labels, and of those the ones named, if any are."""
    wanted = set(names)
    jobs = [job for job in api.list_jobs(cluster, labels) if not wanted or job["metadata"]["name"] in wanted]
    if not jobs:
        return []
    queues = {_label(job, QUEUE_LABEL) for job in jobs if job["spec"].get("suspend")} - {""}
    positions: dict[str, int] = {}
    for queue in sorted(queues):
        positions |= api.pending_positions(cluster, queue)
    objects = Objects(
        jobs,
        api.list_workloads(cluster),
        api.list_pods(cluster, labels),
        api.list_events(cluster),
        positions,
    )
    return describe(objects, datetime.datetime.now(datetime.UTC))


def describe(objects: Objects, now: datetime.datetime) -> list[Status]:
    """The state of each Job at that time."""
    workloads = {uid: load for load in objects.workloads for uid in _owners(load)}
    pods: dict[str, list[Object]] = {}
    for pod in objects.pods:
        for uid in _owners(pod):
            pods.setdefault(uid, []).append(pod)
    events: dict[str, list[Object]] = {}
    for event in sorted(objects.events, key=_event_time):
        events.setdefault(event.get("involvedObject", {}).get("uid", ""), []).append(event)
    return [
        _describe_one(
            job,
            workloads.get(job["metadata"]["uid"]),
            pods.get(job["metadata"]["uid"], []),
            events,
            objects.positions,
            now,
        )
        for job in objects.jobs
    ]


def _describe_one(
    job: Object,
    workload: Object | None,
    pods: list[Object],
    events: Mapping[str, list[Object]],
    positions: Mapping[str, int],
    now: datetime.datetime,
) -> Status:
    pod = pods[-1] if pods else None
    state, step = _state(job, workload, pod)
    messages = [message for each in pods for message in _messages(each)]
    failed = _failed_container(job, pods) if state == FAILED else None
    exit_code = failed[1] if failed else None
    if failed:
        step = failed[0]
    return Status(
        job=job["metadata"]["name"],
        model=_label(job, MODEL_LABEL),
        run=_label(job, RUN_LABEL),
        state=state,
        step=step,
        position=positions.get(workload["metadata"]["name"]) if workload and state == QUEUED else None,
        node=(pod or {}).get("spec", {}).get("nodeName") or "",
        elapsed_seconds=_elapsed(job, now),
        bytes=_total(message.get("bytes") for message in messages if "checked" not in message),
        peak_memory_bytes=max((peak for message in messages if (peak := _peak(message))), default=None),
        exit_code=exit_code,
        reason=_reason(job, workload, pods, events, state),
        check=next((told for message in reversed(messages) if (told := _checked(message))), ""),
        outputs=outputs(job),
    )


def _state(job: Object, workload: Object | None, pod: Object | None) -> tuple[str, str]:
    """State and step of a Job."""
    if _condition(job, "Complete"):
        return CHECKED, ""
    if _condition(job, "Failed") or _condition(job, "FailureTarget"):
        return FAILED, ""
    if job["spec"].get("suspend"):
        admitted = workload is not None and _condition(workload, "Admitted")
        return (ADMITTED if admitted else QUEUED), ""
    if pod is None:
        return ADMITTED, ""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if "running" in container.get("state", {}):
            main = container in status.get("containerStatuses", ())
            return (CONVERTED if main else RUNNING), container["name"]
    inits = status.get("initContainerStatuses", ())
    ended = [each["state"]["terminated"]["exitCode"] for each in inits if "terminated" in each.get("state", {})]
    if inits and len(ended) == len(inits) and not any(ended):
        return CONVERTED, ""
    return (RUNNING if ended else ADMITTED), ""


def _reason(
    job: Object,
    workload: Object | None,
    pods: list[Object],
    events: Mapping[str, list[Object]],
    state: str,
) -> str:
    """Why a Job waits, is stuck or failed; "" for one that goes on well."""
    uid = job["metadata"]["uid"]
    if state == CHECKED:
        return ""
    if state == FAILED:
        condition = _condition(job, "Failed") or _condition(job, "FailureTarget") or {}
        told = next((text for pod in reversed(pods) if (text := _container_failure(pod))), "")
        return _join(condition.get("reason", ""), told or condition.get("message", ""))
    if state == QUEUED:
        return _waiting(job, workload, events.get(uid, []))
    if not pods:
        return _last_event(events.get(uid, []), _JOB_TROUBLE)
    latest = pods[-1]
    trouble = _pod_trouble(latest, events.get(latest["metadata"]["uid"], []))
    if trouble:
        return trouble
    # Goes on after an earlier try failed: worth saying.
    earlier = next((text for pod in reversed(pods[:-1]) if (text := _container_failure(pod))), "")
    return f"try {len(pods)}; before: {earlier}" if earlier else ""


def _waiting(job: Object, workload: Object | None, events: list[Object]) -> str:
    """What Kueue says of a Job that waits."""
    queue = _label(job, QUEUE_LABEL)
    if workload is None:
        told = _last_event(events, _JOB_TROUBLE)
        return told or f"Kueue has not taken it up: is Kueue running, and does it manage queue {queue}?"
    evicted = _condition(workload, "Evicted")
    reserved = _condition(workload, "QuotaReserved", status="False")
    told = _join(reserved.get("reason", ""), reserved.get("message", "")) if reserved else ""
    if evicted:
        told = "; ".join(
            filter(None, [_join(f"evicted, {evicted.get('reason', '')}", evicted.get("message", "")), told])
        )
    return told or "waits for its turn"


def _pod_trouble(pod: Object, events: list[Object]) -> str:
    """Why a pod does not run; "" if it does."""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _IMAGE_TROUBLE:
            return _join(f"image pull: {waiting['reason']}", waiting.get("message", ""))
        if waiting.get("reason") in _START_TROUBLE:
            return _join(waiting["reason"], waiting.get("message", ""))
    failure = _container_failure(pod)
    if failure:
        return failure
    scheduled = _condition(pod, "PodScheduled", status="False")
    if scheduled and scheduled.get("reason") != "SchedulingGated":
        scaling = _last_event(events, _POD_TROUBLE)
        return _join("no node yet", scaling or scheduled.get("message", ""))
    if status.get("phase") == "Pending":
        return _last_event(events, _POD_TROUBLE)
    return ""


def _container_failure(pod: Object) -> str:
    """How a pod's container, or the pod as a whole, failed; "" if it did not."""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        ended = container.get("state", {}).get("terminated")
        if not ended or ended.get("exitCode", 0) == 0:
            continue
        if ended.get("reason") == "OOMKilled" or ended["exitCode"] == _OOM_EXIT_CODE:
            return f"{container['name']}: out of memory (OOM), exit code {ended['exitCode']}"
        told = _message(ended).get("error") or _one_line(ended.get("message", "")) or ended.get("reason", "")
        return _join(f"{container['name']}: exit code {ended['exitCode']}", told)
    if status.get("phase") == "Failed" or _condition(pod, "DisruptionTarget"):
        disrupted = _condition(pod, "DisruptionTarget") or {}
        told = disrupted.get("message") or status.get("message", "")
        return _join(disrupted.get("reason") or status.get("reason", "pod failed"), told)
    return ""


def _failed_container(job: Object, pods: list[Object]) -> tuple[str, int] | None:
    """The container that failed last, and its exit code."""
    for pod in reversed(pods):
        status = pod.get("status", {})
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            ended = container.get("state", {}).get("terminated")
            if ended and ended.get("exitCode", 0) != 0:
                return container["name"], ended["exitCode"]
    condition = _condition(job, "Failed") or _condition(job, "FailureTarget") or {}
    match = _POLICY_MESSAGE.search(condition.get("message", ""))
    return (match[1], int(match[2])) if match else None


def _messages(pod: Object) -> list[Mapping[str, Any]]:
    """The converter's termination messages of a pod's containers."""
    status = pod.get("status", {})
    ended = (
        container.get("state", {}).get("terminated")
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    )
    return [message for each in ended if each and (message := _message(each))]


def _message(terminated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The converter's termination message; empty where the text is something else, as the last lines of a log."""
    try:
        message = json.loads(terminated.get("message", ""))
    except ValueError:
        return {}
    return message if isinstance(message, dict) and "exit_code" in message else {}


def _peak(message: Mapping[str, Any]) -> int | None:
    """Peak memory, what counts against the limit before what the process sees of itself."""
    peaks = message.get("peak_memory_bytes")
    if not isinstance(peaks, dict):
        return None
    return next((peaks[key] for key in ("anonymous_and_shared", "resident", "cgroup") if peaks.get(key)), None)


def _checked(message: Mapping[str, Any]) -> str:
    """What a check's termination message says it found; "" for any other."""
    checked = message.get("checked")
    if not isinstance(checked, dict):
        return ""
    arrays, differences = checked.get("arrays"), checked.get("differences")
    return f"{differences} of {arrays} arrays differ" if differences else f"{arrays} arrays equal"


def _total(values: Iterable[Any]) -> int | None:
    numbers = [value for value in values if isinstance(value, int)]
    return sum(numbers) if numbers else None


def _elapsed(job: Object, now: datetime.datetime) -> int:
    status = job.get("status", {})
    finished = _condition(job, "Complete") or _condition(job, "Failed") or {}
    start = _time(status.get("startTime") or job["metadata"].get("creationTimestamp"))
    end = _time(status.get("completionTime") or finished.get("lastTransitionTime")) or now
    return max(0, round((end - start).total_seconds())) if start else 0


def _condition(thing: Object, kind: str, *, status: str = "True") -> Object:
    """The condition of that type and status; empty if there is none."""
    conditions: list[Object] = thing.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind and each.get("status") == status), {})


def _last_event(events: Iterable[Object], reasons: tuple[str, ...]) -> str:
    told = [_join(event["reason"], event.get("message", "")) for event in events if event.get("reason") in reasons]
    return told[-1] if told else ""


def _event_time(event: Object) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((time for time in times if time), event["metadata"].get("creationTimestamp") or "")


def _owners(thing: Object) -> list[str]:
    return [owner["uid"] for owner in thing["metadata"].get("ownerReferences", ()) if owner.get("kind") == "Job"]


def _label(thing: Object, key: str) -> str:
    labels: Mapping[str, str] = thing["metadata"].get("labels") or {}
    return labels.get(key, "")


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text) if text else None


def _join(head: str, text: str) -> str:
    return ": ".join(filter(None, (head, _one_line(text))))


def _one_line(text: str) -> str:
    return " ".join(text.split())
