"""The flows on a real cluster with Kueue: kind, GKE, or a bare kube-apiserver with Kueue. Run by `make e2e`.

The cluster is that of $KUBECONFIG. All that is made is named after a new stack, e2e-XXXXXX, and removed again: a
namespace, a flavor, a queue of ten nodes, Node objects that no machine is behind, and Jobs on them. No image is
pulled: pods are bound here where no scheduler does it, and marked as finished here, as a kubelet would.

Nodes without a machine do not last on a cloud's cluster. There, name a pool that may grow to ten real nodes by its
label's value, E2E_NODE_POOL=VALUE (conversion-pool=VALUE); its nodes are paid for while the tests run.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from flows import *  # noqa: F403 - its tests are run here
from flows import World
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from stack import dump

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="no cluster: set KUBECONFIG to one that has Kueue"),
]

NODES = 10
_KUEUE = "kueue.x-k8s.io"
_WANTED = {"Namespace", "ResourceFlavor", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass", "ServiceAccount"}
_PLURALS = {
    "ResourceFlavor": "resourceflavors",
    "ClusterQueue": "clusterqueues",
    "LocalQueue": "localqueues",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}


class Cluster:
    """The cluster under test, and what was made in it."""

    def __init__(self) -> None:
        self.kubeconfig = os.environ["KUBECONFIG"]
        self.api = config.new_client_from_config(self.kubeconfig)
        self.core = client.CoreV1Api(self.api)
        self.batch = client.BatchV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self.leases = client.CoordinationV1Api(self.api)
        self.pool = os.environ.get("E2E_NODE_POOL", "")
        stack_name = f"e2e-{secrets.token_hex(3)}"
        dumped = copy.deepcopy(dump(stack_name))
        self.outputs: dict[str, Any] = dumped["outputs"]
        self.objects = [each for each in dumped["objects"].values() if each["kind"] in _WANTED]
        if self.pool:
            for each in self.objects:
                if each["kind"] == "ResourceFlavor":
                    each["spec"]["nodeLabels"]["conversion-pool"] = self.pool
                    each["spec"]["tolerations"][0]["value"] = self.pool
            self.outputs["nodeLabel"]["value"] = self.outputs["taint"]["value"] = self.pool
        self.namespace: str = self.outputs["namespace"]
        self.nodes = [] if self.pool else [f"{stack_name}-{number}" for number in range(NODES)]
        self.undo: list[Callable[[], Any]] = []
        self.ended = threading.Event()

    def install(self) -> None:
        """Apply the stack's objects, flavors before queues before the queue in the namespace."""
        order = ["Namespace", "WorkloadPriorityClass", "ResourceFlavor", "ClusterQueue", "LocalQueue", "ServiceAccount"]
        for each in sorted(self.objects, key=lambda each: order.index(each["kind"])):
            self._create(each)
        for name in self.nodes:
            self._create_node(name)
        threading.Thread(target=self._heartbeat, daemon=True).start()
        threading.Thread(target=self._bind, daemon=True).start()

    def remove(self) -> None:
        """Remove it all, Jobs and their namespace before the queues they hold."""
        self.ended.set()
        with suppress(ApiException):
            self.batch.delete_collection_namespaced_job(self.namespace, propagation_policy="Foreground")
        for pod in self.core.list_namespaced_pod(self.namespace).items:
            # No kubelet confirms the end of a pod on a node without a machine.
            with suppress(ApiException):
                self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=0)
        for undo in reversed(self.undo):
            with suppress(ApiException):
                undo()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                self.core.read_namespace(self.namespace)
            except ApiException as error:
                if error.status == 404:
                    return
            time.sleep(1)
        raise AssertionError(f"namespace {self.namespace} does not go away")

    def finish(self, job: str) -> None:
        """Let a Job's latest pod end well, as its kubelet would say it."""
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=f"batch.kubernetes.io/job-name={job}").items
        pod = max(pods, key=lambda each: each.metadata.creation_timestamp)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

        def ended(container: Any) -> dict[str, Any]:
            state = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}
            return {
                "name": container.name,
                "image": container.image,
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": state,
            }

        status = {
            "phase": "Succeeded",
            "initContainerStatuses": [ended(each) for each in pod.spec.init_containers],
            "containerStatuses": [ended(each) for each in pod.spec.containers],
        }
        self.core.patch_namespaced_pod_status(pod.metadata.name, self.namespace, {"status": status})

    @contextmanager
    def quota(self, cpus: str) -> Iterator[None]:
        """Another quota of CPUs for the queue, until the context ends."""
        name = next(each["metadata"]["name"] for each in self.objects if each["kind"] == "ClusterQueue")
        queue = self.custom.get_cluster_custom_object(_KUEUE, "v1beta2", "clusterqueues", name)
        before = copy.deepcopy(queue["spec"]["resourceGroups"])
        queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"] = cpus

        def patch(groups: Any) -> None:
            body = {"spec": {"resourceGroups": groups}}
            self.custom.patch_cluster_custom_object(_KUEUE, "v1beta2", "clusterqueues", name, body)

        patch(queue["spec"]["resourceGroups"])
        try:
            yield
        finally:
            patch(before)

    def _create(self, thing: dict[str, Any]) -> None:
        kind, name = thing["kind"], thing["metadata"]["name"]
        if kind == "Namespace":
            self.core.create_namespace(thing)
            self.undo.append(lambda: self.core.delete_namespace(name))
        elif kind == "ServiceAccount":
            self.core.create_namespaced_service_account(self.namespace, thing)
        elif kind == "LocalQueue":
            self.custom.create_namespaced_custom_object(_KUEUE, "v1beta2", self.namespace, _PLURALS[kind], thing)
        else:
            try:
                self.custom.create_cluster_custom_object(_KUEUE, "v1beta2", _PLURALS[kind], thing)
            except ApiException as error:
                # Priority classes have the same names in every stack.
                if error.status != 409 or kind != "WorkloadPriorityClass":
                    raise
                return
            self.undo.append(lambda: self.custom.delete_cluster_custom_object(_KUEUE, "v1beta2", _PLURALS[kind], name))

    def _create_node(self, name: str) -> None:
        """A Node object of the pool's machine type, as the kubelet would register it."""
        size = {"cpu": "63770m", "memory": "486Gi", "ephemeral-storage": "776Gi", "pods": "110"}
        label, taint = self.outputs["nodeLabel"], self.outputs["taint"]
        self.core.create_node(
            {
                "metadata": {"name": name, "labels": {label["key"]: label["value"], "kubernetes.io/hostname": name}},
                "spec": {"taints": [taint]},
            }
        )
        self.undo.append(lambda: self.core.delete_node(name))
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        self.core.patch_node_status(
            name, {"status": {"capacity": size, "allocatable": size, "conditions": [ready], "phase": "Running"}}
        )

    def _heartbeat(self) -> None:
        """Renew the nodes' leases, without which they are taken for dead after 40 seconds."""
        while not self.ended.wait(10):
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            for name in self.nodes:
                spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}
                lease = {"metadata": {"name": name}, "spec": spec}
                with suppress(ApiException):
                    try:
                        self.leases.patch_namespaced_lease(name, "kube-node-lease", lease)
                    except ApiException as error:
                        if error.status != 404:
                            raise
                        self.leases.create_namespaced_lease("kube-node-lease", lease)

    def _bind(self) -> None:
        """Be the scheduler where there is none: bind pods that nobody has bound for a while, one to a node."""
        seen: dict[str, float] = {}
        while not self.ended.wait(1):
            with suppress(ApiException):
                pods = self.core.list_namespaced_pod(self.namespace).items
                taken = {each.spec.node_name for each in pods if each.status.phase not in ("Succeeded", "Failed")}
                for pod in pods:
                    since = seen.setdefault(pod.metadata.uid, time.monotonic())
                    free = [name for name in self.nodes if name not in taken]
                    if pod.spec.node_name or time.monotonic() - since < 10 or not free:
                        continue
                    name = pod.metadata.name
                    body = {"metadata": {"name": name}, "target": {"kind": "Node", "apiVersion": "v1", "name": free[0]}}
                    self.core.create_namespaced_binding(self.namespace, body, _preload_content=False)
                    taken.add(free[0])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.install()
        yield made
    finally:
        made.remove()


@pytest.fixture
def world(cluster: Cluster, jobs: Command, tmp_path: Path) -> Iterator[World]:
    (tmp_path / "outputs.json").write_text(json.dumps(cluster.outputs))
    words = ("--stack-outputs", str(tmp_path / "outputs.json"), "--kubeconfig", cluster.kubeconfig)
    # Nothing of a bucket is read: what this machine may read there is not the cluster's business.
    (tmp_path / "out").mkdir()
    output = ("--output-root", str(tmp_path / "out"), "--output-claim", "results")
    yield World(jobs, (*words, *output), NODES, cluster.finish, cluster.quota, 180)
    for job in cluster.batch.list_namespaced_job(cluster.namespace).items:
        with suppress(ApiException):
            cluster.batch.delete_namespaced_job(job.metadata.name, cluster.namespace, propagation_policy="Background")
    for pod in cluster.core.list_namespaced_pod(cluster.namespace).items:
        with suppress(ApiException):
            cluster.core.delete_namespaced_pod(pod.metadata.name, cluster.namespace, grace_period_seconds=0)
