"""The stack configuration: read once from Pulumi's flat keys into frozen dataclasses that refuse nonsense.

Imports no Pulumi: `parse` takes the keys as a mapping. Each field is one key of `Pulumi.yaml`, in camelCase
(`max_nodes` is `maxNodes`), and its default here is the default there.
"""

import dataclasses
import difflib
import ipaddress
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from infra import pool as facts
from infra.naming import fit

HUGGING_FACE_TOKEN_KEY = "huggingFaceToken"  # a secret, so it is read by the program and never lies in these classes

T = TypeVar("T")

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


class ConfigError(ValueError):
    """A configuration the program refuses; its text is one line that names the key and says what to do."""


@dataclass(frozen=True)
class MaintenanceExclusion:
    """A stretch of time in which GKE leaves the cluster alone (an entry of `maintenanceExclusions`)."""

    name: str
    start: str
    end: str
    scope: str = "NO_MINOR_OR_NODE_UPGRADES"

    def __post_init__(self) -> None:
        _one_of("scope", self.scope, ("NO_UPGRADES", "NO_MINOR_UPGRADES", "NO_MINOR_OR_NODE_UPGRADES"))
        _dns_label("name", self.name)
        if _instant("end", self.end) <= _instant("start", self.start):
            raise ConfigError(f"end: {self.end} is not after start {self.start}; give a later end")


@dataclass(frozen=True)
class ClusterConfig:
    """The cluster to create, or the one to adopt; every other field is about a created one."""

    adopt_cluster: str = ""
    release_channel: str = "REGULAR"
    deletion_protection: bool = True
    maintenance_start: str = "2026-01-03T00:00:00Z"
    maintenance_end: str = "2026-01-03T23:00:00Z"
    maintenance_recurrence: str = "FREQ=WEEKLY;BYDAY=SA,SU"
    maintenance_exclusions: tuple[MaintenanceExclusion, ...] = ()
    system_machine_type: str = "e2-standard-4"
    system_max_nodes: int = 3
    rbac_security_group: str = ""

    def __post_init__(self) -> None:
        if self.adopt_cluster:
            for other in dataclasses.fields(self)[1:]:
                if getattr(self, other.name) != other.default:
                    raise ConfigError(
                        f"{_camel(other.name)}: is for a cluster this stack creates, but adoptCluster names "
                        f"{self.adopt_cluster!r}; remove one of the two"
                    )
        _one_of("releaseChannel", self.release_channel, ("RAPID", "REGULAR", "STABLE", "EXTENDED"))
        if _instant("maintenanceEnd", self.maintenance_end) <= _instant("maintenanceStart", self.maintenance_start):
            raise ConfigError("maintenanceEnd: is not after maintenanceStart; give a later end")
        if not self.maintenance_recurrence.startswith("FREQ="):
            raise ConfigError(
                f"maintenanceRecurrence: {self.maintenance_recurrence!r} is not an RFC 5545 rule; "
                "write for example FREQ=WEEKLY;BYDAY=SA,SU"
            )
        if self.system_max_nodes < 1:
            raise ConfigError("systemMaxNodes: must be at least 1; Kueue and kube-system run there")
        if self.rbac_security_group and not self.rbac_security_group.startswith("gke-security-groups@"):
            raise ConfigError(
                f"rbacSecurityGroup: {self.rbac_security_group!r} must be gke-security-groups@YOUR-DOMAIN; "
                "GKE takes no other group"
            )


@dataclass(frozen=True)
class PoolConfig:
    """One node pool and the queue in front of it: the first from the flat keys, others from `extraPools`."""

    pool_name: str = "conversion"
    queue_name: str = "conversion"
    machine_type: str = facts.DEFAULT_MACHINE_TYPE
    min_nodes: int = 0
    max_nodes: int = 10
    spot: bool = False
    local_ssd_count: int = 0
    disk_type: str = facts.DEFAULT_DISK_TYPE
    disk_size_gb: int = facts.DEFAULT_DISK_GB
    node_zones: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _dns_label("poolName", self.pool_name)
        _dns_label("queueName", self.queue_name)
        machine = facts.MACHINE_TYPES.get(self.machine_type)
        if machine is None:
            raise ConfigError(
                f"machineType: {self.machine_type!r} is not in the table: {', '.join(facts.MACHINE_TYPES)}"
            )
        if self.min_nodes < 0:
            raise ConfigError(f"minNodes: {self.min_nodes} is negative; use 0 to scale to zero")
        if self.max_nodes < 1:
            raise ConfigError(f"maxNodes: {self.max_nodes} lets no Job run; use at least 1")
        if self.max_nodes < self.min_nodes:
            raise ConfigError(f"maxNodes: {self.max_nodes} is less than minNodes {self.min_nodes}; raise maxNodes")
        if self.local_ssd_count and self.local_ssd_count not in machine.local_ssd_counts:
            allowed = ", ".join(map(str, (0, *machine.local_ssd_counts)))
            raise ConfigError(f"localSsdCount: {self.machine_type} takes {allowed}, not {self.local_ssd_count}")
        _one_of("diskType", self.disk_type, machine.disk_types)
        if not 100 <= self.disk_size_gb <= 65536:
            raise ConfigError(f"diskSizeGb: {self.disk_size_gb} is outside 100..65536")

    @property
    def request(self) -> facts.PodRequest:
        """What the one pod on each node of this pool requests."""
        return facts.pod_request(self.machine_type, self.disk_size_gb, self.local_ssd_count)


@dataclass(frozen=True)
class ExtraQueue:
    """A further queue on a pool, with a share of its nodes (an entry of `extraQueues`)."""

    queue_name: str
    nodes: int
    pool_name: str = PoolConfig.pool_name

    def __post_init__(self) -> None:
        _dns_label("queueName", self.queue_name)
        if self.nodes < 1:
            raise ConfigError(f"nodes: a quota of {self.nodes} nodes is smaller than one pod; use at least 1")


@dataclass(frozen=True)
class Queue:
    """One ClusterQueue with its LocalQueue: a quota of `nodes` pods on the pool called `pool_name`."""

    name: str
    pool_name: str
    nodes: int


@dataclass(frozen=True)
class KueueConfig:
    """Kueue: whether this stack installs it, and how its queues behave."""

    kueue: str = "auto"
    kueue_version: str = "0.19.2"
    priority_classes: str = "auto"
    pods_ready_timeout_minutes: int = 30
    cohort: str = ""

    def __post_init__(self) -> None:
        _one_of("kueue", self.kueue, ("auto", "install", "existing"))
        _one_of("priorityClasses", self.priority_classes, ("auto", "create", "existing"))
        if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", self.kueue_version):
            raise ConfigError(f"kueueVersion: {self.kueue_version!r} is not a chart version; write for example 0.19.2")
        if self.pods_ready_timeout_minutes < 10:
            raise ConfigError(
                f"podsReadyTimeoutMinutes: {self.pods_ready_timeout_minutes} is less than a node needs "
                "to start; use at least 10"
            )
        if self.cohort and not _DNS_SUBDOMAIN.fullmatch(self.cohort):
            raise ConfigError(f"cohort: {self.cohort!r} is not a DNS name; use lower-case letters, digits, - and .")


@dataclass(frozen=True)
class JobsConfig:
    """What Jobs and their submitters get: namespace, bucket, secret, network, alerts."""

    namespace: str = ""
    bucket_location: str = ""
    soft_delete_days: int = 7
    run_expiry_days: int = 0
    run_expiry_prefixes: tuple[str, ...] = ()
    hugging_face_secret: str = ""
    metadata_server: str = "auto"
    submitters: tuple[str, ...] = ()
    github_repository: str = ""
    log_retention_days: int = 90
    alert_email: str = ""
    billing_account: str = ""
    monthly_budget: int = 0

    def __post_init__(self) -> None:
        if self.namespace:
            _dns_label("namespace", self.namespace)
        if self.soft_delete_days and not 7 <= self.soft_delete_days <= 90:
            raise ConfigError(f"softDeleteDays: {self.soft_delete_days} is neither 0 (off) nor within 7..90")
        if self.run_expiry_days < 0:
            raise ConfigError(f"runExpiryDays: {self.run_expiry_days} is negative; use 0 to keep every run")
        if self.run_expiry_prefixes and not self.run_expiry_days:
            raise ConfigError("runExpiryPrefixes: does nothing without runExpiryDays; set that too")
        if self.hugging_face_secret and not _DNS_SUBDOMAIN.fullmatch(self.hugging_face_secret):
            raise ConfigError(f"huggingFaceSecret: {self.hugging_face_secret!r} is not the name of a Kubernetes Secret")
        if self.metadata_server != "auto":
            parse_endpoint(self.metadata_server)
        for submitter in self.submitters:
            if not re.fullmatch(r"(user|group|serviceAccount):[^@\s:]+@[^@\s:]+", submitter):
                raise ConfigError(f"submitters: {submitter!r} must be user:EMAIL, group:EMAIL or serviceAccount:EMAIL")
        if self.github_repository and not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", self.github_repository):
            raise ConfigError(f"githubRepository: {self.github_repository!r} must be OWNER/NAME")
        if not 1 <= self.log_retention_days <= 3650:
            raise ConfigError(f"logRetentionDays: {self.log_retention_days} is outside 1..3650")
        if self.alert_email and not re.fullmatch(r"[^@\s]+@[^@\s]+", self.alert_email):
            raise ConfigError(f"alertEmail: {self.alert_email!r} is not an address")
        if self.monthly_budget < 0:
            raise ConfigError(f"monthlyBudget: {self.monthly_budget} is negative; use 0 for no budget")
        if bool(self.monthly_budget) != bool(self.billing_account):
            raise ConfigError(
                "monthlyBudget: a budget needs both monthlyBudget and billingAccount; set both or neither"
            )


@dataclass(frozen=True)
class Config:
    """The whole configuration of one stack."""

    project: str
    location: str
    region: str
    prefix: str
    cluster: ClusterConfig
    pools: tuple[PoolConfig, ...]
    queues: tuple[Queue, ...]
    kueue: KueueConfig
    jobs: JobsConfig

    @property
    def namespace(self) -> str:
        """The Jobs' namespace. It names the stack, because Workload Identity takes the same namespace in two
        clusters of one project for one."""
        return self.jobs.namespace or self.prefix

    @property
    def bucket_location(self) -> str:
        """Where the bucket lies: by default the region of the cluster."""
        return self.jobs.bucket_location or self.region

    @property
    def installs_kueue(self) -> bool:
        """Whether this stack installs Kueue: always into its own cluster, into an adopted one if asked."""
        return self.kueue.kueue == "install" or not self.cluster.adopt_cluster

    @property
    def creates_priority_classes(self) -> bool:
        """Whether this stack makes the WorkloadPriorityClasses: with Kueue, unless told otherwise."""
        if self.kueue.priority_classes == "auto":
            return self.installs_kueue
        return self.kueue.priority_classes == "create"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but probably not wanted."""
        warnings = []
        if self.bucket_location.lower() != self.region:
            warnings.append(
                f"bucketLocation: {self.bucket_location} is not the cluster's region {self.region}; "
                "every byte read and written is billed as network traffic"
            )
        if not self.installs_kueue and self.kueue.pods_ready_timeout_minutes != KueueConfig.pods_ready_timeout_minutes:
            warnings.append("podsReadyTimeoutMinutes: is a setting of Kueue's installation, which is not this stack's")
        return tuple(warnings)

    def pool(self, name: str) -> PoolConfig:
        """The pool called `name`."""
        return next(pool for pool in self.pools if pool.pool_name == name)

    def scoped(self, name: str, limit: int = 63) -> str:
        """`name` with the stack's prefix: for what must be unique in a project or a cluster."""
        return fit(f"{self.prefix}-{name}", limit)


_GROUPS = (ClusterConfig, PoolConfig, KueueConfig, JobsConfig)
_LISTS = ("extraPools", "extraQueues")


def parse(raw: Mapping[str, Any], project_name: str, stack: str) -> Config:
    """The configuration from Pulumi's keys: the project's own without namespace, the provider's as `gcp:...`.

    Values are strings as Pulumi hands them over (lists and objects as JSON) or already parsed.
    Raises ConfigError, with one line, for anything that cannot be what the user meant.
    """
    own = {key: value for key, value in raw.items() if ":" not in key}
    _refuse_unknown(own, {*(_keys(*_GROUPS)), *_LISTS, HUGGING_FACE_TOKEN_KEY})
    project, region, location = _place(raw)
    cluster, kueue, jobs = _group(ClusterConfig, own), _group(KueueConfig, own), _group(JobsConfig, own)
    pools = (
        _group(PoolConfig, own),
        *(_extra_pool(entry, where) for where, entry in _entries(own, "extraPools")),
    )
    extra_queues = [(where, _read(ExtraQueue, entry, where)) for where, entry in _entries(own, "extraQueues")]
    _refuse_repeats("poolName", [each.pool_name for each in pools])
    for each in pools:
        _refuse_foreign_zones(each, region)
    if kueue.kueue == "existing" and not cluster.adopt_cluster:
        raise ConfigError("kueue: 'existing' needs adoptCluster; a new cluster has no Kueue, use auto")
    if jobs.hugging_face_secret and own.get(HUGGING_FACE_TOKEN_KEY):
        raise ConfigError("huggingFaceSecret: huggingFaceToken is set too; keep one of the two")
    if not cluster.adopt_cluster and not cluster.rbac_security_group:
        for submitter in jobs.submitters:
            if submitter.startswith("group:"):
                raise ConfigError(f"submitters: {submitter!r} needs rbacSecurityGroup, without it GKE knows no groups")
    return Config(
        project=project,
        location=location,
        region=region,
        prefix=fit(f"{project_name}-{stack}", 40),
        cluster=cluster,
        pools=pools,
        queues=_queues(pools, extra_queues),
        kueue=kueue,
        jobs=jobs,
    )


def parse_endpoint(text: str) -> tuple[str, tuple[int, ...]]:
    """`"169.254.169.254:80,8080"` as address and ports. Raises ConfigError for anything else."""
    address, _, ports = text.partition(":")
    try:
        ipaddress.IPv4Address(address)
        numbers = tuple(int(port) for port in ports.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < 65536 for number in numbers):
        raise ConfigError(f"metadataServer: {text!r} must be auto or ADDRESS:PORT[,PORT], as 169.254.169.254:80,8080")
    return address, numbers


def defaults() -> dict[str, Any]:
    """Every key that has a default, with it; what `Pulumi.yaml` must say too."""
    return {
        _camel(each.name): list(each.default) if isinstance(each.default, tuple) else each.default
        for group in _GROUPS
        for each in dataclasses.fields(group)
    }


def _place(raw: Mapping[str, Any]) -> tuple[str, str, str]:
    """Project, region and location of the cluster from the provider's keys."""
    project, region, zone = (str(raw.get(f"gcp:{key}") or "") for key in ("project", "region", "zone"))
    if not project:
        raise ConfigError("gcp:project: is not set; run pulumi config set gcp:project PROJECT")
    if region and zone:
        raise ConfigError(
            "gcp:zone: gcp:region is set too; keep the region for a regional cluster or the zone for a zonal"
        )
    if not region and not zone:
        raise ConfigError("gcp:region: neither region nor zone is set; run pulumi config set gcp:region REGION")
    if region and not re.fullmatch(r"[a-z]+-[a-z]+\d+", region):
        raise ConfigError(f"gcp:region: {region!r} is not a region; write for example us-central1")
    if zone and not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", zone):
        raise ConfigError(f"gcp:zone: {zone!r} is not a zone; write for example us-central1-b")
    return project, region or zone.rpartition("-")[0], region or zone


def _extra_pool(entry: Mapping[str, Any], where: str) -> PoolConfig:
    """An entry of `extraPools`: the keys of the first pool; its queue is called as the pool by default."""
    if "poolName" not in entry:
        raise ConfigError(f"{where}.poolName: is not set; give the pool a name")
    return _read(PoolConfig, {"queueName": entry["poolName"], **entry}, where)


def _queues(pools: tuple[PoolConfig, ...], extra: list[tuple[str, ExtraQueue]]) -> tuple[Queue, ...]:
    """All queues; a pool's own queue has the quota that the extra ones on that pool leave."""
    for where, queue in extra:
        if queue.pool_name not in {pool.pool_name for pool in pools}:
            raise ConfigError(f"{where}.poolName: there is no pool {queue.pool_name!r}; add it to extraPools")
    queues = []
    for pool in pools:
        left = pool.max_nodes - sum(queue.nodes for _, queue in extra if queue.pool_name == pool.pool_name)
        if left < 1:
            raise ConfigError(
                f"extraQueues: they leave queue {pool.queue_name!r} a quota smaller than one pod "
                f"({left} of maxNodes {pool.max_nodes}); give them fewer nodes or raise maxNodes"
            )
        queues.append(Queue(pool.queue_name, pool.pool_name, left))
    queues += [Queue(queue.queue_name, queue.pool_name, queue.nodes) for _, queue in extra]
    _refuse_repeats("queueName", [queue.name for queue in queues])
    return tuple(queues)


def _group(kind: type[T], own: Mapping[str, Any]) -> T:
    """A dataclass from those of the flat keys that are its fields."""
    return _read(kind, {key: own[key] for key in _keys(kind) if key in own})


def _read(kind: type[T], raw: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from its keys. Raises ConfigError with `where` in front of the key."""
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(kind)
    fields = {_camel(each.name): each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    try:
        _refuse_unknown(raw, set(fields))
        for key, each in fields.items():
            if key not in raw and each.default is dataclasses.MISSING:
                raise ConfigError(f"{key}: is not set")
        return kind(**{fields[key].name: _value(key, hints[fields[key].name], value) for key, value in raw.items()})
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _value(key: str, kind: Any, value: Any) -> Any:
    """One value of type `kind`: str, int, bool, or a tuple of str or of a dataclass."""
    if typing.get_origin(kind) is tuple:
        (item, _) = typing.get_args(kind)
        entries = _list(key, value)
        if dataclasses.is_dataclass(item):
            return tuple(
                _read(typing.cast(type, item), _mapping(f"{key}[{i}]", entry), f"{key}[{i}]")
                for i, entry in enumerate(entries)
            )
        return tuple(_value(f"{key}[{i}]", item, entry) for i, entry in enumerate(entries))
    if kind is bool:
        if str(value).lower() not in ("true", "false"):
            raise ConfigError(f"{key}: {value!r} is neither true nor false")
        return str(value).lower() == "true"
    if kind is int:
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)):
            raise ConfigError(f"{key}: {value!r} is not a whole number")
        return int(str(value))
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {value!r} is not a text")
    return value


def _entries(own: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The entries of a list of objects, each with where it stands."""
    return [(f"{key}[{i}]", _mapping(f"{key}[{i}]", entry)) for i, entry in enumerate(_list(key, own.get(key, [])))]


def _list(key: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = None
    if not isinstance(value, list):
        raise ConfigError(f"{key}: is not a list; set entries with pulumi config set --path '{key}[0]' VALUE")
    return value


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {value!r} is not an object; set its keys with --path '{where}.KEY'")
    return value


def _keys(*kinds: type) -> set[str]:
    return {_camel(each.name) for kind in kinds for each in dataclasses.fields(kind)}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _refuse_unknown(raw: Mapping[str, Any], known: set[str]) -> None:
    for key in sorted(set(raw) - known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "see Pulumi.yaml for the keys"
        raise ConfigError(f"{key}: is not a key of this program; {hint}")


def _refuse_repeats(key: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{key}: {name!r} stands twice; give each its own name")


def _refuse_foreign_zones(pool: PoolConfig, region: str) -> None:
    for zone in pool.node_zones:
        if not re.fullmatch(rf"{region}-[a-z]", zone):
            raise ConfigError(f"nodeZones: {zone!r} is not a zone of {region}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")


def _dns_label(key: str, value: str) -> None:
    if not _DNS_LABEL.fullmatch(value):
        raise ConfigError(f"{key}: {value!r} is not a DNS label; use at most 63 lower-case letters, digits and hyphens")


def _instant(key: str, value: str) -> datetime:
    try:
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise ConfigError(f"{key}: {value!r} is not a UTC time; write it as 2026-12-24T00:00:00Z") from None
