"""The trigger that waits for a Job's end. It holds no worker, however long Kueue makes the Job wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from jobs import cluster as api
from jobs.airflow.connection import Connection
from jobs.cluster import Object
from jobs.errors import JobsError, WorldError


def end_of(job: Object | None) -> str:
    """ "complete", "failed", "gone", or "" while a Job goes on: suspended, running or retrying."""
    if job is None:
        return "gone"
    conditions = job.get("status", {}).get("conditions") or ()
    true = {each["type"] for each in conditions if each.get("status") == "True"}
    return "complete" if "Complete" in true else "failed" if "Failed" in true else ""


class ConversionTrigger(BaseTrigger):
    """Fires once, with {"end": complete, failed, gone or refused, "reason": ..., and what the trigger was given}.

    Looks at the Job alone, which the submitters' role may read. A cluster that does not answer is asked again: a day
    of waiting outlives an upgrade of the control plane.

    Args:
      job, namespace: of the Job.
      connection: the values of a `Connection`.
      outputs: variant -> directory; for whoever gets the event.
      poll_interval: seconds between looks.
    """

    def __init__(
        self,
        *,
        job: str,
        namespace: str,
        connection: Mapping[str, Any],
        outputs: Mapping[str, str],
        poll_interval: float,
    ) -> None:
        super().__init__()
        self.job = job
        self.namespace = namespace
        self.connection = dict(connection)
        self.outputs = dict(outputs)
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Where the trigger is and what it was given."""
        return (
            "jobs.airflow.triggers.ConversionTrigger",
            {
                "job": self.job,
                "namespace": self.namespace,
                "connection": self.connection,
                "outputs": self.outputs,
                "poll_interval": self.poll_interval,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the Job has ended."""
        while True:
            try:
                job = await sync_to_async(self._read)()
            except WorldError as error:
                self.log.warning("%s", error)
            except JobsError as error:
                yield self._event("refused", str(error))
                return
            else:
                if end := end_of(job):
                    yield self._event(end, _reason(job))
                    return
            await asyncio.sleep(self.poll_interval)

    def _read(self) -> Object | None:
        return api.read_job(Connection(**self.connection).cluster(self.namespace), self.job)

    def _event(self, end: str, reason: str) -> TriggerEvent:
        return TriggerEvent(
            {
                "end": end,
                "reason": reason,
                "job": self.job,
                "namespace": self.namespace,
                "connection": self.connection,
                "outputs": self.outputs,
            }
        )


def _reason(job: Object | None) -> str:
    for condition in (job or {}).get("status", {}).get("conditions") or ():
        if condition["type"] == "Failed":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return ""
