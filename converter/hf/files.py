"""The files a repository is made of: which hold the weights, and reading its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from converter.errors import RequestError, WorldError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 100_000_000


def weight_files(root: Path, names: Collection[str], location: str) -> list[str]:
    """The names of the files that hold the weights: those of an index or else the single file.

    Args:
      root: a folder that has the index, where there is one.
      names: every file of the repository.
      location: what the user called the repository.

    Raises:
      RequestError: there are no safetensors files, or shards without an index.
    """
    if INDEX in names:
        return sorted(set(weight_map(root).values()))
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


def weight_map(root: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says."""
    index = read_json(root / INDEX, f"{root / INDEX} does not exist")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RequestError(f"{root / INDEX} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise RequestError(f"{root / INDEX} puts tensor {tensor[:200]!r} into the odd file {name!r}")
    return weight_map


def read_json(path: Path, missing: str) -> dict[str, Any]:
    """The JSON object in `path`; `missing` is the error's text where there is no such file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise RequestError(f"{path} is too large for a JSON file of a repository")
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RequestError(missing) from error
    except PermissionError as error:
        raise RequestError(f"{path} may not be read by this user") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise WorldError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{path} holds no JSON object")
    return content
