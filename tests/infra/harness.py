"""Runs the whole program as Pulumi does, against mocks, and keeps what it registered."""

import asyncio
import functools
import json
import logging
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulumi
import pulumi.runtime
import yaml
from google.protobuf import json_format
from pulumi.runtime import mocks, rpc
from pulumi.runtime.settings import set_root_resource
from pulumi.runtime.stack import run_in_stack

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "shardpool"
SECRET_SIGNATURE = "4dabf18193072939515e22adb298388d"

REGIONAL = {"gcp:project": "acme-ml", "gcp:region": "us-central1"}

# What Google Cloud adds to what was asked for, as far as the program reads it.
_COMPUTED = {
    "gcp:serviceaccount/account:Account": lambda i: {
        "name": f"projects/-/serviceAccounts/{i['accountId']}@{i['project']}.iam.gserviceaccount.com",
        "email": f"{i['accountId']}@{i['project']}.iam.gserviceaccount.com",
        "member": f"serviceAccount:{i['accountId']}@{i['project']}.iam.gserviceaccount.com",
        "uniqueId": "109876543210987654321",
    },
    "gcp:container/cluster:Cluster": lambda i: {
        "controlPlaneEndpointsConfig": {
            "dnsEndpointConfig": {"endpoint": "gke-1234.us-central1.gke.goog", "allowExternalTraffic": True}
        }
    },
    "gcp:artifactregistry/repository:Repository": lambda i: {"name": i["repositoryId"]},
    "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": lambda i: {
        "name": f"projects/123/locations/global/workloadIdentityPools/{i['workloadIdentityPoolId']}"
    },
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": lambda i: {
        "name": f"projects/123/locations/global/workloadIdentityPools/{i['workloadIdentityPoolId']}/x"
    },
    "gcp:projects/iAMCustomRole:IAMCustomRole": lambda i: {"name": f"projects/{i['project']}/roles/{i['roleId']}"},
    "gcp:monitoring/notificationChannel:NotificationChannel": lambda i: {"name": "projects/acme-ml/channels/1"},
}

# An adopted cluster as `gcp.container.get_cluster` returns it.
EXISTING_CLUSTER = {
    "name": "tpu",
    "enableAutopilot": False,
    "endpoint": "203.0.113.7",
    "datapathProvider": "ADVANCED_DATAPATH",
    "networkPolicies": [{"enabled": False, "provider": ""}],
    "masterAuths": [{"clusterCaCertificate": "Q0E="}],
    "workloadIdentityConfigs": [{"workloadPool": "acme-ml.svc.id.goog"}],
    "clusterAutoscalings": [{"autoscalingProfile": "OPTIMIZE_UTILIZATION", "enabled": False}],
    "controlPlaneEndpointsConfigs": [],
}


@dataclass(frozen=True)
class Registered:
    """One resource as the program asked for it."""

    urn: str
    type: str
    name: str
    inputs: dict[str, Any]
    raw: dict[str, Any]  # as sent, secrets still marked
    depends_on: frozenset[str]
    ignored: tuple[str, ...]
    delete_timeout: str

    @property
    def is_kubernetes_object(self) -> bool:
        """Whether it is an object the program registers itself (the chart's own are the chart's)."""
        return self.type.startswith("kubernetes:") and not self.type.startswith("kubernetes:helm.sh")

    @property
    def manifest(self) -> dict[str, Any]:
        """The Kubernetes object, with whole numbers as Kubernetes has them."""
        return whole(self.inputs)


@dataclass
class Stack:
    """Everything one run registered, exported and warned of."""

    resources: list[Registered] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    raw_outputs: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any], frozenset[str]]] = field(default_factory=list)  # and what was there

    def of_type(self, type_: str) -> list[Registered]:
        """All resources whose type ends in `type_`."""
        return [each for each in self.resources if each.type.rpartition(":")[2] == type_]

    def __getitem__(self, name: str) -> Registered:
        """The one resource of that logical name."""
        (found,) = (each for each in self.resources if each.name == name)
        return found

    def needs(self, name: str, other: str) -> bool:
        """Whether `name` is made after, and destroyed before, `other`."""
        by_urn = {each.urn: each for each in self.resources}
        seen: set[str] = set()
        todo = list(self[name].depends_on)
        while todo:
            urn = todo.pop()
            if urn not in seen and urn in by_urn:
                seen.add(urn)
                todo.extend(by_urn[urn].depends_on)
        return self[other].urn in seen

    def kubernetes_objects(self) -> list[Registered]:
        """The Kubernetes objects the program registers itself."""
        return [each for each in self.resources if each.is_kubernetes_object]


def whole(value: Any) -> Any:
    """`value` with every float that is a whole number as an int: protobuf knows only floats."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unwrapped(value: Any) -> Any:
    """`value` without the marks of secrets."""
    if isinstance(value, dict):
        return _unwrapped(value["value"]) if SECRET_SIGNATURE in value else {k: _unwrapped(v) for k, v in value.items()}
    return [_unwrapped(item) for item in value] if isinstance(value, list) else value


def strings(value: Any) -> Iterator[str]:
    """Every text in a nested value, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def stack_keys(config: dict[str, Any]) -> dict[str, str]:
    """The keys as Pulumi's engine hands them over: with Pulumi.yaml's defaults, everything text or JSON."""
    declared = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["config"]
    merged = {key: each["default"] for key, each in declared.items()} | config
    return {
        key if ":" in key else f"{PROJECT}:{key}": value
        if isinstance(value, str)
        else json.dumps(value)  # 10, true, ["a"]: as the engine prints them
        for key, value in merged.items()
    }


class _Mocks(mocks.Mocks):
    def __init__(self, stack: Stack, cluster: dict[str, Any]) -> None:
        self.stack = stack
        self.cluster = cluster

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        there = frozenset(each.name for each in self.stack.resources)
        self.stack.calls.append((args.token, args.args, there))
        if args.token == "gcp:container/getCluster:getCluster":
            if args.args["name"] != self.cluster["name"]:
                return {}, [("name", f"cluster {args.args['name']}\nnot found")]
            return self.cluster, []
        if args.token == "gcp:organizations/getProject:getProject":
            return {"number": "123"}, []
        raise AssertionError(f"unexpected call {args.token}")

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        computed = _COMPUTED.get(args.typ, lambda inputs: {})(args.inputs)
        defaults = {"name": f"{args.name}-1a2b3c4"} if "name" not in args.inputs else {}
        return f"{args.name}-id", {**defaults, **args.inputs, **computed}


class _Monitor(mocks.MockMonitor):
    """The mock monitor, which also keeps what the mocks never see: dependencies and options."""

    def __init__(self, stack: Stack, cluster: dict[str, Any]) -> None:
        super().__init__(_Mocks(stack, cluster))
        self.stack = stack

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802
        response = super().RegisterResource(request)
        if request.type != "pulumi:pulumi:Stack":
            self.stack.resources.append(
                Registered(
                    urn=response.urn,
                    type=request.type,
                    name=request.name,
                    inputs=_unwrapped(rpc.deserialize_properties(request.object)),
                    raw=json_format.MessageToDict(request.object),
                    depends_on=frozenset({*request.dependencies, request.provider.rpartition("::")[0]} - {""}),
                    ignored=tuple(request.ignoreChanges),
                    delete_timeout=request.customTimeouts.delete,
                )
            )
        return response

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802
        if "pulumi:pulumi:Stack" in request.urn:
            self.stack.raw_outputs = json_format.MessageToDict(request.outputs)
            self.stack.outputs = whole(rpc.deserialize_properties(request.outputs))
        return super().RegisterResourceOutputs(request)


class _Warnings(logging.Handler):
    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.stack.warnings.append(record.getMessage())


def up(
    config: dict[str, Any] | None = None,
    *,
    place: dict[str, str] | None = None,
    stack_name: str = "dev",
    secrets: tuple[str, ...] = (),
    cluster: dict[str, Any] | None = None,
    program: str = str(ROOT / "infra"),
    stack: Stack | None = None,
) -> Stack:
    """Run the program with these keys on top of the defaults, in `place`; raises what the program raises."""
    stack = stack or Stack()
    logger = logging.Logger("pulumi-engine")
    logger.addHandler(_Warnings(stack))
    pulumi.runtime.set_all_config(
        stack_keys({**(REGIONAL if place is None else place), **(config or {})}),
        [f"{PROJECT}:{key}" for key in secrets],
    )
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        mocks.set_mocks(
            _Mocks(stack, cluster or EXISTING_CLUSTER),
            project=PROJECT,
            stack=stack_name,
            preview=False,
            logger=logger,
            monitor=_Monitor(stack, cluster or EXISTING_CLUSTER),
        )
        set_root_resource(None)  # that of the mocks; the program gets its own, with its outputs
        loop.run_until_complete(run_in_stack(lambda: runpy.run_path(program, run_name="__main__")))
    finally:
        loop.close()
    return stack


@functools.cache
def default_stack() -> Stack:
    """The stack with nothing but project and region set."""
    return up()
