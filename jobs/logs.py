"""Logs of Jobs: every container of every pod, in the order they ran, entries in JSON as lines for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

from jobs import cluster as api
from jobs.cluster import Cluster, Object
from jobs.errors import RequestError
from jobs.status import observe

_INTERVAL = 5  # seconds between looks for a container that has not started


def show(cluster: Cluster, labels: Mapping[str, str], names: Sequence[str], container: str = "") -> None:
    """Print what has been written so far.

    Raises:
      RequestError: there is no such Job, or it has no pod or no such container.
    """
    pods = _pods(cluster, labels, names)
    if not pods:
        waiting = "; ".join(f"{each.job} is {each.state} ({each.reason})" for each in observe(cluster, labels, names))
        raise RequestError(f"no pod of it is there: {waiting or 'no such Job either'}")
    for pod in pods:
        for each in _containers(pod, container):
            text = api.read_log(cluster, pod["metadata"]["name"], each)
            if text:
                _header(pod, each)
                print("\n".join(map(_readable, text.splitlines())))


def follow(
    cluster: Cluster,
    labels: Mapping[str, str],
    names: Sequence[str],
    container: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print lines as they are written, container after container, until the Job has ended.

    Raises:
      RequestError: there is no such Job, or several are meant.
    """
    followed: set[tuple[str, str]] = set()
    told = ""
    while True:
        found = observe(cluster, labels, names)
        if len(found) != 1:
            raise RequestError(f"--follow is of one Job; {len(found)} are there: {', '.join(e.job for e in found)}")
        (status,) = found
        started = False
        for pod in _pods(cluster, labels, [status.job]):
            for each in _containers(pod, container):
                key = (pod["metadata"]["name"], each)
                if key not in followed and _has_started(pod, each):
                    followed.add(key)
                    started = True
                    _header(pod, each)
                    for line in api.follow_log(cluster, *key):
                        print(_readable(line), flush=True)
        if status.done and not started:
            return
        if not started:
            line = f"{status.state}: {status.reason}" if status.reason else status.state
            if line != told:
                print(f"... {line}", flush=True)
                told = line
            sleep(_INTERVAL)


def _readable(line: str) -> str:
    """A log entry's time, severity and message; any other line as it is."""
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "message" not in entry:
        return line
    return " ".join(str(entry[key]) for key in ("time", "severity", "message") if key in entry)


def _pods(cluster: Cluster, labels: Mapping[str, str], names: Sequence[str]) -> list[Object]:
    wanted = set(names)
    return [
        pod
        for pod in api.list_pods(cluster, labels)
        if not wanted or wanted & {owner["name"] for owner in pod["metadata"].get("ownerReferences", ())}
    ]


def _containers(pod: Object, wanted: str) -> list[str]:
    spec = pod["spec"]
    names = [each["name"] for each in (*spec.get("initContainers", ()), *spec["containers"])]
    if wanted and wanted not in names:
        raise RequestError(f"no container {wanted!r} in {pod['metadata']['name']}; it has {', '.join(names)}")
    return [name for name in names if not wanted or name == wanted]


def _has_started(pod: Object, container: str) -> bool:
    status = pod.get("status", {})
    states = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    return any(each["name"] == container and {"running", "terminated"} & set(each.get("state", {})) for each in states)


def _header(pod: Object, container: str) -> None:
    print(f"==> {pod['metadata']['name']} {container} <==", flush=True)
