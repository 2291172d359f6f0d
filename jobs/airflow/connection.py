"""The way from Airflow to the cluster: Google's API for a GKE cluster, else a Kubernetes connection or kubeconfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.providers.google.cloud.hooks.kubernetes_engine import GKEHook, GKEKubernetesHook
from airflow.providers.google.cloud.operators.kubernetes_engine import GKEClusterAuthDetails

from jobs.cluster import Cluster
from jobs.errors import RequestError

# With the first alone GKE knows a service account by its number, and no RoleBinding by its e-mail is about it.
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform", "https://www.googleapis.com/auth/userinfo.email")


class _Hook(GKEKubernetesHook):
    @property
    def scopes(self) -> Sequence[str]:
        return _SCOPES


@dataclass(frozen=True)
class Connection:
    """How to reach the cluster; plain values, so that a trigger can carry them.

    Attributes:
      cluster_url, ssl_ca_cert, use_dns_endpoint, gcp_conn_id, impersonation_chain: of a GKE cluster.
      kubernetes_conn_id, config_file: of any other; used where cluster_url is "".
    """

    cluster_url: str = ""
    ssl_ca_cert: str = ""
    use_dns_endpoint: bool = False
    gcp_conn_id: str = "google_cloud_default"
    impersonation_chain: str | Sequence[str] | None = None
    kubernetes_conn_id: str = ""
    config_file: str = ""

    def values(self) -> dict[str, Any]:
        """The attributes as a mapping."""
        return asdict(self)

    def cluster(self, namespace: str) -> Cluster:
        """The cluster, with a token that is fresh now."""
        if self.cluster_url:
            hook = _Hook(
                cluster_url=self.cluster_url,
                ssl_ca_cert=self.ssl_ca_cert,
                use_dns_endpoint=self.use_dns_endpoint,
                gcp_conn_id=self.gcp_conn_id,
                impersonation_chain=self.impersonation_chain,
                enable_tcp_keepalive=True,
            )
        else:
            hook = KubernetesHook(conn_id=self.kubernetes_conn_id or None, config_file=self.config_file or None)
        return Cluster(hook.get_conn(), namespace)


def connection_of(
    outputs: Mapping[str, Any],
    *,
    gcp_conn_id: str,
    impersonation_chain: str | Sequence[str] | None,
    kubernetes_conn_id: str,
    config_file: str,
) -> Connection:
    """The connection to the cluster of a stack's outputs, or to another that is given.

    Raises:
      RequestError: the outputs name no cluster.
    """
    if kubernetes_conn_id or config_file:
        return Connection(kubernetes_conn_id=kubernetes_conn_id, config_file=config_file)
    if missing := [key for key in ("project", "location", "cluster") if not outputs.get(key)]:
        raise RequestError(f"the stack's outputs lack {', '.join(missing)}; was `pulumi up` run?")
    use_dns_endpoint = "--dns-endpoint" in outputs.get("getCredentials", "")
    url, certificate = GKEClusterAuthDetails(
        cluster_name=outputs["cluster"],
        project_id=outputs["project"],
        use_internal_ip=False,
        use_dns_endpoint=use_dns_endpoint,
        cluster_hook=GKEHook(
            gcp_conn_id=gcp_conn_id, location=outputs["location"], impersonation_chain=impersonation_chain
        ),
    ).fetch_cluster_info()
    return Connection(url, certificate, use_dns_endpoint, gcp_conn_id, impersonation_chain)
