"""What a Job needs to know of the cluster: from the Pulumi stack's outputs, from flags, or by default.

The pool's facts are those of `infra.pool`; defaults are what the Pulumi program makes of a stack called `prod`
in which nothing but project and region is set. Nothing here imports Pulumi.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra import pool
from infra.config import parse as parse_stack
from jobs.errors import RequestError
from jobs.naming import MAX_NAME

DEFAULT_STACK = "prod"
# As infra.identities and infra.jobs name them, which import Pulumi; a test keeps these equal.
SERVICE_ACCOUNT = "converter"
SECRET = "hugging-face-token"
SECRET_KEY = "token"
PROJECT = "shardpool"

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True)
class Settings:
    """Where a Job goes and what it is given.

    Attributes:
      namespace, queue, service_account: of the Job.
      output_root: gs://BUCKET[/...] or an absolute path inside the pod.
      output_claim: the PersistentVolumeClaim mounted at a path `output_root`; "" for gs://.
      secret, secret_key: the Secret of the Hugging Face token; "" gives the Job none.
      node_label, taint: of the pool, as Kubernetes spells them.
      cpu, memory_gib, storage_gib: what one pod requests, which fills one node.
      machine_type, spot: what the pod runs on; machine_type is "" where the stack does not say.
    """

    namespace: str
    queue: str
    service_account: str
    output_root: str
    output_claim: str
    secret: str
    secret_key: str
    node_label: Mapping[str, str]
    taint: Mapping[str, str]
    cpu: int
    memory_gib: int
    storage_gib: int
    machine_type: str
    spot: bool

    @property
    def toleration(self) -> dict[str, str]:
        """The toleration of the pool's taint."""
        return {
            "key": self.taint["key"],
            "operator": "Equal",
            "value": self.taint["value"],
            "effect": self.taint["effect"],
        }


@dataclass(frozen=True)
class Overrides:
    """What the flags say; "" leaves it to the stack's outputs or the defaults."""

    bucket: str = ""
    output_root: str = ""
    output_claim: str = ""
    namespace: str = ""
    queue: str = ""
    service_account: str = ""
    secret: str = ""
    secret_key: str = ""
    machine_type: str = ""
    node_pool: str = ""


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The outputs of a stack in which nothing but project and region is set, as far as they do not need Google."""
    config = parse_stack({"gcp:project": "project", "gcp:region": "us-central1"}, PROJECT, DEFAULT_STACK)
    first = config.queues[0]
    facts = config.pool(first.pool_name)
    return {
        "namespace": config.namespace,
        "queue": first.name,
        "serviceAccount": SERVICE_ACCOUNT,
        "secretName": SECRET,
        "secretKey": SECRET_KEY,
        **_pool(facts.machine_type, config.scoped(facts.pool_name), facts.request),
        "spot": facts.spot,
    }


def read_outputs(path: str) -> Mapping[str, Any]:
    """The stack's outputs from the file that `pulumi stack output --json` made; `-` is standard input.

    Raises:
      RequestError: there is no such file, or it is something else.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        outputs = json.loads(text)
    except OSError as error:
        raise RequestError(
            f"--stack-outputs {path}: {error.strerror}; make it: pulumi stack output --json > {path}"
        ) from None
    except ValueError:
        raise RequestError(
            f"--stack-outputs {path}: is not JSON; make it: pulumi stack output --json > {path}"
        ) from None
    if not isinstance(outputs, dict):
        raise RequestError(f"--stack-outputs {path}: is not an object; make it: pulumi stack output --json > {path}")
    return outputs


def make(outputs: Mapping[str, Any] | None, flags: Overrides) -> Settings:
    """Settings from the stack's outputs (None: the defaults), with what the flags say on top.

    Raises:
      RequestError: something is missing or cannot be.
    """
    needed = ("namespace", "queue", "serviceAccount", "podRequest", "nodeLabel", "taint", "secretName", "secretKey")
    known = dict(defaults() if outputs is None else outputs)
    if missing := [key for key in needed if key not in known]:
        raise RequestError(
            f"the stack's outputs lack {', '.join(missing)}; was `pulumi up` run? "
            "(pulumi stack output --json must show them)"
        )
    if flags.queue and flags.queue in (known.get("queues") or {}):
        known |= known["queues"][flags.queue]
    if flags.machine_type:
        known |= _machine(flags.machine_type)
    if flags.node_pool:
        _label("--node-pool", flags.node_pool)
        known |= _labels(flags.node_pool)
    settings = Settings(
        namespace=_label("--namespace", flags.namespace or known["namespace"]),
        queue=_subdomain("--queue", flags.queue or known["queue"]),
        service_account=_subdomain("--service-account", flags.service_account or known["serviceAccount"]),
        output_root=_output_root(flags, str(known.get("bucket") or "")),
        output_claim=flags.output_claim,
        secret=flags.secret or known["secretName"],
        secret_key=flags.secret_key or known["secretKey"],
        node_label={known["nodeLabel"]["key"]: known["nodeLabel"]["value"]},
        taint=known["taint"],
        cpu=int(known["podRequest"]["cpu"]),
        memory_gib=_gib("podRequest.memory", known["podRequest"]["memory"]),
        storage_gib=_gib("podRequest.ephemeralStorage", known["podRequest"]["ephemeralStorage"]),
        machine_type=str(known.get("machineType", "")),
        spot=bool(known.get("spot", False)),
    )
    return _checked(settings)


def namespace(outputs: Mapping[str, Any] | None, flag: str) -> str:
    """The namespace alone, for commands that only look at Jobs.

    Raises:
      RequestError: neither the flag nor the outputs name a usable one.
    """
    known = defaults() if outputs is None else outputs
    if not flag and "namespace" not in known:
        raise RequestError("the stack's outputs lack namespace; give --namespace")
    return _label("--namespace", flag or known["namespace"])


def _checked(settings: Settings) -> Settings:
    if settings.secret:
        _subdomain("--secret", settings.secret)
    local = not settings.output_root.startswith("gs://")
    if local and not settings.output_claim:
        raise RequestError(
            f"--output-root {settings.output_root} is a path inside the pod: name the PersistentVolumeClaim "
            "that is mounted there with --output-claim, or give gs://BUCKET"
        )
    if settings.output_claim:
        if not local:
            raise RequestError("--output-claim is for an --output-root that is a path, not for gs://")
        _subdomain("--output-claim", settings.output_claim)
    return dataclasses.replace(settings, output_root=settings.output_root.rstrip("/"))


def _output_root(flags: Overrides, bucket: str) -> str:
    if flags.bucket and flags.output_root:
        raise RequestError("--bucket and --output-root name the same thing; give one of them")
    if flags.output_root:
        root = flags.output_root
        if root.startswith("gs://"):
            _bucket("--output-root", root.removeprefix("gs://").partition("/")[0])
        elif not root.startswith("/") or "://" in root:
            raise RequestError(f"--output-root {root}: give gs://BUCKET[/FOLDER] or an absolute path")
        elif root.rstrip("/") in _TAKEN:
            raise RequestError(f"--output-root {root}: the pod has its own {root}; give another path")
        return root
    bucket = flags.bucket or bucket
    if not bucket:
        raise RequestError("nowhere to write to: give --bucket, --output-root or --stack-outputs")
    return f"gs://{_bucket('--bucket', bucket.removeprefix('gs://').rstrip('/'))}"


_TAKEN = ("", "/tmp", "/cache", "/home", "/home/converter", "/dev", "/etc", "/proc", "/sys", "/usr")


def _bucket(flag: str, name: str) -> str:
    if not _BUCKET.fullmatch(name):
        raise RequestError(f"{flag}: {name!r} is not a bucket's name")
    return name


def _label(flag: str, text: str) -> str:
    if len(text) > MAX_NAME or not _DNS_LABEL.fullmatch(text):
        raise RequestError(
            f"{flag} {text!r} is not a DNS label: lower-case letters, digits and '-', at most {MAX_NAME}"
        )
    return text


def _subdomain(flag: str, text: str) -> str:
    # A queue's name is a label's value too, which is the shorter.
    if len(text) > MAX_NAME or not _DNS_SUBDOMAIN.fullmatch(text):
        raise RequestError(
            f"{flag} {text!r} is not a DNS name: lower-case letters, digits, '-' and '.', at most {MAX_NAME}"
        )
    return text


def _gib(name: str, quantity: Any) -> int:
    match = re.fullmatch(r"(\d+)(Gi|Ti)", str(quantity))
    if not match:
        raise RequestError(f"the stack's output {name} is {quantity!r}; it must be in whole Gi")
    return int(match[1]) * (1024 if match[2] == "Ti" else 1)


def _machine(machine_type: str) -> dict[str, Any]:
    if machine_type not in pool.MACHINE_TYPES:
        raise RequestError(f"--machine-type {machine_type!r} is not in the table: {', '.join(pool.MACHINE_TYPES)}")
    return {"machineType": machine_type, "podRequest": _request(pool.pod_request(machine_type))}


def _pool(machine_type: str, label: str, request: pool.PodRequest) -> dict[str, Any]:
    return {"machineType": machine_type, "podRequest": _request(request), **_labels(label)}


def _labels(value: str) -> dict[str, Any]:
    return {
        "nodeLabel": {"key": pool.LABEL_KEY, "value": value},
        "taint": {"key": pool.LABEL_KEY, "value": value, "effect": pool.TAINT_EFFECT},
    }


def _request(request: pool.PodRequest) -> dict[str, str]:
    quantities = request.resources()
    return {
        "cpu": quantities["cpu"],
        "memory": quantities["memory"],
        "ephemeralStorage": quantities["ephemeral-storage"],
    }
