"""The Kubernetes API, as far as the commands need it: answers as plain JSON, failures as one line with an exit code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from jobs.errors import JobsError, RequestError, WorldError
from jobs.render import MANAGED_BY, MANAGED_BY_LABEL, Manifest

Object = dict[str, Any]

KUEUE_GROUP, KUEUE_VERSION = "kueue.x-k8s.io", "v1beta2"
_VISIBILITY_GROUP = "visibility.kueue.x-k8s.io"
_TIMEOUT = (10, 60)  # seconds to connect and to answer
_PAGE = 500


@dataclass(frozen=True)
class Cluster:
    """A cluster and the namespace of the Jobs in it."""

    api: client.ApiClient
    namespace: str

    @property
    def batch(self) -> client.BatchV1Api:
        return client.BatchV1Api(self.api)

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.api)

    @property
    def custom(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self.api)

    @property
    def host(self) -> str:
        host: str = self.api.configuration.host
        return host


def connect(namespace: str, *, kubeconfig: str = "", context: str = "") -> Cluster:
    """The cluster of a kubeconfig ($KUBECONFIG or ~/.kube/config by default), or the one this runs in.

    Raises:
      RequestError: there is neither, or the kubeconfig has no such context.
    """
    try:
        configuration = client.Configuration()
        try:
            config.load_kube_config(kubeconfig or None, context or None, client_configuration=configuration)
        except config.ConfigException as error:
            if kubeconfig or context:
                raise RequestError(f"kubeconfig {kubeconfig}: {_one_line(error)}") from None
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                raise RequestError(
                    f"no cluster to talk to: {_one_line(error)}; give --kubeconfig, or run the stack's getCredentials"
                ) from None
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"kubeconfig {kubeconfig}: {_one_line(error)}") from None
    # Retries are the caller's; the library's would make an unreachable cluster a matter of minutes.
    configuration.retries = urllib3.Retry(connect=1, read=0, redirect=0, status=0, backoff_factor=0.5)
    # The client has no function for the subresource of a custom object, whose path it would quote.
    configuration.safe_chars_for_path_param = "/"
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    return Cluster(client.ApiClient(configuration), namespace)


def create_job(cluster: Cluster, manifest: Manifest, *, dry_run: bool = False) -> Object:
    """Create a Job, or let the server say whether it would take it.

    Raises:
      AlreadyExistsError: there is a Job of that name.
      JobsError: the server refuses or cannot be reached.
    """
    options: dict[str, Any] = {"field_validation": "Strict"} | ({"dry_run": "All"} if dry_run else {})
    return _call(
        cluster,
        f"create Job {manifest['metadata']['name']}",
        # Sent as it is: the client's own type of a Job would silently drop a field that it does not know.
        lambda: cluster.custom.create_namespaced_custom_object(
            "batch", "v1", cluster.namespace, "jobs", manifest, **options, **_RAW
        ),
    )


def read_job(cluster: Cluster, name: str) -> Object | None:
    """The Job of that name, None if there is none."""
    try:
        return _call(
            cluster, f"read Job {name}", lambda: cluster.batch.read_namespaced_job(name, cluster.namespace, **_RAW)
        )
    except NotFoundError:
        return None


def delete_job(cluster: Cluster, name: str) -> bool:
    """Delete a Job and its pods; False if there is none."""
    try:
        _call(
            cluster,
            f"delete Job {name}",
            lambda: cluster.batch.delete_namespaced_job(
                name, cluster.namespace, propagation_policy="Background", **_RAW
            ),
        )
    except NotFoundError:
        return False
    return True


def list_jobs(cluster: Cluster, labels: Mapping[str, str] | None = None) -> list[Object]:
    """This program's Jobs in the namespace, the oldest first."""
    selector = _selector({MANAGED_BY_LABEL: MANAGED_BY, **(labels or {})})
    jobs = _list(
        cluster, "list Jobs", lambda **page: cluster.batch.list_namespaced_job(cluster.namespace, **page), selector
    )
    return sorted(jobs, key=lambda job: (job["metadata"].get("creationTimestamp") or "", job["metadata"]["name"]))


def list_pods(cluster: Cluster, labels: Mapping[str, str] | None = None) -> list[Object]:
    """The pods of this program's Jobs, the oldest first."""
    selector = _selector({MANAGED_BY_LABEL: MANAGED_BY, **(labels or {})})
    pods = _list(
        cluster, "list pods", lambda **page: cluster.core.list_namespaced_pod(cluster.namespace, **page), selector
    )
    return sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]))


def list_workloads(cluster: Cluster) -> list[Object]:
    """Kueue's Workloads in the namespace; none where the cluster has no Kueue."""
    try:
        return _list(
            cluster,
            "list Kueue's workloads",
            lambda **page: cluster.custom.list_namespaced_custom_object(
                KUEUE_GROUP, KUEUE_VERSION, cluster.namespace, "workloads", **page
            ),
        )
    except NotFoundError:
        return []


def list_events(cluster: Cluster) -> list[Object]:
    """The namespace's events."""
    return _list(cluster, "list events", lambda **page: cluster.core.list_namespaced_event(cluster.namespace, **page))


def pending_positions(cluster: Cluster, queue: str) -> dict[str, int]:
    """Workload -> its position in the ClusterQueue, 1 being next; empty where Kueue does not tell.

    Source: Kueue's visibility API, PendingWorkloadsSummary; positions there start at 0.
    """
    for version in ("v1beta2", "v1beta1"):
        try:
            summary = _call(
                cluster,
                "read the queue",
                lambda version=version: cluster.custom.list_namespaced_custom_object(  # type: ignore[misc]
                    _VISIBILITY_GROUP, version, cluster.namespace, f"localqueues/{queue}/pendingworkloads", **_RAW
                ),
            )
        except JobsError:
            # Optional in Kueue, served by another server, and not everybody may read it: the table does without.
            continue
        return {item["metadata"]["name"]: item["positionInClusterQueue"] + 1 for item in summary.get("items") or ()}
    return {}


def read_log(cluster: Cluster, pod: str, container: str) -> str:
    """What a container has written so far; "" if it has not started."""
    try:
        response = _answer(
            cluster,
            f"read the log of {pod}",
            lambda: cluster.core.read_namespaced_pod_log(pod, cluster.namespace, container=container, **_RAW),
        )
    except RequestError:
        return ""
    text: str = response.data.decode(errors="replace")
    return text


def follow_log(cluster: Cluster, pod: str, container: str) -> Iterator[str]:
    """A container's lines as it writes them, until it ends."""
    response = _answer(
        cluster,
        f"follow the log of {pod}",
        lambda: cluster.core.read_namespaced_pod_log(
            pod, cluster.namespace, container=container, follow=True, **_STREAM
        ),
    )
    rest = b""
    try:
        for part in response.stream(2**16):
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise WorldError(f"the log of {pod} broke off: {_one_line(error)}; run logs again") from None
    if rest:
        yield rest.decode(errors="replace")


class AlreadyExistsError(RequestError):
    """There is an object of that name."""


class NotFoundError(RequestError):
    """There is no such object, namespace or kind."""


_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": _TIMEOUT}
# A container may write nothing for as long as a Job may run.
_STREAM: dict[str, Any] = {"_preload_content": False, "_request_timeout": (10, 24 * 3600)}


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _list(cluster: Cluster, what: str, request: Callable[..., Any], selector: str = "") -> list[Object]:
    """All items, page by page."""
    items: list[Object] = []
    page: dict[str, Any] = {"limit": _PAGE, **({"label_selector": selector} if selector else {}), **_RAW}
    while True:
        answer = _call(cluster, what, lambda: request(**page))
        items += answer.get("items") or []
        following = answer.get("metadata", {}).get("continue")
        if not following:
            return items
        page["_continue"] = following


def _call(cluster: Cluster, what: str, request: Callable[[], Any]) -> Object:
    response = _answer(cluster, what, request)
    try:
        answer = json.loads(response.data)
    except ValueError:
        raise WorldError(f"cannot {what}: {cluster.host} did not answer in JSON; is it a Kubernetes API?") from None
    return answer if isinstance(answer, dict) else {}


def _answer(cluster: Cluster, what: str, request: Callable[[], Any]) -> Any:
    try:
        return request()
    except ApiException as error:
        raise _translated(cluster, what, error) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise WorldError(f"cannot {what}: {cluster.host} cannot be reached: {_one_line(reason)}") from None


def _translated(cluster: Cluster, what: str, error: ApiException) -> JobsError:
    """The server's refusal as what the user can do about it."""
    message = _message(error)
    where = f"namespace {cluster.namespace}"
    if error.status == 401:
        return RequestError(f"cannot {what}: not authenticated: {message}; log in, or run the stack's getCredentials")
    if error.status == 403:
        return RequestError(f"cannot {what}: no permission in {where}: {message}; ask for the submitter role there")
    if error.status == 404:
        return NotFoundError(f"cannot {what} in {where}: {message}; is the stack up, and --namespace right?")
    if error.status == 409:
        return AlreadyExistsError(f"cannot {what} in {where}: {message}")
    if error.status == 429 or (error.status or 0) >= 500:
        return WorldError(f"cannot {what}: {cluster.host} answered {error.status}: {message}; try again")
    return RequestError(f"cannot {what} in {where}: {cluster.host} answered {error.status}: {message}")


def _message(error: ApiException) -> str:
    """The message of a Status object, else the HTTP reason."""
    try:
        return _one_line(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return _one_line(error.reason or "no reason given")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
