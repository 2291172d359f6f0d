"""What the configuration takes, and what it refuses in one line."""

import re
from typing import Any

import pytest
import yaml
from harness import PROJECT, REGIONAL, ROOT, stack_keys

from infra import pool
from infra.config import Config, ConfigError, defaults, parse
from infra.naming import fit

PULUMI_YAML = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())


def configure(keys: dict[str, Any] | None = None, place: dict[str, str] | None = None) -> Config:
    """A configuration from keys as the engine hands them over."""
    raw = stack_keys({**(REGIONAL if place is None else place), **(keys or {})})
    return parse({key.removeprefix(f"{PROJECT}:"): value for key, value in raw.items()}, PROJECT, "dev")


def test_pulumi_yaml_and_the_dataclasses_have_the_same_defaults() -> None:
    declared = {key: each["default"] for key, each in PULUMI_YAML["config"].items()}
    # Pulumi has no type for a list of objects.
    expected = {key: value for key, value in defaults().items() if key != "maintenanceExclusions"}
    assert declared == expected
    assert {key: type(value) for key, value in declared.items()} == {
        key: type(value) for key, value in expected.items()
    }


def test_every_declared_key_has_a_type_and_a_description() -> None:
    types = {"string": str, "integer": int, "boolean": bool, "array": list}
    for key, each in PULUMI_YAML["config"].items():
        assert type(each["default"]) is types[each["type"]], key
        assert each["description"], key
        assert ("items" in each) == (each["type"] == "array"), key
        # Pulumi demands a stack value for these, so the default would never do.
        assert not each.get("secret"), key


def test_project_file_runs_the_folder_with_its_own_environment() -> None:
    assert (ROOT / PULUMI_YAML["main"] / "__main__.py").is_file()
    assert PULUMI_YAML["name"] == PROJECT
    requirements = (ROOT / PULUMI_YAML["main"] / "requirements.txt").read_text()
    (included,) = re.findall(r"^-r (\S+)$", requirements, re.MULTILINE)
    locked = (ROOT / PULUMI_YAML["main"] / included).read_text()
    for package in ("pulumi", "pulumi-gcp", "pulumi-kubernetes"):
        assert re.search(rf"^{package}==\S+ \\\n    --hash=", locked, re.MULTILINE)


def test_only_project_and_a_place_are_needed() -> None:
    regional = configure()
    assert (regional.project, regional.region, regional.location) == ("acme-ml", "us-central1", "us-central1")
    zonal = configure(place={"gcp:project": "acme-ml", "gcp:zone": "us-central1-b"})
    assert (zonal.region, zonal.location) == ("us-central1", "us-central1-b")
    assert zonal.pools[0].max_nodes == 10
    assert [queue.nodes for queue in zonal.queues] == [10]
    assert not regional.warnings


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"minNodes": 5, "maxNodes": 3}, "maxNodes: 3 is less than minNodes 5"),
        ({"maxNodes": 0}, "maxNodes: 0 lets no Job run"),
        ({"minNodes": -1}, "minNodes: -1 is negative"),
        ({"maxNodes": "ten"}, "maxNodes: 'ten' is not a whole number"),
        ({"maxNodes": "10.5"}, "maxNodes: '10.5' is not a whole number"),
        ({"spot": "yes"}, "spot: 'yes' is neither true nor false"),
        ({"machineType": "n2-highmem-128"}, "machineType: 'n2-highmem-128' is not in the table"),
        ({"localSsdCount": 4}, "localSsdCount: n2-highmem-64 takes 0, 8, 16, 24, not 4"),
        ({"localSsdCount": -8}, "localSsdCount: n2-highmem-64 takes"),
        ({"machineType": "c3-highmem-88", "localSsdCount": 8}, "localSsdCount: c3-highmem-88 takes 0, not 8"),
        (
            {"machineType": "c3-highmem-88", "diskType": "pd-standard"},
            "diskType: 'pd-standard' is not one of",
        ),
        ({"diskType": "pd-fast"}, "diskType: 'pd-fast' is not one of pd-balanced"),
        ({"diskSizeGb": 10}, "diskSizeGb: 10 is outside"),
        ({"nodeZones": ["europe-west4-a"]}, "nodeZones: 'europe-west4-a' is not a zone of us-central1"),
        ({"nodeZones": "us-central1-a"}, "nodeZones: is not a list"),
        ({"queueName": "My_Queue"}, "queueName: 'My_Queue' is not a DNS label"),
        ({"queueName": ""}, "queueName: '' is not a DNS label"),
        ({"queueName": "a" * 64}, "queueName: 'aaa"),
        ({"poolName": "-x"}, "poolName: '-x' is not a DNS label"),
        ({"namespace": "Team.A"}, "namespace: 'Team.A' is not a DNS label"),
        ({"maxNode": 3}, "maxNode: is not a key of this program; did you mean maxNodes?"),
        ({"colour": "red"}, "colour: is not a key of this program; see Pulumi.yaml"),
        ({"extraPools": [{"poolName": "b", "maxNode": 3}]}, "extraPools[0].maxNode: is not a key"),
        ({"extraPools": [{"maxNodes": 3}]}, "extraPools[0].poolName: is not set"),
        ({"extraPools": [{"poolName": "b", "maxNodes": 0}]}, "extraPools[0].maxNodes: 0 lets no Job run"),
        ({"extraPools": [{"poolName": "conversion"}]}, "poolName: 'conversion' stands twice"),
        (
            {"extraPools": [{"poolName": "b", "queueName": "conversion"}]},
            "queueName: 'conversion' stands twice",
        ),
        ({"extraPools": ["b"]}, "extraPools[0]: 'b' is not an object"),
        (
            {"extraQueues": [{"queueName": "b", "nodes": 0}]},
            "extraQueues[0].nodes: a quota of 0 nodes is smaller than one",
        ),
        (
            {"extraQueues": [{"queueName": "b", "nodes": 10}]},
            "extraQueues: they leave queue 'conversion' a quota smaller",
        ),
        ({"extraQueues": [{"queueName": "b"}]}, "extraQueues[0].nodes: is not set"),
        (
            {"extraQueues": [{"queueName": "b", "nodes": 1, "poolName": "x"}]},
            "extraQueues[0].poolName: there is no pool",
        ),
        (
            {"adoptCluster": "tpu", "releaseChannel": "RAPID"},
            "releaseChannel: is for a cluster this stack creates",
        ),
        (
            {"adoptCluster": "tpu", "deletionProtection": False},
            "deletionProtection: is for a cluster this stack creates",
        ),
        (
            {
                "adoptCluster": "tpu",
                "maintenanceExclusions": [
                    {"name": "a", "start": "2026-12-01T00:00:00Z", "end": "2026-12-02T00:00:00Z"}
                ],
            },
            "maintenanceExclusions: is for a cluster this stack creates",
        ),
        ({"kueue": "existing"}, "kueue: 'existing' needs adoptCluster"),
        ({"kueue": "perhaps"}, "kueue: 'perhaps' is not one of auto, install, existing"),
        ({"kueueVersion": "latest"}, "kueueVersion: 'latest' is not a chart version"),
        ({"podsReadyTimeoutMinutes": 1}, "podsReadyTimeoutMinutes: 1 is less than a node needs"),
        ({"cohort": "Team A"}, "cohort: 'Team A' is not a DNS name"),
        ({"releaseChannel": "FAST"}, "releaseChannel: 'FAST' is not one of"),
        ({"maintenanceStart": "Saturday"}, "maintenanceStart: 'Saturday' is not a UTC time"),
        ({"maintenanceEnd": "2025-01-01T00:00:00Z"}, "maintenanceEnd: is not after"),
        ({"maintenanceRecurrence": "weekly"}, "maintenanceRecurrence: 'weekly' is not an RFC 5545 rule"),
        (
            {"maintenanceExclusions": [{"name": "a", "start": "2026-12-02T00:00:00Z", "end": "2026-12-01T00:00:00Z"}]},
            "maintenanceExclusions[0].end: ",
        ),
        ({"systemMaxNodes": 0}, "systemMaxNodes: must be at least 1"),
        (
            {"rbacSecurityGroup": "team@example.com"},
            "rbacSecurityGroup: 'team@example.com' must be gke-security",
        ),
        (
            {"huggingFaceSecret": "hf", "huggingFaceToken": "hf_x"},
            "huggingFaceSecret: huggingFaceToken is set too",
        ),
        ({"huggingFaceSecret": "HF_TOKEN"}, "huggingFaceSecret: 'HF_TOKEN' is not the name"),
        (
            {"metadataServer": "metadata.google.internal"},
            "metadataServer: 'metadata.google.internal' must be",
        ),
        ({"metadataServer": "169.254.169.254:0"}, "metadataServer: '169.254.169.254:0' must be"),
        ({"submitters": ["ann@example.com"]}, "submitters: 'ann@example.com' must be user:EMAIL"),
        (
            {"submitters": ["group:ml@example.com"]},
            "submitters: 'group:ml@example.com' needs rbacSecurityGroup",
        ),
        (
            {"githubRepository": "https://github.com/a/b"},
            "githubRepository: 'https://github.com/a/b' must be",
        ),
        ({"githubRepository": "a/b' || true"}, "githubRepository: "),
        ({"softDeleteDays": 3}, "softDeleteDays: 3 is neither 0"),
        ({"runExpiryDays": -1}, "runExpiryDays: -1 is negative"),
        ({"runExpiryPrefixes": ["runs/"]}, "runExpiryPrefixes: does nothing without runExpiryDays"),
        ({"logRetentionDays": 0}, "logRetentionDays: 0 is outside"),
        ({"alertEmail": "ops"}, "alertEmail: 'ops' is not an address"),
        ({"monthlyBudget": 100}, "monthlyBudget: a budget needs both"),
        ({"billingAccount": "0-1-2"}, "monthlyBudget: a budget needs both"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_names_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(keys)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"gcp:region": "us-central1"}, "gcp:project: is not set"),
        ({"gcp:project": "acme-ml"}, "gcp:region: neither region nor zone is set"),
        (
            {"gcp:project": "acme-ml", "gcp:region": "us-central1", "gcp:zone": "us-central1-b"},
            "gcp:zone: gcp:region is set too",
        ),
        (
            {"gcp:project": "acme-ml", "gcp:region": "us-central1-b"},
            "gcp:region: 'us-central1-b' is not a region",
        ),
        ({"gcp:project": "acme-ml", "gcp:zone": "us-central1"}, "gcp:zone: 'us-central1' is not a zone"),
    ],
)
def test_the_place_is_one_region_or_one_zone(place: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        configure(place=place)


def test_values_as_the_engine_hands_them_over() -> None:
    config = configure({"maxNodes": "20", "spot": "true", "nodeZones": '["us-central1-a"]', "submitters": []})
    assert config.pools[0].max_nodes == 20
    assert config.pools[0].spot is True
    assert config.pools[0].node_zones == ("us-central1-a",)


def test_extra_pools_and_queues() -> None:
    config = configure(
        {
            "extraPools": [{"poolName": "small", "machineType": "n2-highmem-32", "maxNodes": 4}],
            "extraQueues": [
                {"queueName": "nightly", "nodes": 3},
                {"queueName": "tiny", "nodes": 1, "poolName": "small"},
            ],
        }
    )
    assert [(queue.name, queue.pool_name, queue.nodes) for queue in config.queues] == [
        ("conversion", "conversion", 7),
        ("small", "small", 3),
        ("nightly", "conversion", 3),
        ("tiny", "small", 1),
    ]
    assert config.pool("small").request == pool.pod_request("n2-highmem-32")


def test_a_bucket_elsewhere_is_a_warning() -> None:
    assert not configure({"bucketLocation": "US-CENTRAL1"}).warnings
    (warning,) = configure({"bucketLocation": "europe-west4"}).warnings
    assert warning.startswith("bucketLocation: europe-west4 is not the cluster's region us-central1")
    assert configure({"bucketLocation": "US"}).warnings


def test_kueue_is_installed_into_an_adopted_cluster_only_if_asked() -> None:
    assert configure().installs_kueue
    assert configure().creates_priority_classes
    assert not configure({"adoptCluster": "tpu"}).installs_kueue
    assert not configure({"adoptCluster": "tpu"}).creates_priority_classes
    assert configure({"adoptCluster": "tpu", "kueue": "install"}).creates_priority_classes
    assert configure({"adoptCluster": "tpu", "priorityClasses": "create"}).creates_priority_classes
    assert not configure({"priorityClasses": "existing"}).creates_priority_classes
    assert configure({"adoptCluster": "tpu", "podsReadyTimeoutMinutes": 20}).warnings


def test_the_example_stack_file_is_right_in_every_section() -> None:
    text = (ROOT / "Pulumi.example.yaml").read_text()
    head, *sections = re.split(r"^  # ---.*$", text, flags=re.MULTILINE)
    place = yaml.safe_load(head)["config"]
    assert place == {"gcp:project": "my-project", "gcp:region": "us-central1"}
    seen: set[str] = set()
    for section in sections:
        lines = [re.sub(r"^  # ", "  ", line) for line in section.splitlines() if re.match(r"  # ( |shardpool:)", line)]
        keys = yaml.safe_load("\n".join(lines))
        assert keys
        seen |= set(keys)
        configure({key.removeprefix(f"{PROJECT}:"): value for key, value in keys.items()}, place)
    assert {"extraPools", "extraQueues", "maintenanceExclusions"} <= {key.removeprefix("shardpool:") for key in seen}


def test_names_fit_and_differ() -> None:
    assert fit("shardpool-dev", 40) == "shardpool-dev"
    for text, limit in (
        ("shardpool-Dev", 40),
        ("shardpool-dev_1", 40),
        ("a" * 50, 30),
        ("1x", 30),
        ("a-" * 20, 30),
    ):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", fit(text, limit))
        assert len(fit(text, limit)) <= limit
    assert len({fit(text, 40) for text in ("a-b", "a_b", "a.b", "A-b", "a b")}) == 5
    assert fit("a" * 50, 30) != fit("a" * 51, 30)
