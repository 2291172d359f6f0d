"""What the stack tells those who submit Jobs (`pulumi stack output --json`)."""

from typing import Any

import pulumi
import pulumi_gcp as gcp

from infra import pool as facts
from infra.cluster import Target
from infra.config import Config, PoolConfig
from infra.identities import CONVERTER_SERVICE_ACCOUNT, GitHub
from infra.jobs import TOKEN_SECRET_KEY
from infra.registry import image_repository


def export(
    config: Config,
    target: Target,
    bucket: gcp.storage.Bucket,
    images: gcp.artifactregistry.Repository,
    secret_name: str,
    ci: GitHub | None,
) -> None:
    """Export everything a Job's manifest needs; of several queues, the first pool's is the default."""
    first = config.queues[0]
    outputs: dict[str, Any] = {
        "project": config.project,
        "cluster": target.name,
        "location": config.location,
        "namespace": config.namespace,
        "queue": first.name,
        "serviceAccount": CONVERTER_SERVICE_ACCOUNT,
        "bucket": bucket.name,
        "imageRepository": image_repository(config, images),
        **_pool(config, config.pool(first.pool_name)),
        "secretName": secret_name,
        "secretKey": TOKEN_SECRET_KEY,
        "queues": {
            queue.name: {"nodes": queue.nodes, **_pool(config, config.pool(queue.pool_name))} for queue in config.queues
        },
        "getCredentials": pulumi.Output.concat(
            "gcloud container clusters get-credentials ",
            target.name,
            f" --location={config.location} --project={config.project}",
            " --dns-endpoint" if target.uses_dns_endpoint else "",
        ),
    }
    if ci:
        outputs |= {"githubWorkloadIdentityProvider": ci.provider, "githubServiceAccount": ci.account.email}
    for name, value in outputs.items():
        pulumi.export(name, value)


def _pool(config: Config, pool: PoolConfig) -> dict[str, Any]:
    """The pool as a Job's manifest needs it."""
    label = config.scoped(pool.pool_name)
    return {
        "machineType": pool.machine_type,
        "spot": pool.spot,
        "nodeLabel": {"key": facts.LABEL_KEY, "value": label},
        "taint": {"key": facts.LABEL_KEY, "value": label, "effect": facts.TAINT_EFFECT},
        "podRequest": _camel_request(pool.request),
    }


def _camel_request(request: facts.PodRequest) -> dict[str, str]:
    cpu, memory, storage = request.resources().values()
    return {"cpu": cpu, "memory": memory, "ephemeralStorage": storage}
