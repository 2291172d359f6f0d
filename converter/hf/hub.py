"""Downloads from the Hugging Face hub, through huggingface_hub's cache.

The hub's Xet transport talks to servers of its own, so it would bypass a mirror behind HF_ENDPOINT: it is
switched off when HF_ENDPOINT is set, and left to the user (HF_HUB_DISABLE_XET) otherwise.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from converter.errors import RequestError, WorldError
from converter.hf.files import CONFIG, INDEX, weight_files

TRIES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Pinned:
    """A repository on the hub at one commit.

    Attributes:
      repo: its id, org/name.
      commit: None where the hub may not be asked and no revision was given.
      files: the names of its files, empty where the hub may not be asked.
      sha256: the hub's hashes of its large files.
    """

    repo: str
    commit: str | None
    files: tuple[str, ...]
    sha256: dict[str, str]


def pin(repo: str, *, revision: str | None, token: str | None) -> Pinned:
    """Ask the hub which commit a revision is, so that a branch that moves meanwhile cannot mix two states.

    Raises:
      RequestError: no such repository or revision, or no access to it (HTTP 401, 403, 404).
      WorldError: the network or the hub failed.
    """
    _configure()
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        root = _try(
            repo,
            revision,
            lambda: snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[CONFIG]),
        )
        return Pinned(repo, Path(root).name, (), {})
    api = HfApi(token=token)
    info = _try(repo, revision, lambda: api.model_info(repo, revision=revision, files_metadata=True, timeout=30))
    # Notes in the cache which commit the branch is at, for runs that may not ask.
    _try(repo, revision, lambda: snapshot_download(repo, revision=revision, token=token, allow_patterns=[CONFIG]))
    siblings = info.siblings or []
    return Pinned(
        repo,
        info.sha,
        tuple(file.rfilename for file in siblings),
        {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs},
    )


def download(pinned: Pinned, token: str | None) -> Path:
    """Bring config.json, the index and the weights into the hub's cache; the folder they are in.

    Transient failures are tried again; a file that was cut off is continued.

    Raises:
      RequestError: the repository has no safetensors weights.
      WorldError: the network or the hub failed, or the disk is full.
    """
    root = download_files(pinned, token, [CONFIG, INDEX])
    names = pinned.files or [path.name for path in root.iterdir()]
    return download_files(pinned, token, [CONFIG, INDEX, *weight_files(root, names, pinned.repo)])


def download_files(pinned: Pinned, token: str | None, names: list[str]) -> Path:
    """Bring those of the named files that there are into the hub's cache; the folder they are in.

    Raises:
      WorldError: the network or the hub failed, or the disk is full.
    """
    from huggingface_hub import snapshot_download

    return Path(
        _try(
            pinned.repo,
            pinned.commit,
            lambda: snapshot_download(pinned.repo, revision=pinned.commit, token=token, allow_patterns=names),
        )
    )


def _configure() -> None:
    """Set huggingface_hub up before it is first imported."""
    if "HF_ENDPOINT" in os.environ:
        os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not os.isatty(2):
        disable_progress_bars()


def _try(repo: str, revision: str | None, call: Callable[[], T]) -> T:
    """Call, again after transient failures, and turn what remains into one line."""
    from huggingface_hub.errors import HfHubHTTPError
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

    try:
        for attempt in Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(TRIES),
            wait=wait_exponential_jitter(initial=0.5, max=20),
            reraise=True,
        ):
            with attempt:
                return _interruptible(call)
    except (RequestError, WorldError):
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        where = f"{repo} at revision {revision}" if revision else repo
        if status in (401, 403):
            raise RequestError(
                f"the hub refuses access to {where} (HTTP {status}): accept its licence on the hub and give a "
                "token that may read it in HF_TOKEN"
            ) from error
        if status == 404:
            raise RequestError(f"the hub has no {where}, or it is private and HF_TOKEN is not set") from error
        if status is not None and 400 <= status < 500 and status not in (408, 429):
            raise RequestError(f"the hub refuses {where} (HTTP {status})") from error
        raise WorldError(f"the hub failed with HTTP {status} for {where}; try again later") from error
    except FileNotFoundError as error:
        if _is_transient(error):
            raise WorldError(f"downloading {repo} failed: {_one_line(error)}; try again") from error
        raise RequestError(f"{repo} is not in the local cache, and the hub cannot be asked") from error
    except OSError as error:
        raise WorldError(f"downloading {repo} failed: {_one_line(error)}; try again") from error
    except json.JSONDecodeError as error:
        raise WorldError(f"the hub's answer about {repo} is no JSON: {_one_line(error)}; try again") from error
    except Exception as error:
        if not _is_transient(error):
            raise
        raise WorldError(f"downloading {repo} failed: {_one_line(error)}; try again") from error
    raise AssertionError("unreachable")


def _interruptible(call: Callable[[], T]) -> T:
    """Call in a thread of its own, so that a signal ends the wait at once.

    huggingface_hub waits for its own threads, which may hang in a download, before it lets an exception through.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    while not result.done():
        # Not for ever at once: a signal that arrives just before the wait begins would only be seen after it.
        wait([result], timeout=0.1)
    return result.result()


def _is_transient(error: BaseException) -> bool:
    """Whether the same call can succeed a moment later."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 500
        return status >= 500 or status in (408, 429)
    if isinstance(error, LocalEntryNotFoundError):
        # huggingface_hub's word for "the hub did not answer and the cache is empty".
        return error.__cause__ is not None and _is_transient(error.__cause__)
    if isinstance(error, PermissionError | FileNotFoundError):
        return False
    if isinstance(error, OSError) and error.errno == 28:
        return False
    module = type(error).__module__.split(".")[0]
    return isinstance(error, OSError | TimeoutError) or module in ("httpx", "httpx2", "httpcore", "httpcore2")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
