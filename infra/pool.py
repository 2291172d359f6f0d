"""The facts of a conversion pool: machine types, what is left of a node, a pod's request, label and taint.

Imports nothing but the standard library, so that whatever renders a Job can use the same numbers.
Memory and storage are in GiB (Google's "GB" of memory, disk and local SSD is 2**30 bytes).
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

DEFAULT_MACHINE_TYPE = "n2-highmem-64"
DEFAULT_DISK_TYPE = "pd-balanced"
DEFAULT_DISK_GB = 1000

# The label that selects a pool's nodes and the taint that keeps every other pod off them share key and value.
LABEL_KEY = "conversion-pool"
TAINT_EFFECT = "NoSchedule"  # as Kubernetes spells it

LOCAL_SSD_GIB = 375


@dataclass(frozen=True)
class MachineType:
    """One machine type: its size, the disks it takes, and what the one pod on it requests.

    The request is a number of its own, not a ratio of the size: it must be more than half of what is left of
    a node, so that two pods never share one, and less than what the DaemonSets leave.

    Sizes, disk types and local SSD counts: Compute Engine's documentation of the N2, N2D and C3 series.
    """

    vcpus: int
    memory_gib: int
    pod_cpus: int
    pod_memory_gib: int
    local_ssd_counts: tuple[int, ...]
    disk_types: tuple[str, ...]


@dataclass(frozen=True)
class Allocatable:
    """What a node offers to all pods together, DaemonSets included."""

    cpus: float
    memory_gib: float
    ephemeral_storage_gib: float


@dataclass(frozen=True)
class PodRequest:
    """What one conversion pod requests; no node has room for two."""

    cpus: int
    memory_gib: int
    ephemeral_storage_gib: int

    def resources(self, pods: int = 1) -> dict[str, str]:
        """The request of `pods` pods as Kubernetes quantities; the quota of a queue that runs so many."""
        return {
            "cpu": str(self.cpus * pods),
            "memory": f"{self.memory_gib * pods}Gi",
            "ephemeral-storage": f"{self.ephemeral_storage_gib * pods}Gi",
        }


_PERSISTENT_DISKS = ("pd-balanced", "pd-ssd", "pd-standard")
_C3_DISKS = ("pd-balanced", "pd-ssd", "hyperdisk-balanced")

MACHINE_TYPES = MappingProxyType(
    {
        "n2-highmem-64": MachineType(64, 512, 60, 460, (8, 16, 24), _PERSISTENT_DISKS),
        "n2-highmem-32": MachineType(32, 256, 29, 225, (4, 8, 16, 24), _PERSISTENT_DISKS),
        "n2-highmem-48": MachineType(48, 384, 45, 340, (8, 16, 24), _PERSISTENT_DISKS),
        "n2-highmem-80": MachineType(80, 640, 76, 575, (8, 16, 24), _PERSISTENT_DISKS),
        "n2d-highmem-32": MachineType(32, 256, 29, 225, (2, 4, 8, 16, 24), _PERSISTENT_DISKS),
        "n2d-highmem-48": MachineType(48, 384, 45, 340, (2, 4, 8, 16, 24), _PERSISTENT_DISKS),
        "n2d-highmem-64": MachineType(64, 512, 60, 460, (4, 8, 16, 24), _PERSISTENT_DISKS),
        "n2d-highmem-80": MachineType(80, 640, 76, 575, (4, 8, 16, 24), _PERSISTENT_DISKS),
        # C3 has local SSD only on the -lssd machine types, and none of those is highmem.
        "c3-highmem-44": MachineType(44, 352, 41, 312, (), _C3_DISKS),
        "c3-highmem-88": MachineType(88, 704, 84, 635, (), _C3_DISKS),
        "c3-highmem-176": MachineType(176, 1408, 170, 1280, (), _C3_DISKS),
    }
)


def reserved_cpus(vcpus: int) -> float:
    """The CPU that GKE reserves.

    6 % of the first core, 1 % of the second, 0.5 % of two more, 0.25 % of the rest.
    Source: "Plan GKE Standard node sizes" in GKE's documentation.
    """
    return _by_tier(vcpus, ((1, 0.06), (1, 0.01), (2, 0.005), (math.inf, 0.0025)))


def reserved_memory_gib(memory_gib: float) -> float:
    """The memory that GKE reserves, the kubelet's 100 MiB eviction threshold included.

    25 % of the first 4 GiB, 20 % of 4 more, 10 % of 8 more, 6 % of 112 more, 2 % of the rest.
    Source: "Plan GKE Standard node sizes" in GKE's documentation.
    """
    tiers = ((4, 0.25), (4, 0.20), (8, 0.10), (112, 0.06), (math.inf, 0.02))
    return _by_tier(memory_gib, tiers) + 100 / 1024


def kernel_memory_gib(memory_gib: float) -> float:
    """The memory that the kernel keeps before the kubelet sees any (page table, firmware): 1/64 + 0.3 GiB."""
    return memory_gib / 64 + 0.3


def allocatable_ephemeral_storage_gib(disk_gb: int, local_ssd_count: int = 0) -> float:
    """The ephemeral storage that pods can request on a node, in GiB.

    On the boot disk GKE reserves the least of 50 %, 6 GiB + 35 % and 100 GiB; on local SSD 50, 75 or 100 GiB
    for one, two, or more disks. The kubelet keeps another 10 % free (its eviction threshold).
    Source: "Plan GKE Standard node sizes" in GKE's documentation.
    """
    if local_ssd_count:
        raw = capacity = local_ssd_count * LOCAL_SSD_GIB * 0.98  # ext4's own tables
        reserved = {1: 50.0, 2: 75.0}.get(local_ssd_count, 100.0)
    else:
        raw = disk_gb
        capacity = max(disk_gb * 0.98 - 4, 0)  # ext4's own tables and the image's other partitions
        reserved = min(raw * 0.5, 6 + raw * 0.35, 100)
    return max(capacity - reserved - raw * 0.1, 0)


def allocatable(machine_type: str, disk_gb: int = DEFAULT_DISK_GB, local_ssd_count: int = 0) -> Allocatable:
    """What is left of a node for all its pods. Raises KeyError for a machine type not in `MACHINE_TYPES`."""
    machine = MACHINE_TYPES[machine_type]
    memory = machine.memory_gib - kernel_memory_gib(machine.memory_gib) - reserved_memory_gib(machine.memory_gib)
    return Allocatable(
        cpus=machine.vcpus - reserved_cpus(machine.vcpus),
        memory_gib=memory,
        ephemeral_storage_gib=allocatable_ephemeral_storage_gib(disk_gb, local_ssd_count),
    )


def pod_request(
    machine_type: str = DEFAULT_MACHINE_TYPE, disk_gb: int = DEFAULT_DISK_GB, local_ssd_count: int = 0
) -> PodRequest:
    """What the one conversion pod of a node requests.

    Ephemeral storage is 90 % of what is allocatable, in steps of 10 GiB: images and logs lie on the same
    disk. Raises KeyError for a machine type not in `MACHINE_TYPES`.
    """
    machine = MACHINE_TYPES[machine_type]
    storage = allocatable_ephemeral_storage_gib(disk_gb, local_ssd_count)
    return PodRequest(machine.pod_cpus, machine.pod_memory_gib, math.floor(storage * 0.9 / 10) * 10)


def node_label(value: str) -> dict[str, str]:
    """The node label (and a pod's nodeSelector) of the pool whose nodes carry `value`."""
    return {LABEL_KEY: value}


def toleration(value: str) -> dict[str, str]:
    """The toleration that lets a pod onto the pool whose nodes carry `value`."""
    return {"key": LABEL_KEY, "operator": "Equal", "value": value, "effect": TAINT_EFFECT}


def _by_tier(amount: float, tiers: tuple[tuple[float, float], ...]) -> float:
    """The sum over `tiers` of (size, share): each takes its share of the part of `amount` in it."""
    total = 0.0
    for size, share in tiers:
        part = min(amount, size)
        total += part * share
        amount -= part
    return total
