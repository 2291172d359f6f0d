"""The program: reads the configuration, makes everything in order, exports what submitters need."""

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.runtime import config as pulumi_config

from infra import (
    alerts,
    cluster,
    identities,
    jobs,
    kueue,
    logs,
    network,
    node_pools,
    outputs,
    registry,
    services,
    storage,
)
from infra.config import HUGGING_FACE_TOKEN_KEY, ConfigError, parse
from infra.kubernetes import provider


def main() -> None:
    """Make the stack. Raises pulumi.RunError, which Pulumi prints as one line, for a bad configuration."""
    try:
        config = parse(_keys(), pulumi.get_project(), pulumi.get_stack())
        token = _token()
        adopted = cluster.look_up(config) if config.cluster.adopt_cluster else None
    except ConfigError as error:
        raise pulumi.RunError(str(error)) from None
    for warning in (*config.warnings, *(adopted.warnings if adopted else ())):
        pulumi.log.warn(warning)

    enabled = services.enable(config)
    nodes = identities.node_service_account(config, enabled)
    if adopted is None:
        subnet = network.create(config, enabled)
        target = cluster.create(config, subnet, nodes.account, [*enabled, nodes.role])
    else:
        target = adopted
    pools = node_pools.create(config, target, nodes)
    kubernetes = provider(target)

    images = registry.create(config, nodes.account, enabled)
    bucket = storage.create(config, enabled)
    queues = kueue.create(config, target, kubernetes, pools)
    namespace = jobs.create_namespace(config, kubernetes, [*pools, *queues])
    kueue.create_local_queues(config, kubernetes, namespace, queues)
    converter = identities.converter_service_account(config, bucket, target, enabled)
    jobs.create_service_account(config, kubernetes, namespace, converter)
    secret_name = jobs.create_secret(config, kubernetes, namespace, token)
    jobs.create_network_policy(config, kubernetes, namespace, target)
    ci = identities.github(config, images, enabled)
    submitters = identities.submitters(config, ci, enabled)
    jobs.create_submitter_role(config, kubernetes, namespace, submitters)
    logs.create(config, target, nodes.account, enabled)
    alerts.create(config, target, enabled)
    outputs.export(config, target, bucket, images, secret_name, ci)


def _keys() -> Mapping[str, Any]:
    """Every configuration key of the stack, the project's own without their namespace.

    Pulumi has no public call that lists keys, and without a list a misspelt key would pass unnoticed.
    """
    own = f"{pulumi.get_project()}:"
    return {
        key.removeprefix(own): value
        for key, value in pulumi_config.CONFIG.get().items()
        if key.startswith((own, "gcp:"))
    }


def _token() -> pulumi.Output[str] | None:
    """The Hugging Face token, still encrypted. Raises ConfigError when it was stored in plain text."""
    token = pulumi.Config().get_secret(HUGGING_FACE_TOKEN_KEY)
    if token is None:
        return None
    key = f"{pulumi.get_project()}:{HUGGING_FACE_TOKEN_KEY}"
    if not pulumi_config.is_config_secret(key):
        raise ConfigError(
            f"{HUGGING_FACE_TOKEN_KEY}: is stored in plain text; set it again with pulumi config set --secret"
        )
    return token
