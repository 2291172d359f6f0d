"""How Pulumi reaches the cluster, and the kinds that no provider types."""

from collections.abc import Mapping
from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from infra.cluster import Target


def provider(target: Target) -> k8s.Provider:
    """A provider that gets its tokens from gcloud's plugin, so that no credential lies in the state."""
    return k8s.Provider(
        "kubernetes",
        kubeconfig=pulumi.Output.json_dumps(_kubeconfig(target)),
        opts=pulumi.ResourceOptions(depends_on=target.ready),
    )


def custom_object(
    logical_name: str, api_version: str, kind: str, body: Mapping[str, Any], opts: pulumi.ResourceOptions
) -> pulumi.CustomResource:
    """An object of a custom kind, `body` being everything but its apiVersion and kind.

    pulumi_kubernetes' own class takes `metadata` and `spec` only, and a WorkloadPriorityClass has no spec.
    """
    properties = {"apiVersion": api_version, "kind": kind, **body}
    return pulumi.CustomResource(f"kubernetes:{api_version}:{kind}", logical_name, properties, opts)


def _kubeconfig(target: Target) -> dict[str, Any]:
    where: dict[str, Any] = {"server": target.server}
    if target.ca_certificate is not None:
        where["certificate-authority-data"] = target.ca_certificate
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "gke-gcloud-auth-plugin",
        "installHint": "run gcloud components install gke-gcloud-auth-plugin",
        "provideClusterInfo": True,
        "interactiveMode": "Never",
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": where}],
        "users": [{"name": "gcloud", "user": {"exec": plugin}}],
        "contexts": [{"name": "context", "context": {"cluster": "cluster", "user": "gcloud"}}],
        "current-context": "context",
    }
