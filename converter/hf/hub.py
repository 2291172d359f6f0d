"""The Hugging Face hub: which commit a revision is, its files by ranges, and downloads through the hub's cache.

The hub's Xet transport talks to servers of its own, so it would bypass a mirror behind HF_ENDPOINT: it is
switched off when HF_ENDPOINT is set, and left to the user (HF_HUB_DISABLE_XET) otherwise. Ranges are plain HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from converter import __version__, retrying, termination
from converter.errors import ConverterError, RequestError, WorldError
from converter.hf.files import CONFIG, INDEX, reading, weight_files
from converter.hf.location import HubModel
from converter.hf.remote import RemoteFile, Server, ask
from converter.hf.space import check_cache_space

if TYPE_CHECKING:
    import requests

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Pinned:
    """A repository on the hub at one commit.

    Attributes:
      repo: its id, org/name.
      commit: None where the hub may not be asked and no revision was given.
      files: its files, by name; empty where the hub may not be asked.
      offline: the hub may not be asked.
    """

    repo: str
    commit: str | None
    files: dict[str, RemoteFile]
    offline: bool


@dataclass(frozen=True)
class Cache:
    """How files of the hub are kept here.

    Attributes:
      folder: of the cache, None for the hub's usual one.
      token: None for the one that is in the environment or logged in with.
      seconds: for how long a call is tried again.
    """

    folder: Path | None
    token: str | None
    seconds: float


def pin(model: HubModel, cache: Cache) -> Pinned:
    """Ask the hub which commit a revision is, so that a branch that moves meanwhile cannot mix two states.

    Raises:
      RequestError: no such repository or revision, or no access to it (HTTP 401, 403, 404).
      WorldError: the network or the hub failed.
    """
    _configure()
    from huggingface_hub import constants

    repo, revision = model.repo, model.revision
    if constants.HF_HUB_OFFLINE:
        from huggingface_hub import snapshot_download

        root = _try(
            model,
            cache.seconds,
            lambda: snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=[CONFIG], cache_dir=cache.folder
            ),
        )
        return Pinned(repo, Path(root).name, {}, offline=True)
    at = f"/revision/{quote(revision, safe='')}" if revision else ""
    answer = ask(
        _session(cache),
        f"{_endpoint()}api/models/{repo}{at}",
        {"blobs": "true"},
        what=f"asking the hub for {repo}",
        seconds=cache.seconds,
        refused=lambda status: _refused(status, model),
    )
    try:
        commit = _checked(answer["sha"], _COMMIT)
        files = {file.name: file for entry in answer.get("siblings") or [] if (file := _file(repo, commit, entry))}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorldError(f"the hub's answer about {repo} is none about a model; try again later") from error
    return Pinned(repo, commit, files, offline=False)


def _file(repo: str, commit: str, entry: Mapping[str, Any]) -> RemoteFile | None:
    """A file as the hub's answer describes it, None where its name is none that could be asked for.

    Raises:
      KeyError, TypeError, ValueError, AttributeError: it does not describe one.
    """
    from huggingface_hub import hf_hub_url

    name, size, large = entry["rfilename"], entry.get("size") or 0, entry.get("lfs")
    if not name.isprintable():
        return None
    if not isinstance(size, int) or not 0 <= size < 1 << 63:
        raise ValueError("no size")
    sha256 = _checked(large["sha256"], _SHA256) if large else None
    git_sha1 = _checked(entry["blobId"], _COMMIT) if not large and entry.get("blobId") else None
    return RemoteFile(name, size, hf_hub_url(repo, name, revision=commit), sha256=sha256, git_sha1=git_sha1)


def _checked(text: str, pattern: re.Pattern[str]) -> str:
    """Of what becomes part of addresses and of paths."""
    if not pattern.fullmatch(text):
        raise ValueError("no digest")
    return text


def server(pinned: Pinned, cache: Cache) -> Server:
    """The pinned files, to be read by ranges."""
    model = HubModel(pinned.repo, pinned.commit)
    return Server(
        pinned.repo,
        pinned.files,
        lambda: _session(cache),
        lambda name, status: _refused(status, model),
        cache.seconds,
    )


def _session(cache: Cache) -> requests.Session:
    """Shows the token to the hub itself and to nobody else."""
    import requests
    from huggingface_hub import constants, get_token

    made = requests.Session()
    made.trust_env = False
    # Not huggingface_hub's headers: making them asks the hub for things of its own.
    made.headers["User-Agent"] = f"shardpool/{__version__}"
    token = cache.token or (None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token())
    if token:
        if not token.isascii() or not token.isprintable():
            raise RequestError("the hub's token holds characters that no token has")

        def authorise(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # What the hub redirects to is signed.
            if (request.url or "").startswith(_endpoint()):
                request.headers["Authorization"] = f"Bearer {token}"
            return request

        made.auth = authorise
    return made


def download(model: HubModel, pinned: Pinned, cache: Cache, names: Sequence[str] = ()) -> Path:
    """Bring config.json, the index and the weights into the hub's cache, checked; the folder they are in.

    Transient failures are tried again; a file that was cut off is continued. Weights whose sha256 is not the hub's are
    fetched once more.

    Args:
      names: what is wanted instead, as far as it is there; JSON first.

    Raises:
      RequestError: the repository has no safetensors weights.
      WorldError: the network or the hub failed, or the disk is full.
    """
    from huggingface_hub import snapshot_download

    def fetch(revision: str | None, wanted: list[str]) -> Path:
        return Path(
            _try(
                HubModel(pinned.repo, pinned.commit),
                cache.seconds,
                lambda: snapshot_download(
                    pinned.repo,
                    revision=revision,
                    token=cache.token,
                    allow_patterns=wanted,
                    cache_dir=cache.folder,
                    local_files_only=pinned.offline,
                ),
            )
        )

    small = [name for name in names if name.endswith(".json")] or [CONFIG, INDEX]
    if not pinned.offline:
        # By its name, so that the cache notes which commit the branch is at, for runs that may not ask.
        fetch(model.revision, small[:1])
    root = fetch(pinned.commit, small)
    if names:
        weights = [name for name in names if name not in small]
    else:
        here = (root / INDEX).read_bytes if (root / INDEX).exists() else None
        there = list(pinned.files) or [path.name for path in root.iterdir()]
        weights = weight_files(there, here, str(root / INDEX), pinned.repo)
    if pinned.offline:
        return fetch(pinned.commit, [*small, *weights])
    wanted = [pinned.files[name] for name in weights if name in pinned.files]
    check_cache_space(root, [(file.size, root / file.name, _partial(root, file)) for file in wanted])
    root = fetch(pinned.commit, [*small, *weights])
    if any(not _is_right(root, file, cache.seconds) for file in wanted):
        root = fetch(pinned.commit, [*small, *weights])
        for file in wanted:
            if not _is_right(root, file, cache.seconds):
                raise WorldError(f"{file.name} of {pinned.repo} came twice with another sha256 than the hub's")
    return root


def _partial(root: Path, file: RemoteFile) -> Path | None:
    """Where the cache keeps what it has of a file that was cut off."""
    return root.parent.parent / "blobs" / f"{file.sha256}.incomplete" if file.sha256 else None


def _is_right(root: Path, file: RemoteFile, seconds: float) -> bool:
    """Whether a cached file has the hub's sha256; one that has not is removed. Files already checked are not read."""
    path = (root / file.name).resolve()
    if file.sha256 is None or not path.exists():
        return True
    stat = path.stat()
    state = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    note = root.parent.parent / ".checked" / file.sha256
    with contextlib.suppress(OSError):
        if note.read_text() == state:
            return True
    if termination.interruptible(lambda: _sha256(path)) != file.sha256:
        retrying.log.warning("%s has another sha256 than the hub's: removed, to be fetched again", path)
        (root / file.name).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return False
    with contextlib.suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        partial = note.with_name(f"{note.name}.{os.getpid()}")
        partial.write_text(state)
        partial.replace(note)
    return True


def _sha256(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _configure() -> None:
    """Set huggingface_hub up before it is first imported."""
    if "HF_ENDPOINT" in os.environ:
        os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not os.isatty(2):
        disable_progress_bars()


def _endpoint() -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT.rstrip('/')}/"


def _refused(status: int, model: HubModel) -> ConverterError:
    where = f"{model.repo} at revision {model.revision}" if model.revision else model.repo
    if status in (401, 403):
        return RequestError(
            f"the hub refuses access to {where} (HTTP {status}): accept its licence on the hub and give a "
            "token that may read it in HF_TOKEN"
        )
    if status == 404:
        return RequestError(f"the hub has no {where}, or it is private and HF_TOKEN is not set")
    return RequestError(f"the hub refuses {where} (HTTP {status})")


def _try(model: HubModel, seconds: float, attempt: Callable[[], T]) -> T:
    """Call huggingface_hub, again after transient failures, and turn what remains into one line."""
    from huggingface_hub.errors import HfHubHTTPError

    what = f"asking the hub for {model.repo}"
    try:
        return retrying.call(lambda: termination.interruptible(attempt), what=what, verdict=_verdict, seconds=seconds)
    except (RequestError, WorldError):
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise _refused(status, model) from error
    except FileNotFoundError as error:
        raise RequestError(f"{model.repo} is not in the local cache, and the hub cannot be asked") from error
    except OSError as error:
        raise WorldError(f"downloading {model.repo} failed: {retrying.one_line(error)}; try again") from error
    except json.JSONDecodeError as error:
        raise WorldError(
            f"the hub's answer about {model.repo} is no JSON: {retrying.one_line(error)}; try again"
        ) from error


def _verdict(error: Exception) -> float | None:
    """See `retrying.Verdict`: for what huggingface_hub raises."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, HfHubHTTPError):
        asked = retrying.retry_after(error.response.headers.get("Retry-After"))
        return asked if retrying.is_transient_status(error.response.status_code) else None
    if isinstance(error, LocalEntryNotFoundError):
        # huggingface_hub's word for "the hub did not answer and the cache is empty".
        return _verdict(error.__cause__) if isinstance(error.__cause__, Exception) else None
    if isinstance(error, PermissionError | FileNotFoundError):
        return None
    if isinstance(error, OSError) and error.errno == 28:
        return None
    module = type(error).__module__.split(".")[0]
    transient = isinstance(error, OSError | TimeoutError) or module in ("httpx", "httpx2", "httpcore", "httpcore2")
    return 0.0 if transient else None
