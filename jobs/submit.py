"""Submitting: create each Job once, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jobs import cluster as api
from jobs import reports
from jobs.access import check_access
from jobs.cluster import AlreadyExistsError, Cluster, Object
from jobs.errors import JobsError, RequestError
from jobs.render import HASH_ANNOTATION, MODEL_LABEL, Manifest, outputs

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Submitted:
    """What became of one manifest.

    Attributes:
      result: "created"; "exists", the same Job is there; or "finished", its output is.
    """

    job: str
    model: str
    result: str


def submit(
    cluster: Cluster,
    manifests: Sequence[Manifest],
    warn: Warn,
    *,
    sources: Sequence[str] = (),
    secret: str = "",
) -> list[Submitted]:
    """Create the Jobs that are not there and whose output is not finished; none, if one of them cannot be created.

    Args:
      sources: repositories on the hub to check the token's access to, one per manifest; "" or none checks nothing.
      secret: the Secret of the Jobs' token.

    Raises:
      RequestError: the server would refuse one, the token may not read a model, or a Job of that name says otherwise.
      WorldError: the cluster cannot be reached.
    """
    results = [_before(cluster, manifest, warn) for manifest in manifests]
    missing = [index for index, result in enumerate(results) if result == "created"]
    for source in dict.fromkeys(sources[index] for index in missing if sources):
        for warning in check_access(source, secret) if source else ():
            warn(warning)
    for index in missing:
        _ensure(cluster, manifests[index], dry_run=True)
    for index in missing:
        results[index] = _ensure(cluster, manifests[index])
    return [
        Submitted(manifest["metadata"]["name"], manifest["metadata"]["labels"][MODEL_LABEL], result)
        for manifest, result in zip(manifests, results, strict=True)
    ]


def ensure_job(cluster: Cluster, manifest: Manifest) -> str:
    """Create one Job unless the same one is there: "created" or "exists".

    Raises:
      RequestError: the server refuses it, or a Job of that name says otherwise.
      WorldError: the cluster cannot be reached.
    """
    existing = api.read_job(cluster, manifest["metadata"]["name"])
    if existing is not None:
        return _same(existing, manifest)
    return _ensure(cluster, manifest)


def _before(cluster: Cluster, manifest: Manifest, warn: Warn) -> str:
    """ "exists", "finished", or "created" for what is still to be created."""
    existing = api.read_job(cluster, manifest["metadata"]["name"])
    if existing is not None:
        return _same(existing, manifest)
    model = manifest["metadata"]["labels"][MODEL_LABEL]
    try:
        return "created" if reports.unfinished(outputs(manifest), model) else "finished"
    except JobsError as error:
        # The converter skips what is there, so that a Job too many costs little.
        warn(f"{error}; {model} is submitted, and the Job skips what is finished")
        return "created"


def _ensure(cluster: Cluster, manifest: Manifest, *, dry_run: bool = False) -> str:
    try:
        api.create_job(cluster, manifest, dry_run=dry_run)
    except AlreadyExistsError:
        existing = api.read_job(cluster, manifest["metadata"]["name"])
        if existing is None:
            raise
        return _same(existing, manifest)
    return "created"


def _same(existing: Object, manifest: Manifest) -> str:
    """ "exists", if the Job that is there was made from the same manifest."""
    annotations = existing["metadata"].get("annotations") or {}
    if annotations.get(HASH_ANNOTATION) != manifest["metadata"]["annotations"][HASH_ANNOTATION]:
        name = existing["metadata"]["name"]
        raise RequestError(
            f"Job {name} exists and was made from another request (image, variants or settings differ); "
            f"give another --run-name, or first: python -m jobs cancel {name}"
        )
    return "exists"
