"""The GKE cluster: created with a small system pool, or adopted by name."""

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra.config import Config, ConfigError, parse_endpoint
from infra.naming import fit
from infra.network import PODS_RANGE, SERVICES_RANGE, Subnet

# Where the metadata server answers once the dataplane has seen the packet. Source: "About Workload Identity
# Federation for GKE", network policies.
_METADATA_DATAPLANE_V2 = ("169.254.169.254", (80, 8080))
_METADATA_OTHER = ("169.254.169.252", (988, 987))

# The system pool's nodes carry it; what must stay off the conversion nodes selects it.
SYSTEM_NODE_LABEL = {"node-pool-role": "system"}

OAUTH_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True)
class Target:
    """The cluster everything else goes into, created or adopted."""

    name: pulumi.Input[str]
    server: pulumi.Input[str]  # https://...
    ca_certificate: pulumi.Input[str] | None  # base64; None on the DNS endpoint, whose certificate is public
    workload_pool: str
    metadata_server: tuple[str, tuple[int, ...]]  # address, ports
    system_node_label: dict[str, str]  # empty where the system nodes are not ours to know
    ready: list[pulumi.Resource]
    warnings: tuple[str, ...] = ()

    @property
    def uses_dns_endpoint(self) -> bool:
        """Whether the control plane is reached by its DNS name."""
        return self.ca_certificate is None


def create(
    config: Config, subnet: Subnet, nodes: gcp.serviceaccount.Account, enabled: Sequence[pulumi.Resource]
) -> Target:
    """Make the cluster and its system pool."""
    settings = config.cluster
    workload_pool = f"{config.project}.svc.id.goog"
    cluster = gcp.container.Cluster(
        "cluster",
        name=fit(config.prefix, 40),
        project=config.project,
        location=config.location,
        deletion_protection=settings.deletion_protection,
        release_channel=gcp.container.ClusterReleaseChannelArgs(channel=settings.release_channel),
        # GKE wants one pool to start with; it is removed at once, the system pool takes over.
        remove_default_node_pool=True,
        initial_node_count=1,
        node_config=gcp.container.ClusterNodeConfigArgs(
            machine_type="e2-medium",
            disk_type="pd-standard",
            disk_size_gb=30,
            service_account=nodes.email,
            oauth_scopes=[OAUTH_SCOPE],
            shielded_instance_config=gcp.container.ClusterNodeConfigShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_integrity_monitoring=True
            ),
        ),
        networking_mode="VPC_NATIVE",
        network=subnet.network,
        subnetwork=subnet.subnetwork,
        ip_allocation_policy=gcp.container.ClusterIpAllocationPolicyArgs(
            cluster_secondary_range_name=PODS_RANGE, services_secondary_range_name=SERVICES_RANGE
        ),
        default_max_pods_per_node=64,
        datapath_provider="ADVANCED_DATAPATH",
        private_cluster_config=gcp.container.ClusterPrivateClusterConfigArgs(enable_private_nodes=True),
        # IAM guards the DNS name, from anywhere; the control plane has no IP address to reach.
        control_plane_endpoints_config=gcp.container.ClusterControlPlaneEndpointsConfigArgs(
            dns_endpoint_config=gcp.container.ClusterControlPlaneEndpointsConfigDnsEndpointConfigArgs(
                allow_external_traffic=True
            ),
            ip_endpoints_config=gcp.container.ClusterControlPlaneEndpointsConfigIpEndpointsConfigArgs(enabled=False),
        ),
        workload_identity_config=gcp.container.ClusterWorkloadIdentityConfigArgs(workload_pool=workload_pool),
        enable_shielded_nodes=True,
        cluster_autoscaling=gcp.container.ClusterClusterAutoscalingArgs(
            enabled=False, autoscaling_profile="OPTIMIZE_UTILIZATION"
        ),
        cost_management_config=gcp.container.ClusterCostManagementConfigArgs(enabled=True),
        logging_config=gcp.container.ClusterLoggingConfigArgs(enable_components=["SYSTEM_COMPONENTS", "WORKLOADS"]),
        monitoring_config=gcp.container.ClusterMonitoringConfigArgs(
            enable_components=["SYSTEM_COMPONENTS"],
            # Its collectors would run on every node and ask for a larger system pool.
            managed_prometheus=gcp.container.ClusterMonitoringConfigManagedPrometheusArgs(enabled=False),
        ),
        maintenance_policy=_maintenance(config),
        authenticator_groups_config=(
            gcp.container.ClusterAuthenticatorGroupsConfigArgs(security_group=settings.rbac_security_group)
            if settings.rbac_security_group
            else None
        ),
        opts=pulumi.ResourceOptions(
            depends_on=[*enabled, *subnet.ready],
            # They describe the pool that was removed.
            ignore_changes=["initialNodeCount", "nodeConfig"],
        ),
    )
    system = _system_pool(config, cluster, nodes)
    endpoint = cluster.control_plane_endpoints_config.dns_endpoint_config.endpoint
    return Target(
        name=cluster.name,
        server=pulumi.Output.concat("https://", endpoint),
        ca_certificate=None,
        workload_pool=workload_pool,
        metadata_server=_metadata_server(config, dataplane_v2=True),
        system_node_label=SYSTEM_NODE_LABEL,
        ready=[cluster, system],
    )


def look_up(config: Config) -> Target:
    """The adopted cluster. Raises ConfigError when it cannot serve, before anything is made."""
    name = config.cluster.adopt_cluster
    try:
        found = gcp.container.get_cluster(name=name, location=config.location, project=config.project)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"adoptCluster: cannot read cluster {name!r} in {config.location}: {reason}") from None
    if found.enable_autopilot:
        raise ConfigError(
            f"adoptCluster: {name!r} is an Autopilot cluster, which takes no node pool; use a Standard one"
        )
    if not found.workload_identity_configs or not found.workload_identity_configs[0].workload_pool:
        raise ConfigError(
            f"adoptCluster: {name!r} has no Workload Identity; "
            f"run gcloud container clusters update {name} --workload-pool={config.project}.svc.id.goog"
        )
    endpoints = found.control_plane_endpoints_configs
    dns = endpoints[0].dns_endpoint_configs if endpoints else []
    by_name = bool(dns and dns[0].endpoint and dns[0].allow_external_traffic)
    dataplane_v2 = found.datapath_provider == "ADVANCED_DATAPATH"
    return Target(
        name=found.name,
        server=f"https://{dns[0].endpoint if by_name else found.endpoint}",
        ca_certificate=None if by_name else found.master_auths[0].cluster_ca_certificate,
        workload_pool=found.workload_identity_configs[0].workload_pool,
        metadata_server=_metadata_server(config, dataplane_v2),
        system_node_label={},
        ready=[],
        warnings=_adoption_warnings(found, dataplane_v2),
    )


def _adoption_warnings(found: gcp.container.GetClusterResult, dataplane_v2: bool) -> tuple[str, ...]:
    warnings = []
    if not dataplane_v2 and not any(policy.enabled for policy in found.network_policies):
        warnings.append(
            f"adoptCluster: {found.name} enforces no NetworkPolicy (neither Dataplane V2 nor Calico); "
            "the one this stack makes has no effect there"
        )
    profiles = [autoscaling.autoscaling_profile for autoscaling in found.cluster_autoscalings]
    if "OPTIMIZE_UTILIZATION" not in profiles:
        warnings.append(
            f"adoptCluster: {found.name} has the BALANCED autoscaling profile; idle nodes stay longer "
            "than with --autoscaling-profile=optimize-utilization"
        )
    return tuple(warnings)


def _metadata_server(config: Config, dataplane_v2: bool) -> tuple[str, tuple[int, ...]]:
    if config.jobs.metadata_server != "auto":
        return parse_endpoint(config.jobs.metadata_server)
    return _METADATA_DATAPLANE_V2 if dataplane_v2 else _METADATA_OTHER


def _maintenance(config: Config) -> gcp.container.ClusterMaintenancePolicyArgs:
    """Upgrades only in the window; a new minor version only on request or when the old one's support ends."""
    settings = config.cluster
    exclusions = [
        gcp.container.ClusterMaintenancePolicyMaintenanceExclusionArgs(
            exclusion_name="no-minor-upgrades",
            start_time=settings.maintenance_start,
            exclusion_options=gcp.container.ClusterMaintenancePolicyMaintenanceExclusionExclusionOptionsArgs(
                scope="NO_MINOR_UPGRADES", end_time_behavior="UNTIL_END_OF_SUPPORT"
            ),
        ),
        *(
            gcp.container.ClusterMaintenancePolicyMaintenanceExclusionArgs(
                exclusion_name=exclusion.name,
                start_time=exclusion.start,
                end_time=exclusion.end,
                exclusion_options=gcp.container.ClusterMaintenancePolicyMaintenanceExclusionExclusionOptionsArgs(
                    scope=exclusion.scope
                ),
            )
            for exclusion in settings.maintenance_exclusions
        ),
    ]
    return gcp.container.ClusterMaintenancePolicyArgs(
        recurring_window=gcp.container.ClusterMaintenancePolicyRecurringWindowArgs(
            start_time=settings.maintenance_start,
            end_time=settings.maintenance_end,
            recurrence=settings.maintenance_recurrence,
        ),
        maintenance_exclusions=exclusions,
    )


def _system_pool(
    config: Config, cluster: gcp.container.Cluster, nodes: gcp.serviceaccount.Account
) -> gcp.container.NodePool:
    """The nodes of kube-system and Kueue."""
    return gcp.container.NodePool(
        "system",
        project=config.project,
        location=config.location,
        cluster=cluster.name,
        initial_node_count=1,
        autoscaling=gcp.container.NodePoolAutoscalingArgs(
            total_min_node_count=1,
            total_max_node_count=config.cluster.system_max_nodes,
            location_policy="BALANCED",
        ),
        management=gcp.container.NodePoolManagementArgs(auto_repair=True, auto_upgrade=True),
        network_config=gcp.container.NodePoolNetworkConfigArgs(enable_private_nodes=True),
        node_config=gcp.container.NodePoolNodeConfigArgs(
            machine_type=config.cluster.system_machine_type,
            disk_type="pd-balanced",
            disk_size_gb=50,
            image_type="COS_CONTAINERD",
            labels=SYSTEM_NODE_LABEL,
            service_account=nodes.email,
            oauth_scopes=[OAUTH_SCOPE],
            workload_metadata_config=gcp.container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
            shielded_instance_config=gcp.container.NodePoolNodeConfigShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_integrity_monitoring=True
            ),
        ),
        opts=pulumi.ResourceOptions(ignore_changes=["initialNodeCount"]),
    )
