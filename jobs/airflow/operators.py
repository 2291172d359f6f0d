"""The operator that converts one model: creates the Job that the CLI would create, and waits for its end.

Google's GKEStartKueueJobOperator looks for pods at once and gives up while Kueue holds the Job, renames it and merges a
pod of its own into it. This one creates the rendered Job as it is, and defers on the Job's conditions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from jobs import cluster as api
from jobs.airflow.connection import Connection, connection_of
from jobs.airflow.triggers import ConversionTrigger, end_of
from jobs.catalogue import catalogue, pick, pick_variants
from jobs.cluster import Cluster
from jobs.errors import JobsError, RequestError, WorldError
from jobs.render import FATAL_EXIT_CODES, HASH_ANNOTATION, Manifest, Request, outputs, render
from jobs.settings import Overrides, Settings, make
from jobs.status import observe
from jobs.submit import ensure_job

_DELETION_SECONDS = 120


class ConversionJobOperator(BaseOperator):
    """Converts one model of the catalogue as a Kubernetes Job, which waits in Kueue's queue for as long as it must.

    The result (XCom) is variant -> the checkpoint's directory, as gs://BUCKET/.../0/items.

    An Airflow retry finds the Job of the try before by its name and goes on waiting for it; a Job that failed is made
    anew, and skips what it has converted. A bug, a wrong request or a difference fails the task without retries.

    Args:
      model: a name of the catalogue.
      image: the converter's image (templated).
      run_name: names the Job and its output (templated).
      stack_outputs: what `pulumi stack output --json` prints, as text or as a mapping (templated).
      only: names of the models to convert, separated by commas; another model's task is skipped (templated).
      variants: those to write; empty means all the catalogue has.
      priority: WorkloadPriorityClass; "" means the catalogue's.
      output_root: instead of the stack's bucket (templated).
      output_claim: the PersistentVolumeClaim at a path `output_root`.
      gcp_conn_id, impersonation_chain: for the GKE cluster that the stack's outputs name.
      kubernetes_conn_id, config_file: of a cluster to use instead.
      poll_interval: seconds between looks at the Job.
    """

    template_fields: Sequence[str] = ("image", "run_name", "stack_outputs", "only", "output_root")

    def __init__(
        self,
        *,
        model: str,
        image: str,
        run_name: str,
        stack_outputs: str | Mapping[str, Any],
        only: str = "",
        variants: Sequence[str] = (),
        priority: str = "",
        output_root: str = "",
        output_claim: str = "",
        gcp_conn_id: str = "google_cloud_default",
        impersonation_chain: str | Sequence[str] | None = None,
        kubernetes_conn_id: str = "",
        config_file: str = "",
        poll_interval: float = 30,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.model = model
        self.image = image
        self.run_name = run_name
        self.stack_outputs = stack_outputs
        self.only = only
        self.variants = variants
        self.priority = priority
        self.output_root = output_root
        self.output_claim = output_claim
        self.gcp_conn_id = gcp_conn_id
        self.impersonation_chain = impersonation_chain
        self.kubernetes_conn_id = kubernetes_conn_id
        self.config_file = config_file
        self.poll_interval = poll_interval

    def manifest(self) -> Manifest:
        """The Job, from the same template as everywhere.

        Raises:
          RequestError: the model, the run's name, the image or the stack's outputs cannot be.
        """
        (model,) = pick([self.model], catalogue())
        request = Request(model, self.run_name, self.image, pick_variants(model, self.variants), priority=self.priority)
        return render(request, self._settings())

    def execute(self, context: Any) -> None:
        """Create the Job and defer."""
        wanted = [name.strip() for name in self.only.split(",") if name.strip()]
        if wanted and self.model not in wanted:
            raise AirflowSkipException(f"{self.model} is not among the models of this run: {', '.join(wanted)}")
        try:
            manifest = self.manifest()
            connection = self._connection()
            cluster = connection.cluster(manifest["metadata"]["namespace"])
            result = self._ensure(cluster, manifest)
        except RequestError as error:
            raise AirflowFailException(str(error)) from None
        except JobsError as error:
            raise AirflowException(str(error)) from None
        name = manifest["metadata"]["name"]
        self.log.info("Job %s in namespace %s: %s", name, cluster.namespace, result)
        self.defer(
            trigger=ConversionTrigger(
                job=name,
                namespace=cluster.namespace,
                connection=connection.values(),
                outputs=outputs(manifest),
                poll_interval=self.poll_interval,
            ),
            method_name="execute_complete",
        )

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> dict[str, str]:
        """The checkpoints' directories, once the Job has ended well.

        Raises:
          AirflowFailException: it failed, and would again.
          AirflowException: it failed, and another try can help.
        """
        self.log.info("Job %s: %s", event["job"], event["end"])
        if event["end"] == "complete":
            return {variant: f"{output}/0/items" for variant, output in event["outputs"].items()}
        if event["end"] == "gone":
            raise AirflowException(f"Job {event['job']} is gone: it was deleted while this waited for it")
        if event["end"] == "refused":
            raise AirflowFailException(f"Job {event['job']} cannot be read: {event['reason']}")
        code, reason = self._failure(event)
        failure = AirflowFailException if code in FATAL_EXIT_CODES else AirflowException
        raise failure(f"Job {event['job']} failed: {reason}")

    def _ensure(self, cluster: Cluster, manifest: Manifest) -> str:
        """Create the Job; keep one that waits, runs or is done, and replace one that failed."""
        name = manifest["metadata"]["name"]
        existing = api.read_job(cluster, name)
        if existing is not None and end_of(existing) == "failed":
            same = existing["metadata"].get("annotations", {}).get(HASH_ANNOTATION)
            if same == manifest["metadata"]["annotations"][HASH_ANNOTATION]:
                self.log.info("Job %s failed before: it is made anew", name)
                api.delete_job(cluster, name)
                self._until_gone(cluster, name)
        return ensure_job(cluster, manifest)

    def _until_gone(self, cluster: Cluster, name: str) -> None:
        deadline = time.monotonic() + _DELETION_SECONDS
        while api.read_job(cluster, name) is not None:
            if time.monotonic() > deadline:
                raise WorldError(f"Job {name} does not go away; look for finalizers on it and on its pods")
            time.sleep(1)

    def _failure(self, event: Mapping[str, Any]) -> tuple[int | None, str]:
        """Exit code and reason of a failed Job, from its pods if they are still there."""
        try:
            connection = Connection(**event["connection"])
            for status in observe(connection.cluster(event["namespace"]), names=[event["job"]]):
                return status.exit_code, status.reason
        except JobsError as error:
            self.log.warning("why it failed cannot be read: %s", error)
        return None, event["reason"]

    def _outputs(self) -> Mapping[str, Any]:
        if not isinstance(self.stack_outputs, str):
            return self.stack_outputs
        try:
            loaded = json.loads(self.stack_outputs)
        except ValueError:
            loaded = None
        if not isinstance(loaded, dict):
            raise RequestError(
                "stack_outputs is not what `pulumi stack output --json` prints; see the Variable it is from"
            )
        return loaded

    def _settings(self) -> Settings:
        flags = Overrides(output_root=self.output_root, output_claim=self.output_claim)
        return make(self._outputs(), flags)

    def _connection(self) -> Connection:
        return connection_of(
            self._outputs(),
            gcp_conn_id=self.gcp_conn_id,
            impersonation_chain=self.impersonation_chain,
            kubernetes_conn_id=self.kubernetes_conn_id,
            config_file=self.config_file,
        )
