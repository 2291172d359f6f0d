"""What Jobs find in the cluster: namespace, identity, secret, network rules, and who may submit them."""

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as k8s

from infra.cluster import Target
from infra.config import Config
from infra.identities import CONVERTER_SERVICE_ACCOUNT

TOKEN_SECRET = "hugging-face-token"
TOKEN_SECRET_KEY = "token"

_READ = ["get", "list", "watch"]


def create_namespace(config: Config, provider: k8s.Provider, after: Sequence[pulumi.Resource]) -> k8s.core.v1.Namespace:
    """Make the namespace after what Jobs need, so that `destroy` removes Jobs before the quota they hold."""
    levels = {
        f"pod-security.kubernetes.io/{mode}{suffix}": value
        for mode in ("enforce", "audit", "warn")
        for suffix, value in (("", "restricted"), ("-version", "latest"))
    }
    return k8s.core.v1.Namespace(
        "namespace",
        metadata=k8s.meta.v1.ObjectMetaArgs(name=config.namespace, labels=levels),
        opts=pulumi.ResourceOptions(provider=provider, depends_on=after),
    )


def create_service_account(
    config: Config,
    provider: k8s.Provider,
    namespace: k8s.core.v1.Namespace,
    converter: gcp.serviceaccount.Account,
) -> None:
    """Make the Jobs' Kubernetes account, which is the converter's Google account to Google Cloud."""
    k8s.core.v1.ServiceAccount(
        "converter-account",
        metadata=k8s.meta.v1.ObjectMetaArgs(
            name=CONVERTER_SERVICE_ACCOUNT,
            namespace=config.namespace,
            annotations={"iam.gke.io/gcp-service-account": converter.email},
        ),
        # Jobs talk to Google Cloud, never to the Kubernetes API.
        automount_service_account_token=False,
        opts=pulumi.ResourceOptions(provider=provider, depends_on=[namespace]),
    )


def create_secret(
    config: Config, provider: k8s.Provider, namespace: k8s.core.v1.Namespace, token: pulumi.Output[str] | None
) -> str:
    """Make the Secret of the Hugging Face token, if there is a token; returns the Secret's name or ""."""
    if token is None:
        return config.jobs.hugging_face_secret
    k8s.core.v1.Secret(
        "hugging-face-token",
        metadata=k8s.meta.v1.ObjectMetaArgs(name=TOKEN_SECRET, namespace=config.namespace),
        type="Opaque",
        string_data={TOKEN_SECRET_KEY: token},
        opts=pulumi.ResourceOptions(
            provider=provider, depends_on=[namespace], additional_secret_outputs=["data", "stringData"]
        ),
    )
    return TOKEN_SECRET


def create_network_policy(
    config: Config, provider: k8s.Provider, namespace: k8s.core.v1.Namespace, target: Target
) -> None:
    """Nothing in; out only DNS, HTTPS and the metadata server. Needs a dataplane that enforces it."""
    address, ports = target.metadata_server
    networking = k8s.networking.v1

    def port(number: int, protocol: str = "TCP") -> k8s.networking.v1.NetworkPolicyPortArgs:
        return networking.NetworkPolicyPortArgs(port=number, protocol=protocol)

    def block(cidr: str) -> k8s.networking.v1.NetworkPolicyPeerArgs:
        return networking.NetworkPolicyPeerArgs(ip_block=networking.IPBlockArgs(cidr=cidr))

    networking.NetworkPolicy(
        "network-policy",
        metadata=k8s.meta.v1.ObjectMetaArgs(name="jobs", namespace=config.namespace),
        spec=networking.NetworkPolicySpecArgs(
            pod_selector=k8s.meta.v1.LabelSelectorArgs(),
            policy_types=["Ingress", "Egress"],
            ingress=[],
            egress=[
                # To any address: kube-dns, NodeLocal DNSCache and Cloud DNS answer on different ones.
                networking.NetworkPolicyEgressRuleArgs(ports=[port(53, "UDP"), port(53)]),
                networking.NetworkPolicyEgressRuleArgs(to=[block("0.0.0.0/0")], ports=[port(443)]),
                networking.NetworkPolicyEgressRuleArgs(to=[block(f"{address}/32")], ports=[port(p) for p in ports]),
            ],
        ),
        opts=pulumi.ResourceOptions(provider=provider, depends_on=[namespace]),
    )


def create_submitter_role(
    config: Config,
    provider: k8s.Provider,
    namespace: k8s.core.v1.Namespace,
    submitters: Sequence[pulumi.Input[str]],
) -> None:
    """Let `submitters` (IAM members) create Jobs and see what becomes of them, in this namespace only."""
    rbac = k8s.rbac.v1

    def rule(group: str, resources: list[str], verbs: list[str]) -> k8s.rbac.v1.PolicyRuleArgs:
        return rbac.PolicyRuleArgs(api_groups=[group], resources=resources, verbs=verbs)

    metadata = k8s.meta.v1.ObjectMetaArgs(name="submitter", namespace=config.namespace)
    opts = pulumi.ResourceOptions(provider=provider, depends_on=[namespace])
    role = rbac.Role(
        "submitter",
        metadata=metadata,
        rules=[
            rule("batch", ["jobs"], ["create", *_READ, "delete"]),
            rule("", ["pods", "pods/log", "events"], _READ),
            rule("events.k8s.io", ["events"], _READ),
            rule("kueue.x-k8s.io", ["workloads", "localqueues"], _READ),
            rule("visibility.kueue.x-k8s.io", ["localqueues/pendingworkloads"], _READ),
        ],
        opts=opts,
    )
    if submitters:
        rbac.RoleBinding(
            "submitters",
            metadata=metadata,
            role_ref=rbac.RoleRefArgs(api_group="rbac.authorization.k8s.io", kind="Role", name="submitter"),
            subjects=[pulumi.Output.from_input(member).apply(_subject) for member in submitters],
            opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[role])),
        )


def _subject(member: str) -> k8s.rbac.v1.SubjectArgs:
    """An IAM member as GKE shows it to RBAC: people and service accounts are users, by their e-mail."""
    kind, _, email = member.partition(":")
    return k8s.rbac.v1.SubjectArgs(
        api_group="rbac.authorization.k8s.io", kind="Group" if kind == "group" else "User", name=email
    )
