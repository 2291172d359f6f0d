"""What a run leaves for programs: the JSON report, the termination message, the record in the checkpoint."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import converter
from converter import places
from converter.errors import WorldError
from converter.hf.repository import Repository, SourceFile
from converter.memory import Usage, cgroup_peak
from converter.plan import Chunk, Plan
from converter.request import Request

if TYPE_CHECKING:
    from converter.verification import Findings

VERSION = 1
"""Of the report's, the record's and the message's format."""

_MESSAGE_TEXT_BYTES = 1500
"""Of either text in a termination message, of which Kubernetes keeps 4096 bytes."""


class Digests:
    """A digest per array: sha256 over the sha256 digests (32 bytes each) of its stored chunks in grid order.

    `add` may be called from any thread; the chunks' content is C-ordered and little-endian.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, dict[tuple[int, ...], bytes]] = {}
        self._lock = threading.Lock()

    def add(self, chunk: Chunk, content: np.ndarray) -> None:
        digest = hashlib.sha256(content.reshape(-1).view(np.uint8).data).digest()
        with self._lock:
            self._chunks.setdefault(chunk.array.name, {})[chunk.index] = digest

    def of(self, name: str) -> str:
        """The digest of an array all of whose chunks were added."""
        chunks = self._chunks[name]
        return hashlib.sha256(b"".join(chunks[index] for index in sorted(chunks))).hexdigest()


def source_entry(repository: Repository) -> dict[str, Any]:
    """Which repository was read, file by file."""
    return {
        "repository": repository.name,
        "revision": repository.revision,
        "files": [_file_entry(file) for file in repository.files],
    }


def _file_entry(file: SourceFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": file.name, "bytes": file.size, "sha256": file.sha256}
    if file.generation is not None:
        entry |= {"generation": file.generation, "crc32c": file.crc32c and f"{file.crc32c:08x}"}
    return entry


def request_entry(request: Request) -> dict[str, Any]:
    """The request, without its token."""
    return {"model_name": request.model_name, "output": str(request.output), **request.content()}


def versions() -> dict[str, str]:
    """Of this converter and of the libraries that shape its result."""
    libraries = ("jax", "orbax-checkpoint", "tensorstore", "numpy", "ml_dtypes")
    return {"converter": converter.__version__, **{name: metadata.version(name) for name in libraries}}


def _sources(repository: Repository, adapter: Repository | None) -> dict[str, Any]:
    return {"source": source_entry(repository), **({"adapter": source_entry(adapter)} if adapter else {})}


def record(request: Request, repository: Repository, fingerprint: str, adapter: Repository | None = None) -> bytes:
    """The file that a checkpoint carries about its own making.

    Args:
      adapter: that is merged.
    """
    return _json(
        {
            "version": VERSION,
            "fingerprint": fingerprint,
            "request": request_entry(request),
            **_sources(repository, adapter),
            "versions": versions(),
        }
    )


def report(
    request: Request,
    repository: Repository,
    plan: Plan,
    *,
    adapter: Repository | None = None,
    fingerprint: str,
    digests: Digests,
    stored_bytes: int,
    seconds: Mapping[str, float],
    peak: Usage,
) -> bytes:
    """The JSON report of a finished conversion."""
    return _json(
        {
            "version": VERSION,
            "fingerprint": fingerprint,
            "request": request_entry(request),
            **_sources(repository, adapter),
            "versions": versions(),
            "bytes": {"arrays": plan.nbytes, "stored": stored_bytes},
            "seconds": _seconds_entry(seconds),
            "peak_memory_bytes": memory_entry(peak),
            "digest": "sha256 of the concatenated sha256 digests of the stored chunks in grid order",
            "arrays": [
                {
                    "name": array.name,
                    "shape": list(array.shape),
                    "dtype": array.dtype.name,
                    "chunk_shape": list(array.chunk_shape),
                    "grid": list(array.grid),
                    "digest": digests.of(array.name),
                }
                for array in sorted(plan.arrays, key=lambda array: array.name)
            ],
        }
    )


def verification(findings: Findings, *, seconds: Mapping[str, float], peak: Usage) -> bytes:
    """The JSON report of a finished check."""
    return _json(
        {
            "version": VERSION,
            "checkpoint": str(findings.checkpoint.items),
            **_sources(findings.repository, findings.adapter),
            "versions": versions(),
            **findings.entry(),
            "seconds": _seconds_entry(seconds),
            "peak_memory_bytes": memory_entry(peak),
        }
    )


def write(path: Path, content: bytes, finished: str) -> None:
    """Write a report.

    Args:
      finished: what is done and stays so without it.

    Raises:
      WorldError: it cannot be written.
    """
    try:
        places.write_file(path, content)
    except OSError as error:
        raise WorldError(f"{finished}, but {path} cannot be written: {error.strerror or error}") from error


def _seconds_entry(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def memory_entry(peak: Usage) -> dict[str, int | None]:
    """Peak memory in bytes, by what it counts."""
    return {"resident": peak.resident, "anonymous_and_shared": peak.anonymous, "cgroup": cgroup_peak()}


def termination_message(
    *,
    exit_code: int,
    error: str | None,
    seconds: float,
    nbytes: int,
    peak: Usage,
    output: str | None,
    result: str,
    checked: Mapping[str, int] | None = None,
) -> bytes:
    """A run's end in at most 4096 bytes of JSON.

    Args:
      result: converted, skipped, planned or failed; of a check equal, different or failed.
      output: the checkpoint.
      checked: how many arrays a check was about, and how many of them differ.
    """
    message: dict[str, Any] = {
        "version": VERSION,
        "result": result,
        "exit_code": exit_code,
        "error": error and _shortened(error),
        "seconds": round(seconds, 3),
        "bytes": nbytes,
        "peak_memory_bytes": memory_entry(peak),
        "output": output and _shortened(output),
        **({} if checked is None else {"checked": checked}),
    }
    return _json(message)


def _shortened(text: str) -> str:
    """The beginning of a text, so that it takes at most `_MESSAGE_TEXT_BYTES` bytes of JSON."""
    kept = len(text)
    while len(json.dumps(shown := text if kept == len(text) else f"{text[:kept]}...")) > _MESSAGE_TEXT_BYTES:
        kept = kept * 9 // 10
    return shown


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()
