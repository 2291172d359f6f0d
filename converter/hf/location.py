"""What a user calls a repository: a folder, a model on the hub, a folder of a bucket."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from converter.errors import RequestError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.][\w./-]{0,250}", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]")
"""https://cloud.google.com/storage/docs/buckets#naming"""


@dataclass(frozen=True)
class Folder:
    """A local folder."""

    path: Path


@dataclass(frozen=True)
class HubModel:
    """A model on the hub; `revision` None stands for its default branch."""

    repo: str
    revision: str | None


@dataclass(frozen=True)
class BucketFolder:
    """A folder of a bucket of Google Cloud Storage; `prefix` is empty or ends with a slash."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.prefix}".removesuffix("/")


Location = Folder | HubModel | BucketFolder


def name_of(location: Location) -> str:
    """What a folder that is made for it is called: the last part of its path."""
    match location:
        case Folder(path):
            return Path(os.path.abspath(path)).name  # noqa: PTH100 - links keep their own names
        case HubModel(repo, _):
            return repo.rpartition("/")[2]
        case BucketFolder():
            return str(location).rpartition("/")[2]


def parse_location(text: str, revision: str | None) -> Location:
    """Find out what is meant; only whether a local folder exists is looked up.

    Args:
      text: a folder, `org/name`, `hf://org/name@revision` or `gs://bucket/folder`.
      revision: branch, tag or commit on the hub given beside it.

    Raises:
      RequestError: it is none of these, or the folder cannot be looked at.
    """
    if "\0" in text:
        raise RequestError("a source's name cannot contain a NUL character")
    if text.startswith("gs://"):
        return _bucket_folder(text, revision)
    if text.startswith("hf://"):
        return _hub_model(text, revision)
    if "://" in text:
        raise RequestError(f"{text[:200]}: sources are folders, org/name, hf://org/name@revision or gs://bucket/folder")
    folder = Path(text).expanduser()
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise RequestError(f"no such folder: {text[:100]}...: {error.strerror}") from error
    if is_folder:
        return Folder(folder)
    if exists:
        raise RequestError(f"{text} is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(text):
        raise RequestError(f"no such folder: {text} (and it has not the form org/name of a repository on the hub)")
    return HubModel(text, _checked(revision))


def _bucket_folder(text: str, revision: str | None) -> BucketFolder:
    bucket, _, folder = text.removeprefix("gs://").partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise RequestError(f"{text[:200]}: {bucket[:80]!r} is no name of a bucket; write gs://bucket/folder")
    if revision is not None:
        raise RequestError(f"revision={revision}: a bucket has no revisions; drop the word")
    folder = folder.strip("/")
    return BucketFolder(bucket, f"{folder}/" if folder else "")


def _hub_model(text: str, revision: str | None) -> HubModel:
    repo, at, named = text.removeprefix("hf://").removesuffix("/").partition("@")
    repo = repo.removeprefix("models/")
    if not _HUB_ID.fullmatch(repo):
        raise RequestError(f"{text[:200]}: write hf://org/name or hf://org/name@revision")
    if at and not named:
        raise RequestError(f"{text}: no revision after the @")
    if at and revision is not None and revision != named:
        raise RequestError(f"{text} and revision={revision} name two revisions; drop one")
    return HubModel(repo, _checked(named if at else revision))


def _checked(revision: str | None) -> str | None:
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise RequestError(f"revision={revision[:200]!r} cannot be a branch, tag or commit")
    return revision
