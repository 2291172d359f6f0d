"""Who hears of a Job that failed, and of money."""

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra.cluster import Target
from infra.config import Config

# The reasons the Job controller gives for a Job that failed for good. Source: Kubernetes' batch/v1 API.
_FAILURE_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "PodFailurePolicy",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
)


def create(config: Config, target: Target, enabled: Sequence[pulumi.Resource]) -> None:
    """Make the alert on failed Jobs, the e-mail channel and the budget, the last two if configured."""
    opts = pulumi.ResourceOptions(depends_on=enabled)
    channels = []
    if config.jobs.alert_email:
        channel = gcp.monitoring.NotificationChannel(
            "alert-email",
            project=config.project,
            type="email",
            display_name=f"Conversions ({config.prefix})",
            labels={"email_address": config.jobs.alert_email},
            opts=opts,
        )
        channels.append(channel.name)
    reasons = " OR ".join(f'"{reason}"' for reason in _FAILURE_REASONS)
    gcp.monitoring.AlertPolicy(
        "failed-jobs",
        project=config.project,
        display_name=f"Conversion Job failed ({config.prefix})",
        combiner="OR",
        severity="ERROR",
        conditions=[
            gcp.monitoring.AlertPolicyConditionArgs(
                display_name="A Job failed for good",
                condition_matched_log=gcp.monitoring.AlertPolicyConditionConditionMatchedLogArgs(
                    filter=pulumi.Output.concat(
                        f'logName="projects/{config.project}/logs/events" AND resource.labels.cluster_name="',
                        target.name,
                        f'" AND resource.labels.location="{config.location}"',
                        ' AND jsonPayload.involvedObject.kind="Job"',
                        f' AND jsonPayload.involvedObject.namespace="{config.namespace}"',
                        f" AND jsonPayload.reason=({reasons})",
                    ),
                    label_extractors={"job": "EXTRACT(jsonPayload.involvedObject.name)"},
                ),
            )
        ],
        alert_strategy=gcp.monitoring.AlertPolicyAlertStrategyArgs(
            notification_rate_limit=gcp.monitoring.AlertPolicyAlertStrategyNotificationRateLimitArgs(period="300s"),
            auto_close="86400s",
        ),
        documentation=gcp.monitoring.AlertPolicyDocumentationArgs(
            mime_type="text/markdown",
            content=f"Why: `kubectl --namespace {config.namespace} describe job NAME`, then its pod's logs.",
        ),
        notification_channels=channels,
        opts=opts,
    )
    if config.jobs.monthly_budget:
        _budget(config, channels, enabled)


def _budget(config: Config, channels: list[pulumi.Output[str]], enabled: Sequence[pulumi.Resource]) -> None:
    """A budget for the whole project, in the currency of the billing account."""
    number = gcp.organizations.get_project_output(
        project_id=config.project, opts=pulumi.InvokeOutputOptions(depends_on=enabled)
    ).number
    gcp.billing.Budget(
        "budget",
        billing_account=config.jobs.billing_account,
        display_name=f"Conversions ({config.prefix})",
        amount=gcp.billing.BudgetAmountArgs(
            specified_amount=gcp.billing.BudgetAmountSpecifiedAmountArgs(units=str(config.jobs.monthly_budget))
        ),
        budget_filter=gcp.billing.BudgetBudgetFilterArgs(projects=[pulumi.Output.concat("projects/", number)]),
        threshold_rules=[
            gcp.billing.BudgetThresholdRuleArgs(threshold_percent=0.5),
            gcp.billing.BudgetThresholdRuleArgs(threshold_percent=0.9),
            gcp.billing.BudgetThresholdRuleArgs(threshold_percent=1.0, spend_basis="FORECASTED_SPEND"),
        ],
        all_updates_rule=(
            gcp.billing.BudgetAllUpdatesRuleArgs(monitoring_notification_channels=channels) if channels else None
        ),
        opts=pulumi.ResourceOptions(depends_on=enabled),
    )
