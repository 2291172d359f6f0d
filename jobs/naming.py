"""Names: of a run, of a Job, of its image; and where a run's output lies."""

from __future__ import annotations

import datetime
import hashlib
import re

from jobs.errors import RequestError

MAX_NAME = 63
"""Characters of a DNS label (RFC 1123), of a label's value, and of a Job's name, which becomes its pods' label."""

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PART = r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?"
_IMAGE = re.compile(
    rf"(?P<name>({_PART}(:\d+)?/)?{_PART}(/{_PART})*)"
    r"(?P<tag>:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


def new_run_name(now: datetime.datetime | None = None) -> str:
    """`conv-` and the time (UTC), as the training pipelines name their runs."""
    return f"conv-{now or datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}"


def check_run_name(name: str) -> str:
    """`name`, if it can be a label's value and a folder.

    Raises:
      RequestError: it cannot.
    """
    if len(name) > MAX_NAME or not _LABEL_VALUE.fullmatch(name):
        raise RequestError(
            f"--run-name {name!r} makes a bad label: give 1 to {MAX_NAME} letters, digits, '-', '_' or '.', "
            "the first and the last a letter or digit"
        )
    return name


def job_name(model: str, run: str) -> str:
    """The name of the Job that converts `model` in run `run`: the same each time, a DNS label of at most 63."""
    text = re.sub(r"[^a-z0-9-]", "-", f"{model}-{run}".lower())
    if len(text) <= MAX_NAME:
        return text
    digest = hashlib.sha256(f"{model} {run}".encode()).hexdigest()[:8]
    return f"{text[: MAX_NAME - len(digest) - 1].rstrip('-')}-{digest}"


def check_image(image: str) -> tuple[str, ...]:
    """Warnings about an image's name.

    Raises:
      RequestError: it is no image's name, or has neither tag nor digest.
    """
    match = _IMAGE.fullmatch(image)
    if not match:
        raise RequestError(
            f"--image {image!r} is not an image's name; write REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:..."
        )
    if not match["tag"] and not match["digest"]:
        raise RequestError(f"--image {image} has no tag; write {image}:TAG or, better, {image}@sha256:...")
    if not match["digest"]:
        return (f"--image {image} is a tag, which can be moved while Jobs wait; write NAME@sha256:... to pin it",)
    return ()


def output_directory(root: str, model: str, variant: str, run: str) -> str:
    """Where one checkpoint goes: the `base_output_directory` whose `0/items` the training DAGs load."""
    return f"{root.rstrip('/')}/{model}/to_maxtext/{variant}/{run}"
