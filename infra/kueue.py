"""Kueue: the chart where this stack installs it, and the queues in front of the pools."""

from collections.abc import Sequence
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
import yaml

from infra import pool as facts
from infra.cluster import Target
from infra.config import Config, PoolConfig, Queue
from infra.kubernetes import custom_object

API_VERSION = "kueue.x-k8s.io/v1beta2"
CHART = "oci://registry.k8s.io/kueue/charts/kueue"
PRIORITIES = {"very-high": 1000, "high": 750, "medium": 500, "low": 250}

_KUEUE_NAMESPACE = "kueue-system"
# A namespace has this label whatever its name, from Kubernetes 1.22 on.
_NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
# Deleting an object waits for Kueue to lift its finalizer; a stuck one must not hold `destroy` for ever.
_DELETE_TIMEOUT = pulumi.CustomTimeouts(delete="10m")


def create(
    config: Config, target: Target, provider: k8s.Provider, pools: Sequence[pulumi.Resource]
) -> list[pulumi.Resource]:
    """Make Kueue (if it is ours), flavors, ClusterQueues and priorities; returns what a queue in use needs.

    Each object depends on what its finalizer waits for: `destroy` goes LocalQueue, namespace with its Jobs,
    ClusterQueue, ResourceFlavor, Kueue, so that the controller is there until the last finalizer is lifted.
    """
    installed = [_install(config, target, provider)] if config.installs_kueue else []

    def opts(*after: pulumi.Resource) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(
            provider=provider, depends_on=[*installed, *pools, *after], custom_timeouts=_DELETE_TIMEOUT
        )

    flavors = {
        pool.pool_name: custom_object(
            f"flavor-{pool.pool_name}", API_VERSION, "ResourceFlavor", _flavor(config, pool), opts()
        )
        for pool in config.pools
    }
    queues = [
        custom_object(
            f"clusterqueue-{queue.name}",
            API_VERSION,
            "ClusterQueue",
            _cluster_queue(config, queue),
            opts(flavors[queue.pool_name]),
        )
        for queue in config.queues
    ]
    priorities = [
        custom_object(
            f"priority-{name}",
            API_VERSION,
            "WorkloadPriorityClass",
            {
                "metadata": {"name": name},
                "value": value,
                "description": f"Conversions of {name.replace('-', ' ')} priority",
            },
            opts(),
        )
        for name, value in PRIORITIES.items()
        if config.creates_priority_classes
    ]
    return [*installed, *queues, *priorities]


def create_local_queues(
    config: Config,
    provider: k8s.Provider,
    namespace: k8s.core.v1.Namespace,
    queues: Sequence[pulumi.Resource],
) -> None:
    """Make the LocalQueues that Jobs name in their kueue.x-k8s.io/queue-name label."""
    for queue in config.queues:
        custom_object(
            f"localqueue-{queue.name}",
            API_VERSION,
            "LocalQueue",
            {
                "metadata": {"name": queue.name, "namespace": config.namespace},
                "spec": {"clusterQueue": config.scoped(queue.name)},
            },
            pulumi.ResourceOptions(provider=provider, depends_on=[namespace, *queues], custom_timeouts=_DELETE_TIMEOUT),
        )


def _install(config: Config, target: Target, provider: k8s.Provider) -> k8s.helm.v3.Release:
    """The chart, CRDs included. Helm waits for the controller, which is ready once its webhook serves."""
    namespace = k8s.core.v1.Namespace(
        "kueue-namespace",
        metadata=k8s.meta.v1.ObjectMetaArgs(name=_KUEUE_NAMESPACE),
        opts=pulumi.ResourceOptions(provider=provider),
    )
    return k8s.helm.v3.Release(
        "kueue",
        name="kueue",
        chart=CHART,
        version=config.kueue.kueue_version,
        namespace=_KUEUE_NAMESPACE,
        atomic=True,
        timeout=900,
        max_history=5,
        values={
            "controllerManager": {"nodeSelector": target.system_node_label},
            "managerConfig": {
                "controllerManagerConfigYaml": yaml.safe_dump(_controller_config(config), sort_keys=False)
            },
        },
        opts=pulumi.ResourceOptions(provider=provider, depends_on=[namespace, *target.ready]),
    )


def _controller_config(config: Config) -> dict[str, Any]:
    """The controller's configuration file, which replaces the chart's as a whole."""
    timeout = f"{config.kueue.pods_ready_timeout_minutes}m"
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443"},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        # In the Jobs' namespace a Job without a queue waits instead of passing the others.
        "manageJobsWithoutQueueName": True,
        "managedJobsNamespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: config.namespace}},
        # A Job whose node does not come gives its quota back and queues again, for as long as it takes.
        "waitForPodsReady": {
            "timeout": timeout,
            "recoveryTimeout": timeout,
            "blockAdmission": False,
            "requeuingStrategy": {
                "timestamp": "Eviction",
                "backoffBaseSeconds": 60,
                "backoffMaxSeconds": 1800,
            },
        },
        "integrations": {"frameworks": ["batch/job"]},
        "objectRetentionPolicies": {"workloads": {"afterFinished": "168h"}},
    }


def _flavor(config: Config, pool: PoolConfig) -> dict[str, Any]:
    """The pool's nodes as Kueue sees them; it gives admitted pods the node selector and the toleration."""
    label = config.scoped(pool.pool_name)
    return {
        "metadata": {"name": label},
        "spec": {"nodeLabels": facts.node_label(label), "tolerations": [facts.toleration(label)]},
    }


def _cluster_queue(config: Config, queue: Queue) -> dict[str, Any]:
    """A quota of so many pods' requests: that many run, the next one waits."""
    quota = config.pool(queue.pool_name).request.resources(queue.nodes)
    spec: dict[str, Any] = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: config.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        # A conversion that runs is not stopped for one of higher priority; priorities order those that wait.
        "preemption": {
            "withinClusterQueue": "Never",
            "reclaimWithinCohort": "Any" if config.kueue.cohort else "Never",
        },
        "resourceGroups": [
            {
                "coveredResources": list(quota),
                "flavors": [
                    {
                        "name": config.scoped(queue.pool_name),
                        "resources": [{"name": name, "nominalQuota": amount} for name, amount in quota.items()],
                    }
                ],
            }
        ],
    }
    if config.kueue.cohort:
        spec["cohortName"] = config.kueue.cohort
    return {"metadata": {"name": config.scoped(queue.name)}, "spec": spec}
