"""Who may do what: the nodes, the Jobs, the submitters, and CI without a key."""

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra.cluster import Target
from infra.config import Config

CONVERTER_SERVICE_ACCOUNT = "converter"

_GITHUB_ISSUER = "https://token.actions.githubusercontent.com"


@dataclass(frozen=True)
class Nodes:
    """The account that nodes run as, and the grant without which they report nothing."""

    account: gcp.serviceaccount.Account
    role: pulumi.Resource


@dataclass(frozen=True)
class GitHub:
    """What a GitHub workflow authenticates with."""

    provider: pulumi.Output[str]
    account: gcp.serviceaccount.Account


def node_service_account(config: Config, enabled: Sequence[pulumi.Resource]) -> Nodes:
    """The nodes' account: it writes logs and metrics, and (in the registry) pulls images."""
    account = _account(config, "nodes", "Conversion nodes", enabled)
    role = gcp.projects.IAMMember(
        "nodes-role",
        project=config.project,
        role="roles/container.defaultNodeServiceAccount",
        member=account.member,
    )
    return Nodes(account, role)


def converter_service_account(
    config: Config, bucket: gcp.storage.Bucket, target: Target, enabled: Sequence[pulumi.Resource]
) -> gcp.serviceaccount.Account:
    """The Jobs' account: objects of the one bucket, nothing else, for the Jobs' Kubernetes account only."""
    account = _account(config, "converter", "Conversion Jobs", enabled)
    gcp.storage.BucketIAMMember(
        "converter-objects", bucket=bucket.name, role="roles/storage.objectUser", member=account.member
    )
    gcp.serviceaccount.IAMMember(
        "converter-workload-identity",
        service_account_id=account.name,
        role="roles/iam.workloadIdentityUser",
        member=f"serviceAccount:{target.workload_pool}[{config.namespace}/{CONVERTER_SERVICE_ACCOUNT}]",
        # The pool of identities exists once the project's first cluster with Workload Identity does.
        opts=pulumi.ResourceOptions(depends_on=target.ready),
    )
    return account


def github(
    config: Config, images: gcp.artifactregistry.Repository, enabled: Sequence[pulumi.Resource]
) -> GitHub | None:
    """CI's account and the trust in one GitHub repository's workflows, if one is configured."""
    repository = config.jobs.github_repository
    if not repository:
        return None
    account = _account(config, "ci", f"CI of {repository}", enabled)
    # A deleted pool keeps its id for 30 days; the account's id is a new one each time the stack is made anew.
    pool = gcp.iam.WorkloadIdentityPool(
        "github-pool",
        project=config.project,
        workload_identity_pool_id=account.unique_id.apply(lambda unique: config.scoped(f"ci-{unique[-6:]}", 32)),
        display_name="GitHub workflows",
    )
    provider = gcp.iam.WorkloadIdentityPoolProvider(
        "github-provider",
        project=config.project,
        workload_identity_pool_id=pool.workload_identity_pool_id,
        workload_identity_pool_provider_id="github",
        attribute_mapping={"google.subject": "assertion.sub", "attribute.repository": "assertion.repository"},
        attribute_condition=f"assertion.repository == '{repository}'",
        oidc=gcp.iam.WorkloadIdentityPoolProviderOidcArgs(issuer_uri=_GITHUB_ISSUER),
    )
    gcp.serviceaccount.IAMMember(
        "github-impersonation",
        service_account_id=account.name,
        role="roles/iam.workloadIdentityUser",
        member=pulumi.Output.concat(
            "principalSet://iam.googleapis.com/", pool.name, f"/attribute.repository/{repository}"
        ),
    )
    gcp.artifactregistry.RepositoryIamMember(
        "github-images",
        project=config.project,
        location=images.location,
        repository=images.name,
        role="roles/artifactregistry.writer",
        member=account.member,
    )
    return GitHub(provider.name, account)


def submitters(config: Config, ci: GitHub | None, enabled: Sequence[pulumi.Resource]) -> list[pulumi.Input[str]]:
    """Let submitters reach the control plane; returns them as IAM members (`user:...`) for RBAC."""
    members: list[pulumi.Input[str]] = [*config.jobs.submitters, *([ci.account.member] if ci else [])]
    names = [*config.jobs.submitters, *(["ci"] if ci else [])]
    if not members:
        return []
    # Google's smallest role that surely has container.clusters.connect can also read every workload.
    role = gcp.projects.IAMCustomRole(
        "submitter-role",
        project=config.project,
        role_id=config.scoped("submitter").replace("-", "_"),
        title=f"Conversion submitter ({config.prefix})",
        permissions=["container.clusters.connect", "container.clusters.get"],
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
    for name, member in zip(names, members, strict=True):
        gcp.projects.IAMMember(f"submitter-{name}", project=config.project, role=role.name, member=member)
    return members


def _account(
    config: Config, name: str, display_name: str, enabled: Sequence[pulumi.Resource]
) -> gcp.serviceaccount.Account:
    return gcp.serviceaccount.Account(
        name,
        project=config.project,
        account_id=config.scoped(name, 30),
        display_name=display_name,
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
