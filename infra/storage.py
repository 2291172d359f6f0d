"""The bucket that checkpoints are written to."""

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra.config import Config

_DAY = 24 * 60 * 60


def create(config: Config, enabled: Sequence[pulumi.Resource]) -> gcp.storage.Bucket:
    """Make the bucket. `destroy` refuses to remove it while anything is in it."""
    rules = [
        gcp.storage.BucketLifecycleRuleArgs(
            action=gcp.storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
            condition=gcp.storage.BucketLifecycleRuleConditionArgs(age=7),
        )
    ]
    if config.jobs.run_expiry_days:
        rules.append(
            gcp.storage.BucketLifecycleRuleArgs(
                action=gcp.storage.BucketLifecycleRuleActionArgs(type="Delete"),
                condition=gcp.storage.BucketLifecycleRuleConditionArgs(
                    age=config.jobs.run_expiry_days,
                    matches_prefixes=list(config.jobs.run_expiry_prefixes) or None,
                ),
            )
        )
    return gcp.storage.Bucket(
        "checkpoints",
        # Bucket names are the world's; the project id, which is too, keeps this one free.
        name=config.scoped(f"{config.project}-checkpoints"),
        project=config.project,
        location=config.bucket_location.upper(),
        uniform_bucket_level_access=True,
        public_access_prevention="enforced",
        force_destroy=False,
        soft_delete_policy=gcp.storage.BucketSoftDeletePolicyArgs(
            retention_duration_seconds=config.jobs.soft_delete_days * _DAY
        ),
        lifecycle_rules=rules,
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
