"""The whole program against mocks: what it makes, what it must not make, and in which order."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml
from harness import (
    EXISTING_CLUSTER,
    PROJECT,
    ROOT,
    SECRET_SIGNATURE,
    Stack,
    default_stack,
    strings,
    up,
    whole,
)

from infra import pool

TOKEN = "hf_secretvalue0123456789"

SCENARIOS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "adopted": {"config": {"adoptCluster": "tpu"}},
    "adopted with Kueue": {"config": {"adoptCluster": "tpu", "kueue": "install"}},
    "spot and local SSD": {"config": {"spot": True, "localSsdCount": 8}},
    "existing secret": {"config": {"huggingFaceSecret": "team-token"}},
    "token": {"config": {"huggingFaceToken": TOKEN}, "secrets": ("huggingFaceToken",)},
    "GitHub": {"config": {"githubRepository": "acme/models", "submitters": ["user:ann@acme.example"]}},
    "two pools": {
        "config": {
            "extraPools": [{"poolName": "small", "machineType": "n2-highmem-32", "maxNodes": 4}],
            "extraQueues": [{"queueName": "nightly", "nodes": 3}],
            "cohort": "conversions",
        }
    },
    "money": {"config": {"monthlyBudget": 2000, "billingAccount": "0-1-2", "alertEmail": "ops@acme.example"}},
}


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest) -> Stack:
    """One stack of each kind."""
    return up(**SCENARIOS[request.param])


def conversion_pool(stack: Stack, name: str = "conversion") -> dict[str, Any]:
    """What GKE is asked for."""
    inputs: dict[str, Any] = whole(stack[f"pool-{name}"].inputs)
    return inputs


# --- The pool --------------------------------------------------------------------------------------


def test_the_pool_scales_from_zero_to_ten_and_back() -> None:
    asked = conversion_pool(default_stack())
    assert asked["autoscaling"] == {"totalMinNodeCount": 0, "totalMaxNodeCount": 10, "locationPolicy": "ANY"}
    assert asked["initialNodeCount"] == 0
    assert "nodeCount" not in asked
    # A manual resize changes initialNodeCount in GKE, which would replace the pool.
    assert "initialNodeCount" in default_stack()["pool-conversion"].ignored
    # No surge node, which would be one more large machine, and is one that can never be idle.
    assert asked["upgradeSettings"] == {"strategy": "SURGE", "maxSurge": 0, "maxUnavailable": 1}
    assert asked["management"] == {"autoRepair": True, "autoUpgrade": True}


def test_no_pool_has_limits_per_zone_and_no_node_a_public_address(scenario: Stack) -> None:
    pools = scenario.of_type("NodePool")
    assert pools
    for each in pools:
        assert not {"minNodeCount", "maxNodeCount"} & set(each.inputs["autoscaling"])
        assert {"totalMinNodeCount", "totalMaxNodeCount"} <= set(each.inputs["autoscaling"])
        assert each.inputs["networkConfig"]["enablePrivateNodes"] is True
    for cluster in scenario.of_type("Cluster"):
        assert cluster.inputs["privateClusterConfig"]["enablePrivateNodes"] is True
        # Node pools inside the cluster resource would fight with those beside it.
        assert "nodePools" not in cluster.inputs


def test_the_nodes() -> None:
    node = conversion_pool(default_stack())["nodeConfig"]
    assert node["machineType"] == "n2-highmem-64"
    assert node["labels"] == {pool.LABEL_KEY: "shardpool-dev-conversion"}
    assert node["taints"] == [{"key": pool.LABEL_KEY, "value": "shardpool-dev-conversion", "effect": "NO_SCHEDULE"}]
    assert node["serviceAccount"] == "shardpool-dev-nodes@acme-ml.iam.gserviceaccount.com"
    assert node["workloadMetadataConfig"] == {"mode": "GKE_METADATA"}
    assert node["gcfsConfig"] == {"enabled": True}
    assert node["shieldedInstanceConfig"] == {"enableSecureBoot": True, "enableIntegrityMonitoring": True}
    assert (node["diskType"], node["diskSizeGb"]) == ("pd-balanced", 1000)
    assert node["spot"] is False
    assert "ephemeralStorageLocalSsdConfig" not in node
    assert "preemptible" not in node


def test_spot_and_local_ssd() -> None:
    stack = up({"spot": True, "localSsdCount": 8, "nodeZones": ["us-central1-a"]})
    asked = conversion_pool(stack)
    assert asked["nodeConfig"]["spot"] is True
    assert asked["nodeConfig"]["ephemeralStorageLocalSsdConfig"] == {"localSsdCount": 8}
    assert asked["nodeLocations"] == ["us-central1-a"]
    request = pool.pod_request(local_ssd_count=8)
    assert stack.outputs["podRequest"]["ephemeralStorage"] == f"{request.ephemeral_storage_gib}Gi"
    assert request.ephemeral_storage_gib > 2 * pool.pod_request().ephemeral_storage_gib


def test_only_the_jobs_tolerate_the_taint(scenario: Stack) -> None:
    for each in scenario.resources:
        if each.type.endswith(":ResourceFlavor"):
            continue  # it gives the toleration to the Jobs Kueue admits
        assert "tolerations" not in list(strings(each.inputs)), each.name
    for each in scenario.of_type("ResourceFlavor"):
        assert each.manifest["spec"]["tolerations"] == [pool.toleration(each.manifest["metadata"]["name"])]


# --- The cluster -----------------------------------------------------------------------------------


def test_the_cluster() -> None:
    asked = whole(default_stack()["cluster"].inputs)
    assert asked["location"] == "us-central1"
    assert asked["networkingMode"] == "VPC_NATIVE"
    assert asked["ipAllocationPolicy"] == {
        "clusterSecondaryRangeName": "pods",
        "servicesSecondaryRangeName": "services",
    }
    assert asked["workloadIdentityConfig"] == {"workloadPool": "acme-ml.svc.id.goog"}
    assert asked["datapathProvider"] == "ADVANCED_DATAPATH"
    assert asked["releaseChannel"] == {"channel": "REGULAR"}
    assert asked["clusterAutoscaling"] == {"enabled": False, "autoscalingProfile": "OPTIMIZE_UTILIZATION"}
    assert asked["costManagementConfig"] == {"enabled": True}
    assert asked["enableShieldedNodes"] is True
    assert asked["deletionProtection"] is True
    assert asked["controlPlaneEndpointsConfig"] == {
        "dnsEndpointConfig": {"allowExternalTraffic": True},
        "ipEndpointsConfig": {"enabled": False},
    }
    assert asked["loggingConfig"] == {"enableComponents": ["SYSTEM_COMPONENTS", "WORKLOADS"]}
    assert asked["removeDefaultNodePool"] is True
    # The first pool lives for a minute, but not as the project's default account, which is an editor.
    assert asked["nodeConfig"]["serviceAccount"].startswith("shardpool-dev-nodes@")
    assert "authenticatorGroupsConfig" not in asked


def test_upgrades_keep_to_the_window_and_the_exclusions() -> None:
    policy = whole(default_stack()["cluster"].inputs)["maintenancePolicy"]
    window = policy["recurringWindow"]
    assert window["recurrence"] == "FREQ=WEEKLY;BYDAY=SA,SU"
    # The first window lies on a day that the rule names: 2026-01-03 is a Saturday. Two of 23 h a week are
    # well over the 48 h in 32 days that GKE wants.
    assert (window["startTime"], window["endTime"]) == ("2026-01-03T00:00:00Z", "2026-01-03T23:00:00Z")
    (minor,) = policy["maintenanceExclusions"]
    assert minor["exclusionOptions"] == {
        "scope": "NO_MINOR_UPGRADES",
        "endTimeBehavior": "UNTIL_END_OF_SUPPORT",
    }
    assert "endTime" not in minor
    launch = {"name": "launch", "start": "2026-12-07T00:00:00Z", "end": "2026-12-14T00:00:00Z"}
    asked = whole(up({"maintenanceExclusions": [launch]})["cluster"].inputs)["maintenancePolicy"]
    assert asked["maintenanceExclusions"][1] == {
        "exclusionName": "launch",
        "startTime": "2026-12-07T00:00:00Z",
        "endTime": "2026-12-14T00:00:00Z",
        "exclusionOptions": {"scope": "NO_MINOR_OR_NODE_UPGRADES"},
    }


def test_the_network_reaches_hubs_and_storage_without_public_addresses() -> None:
    stack = default_stack()
    assert stack["subnetwork"].inputs["privateIpGoogleAccess"] is True
    assert stack["network"].inputs["autoCreateSubnetworks"] is False
    nat = whole(stack["nat"].inputs)
    assert nat["subnetworks"] == [{"name": "subnetwork-id", "sourceIpRangesToNats": ["ALL_IP_RANGES"]}]
    assert nat["natIpAllocateOption"] == "AUTO_ONLY"
    # Dynamic ports need endpoint-independent mapping off and powers of two.
    assert nat["enableDynamicPortAllocation"] is True
    assert nat["enableEndpointIndependentMapping"] is False
    assert all(bin(nat[key]).count("1") == 1 for key in ("minPortsPerVm", "maxPortsPerVm"))


def test_kueue_and_kube_system_have_small_nodes_of_their_own() -> None:
    stack = default_stack()
    asked = whole(stack["system"].inputs)
    assert asked["nodeConfig"]["machineType"] == "e2-standard-4"
    assert asked["autoscaling"]["totalMinNodeCount"] == 1
    assert "taints" not in asked["nodeConfig"]
    selector = stack["kueue"].inputs["values"]["controllerManager"]["nodeSelector"]
    assert selector
    assert selector == asked["nodeConfig"]["labels"]
    assert not set(selector.items()) & set(conversion_pool(stack)["nodeConfig"]["labels"].items())


def test_a_zonal_cluster() -> None:
    stack = up(place={"gcp:project": "acme-ml", "gcp:zone": "us-central1-b"})
    assert stack["cluster"].inputs["location"] == "us-central1-b"
    assert stack["pool-conversion"].inputs["location"] == "us-central1-b"
    assert stack["subnetwork"].inputs["region"] == "us-central1"
    assert stack["checkpoints"].inputs["location"] == "US-CENTRAL1"


# --- An adopted cluster ----------------------------------------------------------------------------


def test_an_adopted_cluster_gets_pool_identities_queues_and_bucket_only() -> None:
    stack = up({"adoptCluster": "tpu"})
    for type_ in (
        "Cluster",
        "Network",
        "Subnetwork",
        "Router",
        "RouterNat",
        "Release",
        "WorkloadPriorityClass",
    ):
        assert not stack.of_type(type_), type_
    assert [each.name for each in stack.of_type("NodePool")] == ["pool-conversion"]
    assert stack["pool-conversion"].inputs["cluster"] == "tpu"
    for type_ in ("ResourceFlavor", "ClusterQueue", "LocalQueue", "Bucket", "Repository", "ServiceAccount"):
        assert len(stack.of_type(type_)) == 1, type_
    ((token, arguments, there),) = stack.calls
    assert not there
    assert token == "gcp:container/getCluster:getCluster"
    assert arguments == {"name": "tpu", "location": "us-central1", "project": "acme-ml"}
    kubeconfig = json.loads(stack["kubernetes"].inputs["kubeconfig"])
    assert kubeconfig["clusters"][0]["cluster"] == {
        "server": "https://203.0.113.7",
        "certificate-authority-data": "Q0E=",
    }
    assert stack.outputs["getCredentials"] == (
        "gcloud container clusters get-credentials tpu --location=us-central1 --project=acme-ml"
    )
    assert not stack.warnings


def test_an_adopted_cluster_gets_kueue_if_asked() -> None:
    stack = up({"adoptCluster": "tpu", "kueue": "install"})
    assert len(stack.of_type("Release")) == 1
    assert len(stack.of_type("WorkloadPriorityClass")) == 4
    assert stack["kueue"].inputs["values"]["controllerManager"]["nodeSelector"] == {}


def test_an_adopted_cluster_is_reached_by_its_dns_name_if_it_has_one() -> None:
    endpoints = [{"dnsEndpointConfigs": [{"endpoint": "gke-9.gke.goog", "allowExternalTraffic": True}]}]
    stack = up({"adoptCluster": "tpu"}, cluster={**EXISTING_CLUSTER, "controlPlaneEndpointsConfigs": endpoints})
    kubeconfig = json.loads(stack["kubernetes"].inputs["kubeconfig"])
    assert kubeconfig["clusters"][0]["cluster"] == {"server": "https://gke-9.gke.goog"}
    assert stack.outputs["getCredentials"].endswith(" --dns-endpoint")


@pytest.mark.parametrize(
    ("config", "cluster", "message"),
    [
        ({"adoptCluster": "tpu"}, {"enableAutopilot": True}, "adoptCluster: 'tpu' is an Autopilot cluster"),
        (
            {"adoptCluster": "tpu"},
            {"workloadIdentityConfigs": []},
            "adoptCluster: 'tpu' has no Workload Identity",
        ),
        ({"adoptCluster": "gone"}, {}, "adoptCluster: cannot read cluster 'gone' in us-central1"),
    ],
)
def test_a_cluster_that_cannot_serve_is_refused_before_anything_is_made(
    config: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    stack = Stack()
    with pytest.raises(pulumi.RunError, match=f"^{re.escape(message)}") as refused:
        up(config, cluster={**EXISTING_CLUSTER, **cluster}, stack=stack)
    assert not stack.resources
    assert "\n" not in str(refused.value)


def test_an_adopted_cluster_that_enforces_no_network_policy_is_a_warning() -> None:
    legacy = {**EXISTING_CLUSTER, "datapathProvider": "LEGACY_DATAPATH"}
    (warning,) = up({"adoptCluster": "tpu"}, cluster=legacy).warnings
    assert "enforces no NetworkPolicy" in warning
    calico = {**legacy, "networkPolicies": [{"enabled": True, "provider": "CALICO"}]}
    assert not up({"adoptCluster": "tpu"}, cluster=calico).warnings
    slow = {**EXISTING_CLUSTER, "clusterAutoscalings": [{"autoscalingProfile": "BALANCED", "enabled": False}]}
    (warning,) = up({"adoptCluster": "tpu"}, cluster=slow).warnings
    assert "BALANCED" in warning


# --- Kueue -----------------------------------------------------------------------------------------


def quantity(text: str) -> int:
    """A Kubernetes quantity in its base unit."""
    return int(text[:-2]) * 2**30 if text.endswith("Gi") else int(text)


@pytest.mark.parametrize("config", [{}, {"localSsdCount": 24}, {"maxNodes": 3, "machineType": "n2d-highmem-48"}])
def test_as_many_pods_as_nodes_run_and_the_next_waits(config: dict[str, Any]) -> None:
    stack = up(config)
    (group,) = stack["clusterqueue-conversion"].manifest["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    quota = {each["name"]: quantity(each["nominalQuota"]) for each in flavor["resources"]}
    output = stack.outputs["podRequest"]
    pod = {
        "cpu": quantity(output["cpu"]),
        "memory": quantity(output["memory"]),
        "ephemeral-storage": quantity(output["ephemeralStorage"]),
    }
    # Kueue never admits a pod that asks for a resource its queue does not cover.
    assert set(group["coveredResources"]) == set(quota) == set(pod)
    nodes = conversion_pool(stack)["autoscaling"]["totalMaxNodeCount"]
    for resource, amount in pod.items():
        assert quota[resource] // amount == nodes, resource


def test_queues_name_each_other() -> None:
    stack = default_stack()
    flavor = stack["flavor-conversion"].manifest
    queue = stack["clusterqueue-conversion"].manifest
    local = stack["localqueue-conversion"].manifest
    assert flavor["spec"]["nodeLabels"] == conversion_pool(stack)["nodeConfig"]["labels"]
    assert queue["spec"]["resourceGroups"][0]["flavors"][0]["name"] == flavor["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert local["metadata"] == {"name": "conversion", "namespace": "shardpool-dev"}
    assert queue["spec"]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "shardpool-dev"}}
    # No conversion is stopped for another, and nothing is lent.
    assert queue["spec"]["preemption"] == {"withinClusterQueue": "Never", "reclaimWithinCohort": "Never"}
    assert "cohortName" not in queue["spec"]
    assert {each.inputs["apiVersion"] for each in stack.kubernetes_objects() if "kueue" in each.type} == {
        "kueue.x-k8s.io/v1beta2"
    }


def test_priorities_are_ordered() -> None:
    stack = default_stack()
    values = {
        each.manifest["metadata"]["name"]: each.manifest["value"] for each in stack.of_type("WorkloadPriorityClass")
    }
    assert sorted(values, key=lambda name: -values[name]) == ["very-high", "high", "medium", "low"]
    assert len(set(values.values())) == 4


def test_the_chart() -> None:
    stack = up({"kueueVersion": "0.20.1", "podsReadyTimeoutMinutes": 45})
    release = stack["kueue"].inputs
    assert release["chart"] == "oci://registry.k8s.io/kueue/charts/kueue"
    assert release["version"] == "0.20.1"
    assert release["namespace"] == stack["kueue-namespace"].inputs["metadata"]["name"]
    # Without waiting, the queue objects would meet a webhook that is not there yet.
    assert not release.get("skipAwait")
    assert not release.get("skipCrds")
    assert not release.get("disableWebhooks")
    config = yaml.safe_load(release["values"]["managerConfig"]["controllerManagerConfigYaml"])
    assert config["apiVersion"] == "config.kueue.x-k8s.io/v1beta2"
    assert config["waitForPodsReady"]["timeout"] == config["waitForPodsReady"]["recoveryTimeout"] == "45m"
    # It queues again for as long as it takes.
    assert "backoffLimitCount" not in config["waitForPodsReady"]["requeuingStrategy"]
    assert config["integrations"] == {"frameworks": ["batch/job"]}
    assert config["manageJobsWithoutQueueName"] is True
    assert config["managedJobsNamespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "shardpool-dev"}}
    assert default_stack()["kueue"].inputs["version"] == "0.19.2"


def test_two_pools_and_lent_quota() -> None:
    stack = up(**SCENARIOS["two pools"])
    assert {each.name for each in stack.of_type("NodePool")} == {"system", "pool-conversion", "pool-small"}
    labels = [conversion_pool(stack, name)["nodeConfig"]["labels"][pool.LABEL_KEY] for name in ("conversion", "small")]
    assert len(set(labels)) == 2
    cpus = {}
    for each in stack.of_type("ClusterQueue"):
        (flavor,) = each.manifest["spec"]["resourceGroups"][0]["flavors"]
        cpus[each.name] = (flavor["name"], flavor["resources"][0]["nominalQuota"])
        assert each.manifest["spec"]["cohortName"] == "conversions"
        assert each.manifest["spec"]["preemption"]["reclaimWithinCohort"] == "Any"
    assert cpus == {
        "clusterqueue-conversion": ("shardpool-dev-conversion", "420"),
        "clusterqueue-nightly": ("shardpool-dev-conversion", "180"),
        "clusterqueue-small": ("shardpool-dev-small", "116"),
    }
    assert stack.outputs["queues"]["small"]["nodeLabel"]["value"] == labels[1]
    assert stack.outputs["queues"]["nightly"]["nodes"] == 3


# --- What Jobs need --------------------------------------------------------------------------------


def test_the_namespace_is_restricted() -> None:
    for name in ("enforce", "audit", "warn"):
        labels = default_stack()["namespace"].manifest["metadata"]["labels"]
        assert labels[f"pod-security.kubernetes.io/{name}"] == "restricted"


def test_jobs_reach_the_objects_of_one_bucket_and_nothing_else(scenario: Stack) -> None:
    converter = "serviceAccount:shardpool-dev-converter@acme-ml.iam.gserviceaccount.com"
    grants = [each for each in scenario.resources if each.inputs.get("member") == converter]
    (grant,) = grants
    assert grant.type.endswith(":BucketIAMMember")
    assert grant.inputs["role"] == "roles/storage.objectUser"
    assert grant.inputs["bucket"] == scenario["checkpoints"].inputs["name"]
    account = scenario["converter-account"].manifest
    assert account["metadata"]["annotations"] == {
        "iam.gke.io/gcp-service-account": converter.removeprefix("serviceAccount:")
    }
    binding = scenario["converter-workload-identity"].inputs
    assert binding["role"] == "roles/iam.workloadIdentityUser"
    assert binding["member"] == "serviceAccount:acme-ml.svc.id.goog[shardpool-dev/converter]"
    assert binding["serviceAccountId"].endswith("shardpool-dev-converter@acme-ml.iam.gserviceaccount.com")
    assert account["metadata"]["name"] == "converter"
    assert account["automountServiceAccountToken"] is False


def test_only_known_small_roles_are_granted(scenario: Stack) -> None:
    roles = {each.inputs["role"] for each in scenario.resources if "role" in each.inputs and "member" in each.inputs}
    assert roles <= {
        "roles/container.defaultNodeServiceAccount",
        "roles/artifactregistry.reader",
        "roles/artifactregistry.writer",
        "roles/storage.objectUser",
        "roles/iam.workloadIdentityUser",
        "projects/acme-ml/roles/shardpool_dev_submitter",
    }
    project_wide = {
        each.inputs["role"] for each in scenario.of_type("IAMMember") if each.type.startswith("gcp:projects/")
    }
    assert project_wide <= {
        "roles/container.defaultNodeServiceAccount",
        "projects/acme-ml/roles/shardpool_dev_submitter",
    }
    # An authoritative binding or policy would take rights from others in the project.
    assert not [
        each for each in scenario.resources if re.search(r"IAM(Policy|Binding)$|Iam(Policy|Binding)$", each.type)
    ]
    assert not [each for each in scenario.resources if each.type.endswith("account:Key")]


def test_the_bucket() -> None:
    asked = whole(default_stack()["checkpoints"].inputs)
    assert asked["uniformBucketLevelAccess"] is True
    assert asked["publicAccessPrevention"] == "enforced"
    assert asked["forceDestroy"] is False
    assert asked["softDeletePolicy"] == {"retentionDurationSeconds": 604800}
    assert asked["lifecycleRules"] == [{"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}]
    expiring = whole(up({"runExpiryDays": 30, "runExpiryPrefixes": ["runs/"]})["checkpoints"].inputs)
    assert expiring["lifecycleRules"][1] == {
        "action": {"type": "Delete"},
        "condition": {"age": 30, "matchesPrefixes": ["runs/"]},
    }


def test_a_bucket_elsewhere_is_warned_of() -> None:
    stack = up({"bucketLocation": "europe-west4"})
    assert stack["checkpoints"].inputs["location"] == "EUROPE-WEST4"
    assert any(warning.startswith("bucketLocation:") for warning in stack.warnings)
    assert not default_stack().warnings


def test_the_registry_cleans_up_and_the_nodes_may_pull() -> None:
    stack = default_stack()
    asked = whole(stack["images"].inputs)
    assert asked["format"] == "DOCKER"
    assert asked["cleanupPolicyDryRun"] is False
    delete, keep = asked["cleanupPolicies"]
    assert delete == {
        "id": "delete-untagged",
        "action": "DELETE",
        "condition": {"tagState": "UNTAGGED", "olderThan": "2592000s"},
    }
    assert keep["action"] == "KEEP"
    assert keep["mostRecentVersions"] == {"keepCount": 10}
    assert stack["nodes-images"].inputs["role"] == "roles/artifactregistry.reader"
    assert (
        stack["nodes-images"].inputs["member"] == "serviceAccount:shardpool-dev-nodes@acme-ml.iam.gserviceaccount.com"
    )


def test_the_token_is_only_ever_a_secret() -> None:
    stack = up(**SCENARIOS["token"])
    # Sent to the engine marked as a secret, and nowhere else: not in another resource, not in an output.
    for each in stack.resources:
        if TOKEN in json.dumps(each.raw):
            assert each.name == "hugging-face-token"
            assert each.raw["stringData"][SECRET_SIGNATURE]
    assert TOKEN in json.dumps(stack["hugging-face-token"].raw)
    assert TOKEN not in json.dumps(stack.raw_outputs)
    assert stack.outputs["secretName"] == stack["hugging-face-token"].manifest["metadata"]["name"]
    assert list(stack["hugging-face-token"].inputs["stringData"]) == [stack.outputs["secretKey"]]


def test_a_token_in_plain_text_is_refused() -> None:
    with pytest.raises(pulumi.RunError, match=r"^huggingFaceToken: is stored in plain text") as refused:
        up({"huggingFaceToken": TOKEN})
    assert TOKEN not in str(refused.value)


def test_an_existing_secret_is_named_and_none_is_made() -> None:
    stack = up(**SCENARIOS["existing secret"])
    assert stack.outputs["secretName"] == "team-token"
    assert not stack.of_type("Secret")
    assert default_stack().outputs["secretName"] == ""
    assert not default_stack().of_type("Secret")


def test_the_network_policy_lets_dns_https_and_metadata_out_and_nothing_in() -> None:
    spec = default_stack()["network-policy"].manifest["spec"]
    assert spec["podSelector"] == {}
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert not spec.get("ingress")
    dns, https, metadata = spec["egress"]
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert https["ports"] == [{"port": 443, "protocol": "TCP"}]
    # Dataplane V2 shows the metadata server at 169.254.169.254:80 (and 8080), others at 169.254.169.252:988.
    assert metadata["to"] == [{"ipBlock": {"cidr": "169.254.169.254/32"}}]
    assert [port["port"] for port in metadata["ports"]] == [80, 8080]


@pytest.mark.parametrize(
    ("config", "address", "ports"),
    [({}, "169.254.169.252/32", [988, 987]), ({"metadataServer": "127.0.0.1:988"}, "127.0.0.1/32", [988])],
)
def test_the_metadata_address_goes_by_the_dataplane_or_the_configuration(
    config: dict[str, Any], address: str, ports: list[int]
) -> None:
    legacy = {**EXISTING_CLUSTER, "datapathProvider": "LEGACY_DATAPATH"}
    stack = up({"adoptCluster": "tpu", **config}, cluster=legacy)
    metadata = stack["network-policy"].manifest["spec"]["egress"][2]
    assert metadata["to"] == [{"ipBlock": {"cidr": address}}]
    assert [port["port"] for port in metadata["ports"]] == ports


def test_submitters_may_submit_in_the_namespace_and_nothing_more() -> None:
    members = [
        "user:ann@acme.example",
        "group:ml@acme.example",
        "serviceAccount:composer@acme-ml.iam.gserviceaccount.com",
    ]
    stack = up({"submitters": members, "rbacSecurityGroup": "gke-security-groups@acme.example"})
    assert not stack.of_type("ClusterRole")
    assert not stack.of_type("ClusterRoleBinding")
    role = stack["submitter"].manifest
    assert role["metadata"]["namespace"] == "shardpool-dev"
    verbs = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    read = {"get", "list", "watch"}
    assert verbs == {
        ("batch", "jobs"): read | {"create", "delete"},
        ("", "pods"): read,
        ("", "pods/log"): read,
        ("", "events"): read,
        ("events.k8s.io", "events"): read,
        ("kueue.x-k8s.io", "workloads"): read,
        ("kueue.x-k8s.io", "localqueues"): read,
        ("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads"): read,
    }
    binding = stack["submitters"].manifest
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "submitter",
    }
    assert [(subject["kind"], subject["name"]) for subject in binding["subjects"]] == [
        ("User", "ann@acme.example"),
        ("Group", "ml@acme.example"),
        ("User", "composer@acme-ml.iam.gserviceaccount.com"),
    ]
    # To reach the control plane, and no right in it.
    assert sorted(stack["submitter-role"].inputs["permissions"]) == [
        "container.clusters.connect",
        "container.clusters.get",
    ]
    reach = [each.inputs["member"] for each in stack.of_type("IAMMember") if each.name.startswith("submitter-")]
    assert sorted(reach) == sorted(members)
    assert stack["cluster"].inputs["authenticatorGroupsConfig"] == {"securityGroup": "gke-security-groups@acme.example"}


def test_nobody_submits_unless_named() -> None:
    for type_ in ("RoleBinding", "IAMCustomRole", "WorkloadIdentityPool", "WorkloadIdentityPoolProvider"):
        assert not default_stack().of_type(type_), type_


def test_one_github_repository_submits_without_a_key() -> None:
    stack = up(**SCENARIOS["GitHub"])
    provider = stack["github-provider"].inputs
    assert provider["attributeCondition"] == "assertion.repository == 'acme/models'"
    assert provider["attributeMapping"]["attribute.repository"] == "assertion.repository"
    assert provider["oidc"] == {"issuerUri": "https://token.actions.githubusercontent.com"}
    member = stack["github-impersonation"].inputs["member"]
    assert member.startswith("principalSet://iam.googleapis.com/projects/123/locations/global/workloadIdentityPools/")
    assert member.endswith("/attribute.repository/acme/models")
    assert stack["github-images"].inputs["role"] == "roles/artifactregistry.writer"
    ci = "shardpool-dev-ci@acme-ml.iam.gserviceaccount.com"
    assert [subject["name"] for subject in stack["submitters"].manifest["subjects"]] == [
        "ann@acme.example",
        ci,
    ]
    assert stack.outputs["githubServiceAccount"] == ci
    assert stack.outputs["githubWorkloadIdentityProvider"].endswith("/x")
    pool_id = stack["github-pool"].inputs["workloadIdentityPoolId"]
    assert re.fullmatch(r"[a-z0-9-]{4,32}", pool_id)


# --- Alerts and logs -------------------------------------------------------------------------------


def test_failed_jobs_raise_an_alert() -> None:
    stack = up({"alertEmail": "ops@acme.example"})
    alert = stack["failed-jobs"].inputs
    (condition,) = alert["conditions"]
    text = condition["conditionMatchedLog"]["filter"]
    for part in (
        'logName="projects/acme-ml/logs/events"',
        'resource.labels.cluster_name="shardpool-dev"',
        'jsonPayload.involvedObject.kind="Job"',
        'jsonPayload.involvedObject.namespace="shardpool-dev"',
        '"BackoffLimitExceeded"',
        '"DeadlineExceeded"',
        '"PodFailurePolicy"',
    ):
        assert part in text
    # Monitoring refuses a log alert without one.
    assert alert["alertStrategy"]["notificationRateLimit"] == {"period": "300s"}
    assert alert["notificationChannels"] == ["projects/acme-ml/channels/1"]
    assert stack["alert-email"].inputs["labels"] == {"email_address": "ops@acme.example"}
    assert default_stack()["failed-jobs"].inputs["notificationChannels"] == []


def test_a_budget_only_if_asked() -> None:
    assert not default_stack().of_type("Budget")
    stack = up(**SCENARIOS["money"])
    ((_, _, there),) = stack.calls
    assert "api-cloudresourcemanager" in there  # which a new project has to switch on before it can be asked
    budget = whole(stack["budget"].inputs)
    assert budget["amount"] == {"specifiedAmount": {"units": "2000"}}
    assert budget["budgetFilter"] == {"projects": ["projects/123"]}
    assert [each.inputs["service"] for each in stack.of_type("Service")].count("billingbudgets.googleapis.com") == 1


def test_logs_are_kept_as_long_as_configured() -> None:
    stack = up({"logRetentionDays": 400})
    assert whole(stack["logs"].inputs)["retentionDays"] == 400
    sink = stack["logs-sink"].inputs
    assert sink["destination"] == (
        f"logging.googleapis.com/projects/acme-ml/locations/us-central1/buckets/{stack['logs'].inputs['bucketId']}"
    )
    assert 'resource.labels.namespace_name="shardpool-dev"' in sink["filter"]
    # The project's own bucket is everybody's.
    assert not stack["logs"].inputs["bucketId"].startswith("_")


# --- Order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        ("network", "api-compute"),
        ("cluster", "api-container"),
        ("cluster", "nat"),  # the first node pulls images from outside
        ("cluster", "nodes-role"),
        ("system", "cluster"),
        ("pool-conversion", "cluster"),
        ("pool-conversion", "nodes-role"),
        ("kubernetes", "system"),
        ("kueue", "system"),
        ("kueue", "kueue-namespace"),
        ("flavor-conversion", "kueue"),
        ("flavor-conversion", "pool-conversion"),
        ("clusterqueue-conversion", "kueue"),
        ("clusterqueue-conversion", "flavor-conversion"),
        ("priority-high", "kueue"),
        # `destroy` removes the namespace with its Jobs while Kueue can still lift their finalizers.
        ("namespace", "clusterqueue-conversion"),
        ("namespace", "kueue"),
        ("namespace", "pool-conversion"),
        ("localqueue-conversion", "namespace"),
        ("localqueue-conversion", "clusterqueue-conversion"),
        ("network-policy", "namespace"),
        ("submitter", "namespace"),
        ("submitters", "submitter"),
        ("converter-account", "namespace"),
        ("hugging-face-token", "namespace"),
        ("converter-workload-identity", "cluster"),
        ("checkpoints", "api-storage"),
        ("images", "api-artifactregistry"),
        ("submitter-role", "api-iam"),
        ("github-pool", "ci"),
        ("budget", "api-billingbudgets"),
    ],
)
def test_order_of_up_and_so_of_destroy(later: str, earlier: str) -> None:
    assert _everything().needs(later, earlier)
    assert not _everything().needs(earlier, later)


@functools.cache
def _everything() -> Stack:
    """A stack with all optional parts."""
    parts = SCENARIOS["GitHub"]["config"] | SCENARIOS["token"]["config"] | SCENARIOS["money"]["config"]
    return up(parts, secrets=("huggingFaceToken",))


def test_nodes_of_an_adopted_cluster_have_their_role_too() -> None:
    assert up({"adoptCluster": "tpu"}).needs("pool-conversion", "nodes-role")


def test_every_kubernetes_object_goes_into_the_cluster_of_the_stack() -> None:
    for each in default_stack().kubernetes_objects():
        assert default_stack().needs(each.name, "kubernetes"), each.name


def test_objects_with_finalizers_do_not_hold_destroy_for_ever() -> None:
    for each in default_stack().kubernetes_objects():
        if "kueue.x-k8s.io" in each.type:
            assert each.delete_timeout == "10m", each.name


# --- Names and outputs -----------------------------------------------------------------------------

# What is unique in a project, the world or a cluster, by where the name stands.
_NAME_FIELDS = ("name", "accountId", "repositoryId", "bucketId", "workloadIdentityPoolId", "roleId")


def physical_names(stack: Stack) -> set[tuple[str, str]]:
    """Every (type, name) that another stack in the same project and cluster could collide with."""
    names = set()
    for each in stack.resources:
        if each.is_kubernetes_object:
            metadata = each.inputs["metadata"]
            where = metadata.get("namespace")
            names.add((each.type, f"{where}/{metadata['name']}" if where else metadata["name"]))
        elif each.type != "kubernetes:helm.sh/v3:Release":
            names |= {(each.type, each.inputs[field]) for field in _NAME_FIELDS if field in each.inputs}
    return names


def test_two_stacks_in_one_project_and_one_cluster_do_not_collide() -> None:
    config = {"adoptCluster": "tpu", "githubRepository": "acme/models"}
    one, two = (physical_names(up(config, stack_name=name)) for name in ("dev", "prod"))
    assert len(one) > 10
    assert not one & two
    one, two = (physical_names(up({"priorityClasses": "existing"}, stack_name=name)) for name in ("dev", "prod"))
    # Each has a cluster of its own for Kueue.
    assert {name for _, name in one & two} == {"kueue-system"}


def test_two_pools_in_one_stack_do_not_collide() -> None:
    stack = up(**SCENARIOS["two pools"])
    urns = [each.urn for each in stack.resources]
    assert len(urns) == len(set(urns))
    objects = [(each.type, each.inputs["metadata"]["name"]) for each in stack.kubernetes_objects()]
    assert len(objects) == len(set(objects))


def test_long_pool_names_leave_room_for_the_suffix_and_differ() -> None:
    long = "pool-with-a-long-name-for-models-"
    stack = up({"poolName": f"{long}a", "extraPools": [{"poolName": f"{long}b"}]})
    names = {each.name for each in stack.of_type("NodePool")} - {"system"}
    # GKE takes 40 characters, of which Pulumi adds 8.
    assert len(names) == 2
    assert all(len(name) <= 32 for name in names)


def test_long_and_odd_stack_names_give_names_google_takes() -> None:
    for stack_name in ("a-very-long-stack-name-with-much-to-say-about-itself-and-others", "Dev_1.x"):
        stack = up(SCENARIOS["GitHub"]["config"], stack_name=stack_name)
        for account in stack.of_type("Account"):
            assert re.fullmatch(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])", account.inputs["accountId"])
        assert re.fullmatch(r"[a-z][-a-z0-9]{0,38}[a-z0-9]", stack["cluster"].inputs["name"])
        assert re.fullmatch(r"[a-z0-9][-a-z0-9]{1,61}[a-z0-9]", stack["checkpoints"].inputs["name"])
        assert re.fullmatch(r"[A-Za-z0-9_.]{3,64}", stack["submitter-role"].inputs["roleId"])
        assert len(stack["github-pool"].inputs["workloadIdentityPoolId"]) <= 32


def test_the_outputs_are_what_a_job_needs() -> None:
    outputs = default_stack().outputs
    assert {key: outputs[key] for key in outputs if key != "queues"} == {
        "project": "acme-ml",
        "cluster": "shardpool-dev",
        "location": "us-central1",
        "namespace": "shardpool-dev",
        "queue": "conversion",
        "serviceAccount": "converter",
        "bucket": default_stack()["checkpoints"].inputs["name"],
        "imageRepository": "us-central1-docker.pkg.dev/acme-ml/shardpool-dev-images",
        "machineType": "n2-highmem-64",
        "spot": False,
        "nodeLabel": {"key": pool.LABEL_KEY, "value": "shardpool-dev-conversion"},
        "taint": {"key": pool.LABEL_KEY, "value": "shardpool-dev-conversion", "effect": "NoSchedule"},
        "podRequest": {
            "cpu": "60",
            "memory": "460Gi",
            "ephemeralStorage": f"{pool.pod_request().ephemeral_storage_gib}Gi",
        },
        "secretName": "",
        "secretKey": "token",
        "getCredentials": (
            "gcloud container clusters get-credentials shardpool-dev --location=us-central1"
            " --project=acme-ml --dns-endpoint"
        ),
    }
    first = outputs["queues"]["conversion"]
    assert first["nodes"] == 10
    assert first["podRequest"] == outputs["podRequest"]


def test_no_credential_lies_in_the_kubeconfig() -> None:
    kubeconfig = json.loads(default_stack()["kubernetes"].inputs["kubeconfig"])
    assert kubeconfig["clusters"][0]["cluster"] == {"server": "https://gke-1234.us-central1.gke.goog"}
    (user,) = kubeconfig["users"]
    assert list(user["user"]) == ["exec"]
    assert user["user"]["exec"]["command"] == "gke-gcloud-auth-plugin"


# --- As Pulumi starts it ---------------------------------------------------------------------------

# A Python of its own whose path holds neither the checkout nor the program's folder.
_ELSEWHERE = """
import sys
sys.path.insert(0, {harness!r})
import harness
stack = harness.up({config!r}, program={program!r})
print(sorted(each.name for each in stack.of_type("NodePool")))
"""


@pytest.mark.parametrize("start", ["elsewhere", "in the folder"])
def test_the_program_finds_its_packages_however_it_is_started(tmp_path: Path, start: str) -> None:
    cwd, program = (tmp_path, str(ROOT / "infra")) if start == "elsewhere" else (ROOT / "infra", ".")
    code = _ELSEWHERE.format(harness=str(Path(__file__).parent), program=program, config={})
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "['pool-conversion', 'system']\n", done.stderr


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"maxNode": "3"}, "maxNode: is not a key of this program; did you mean maxNodes?"),
        ({"maxNodes": "0"}, "maxNodes: 0 lets no Job run; use at least 1"),
    ],
)
def test_a_refusal_is_one_line_and_makes_nothing(config: dict[str, Any], line: str) -> None:
    stack = Stack()
    # RunError is what Pulumi prints without a traceback.
    with pytest.raises(pulumi.RunError) as refused:
        up(config, stack=stack)
    assert str(refused.value) == line
    assert not stack.resources


def test_no_module_of_the_program_passes_for_one_of_pythons() -> None:
    # Pulumi puts the folder itself on sys.path.
    assert not {path.stem for path in (ROOT / "infra").glob("*.py")} & (set(sys.stdlib_module_names) - {"__main__"})


def test_project_name_is_the_namespace_of_the_keys() -> None:
    assert yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["name"] == PROJECT
