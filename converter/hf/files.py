"""The files a repository is made of: which hold the weights, and reading its JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from converter.errors import RequestError, WorldError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 100_000_000
_MOST_CONTAINERS, _MOST_VALUES = 1_000_000, 4_000_000
"""Objects and lists, and values: of 250,000 tensors in one file."""


def weight_files(names: Collection[str], index: Callable[[], bytes] | None, label: str, location: str) -> list[str]:
    """The names of the files that hold the weights: those of an index or else the single file.

    Args:
      names: every file of the repository.
      index: reads the index, None where there is none.
      label: the index's name for messages.
      location: what the user called the repository.

    Raises:
      RequestError: there are no safetensors files, or shards without an index.
    """
    if index is not None:
        return sorted(set(weight_map(index(), label).values()))
    if SINGLE in names:
        return [SINGLE]
    shards = [name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    if shards:
        raise RequestError(f"{location} has {len(shards)} weight files but no {INDEX}; download that too")
    if any(Path(name).suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt") for name in names):
        raise RequestError(
            f"{location} has only PyTorch pickles, which are never opened: save it as safetensors first "
            f"(transformers: model.save_pretrained(folder)) or use a revision that has {SINGLE}"
        )
    if any(name.endswith(".gguf") for name in names):
        raise RequestError(
            f"{location} has only GGUF files, which are quantised and cannot be read; "
            "use the repository they were made from"
        )
    raise RequestError(f"{location} has no {SINGLE} and no {INDEX}")


def weight_map(content: bytes, label: str) -> dict[str, str]:
    """Tensor name -> file name, as the index says.

    Raises:
      RequestError: the index is broken, or names a file outside of the repository.
    """
    weight_map = parse_json(content, label).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RequestError(f"{label} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
            raise RequestError(f"{label} puts tensor {tensor[:200]!r} into the odd file {str(name)[:200]!r}")
    return weight_map


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell what the system's errors mean for a file or folder of a source.

    Raises:
      RequestError: it does not exist, may not be read or is a link to itself.
      WorldError: it cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist") from error
    except PermissionError as error:
        raise RequestError(f"{path} may not be read by this user") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RequestError(f"{path} is a link that leads to itself") from error
        raise WorldError(f"{path} cannot be read: {error.strerror or error}") from error


def size_of(path: Path) -> int:
    """The bytes of a file; raises as `reading` does, RequestError too for what is no file."""
    with reading(path):
        if path.exists() and not path.is_file():
            # A pipe would be waited for, a device never ends.
            raise RequestError(f"{path} is no file")
        return path.stat().st_size


def read_small(folder: Path, name: str) -> bytes:
    """A JSON file of a local repository.

    Raises:
      RequestError: it is not there, may not be read or is too large.
      WorldError: it cannot be read.
    """
    path = folder / name
    check_small(size_of(path), str(path))
    with reading(path):
        return path.read_bytes()


def check_small(size: int, label: str) -> None:
    """Raise RequestError for a JSON file of absurd size."""
    if size > MAX_JSON_BYTES:
        raise RequestError(f"{label} is too large for a JSON file of a repository")


def check_complexity(content: bytes, label: str) -> None:
    """Raise RequestError for JSON that would take gigabytes of memory, before it is parsed.

    A list takes 56 bytes of memory for 2 or 3 of text, so the length alone bounds little.
    """
    if content.count(b"[") + content.count(b"{") > _MOST_CONTAINERS or content.count(b",") > _MOST_VALUES:
        raise RequestError(f"{label} describes too much to be the header or configuration of a model")


def parse_json(content: bytes, label: str) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      RequestError: it holds none.
    """
    check_complexity(content, label)
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{label} is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"{label} holds no JSON object")
    return parsed
