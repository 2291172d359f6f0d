"""The pool's facts against what Google publishes."""

import subprocess
import sys

import pytest
from harness import ROOT

from infra import pool


def test_the_facts_import_no_pulumi() -> None:
    code = "import infra.pool, sys; print([m for m in sys.modules if m.split('.')[0] == 'pulumi'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_formulas_give_the_node_that_gke_documents() -> None:
    # "Plan GKE Standard node sizes" shows a node of 4 vCPUs, 16 GiB and a 100 GB boot disk:
    # allocatable cpu 3920m, memory 13498416Ki, ephemeral-storage 47060071478 bytes.
    assert 4 - pool.reserved_cpus(4) == pytest.approx(3.920)
    memory = 16 - pool.kernel_memory_gib(16) - pool.reserved_memory_gib(16)
    assert memory == pytest.approx(13498416 / 2**20, rel=0.02)
    assert memory < 13498416 / 2**20
    storage = pool.allocatable_ephemeral_storage_gib(100)
    assert storage == pytest.approx(47060071478 / 2**30, rel=0.02)
    assert storage < 47060071478 / 2**30


def test_the_reservation_tiers() -> None:
    assert pool.reserved_memory_gib(4) == pytest.approx(1 + 100 / 1024)
    assert pool.reserved_memory_gib(128) == pytest.approx(1 + 0.8 + 0.8 + 6.72 + 100 / 1024)
    assert pool.reserved_memory_gib(512) == pytest.approx(1 + 0.8 + 0.8 + 6.72 + 7.68 + 100 / 1024)
    assert pool.reserved_cpus(1) == pytest.approx(0.06)
    assert pool.reserved_cpus(64) == pytest.approx(0.23)


def test_the_default_pod() -> None:
    left = pool.allocatable("n2-highmem-64")
    assert left.cpus == pytest.approx(63.77)
    assert left.memory_gib == pytest.approx(486.6, abs=0.5)
    assert next(iter(pool.MACHINE_TYPES)) == pool.DEFAULT_MACHINE_TYPE == "n2-highmem-64"
    request = pool.pod_request()
    assert (request.cpus, request.memory_gib) == (60, 460)
    assert request.resources() == {
        "cpu": "60",
        "memory": "460Gi",
        "ephemeral-storage": f"{request.ephemeral_storage_gib}Gi",
    }
    assert request.resources(10) == {
        "cpu": "600",
        "memory": "4600Gi",
        "ephemeral-storage": f"{10 * request.ephemeral_storage_gib}Gi",
    }


@pytest.mark.parametrize("name", pool.MACHINE_TYPES)
def test_one_pod_and_only_one_fits_a_node(name: str) -> None:
    machine = pool.MACHINE_TYPES[name]
    ssds = (0, *machine.local_ssd_counts)
    for local_ssd_count in ssds:
        left = pool.allocatable(name, local_ssd_count=local_ssd_count)
        request = pool.pod_request(name, local_ssd_count=local_ssd_count)
        # Room for the DaemonSets: GKE's own request about 1 CPU and 2 GiB a node.
        assert left.cpus / 2 < request.cpus <= left.cpus - 1.5
        assert left.memory_gib / 2 < request.memory_gib <= left.memory_gib - 5
        assert left.ephemeral_storage_gib / 2 < request.ephemeral_storage_gib < left.ephemeral_storage_gib
        # And little of what is paid for stays unused.
        assert request.cpus >= 0.9 * left.cpus
        assert request.memory_gib >= 0.92 * left.memory_gib


@pytest.mark.parametrize("name", pool.MACHINE_TYPES)
def test_sizes_as_the_name_says(name: str) -> None:
    series, kind, vcpus = name.split("-")
    machine = pool.MACHINE_TYPES[name]
    assert series in ("n2", "n2d", "c3")
    assert kind == "highmem"
    # highmem has 8 GiB a vCPU (n2-highmem-128 does not, and is not in the table).
    assert (machine.vcpus, machine.memory_gib) == (int(vcpus), 8 * int(vcpus))


def test_local_ssd_counts_are_those_of_compute_engine() -> None:
    def counts(name: str) -> tuple[int, ...]:
        return pool.MACHINE_TYPES[name].local_ssd_counts

    assert counts("n2-highmem-64") == counts("n2-highmem-48") == counts("n2-highmem-80") == (8, 16, 24)
    assert counts("n2-highmem-32") == (4, 8, 16, 24)
    assert counts("n2d-highmem-64") == (4, 8, 16, 24)
    assert counts("c3-highmem-88") == ()


def test_local_ssds_replace_the_boot_disk() -> None:
    with_ssds = pool.allocatable_ephemeral_storage_gib(100, local_ssd_count=8)
    # 3,000 GiB less 100 GiB reserved and 10 % kept free.
    assert with_ssds == pytest.approx(3000 - 100 - 300, rel=0.03)
    assert with_ssds == pool.allocatable_ephemeral_storage_gib(2000, local_ssd_count=8)


def test_label_and_toleration_match() -> None:
    assert pool.node_label("x") == {pool.LABEL_KEY: "x"}
    assert pool.toleration("x") == {
        "key": pool.LABEL_KEY,
        "operator": "Equal",
        "value": "x",
        "effect": pool.TAINT_EFFECT,
    }
