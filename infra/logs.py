"""The Jobs' logs, kept for as long as configured and apart from the project's others."""

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra.cluster import Target
from infra.config import Config


def create(
    config: Config, target: Target, nodes: gcp.serviceaccount.Account, enabled: Sequence[pulumi.Resource]
) -> None:
    """Make a log bucket with its own retention, and the sink that fills it."""
    bucket = gcp.logging.ProjectBucketConfig(
        "logs",
        project=config.project,
        location=config.region,
        # A deleted log bucket keeps its id for 7 days; the account's id is new whenever the stack is.
        bucket_id=nodes.unique_id.apply(lambda unique: config.scoped(f"logs-{unique[-6:]}")),
        retention_days=config.jobs.log_retention_days,
        description="Logs of the conversion Jobs",
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
    gcp.logging.ProjectSink(
        "logs-sink",
        name=config.scoped("logs"),
        project=config.project,
        destination=pulumi.Output.concat(
            f"logging.googleapis.com/projects/{config.project}/locations/{config.region}/buckets/",
            bucket.bucket_id,
        ),
        filter=pulumi.Output.concat(
            'resource.labels.cluster_name="',
            target.name,
            f'" AND resource.labels.location="{config.location}"',
            f' AND resource.labels.namespace_name="{config.namespace}"',
        ),
        unique_writer_identity=True,
    )
