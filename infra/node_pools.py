"""The conversion pools: large nodes that come for a Job and leave after it."""

import pulumi
import pulumi_gcp as gcp

from infra import pool as facts
from infra.cluster import OAUTH_SCOPE, Target
from infra.config import Config, PoolConfig
from infra.identities import Nodes
from infra.naming import fit

# GKE spells taint effects its own way.
_GKE_TAINT_EFFECTS = {"NoSchedule": "NO_SCHEDULE", "NoExecute": "NO_EXECUTE"}


def create(config: Config, target: Target, nodes: Nodes) -> list[pulumi.Resource]:
    """Make one node pool for each configured one."""
    return [_create(config, pool, target, nodes) for pool in config.pools]


def _create(config: Config, pool: PoolConfig, target: Target, nodes: Nodes) -> gcp.container.NodePool:
    label = config.scoped(pool.pool_name)
    return gcp.container.NodePool(
        # Pulumi adds a random suffix: a change that GKE cannot make in place brings the new pool up before
        # the old one goes, and two stacks in one cluster do not collide. GKE takes 40 characters.
        fit(f"pool-{pool.pool_name}", 32),
        project=config.project,
        location=config.location,
        cluster=target.name,
        node_locations=list(pool.node_zones) or None,
        initial_node_count=0,
        # The totals count the whole pool; the plain limits would count each zone.
        autoscaling=gcp.container.NodePoolAutoscalingArgs(
            total_min_node_count=pool.min_nodes, total_max_node_count=pool.max_nodes, location_policy="ANY"
        ),
        management=gcp.container.NodePoolManagementArgs(auto_repair=True, auto_upgrade=True),
        # No surge node: an upgrade replaces a node in its place and never keeps an extra one alive.
        upgrade_settings=gcp.container.NodePoolUpgradeSettingsArgs(strategy="SURGE", max_surge=0, max_unavailable=1),
        network_config=gcp.container.NodePoolNetworkConfigArgs(enable_private_nodes=True),
        max_pods_per_node=32,
        node_config=gcp.container.NodePoolNodeConfigArgs(
            machine_type=pool.machine_type,
            spot=pool.spot,
            disk_type=pool.disk_type,
            disk_size_gb=pool.disk_size_gb,
            image_type="COS_CONTAINERD",
            ephemeral_storage_local_ssd_config=(
                gcp.container.NodePoolNodeConfigEphemeralStorageLocalSsdConfigArgs(local_ssd_count=pool.local_ssd_count)
                if pool.local_ssd_count
                else None
            ),
            labels=facts.node_label(label),
            taints=[
                gcp.container.NodePoolNodeConfigTaintArgs(
                    key=facts.LABEL_KEY, value=label, effect=_GKE_TAINT_EFFECTS[facts.TAINT_EFFECT]
                )
            ],
            service_account=nodes.account.email,
            oauth_scopes=[OAUTH_SCOPE],
            workload_metadata_config=gcp.container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
            gcfs_config=gcp.container.NodePoolNodeConfigGcfsConfigArgs(enabled=True),
            gvnic=gcp.container.NodePoolNodeConfigGvnicArgs(enabled=True),
            shielded_instance_config=gcp.container.NodePoolNodeConfigShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_integrity_monitoring=True
            ),
            resource_labels={"stack": config.prefix, "pool": pool.pool_name},
        ),
        opts=pulumi.ResourceOptions(
            depends_on=[*target.ready, nodes.role],
            # GKE reports a manual resize here, and a change of it would replace the pool.
            ignore_changes=["initialNodeCount"],
        ),
    )
