"""A stand-in for a cluster with Kueue, in this process: kmock's HTTP server and object store, and what it leaves out.

kmock answers the API's paths and keeps objects. Added here, because the flows depend on them: dry runs, strict
validation (by kubernetes-validate), label selectors, namespaces that must exist, what a server fills in, deletion of
dependents, logs, Kueue's visibility API, and small controllers in place of Kueue's, the Job's, the scheduler and the
autoscaler. Their rules are those of the real ones as far as these flows go:

* quota: Kueue's flavor assignment; messages as in kueue/pkg/scheduler/flavorassigner;
* podFailurePolicy: "Pod failure policy" in Kubernetes' documentation of Jobs: the first rule that fits decides.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import attrs
import kmock
import kubernetes_validate
import yaml

KUBERNETES_VERSION = "1.35"
JOBS, PODS, EVENTS, NODES = "batch/v1/jobs", "v1/pods", "v1/events", "v1/nodes"
WORKLOADS = "kueue.x-k8s.io/v1beta2/workloads"
Object = dict[str, Any]

_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: Any) -> int:
    """A Kubernetes quantity as a number."""
    digits = str(text).rstrip("KMGTi")
    return int(digits) * _UNITS[str(text)[len(digits) :]]


@attrs.define(kw_only=True)
class Server(kmock.KubernetesEmulator):
    """The API server; the controllers run after each change."""

    namespaces: set[str] = attrs.field(factory=set)
    local_queues: dict[tuple[str, str], str] = attrs.field(factory=dict)  # (namespace, name) -> ClusterQueue
    cluster_queues: dict[str, Object] = attrs.field(factory=dict)
    flavors: dict[str, Object] = attrs.field(factory=dict)
    priorities: dict[str, int] = attrs.field(factory=dict)
    texts: dict[tuple[str, str], str] = attrs.field(factory=dict)  # (pod, container) -> log
    fault: Callable[[kmock.Request], kmock.KubernetesError | None] | None = None
    strange: bytes | None = None  # every answer, instead of Kubernetes' own
    kueue: bool = True
    scheduling: bool = True
    asked: list[tuple[str, str]] = attrs.field(factory=list)
    _numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    async def __call__(self, raw_request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        parts = raw_request.path.strip("/").split("/")
        if parts[:3] == ["api", "v1", "namespaces"] and len(parts) <= 4:
            # kmock takes these paths for a namespace's, not for namespaces.
            return await self._namespace(raw_request, parts[3] if len(parts) == 4 else "")
        return await super().__call__(raw_request)

    async def _namespace(self, raw_request: aiohttp.web.BaseRequest, name: str) -> aiohttp.web.StreamResponse:
        if raw_request.method == "POST":
            thing = await raw_request.json()
            self.namespaces.add(thing["metadata"]["name"])
            return aiohttp.web.json_response(thing)
        if name not in self.namespaces:
            return await self._render_error(_error(404, "NotFound", f'namespaces "{name}" not found'))
        if raw_request.method == "DELETE":
            self.namespaces.discard(name)
            for (_, namespace, _), each in list(self.objects.items()):
                if namespace == name and not each.deleted:
                    each.delete()
        return aiohttp.web.json_response({"kind": "Namespace", "metadata": {"name": name}})

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        self.asked.append((request.method.value, str(request.url)))
        if self.strange is not None:
            return aiohttp.web.Response(body=self.strange, content_type="text/html")
        if self.fault and (error := self.fault(request)):
            raise error
        if request.subresource == "pendingworkloads":
            return aiohttp.web.json_response(self._pending(request))
        if request.subresource == "log":
            key = (str(request.name), request.params["container"])
            if key not in self.texts:
                raise _error(400, "BadRequest", f'container "{key[1]}" in pod "{key[0]}" is waiting to start')
            return aiohttp.web.Response(text=self.texts[key])
        if request.action == kmock.action.CREATE:
            self._admit(request)
            if request.params.get("dryRun") == "All":
                return aiohttp.web.json_response(request.data)
        name = request.name
        known = self._get(request.resource, request.namespace, name) if request.resource and name else None
        if name and known is None and request.action in (kmock.action.FETCH, kmock.action.DELETE):
            kind = f"{request.resource.plural}.{request.resource.group}".rstrip(".")
            raise _error(404, "NotFound", f'{kind} "{name}" not found')
        if request.action == kmock.action.DELETE and known is not None:
            self._collect(known["metadata"]["uid"])
        response = await super()._handle(request)
        if request.action == kmock.action.CREATE and isinstance(request.data, dict):
            install(self, [{"kind": "", **request.data}])
        if request.action == kmock.action.UPDATE and request.name in self.cluster_queues:
            changed = self._get(request.resource, request.namespace, request.name)
            self.cluster_queues[request.name] = changed or self.cluster_queues[request.name]
        if request.subresource == "status" and request.resource == kmock.resource(PODS):
            self._reported(request.name)
        self.reconcile()
        return response

    async def _serve_list(self, request: kmock.Request) -> Any:
        if request.resource and not any(resource == request.resource for resource in self._get_resources()):
            return {"metadata": {}, "items": []}
        answer = await super()._serve_list(request)
        wanted = dict(each.split("=", 1) for each in request.params.get("labelSelector", "").split(",") if each)
        items = [each for each in answer["items"] if wanted.items() <= each["metadata"].get("labels", {}).items()]
        # In pages, if asked for, as the real one.
        start = int(request.params.get("continue") or 0)
        limit = min(int(request.params.get("limit") or len(items) or 1), 7)
        rest = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return {"metadata": {"resourceVersion": "1", **rest}, "items": items[start : start + limit]}

    def all(self, resource: str) -> list[Object]:
        """The objects of a resource, the oldest first."""
        wanted = kmock.resource(resource)
        return [each.raw for (kind, _, _), each in self.objects.items() if kind == wanted and not each.deleted]

    def put(self, resource: str, thing: Object) -> Object:
        """Make an object without asking."""
        metadata = thing["metadata"]
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", _now())
        self.objects[resource, metadata.get("namespace"), metadata["name"]] = thing
        return thing

    def change(self, resource: str, thing: Object, **parts: Any) -> None:
        """Replace parts of an object."""
        metadata = thing["metadata"]
        self.objects[resource, metadata.get("namespace"), metadata["name"]].patch(parts)

    def job(self, name: str) -> Object:
        """The Job of that name."""
        return next(each for each in self.all(JOBS) if each["metadata"]["name"] == name)

    def pods_of(self, job: str) -> list[Object]:
        """A Job's pods, the oldest first."""
        return [pod for pod in self.all(PODS) if pod["metadata"]["ownerReferences"][0]["name"] == job]

    def reconcile(self) -> None:
        """Let the controllers do what is to do."""
        if self.kueue:
            self._queue_jobs()
            self._admit_workloads()
        self._start_pods()

    # What a server does to what it is sent.

    def _get(self, resource: Any, namespace: str | None, name: str | None) -> Object | None:
        for (kind, space, key), each in self.objects.items():
            if kind == resource and space == namespace and key == name and not each.deleted:
                raw: Object = each.raw
                return raw
        return None

    def _admit(self, request: kmock.Request) -> None:
        data, resource = request.data, request.resource
        assert resource is not None
        name = data["metadata"].get("name")
        if request.namespace is not None and request.namespace not in self.namespaces:
            raise _error(404, "NotFound", f'namespaces "{request.namespace}" not found')
        if data["metadata"].get("namespace", request.namespace) != request.namespace:
            raise _error(400, "BadRequest", "the namespace of the object does not match the namespace of the request")
        if request.params.get("fieldValidation") == "Strict":
            try:
                kubernetes_validate.validate(data, KUBERNETES_VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise _error(400, "BadRequest", f"strict decoding error: {error.message}") from None
        if self._get(resource, request.namespace, name):
            raise _error(409, "AlreadyExists", f'{resource.plural}.{resource.group} "{name}" already exists')
        data["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        data.setdefault("status", {})

    def _collect(self, owner: str) -> None:
        """Delete what an object owns, as background propagation does."""
        for (_, _, _), each in list(self.objects.items()):
            if not each.deleted and owner in [o["uid"] for o in each.raw["metadata"].get("ownerReferences", ())]:
                each.delete()

    # The controllers.

    def _queue_jobs(self) -> None:
        """Kueue makes a Workload for each suspended Job with a queue label."""
        owned = {load["metadata"]["ownerReferences"][0]["uid"] for load in self.all(WORKLOADS)}
        for job in self.all(JOBS):
            metadata = job["metadata"]
            if metadata["uid"] in owned or "kueue.x-k8s.io/queue-name" not in metadata.get("labels", {}):
                continue
            assert job["spec"]["suspend"], "Kueue's webhook suspends a Job before it is stored"
            self.put(
                WORKLOADS,
                {
                    "apiVersion": "kueue.x-k8s.io/v1beta2",
                    "kind": "Workload",
                    "metadata": {
                        "name": f"job-{metadata['name'][:50]}-{metadata['uid'][:5]}",
                        "namespace": metadata["namespace"],
                        "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
                        "ownerReferences": [
                            {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
                        ],
                    },
                    "spec": {
                        "queueName": metadata["labels"]["kueue.x-k8s.io/queue-name"],
                        "priority": self.priorities.get(metadata["labels"].get("kueue.x-k8s.io/priority-class"), 0),
                    },
                    "status": {"conditions": []},
                },
            )

    def _waiting(self) -> list[Object]:
        """Workloads that wait, the next first."""
        waiting = [load for load in self.all(WORKLOADS) if not _true(load, "Admitted") and not _true(load, "Finished")]
        return sorted(waiting, key=lambda load: -load["spec"]["priority"])

    def _admit_workloads(self) -> None:
        """Kueue admits what the quota has room for, the best priority and then the oldest first."""
        for load in self._waiting():
            namespace = load["metadata"]["namespace"]
            queue = self.local_queues.get((namespace, load["spec"]["queueName"]))
            if queue is None:
                told = f"LocalQueue {load['spec']['queueName']} doesn't exist"
                self._condition(load, "QuotaReserved", "False", "Misconfigured", told)
                continue
            trouble = self._trouble(load, queue)
            if trouble:
                reason, told = trouble
                self._condition(
                    load, "QuotaReserved", "False", reason, f"couldn't assign flavors to pod set main: {told}"
                )
                continue
            self._condition(load, "QuotaReserved", "True", "QuotaReserved", f"Quota reserved in ClusterQueue {queue}")
            self._condition(load, "Admitted", "True", "Admitted", "The workload is admitted")
            job = self._owner(load)
            flavor = self.flavors[self._flavor(queue)]["spec"]
            spec = copy.deepcopy(job["spec"])
            pod = spec["template"]["spec"]
            for key, value in flavor["nodeLabels"].items():
                assert pod.setdefault("nodeSelector", {}).setdefault(key, value) == value, "Kueue refuses a conflict"
            pod["tolerations"] = [*pod.get("tolerations", []), *flavor.get("tolerations", [])]
            spec["suspend"] = False
            self.change(JOBS, job, spec=spec, status={"startTime": _now()})

    def _flavor(self, queue: str) -> str:
        (group,) = self.cluster_queues[queue]["spec"]["resourceGroups"]
        name: str = group["flavors"][0]["name"]
        return name

    def _trouble(self, load: Object, queue: str) -> tuple[str, str] | None:
        """Why the quota has no room for a workload."""
        (group,) = self.cluster_queues[queue]["spec"]["resourceGroups"]
        quota = {each["name"]: quantity(each["nominalQuota"]) for each in group["flavors"][0]["resources"]}
        wanted = requests(self._owner(load)["spec"]["template"]["spec"])
        used = dict.fromkeys(quota, 0)
        for other in self.all(WORKLOADS):
            if _true(other, "Admitted") and not _true(other, "Finished"):
                for name, amount in requests(self._owner(other)["spec"]["template"]["spec"]).items():
                    used[name] += amount
        for name, amount in wanted.items():
            flavor = self._flavor(queue)
            if name not in quota:
                return "Misconfigured", f"resource {name} unavailable in ClusterQueue"
            if amount > quota[name]:
                return "ExceedsMaxQuota", (
                    f"insufficient quota for {name} in flavor {flavor}, previously considered podsets requests (0) + "
                    f"current podset request ({amount}) > maximum capacity ({quota[name]})"
                )
            if used[name] + amount > quota[name]:
                more = used[name] + amount - quota[name]
                return "WaitingForQuota", f"insufficient unused quota for {name} in flavor {flavor}, {more} more needed"
        return None

    def _owner(self, thing: Object) -> Object:
        uid = thing["metadata"]["ownerReferences"][0]["uid"]
        return next(job for job in self.all(JOBS) if job["metadata"]["uid"] == uid)

    def _start_pods(self) -> None:
        """The Job controller makes a pod, the autoscaler a node for it, the scheduler brings them together."""
        for job in self.all(JOBS):
            if job["spec"]["suspend"] or _true(job, "Complete") or _true(job, "Failed"):
                continue
            if any(pod["status"]["phase"] in ("Pending", "Running") for pod in self.pods_of(job["metadata"]["name"])):
                continue
            template, metadata = job["spec"]["template"], job["metadata"]
            number = next(self._numbers)
            spec = copy.deepcopy(template["spec"])
            status: Object = {"phase": "Pending", "conditions": []}
            if self.scheduling:
                node = f"node-{number}"
                selector = spec["nodeSelector"]
                self.put(
                    NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": dict(selector)}}
                )
                spec["nodeName"] = node
                status = _running(spec)
            self.put(
                PODS,
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"{metadata['name'][:57]}-{number:05}",
                        "namespace": metadata["namespace"],
                        "labels": {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": metadata["name"]},
                        "ownerReferences": [
                            {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
                        ],
                    },
                    "spec": spec,
                    "status": status,
                },
            )

    # What the world does.

    def run_to(self, job: str, container: str) -> None:
        """The containers before `container` have ended well, and it runs."""
        pod = self.pods_of(job)[-1]
        self.change(PODS, pod, status=_running(pod["spec"], container))

    def end(self, job: str, container: str, exit_code: int, message: str = "", reason: str = "") -> None:
        """A container of the Job's latest pod ends; well if its code is 0, and with the last one all is done."""
        pod = self.pods_of(job)[-1]
        names = [each["name"] for each in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])]
        last = container == names[-1]
        status = copy.deepcopy(_running(pod["spec"], container))
        for each in (*status["initContainerStatuses"], *status["containerStatuses"]):
            if each["name"] == container:
                each["state"] = {"terminated": {"exitCode": exit_code, "message": message, "reason": reason}}
        status["phase"] = "Failed" if exit_code else "Succeeded" if last else "Running"
        self.change(PODS, pod, status=status)
        if exit_code:
            self._failed(job)
        elif last:
            self._finished(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")

    def disrupt(self, job: str) -> None:
        """The Job's latest pod is drained from its node and ends with SIGTERM's code."""
        pod = self.pods_of(job)[-1]
        status = copy.deepcopy(pod["status"])
        status["phase"] = "Failed"
        status["conditions"] = [
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "DeletionByTaintManager",
                "message": "Taint manager: deleting due to NoExecute taint",
            }
        ]
        for each in (*status["initContainerStatuses"], *status["containerStatuses"]):
            if "running" in each["state"]:
                each["state"] = {"terminated": {"exitCode": 143, "reason": "Error"}}
        self.change(PODS, pod, status=status)
        self._failed(job)

    def lose_pods(self, job: str) -> None:
        """The node is removed, and its pods with it."""
        for pod in self.pods_of(job):
            self.objects[PODS, pod["metadata"]["namespace"], pod["metadata"]["name"]].delete()

    def _reported(self, name: str | None) -> None:
        """A kubelet has reported a pod's end to the API; the Job controller reads it there."""
        for pod in self.all(PODS):
            if pod["metadata"]["name"] == name and pod["status"]["phase"] == "Succeeded":
                owner = pod["metadata"]["ownerReferences"][0]["name"]
                self._finished(owner, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")

    def _failed(self, name: str) -> None:
        """The Job controller's reaction to a failed pod."""
        job = self.job(name)
        action, container, code = failure_action(job, self.pods_of(name)[-1])
        if action == "FailJob":
            pod = self.pods_of(name)[-1]["metadata"]
            told = (
                f"Container {container} for pod {pod['namespace']}/{pod['name']} failed with exit code {code} "
                "matching FailJob rule at index 1"
            )
            self._finished(name, "Failed", "PodFailurePolicy", told)
            return
        counted = [pod for pod in self.pods_of(name) if failure_action(job, pod)[0] == "Count"]
        if len(counted) > job["spec"]["backoffLimit"]:
            told = "Job has reached the specified backoff limit"
            self._finished(name, "Failed", "BackoffLimitExceeded", told)
        self.reconcile()

    def _finished(self, name: str, kind: str, reason: str, message: str) -> None:
        job = self.job(name)
        status = copy.deepcopy(job["status"])
        status.setdefault("conditions", []).append(
            {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": _now()}
        )
        self.change(JOBS, job, status=status)
        for load in self.all(WORKLOADS):
            if load["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]:
                self._condition(load, "Finished", "True", "JobFinished", message)
        self.reconcile()

    def _condition(self, thing: Object, kind: str, status: str, reason: str, message: str) -> None:
        conditions = [each for each in thing["status"].get("conditions", []) if each["type"] != kind]
        conditions.append({"type": kind, "status": status, "reason": reason, "message": message})
        self.change(WORKLOADS, thing, status={"conditions": conditions})

    def _pending(self, request: kmock.Request) -> Object:
        """Kueue's PendingWorkloadsSummary of a LocalQueue."""
        waiting = [
            load
            for load in self._waiting()
            if (load["metadata"]["namespace"], load["spec"]["queueName"]) == (request.namespace, request.name)
        ]
        return {
            "kind": "PendingWorkloadsSummary",
            "items": [
                {
                    "metadata": {"name": load["metadata"]["name"], "namespace": request.namespace},
                    "priority": load["spec"]["priority"],
                    "localQueueName": request.name,
                    "positionInClusterQueue": index,
                    "positionInLocalQueue": index,
                }
                for index, load in enumerate(waiting)
            ],
        }


def requests(pod: Object) -> dict[str, int]:
    """What a pod requests: the larger of its containers together and each init container."""
    total: dict[str, int] = {}
    for container in pod["containers"]:
        for name, amount in container["resources"]["requests"].items():
            total[name] = total.get(name, 0) + quantity(amount)
    for container in pod.get("initContainers", ()):
        for name, amount in container["resources"]["requests"].items():
            total[name] = max(total.get(name, 0), quantity(amount))
    return total


def failure_action(job: Object, pod: Object) -> tuple[str, str, int]:
    """What the Job's podFailurePolicy does about a failed pod, and the container and code that decided."""
    status = pod["status"]
    if status["phase"] != "Failed":
        return "", "", 0
    conditions = {(each["type"], each["status"]) for each in status.get("conditions", ())}
    ended = [
        (each["name"], each["state"]["terminated"]["exitCode"])
        for each in (*status["initContainerStatuses"], *status["containerStatuses"])
        if each["state"].get("terminated", {}).get("exitCode")
    ]
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if any((each["type"], each["status"]) in conditions for each in rule.get("onPodConditions", ())):
            return rule["action"], "", 0
        codes = rule.get("onExitCodes")
        for name, code in ended if codes else ():
            if codes.get("containerName", name) == name and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"], name, code
    return "Count", "", 0


def _running(spec: Object, container: str = "") -> Object:
    """The status of a pod whose containers before `container` (the first by default) have ended well."""
    names = [each["name"] for each in (*spec["initContainers"], *spec["containers"])]
    at = names.index(container) if container else 0
    states = [
        {"terminated": {"exitCode": 0, "reason": "Completed"}}
        if index < at
        else {"running": {"startedAt": _now()}}
        if index == at
        else {"waiting": {"reason": "PodInitializing"}}
        for index in range(len(names))
    ]
    image = {"image": spec["containers"][0]["image"], "imageID": "", "ready": False, "restartCount": 0}
    statuses = [{"name": name, **image, "state": state} for name, state in zip(names, states, strict=True)]
    count = len(spec["initContainers"])
    return {
        "phase": "Running" if at >= count else "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "initContainerStatuses": statuses[:count],
        "containerStatuses": statuses[count:],
    }


def _true(thing: Object, kind: str) -> bool:
    conditions = thing.get("status", {}).get("conditions", ())
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def _error(status: int, reason: str, message: str) -> kmock.KubernetesError:
    return kmock.KubernetesError(status=status, reason=reason, message=message, details={})


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def serving(folder: Path, stack: Object) -> Iterator[tuple[Server, Path]]:
    """A stand-in with the objects of a stack, and the kubeconfig that leads to it."""
    server = Server()
    install(server, stack["objects"].values())
    started, ended = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        async with server, kmock.Server(server) as listening:
            address.append(str(listening.url))
            started.set()
            await asyncio.get_running_loop().run_in_executor(None, ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(address[0])))
    try:
        yield server, kubeconfig
    finally:
        ended.set()
        thread.join(10)


def install(server: Server, objects: Any) -> None:
    """Give the stand-in a stack's namespace, queues, flavors and priorities."""
    for each in copy.deepcopy(list(objects)):
        name, kind = each["metadata"]["name"], each["kind"]
        if kind == "Namespace":
            server.namespaces.add(name)
        elif kind == "LocalQueue":
            server.local_queues[each["metadata"]["namespace"], name] = each["spec"]["clusterQueue"]
        elif kind == "ClusterQueue":
            server.cluster_queues[name] = each
        elif kind == "ResourceFlavor":
            server.flavors[name] = each
        elif kind == "WorkloadPriorityClass":
            server.priorities[name] = each["value"]


def _kubeconfig(address: str) -> Object:
    return json.loads(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "standin",
                "clusters": [{"name": "standin", "cluster": {"server": address.rstrip("/")}}],
                "users": [{"name": "standin", "user": {"token": "secret-token"}}],
                "contexts": [{"name": "standin", "context": {"cluster": "standin", "user": "standin"}}],
            }
        )
    )
