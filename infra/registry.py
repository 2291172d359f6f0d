"""The registry of the images that Jobs run."""

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra.config import Config

_DAY = 24 * 60 * 60


def create(
    config: Config, nodes: gcp.serviceaccount.Account, enabled: Sequence[pulumi.Resource]
) -> gcp.artifactregistry.Repository:
    """Make the repository, which forgets untagged images after a month, and let the nodes pull from it."""
    repository = gcp.artifactregistry.Repository(
        "images",
        project=config.project,
        location=config.region,
        repository_id=config.scoped("images"),
        format="DOCKER",
        description="Images of the conversion Jobs",
        cleanup_policy_dry_run=False,
        cleanup_policies=[
            gcp.artifactregistry.RepositoryCleanupPolicyArgs(
                id="delete-untagged",
                action="DELETE",
                condition=gcp.artifactregistry.RepositoryCleanupPolicyConditionArgs(
                    tag_state="UNTAGGED", older_than=f"{30 * _DAY}s"
                ),
            ),
            # Wins over the policy above: a Job may name an image by digest.
            gcp.artifactregistry.RepositoryCleanupPolicyArgs(
                id="keep-recent",
                action="KEEP",
                most_recent_versions=gcp.artifactregistry.RepositoryCleanupPolicyMostRecentVersionsArgs(keep_count=10),
            ),
        ],
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
    gcp.artifactregistry.RepositoryIamMember(
        "nodes-images",
        project=config.project,
        location=repository.location,
        repository=repository.name,
        role="roles/artifactregistry.reader",
        member=nodes.member,
    )
    return repository


def image_repository(config: Config, repository: gcp.artifactregistry.Repository) -> pulumi.Output[str]:
    """What an image's name starts with: `REGION-docker.pkg.dev/PROJECT/REPOSITORY`."""
    return pulumi.Output.concat(f"{config.region}-docker.pkg.dev/{config.project}/", repository.repository_id)
