"""The Google Cloud APIs the stack needs, switched on."""

import pulumi
import pulumi_gcp as gcp

from infra.config import Config

_ALWAYS = (
    "artifactregistry",
    "cloudresourcemanager",
    "compute",
    "container",
    "containerfilesystem",  # image streaming
    "iam",
    "iamcredentials",
    "logging",
    "monitoring",
    "storage",
    "sts",
)


def enable(config: Config) -> list[pulumi.Resource]:
    """Switch the APIs on. They stay on after `destroy`: others in the project may use them by then."""
    names = [*_ALWAYS, *(["billingbudgets"] if config.jobs.monthly_budget else [])]
    return [
        gcp.projects.Service(
            f"api-{name}", project=config.project, service=f"{name}.googleapis.com", disable_on_destroy=False
        )
        for name in names
    ]
