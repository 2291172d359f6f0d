"""The network of a created cluster: a VPC of its own, private addresses, Cloud NAT for the model hubs."""

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra.config import Config

PODS_RANGE = "pods"
SERVICES_RANGE = "services"


@dataclass(frozen=True)
class Subnet:
    """Where the nodes live, and what must exist before a node needs the internet."""

    network: pulumi.Output[str]
    subnetwork: pulumi.Output[str]
    ready: list[pulumi.Resource]


def create(config: Config, enabled: Sequence[pulumi.Resource]) -> Subnet:
    """Make VPC, subnet (with Private Google Access: storage traffic stays off the NAT), router and NAT."""
    network = gcp.compute.Network(
        "network",
        name=config.scoped("network"),
        project=config.project,
        auto_create_subnetworks=False,
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
    subnetwork = gcp.compute.Subnetwork(
        "subnetwork",
        name=config.scoped("nodes"),
        project=config.project,
        region=config.region,
        network=network.id,
        ip_cidr_range="10.20.0.0/22",
        private_ip_google_access=True,
        secondary_ip_ranges=[
            gcp.compute.SubnetworkSecondaryIpRangeArgs(range_name=PODS_RANGE, ip_cidr_range="10.24.0.0/16"),
            gcp.compute.SubnetworkSecondaryIpRangeArgs(range_name=SERVICES_RANGE, ip_cidr_range="10.20.16.0/20"),
        ],
    )
    router = gcp.compute.Router(
        "router",
        name=config.scoped("router"),
        project=config.project,
        region=config.region,
        network=network.id,
    )
    nat = gcp.compute.RouterNat(
        "nat",
        name=config.scoped("nat"),
        project=config.project,
        region=config.region,
        router=router.name,
        nat_ip_allocate_option="AUTO_ONLY",
        source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
        subnetworks=[
            gcp.compute.RouterNatSubnetworkArgs(name=subnetwork.id, source_ip_ranges_to_nats=["ALL_IP_RANGES"])
        ],
        # One node opens many connections to one hub; the default of 64 ports a node would starve it.
        enable_dynamic_port_allocation=True,
        enable_endpoint_independent_mapping=False,
        min_ports_per_vm=64,
        max_ports_per_vm=4096,
        log_config=gcp.compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
    )
    return Subnet(network.id, subnetwork.id, [nat])
