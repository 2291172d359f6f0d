"""Words of the command line -> values, as MaxText's converter takes them.

An optional leading `.../base.yml`, then `key=value` words and flags in any order; a flag may be written
`--flag=value`, `--flag value` or as a word `flag=value`. Words that MaxText knows and that cannot change a conversion
are accepted; a word nobody knows is refused.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from converter import retrying
from converter.errors import RequestError

MAXTEXT_VERSION = "0.2.5"
"""The MaxText version whose keys maxtext/base_yml_keys.txt lists."""


def maxtext_keys() -> frozenset[str]:
    """Every key of MaxText's configs/base.yml."""
    text = resources.files("converter.maxtext").joinpath("base_yml_keys.txt").read_text()
    return frozenset(text.split())


def parse_bool(text: str) -> bool:
    """MaxText's booleans: those of YAML and of its own flags."""
    lowered = text.lower()
    if lowered in ("true", "t", "yes", "y", "on", "1"):
        return True
    if lowered in ("false", "f", "no", "n", "off", "0"):
        return False
    raise ValueError("give true or false")


def parse_count(text: str) -> int:
    """A whole number, digits perhaps grouped by underscores."""
    if not re.fullmatch(r"[+-]?\d[\d_]*", text):
        raise ValueError("give a whole number")
    return int(text)


_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(text: str) -> int:
    """A size: `1073741824`, `256MB`, `2GiB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*?)b?\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("give a size such as 268435456, 256MB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ValueError("give a size above zero")
    return size


def parse_seconds(text: str) -> int:
    """A whole number of seconds, at most a week."""
    seconds = parse_count(text.removesuffix("s"))
    if not 0 <= seconds <= 7 * 86400:
        raise ValueError("give seconds, 0 to 604800")
    return seconds


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser for a closed set of words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return text

    return parse


@dataclass(frozen=True)
class Option:
    """One key of the command line.

    Attributes:
      parse: text -> value; raises ValueError with what to give instead.
      help: one line.
      default: value when not given.
      switch: may stand alone, which means true.
      own: a flag of this project's, not one of MaxText's.
    """

    parse: Callable[[str], Any]
    help: str
    default: Any = None
    switch: bool = False
    own: bool = False


OPTIONS: Mapping[str, Option] = {
    "model_name": Option(str, "model to convert; `python -m converter models` lists them"),
    "base_output_directory": Option(str, "where <dir>/0/items is written (default tmp/<run_name>)"),
    "run_name": Option(str, "name of the run (default <model_name>_<time>)"),
    "scan_layers": Option(parse_bool, "stack the layers of a kind into one array", True),
    "param_scan_axis": Option(parse_count, "axis that stacked layers are on", 1),
    "use_multimodal": Option(parse_bool, "convert the vision and audio towers too", False),
    "hf_access_token": Option(str, "token for the hub; better in the environment, HF_TOKEN"),
    "hardware": Option(str, "must be cpu", "cpu"),
    "skip_jax_distributed_system": Option(parse_bool, "must be true", True),
    "checkpoint_storage_use_ocdbt": Option(parse_bool, "one database, else a directory per array", True),
    "checkpoint_storage_use_zarr3": Option(parse_bool, "zarr version 3, else 2", True),
    "vocab_size": Option(parse_count, "rows of the target's vocabulary"),
    "base_num_decoder_layers": Option(parse_count, "convert only the first of the layers"),
    "simulated_cpu_devices_count": Option(parse_count, "devices the arrays are sharded over, 1 to 1024", 16),
    "hf_lora_adapter_path": Option(str, "LoRA adapter, written as hf_model_path: converted alone, or merged"),
    "load_parameters_path": Option(str, "not empty: merge the adapter into the model (nothing is read from there)"),
    "lazy_load_tensors": Option(parse_bool, "no effect: reading is streamed"),
    "eager_load_method": Option(str, "no effect: reading is streamed"),
    "hf_model_path": Option(str, "folder, org/name, hf://org/name@revision or gs://bucket/folder"),
    "revision": Option(str, "branch, tag or commit on the hub"),
    "save_dtype": Option(one_of("bfloat16", "float32", "float8_e4m3fn"), "bfloat16 or float32", "bfloat16"),
    "cache_dir": Option(str, "keep remote files there, or none: read byte ranges (default: the hub's cache)", own=True),
    "spool_dir": Option(str, "keep what is read twice there, or none (default: where temporary files are)", own=True),
    "retry_seconds": Option(
        parse_seconds, "how long a request for the source is tried again", retrying.DEFAULT_SECONDS, own=True
    ),
    "adapter_layout": Option(
        one_of("maxtext", "converter"), "of an adapter alone: as MaxText restores it, or as its converter saves it",
        "maxtext", own=True,
    ),
    "adapter_revision": Option(str, "revision of an adapter that is merged", own=True),
    "memory_budget": Option(parse_bytes, "bytes of chunks in flight, as 256MB (default: by the machine)", own=True),
    "threads": Option(parse_count, "threads that fill, compress and write (default: one per CPU)", own=True),
    "chunk_byte_size": Option(parse_bytes, "largest stored chunk; larger shards are cut", 2 << 30, own=True),
    "compression": Option(one_of("zstd", "none"), "zstd or none", "zstd", own=True),
    "if_exists": Option(one_of("refuse", "skip", "overwrite"), "what to do with what is there", "refuse", own=True),
    "dry_run": Option(parse_bool, "print the plan and write nothing", False, switch=True, own=True),
    "report": Option(str, "write a JSON report there", own=True),
    "log_format": Option(one_of("text", "json"), "text, or a JSON object a line", "text", own=True),
    "termination_message": Option(str, "write a short JSON message there however the run ends", own=True),
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """A parsed command line.

    Attributes:
      values: value per key of `OPTIONS`, defaults included.
      given: keys of `OPTIONS` that were given.
      others: MaxText keys without an option here, as they were given.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    others: Mapping[str, str] = field(default_factory=dict)


def parse_words(argv: Sequence[str]) -> Words:
    """Parse the command line of `to_maxtext`.

    MaxText also takes a key from the environment, as `M_<KEY>`; so does this.

    Raises:
      RequestError: a word is unknown, lacks its value or has a wrong one.
    """
    keys = maxtext_keys()
    texts: dict[str, str] = {}
    words = list(argv)
    if words and re.search(r"\.ya?ml$", words[0]) and "=" not in words[0]:
        words.pop(0)
    while words:
        name, text = _next(words, keys)
        texts[name] = text
    for key in keys:
        from_environment = os.environ.get(f"M_{key.upper()}")
        if from_environment is not None:
            if key in texts:
                raise RequestError(f"{key} is given both as a word and in the environment, M_{key.upper()}")
            texts[key] = from_environment
    values = {name: option.default for name, option in OPTIONS.items()}
    for name, text in texts.items():
        if name in OPTIONS:
            try:
                values[name] = OPTIONS[name].parse(text)
            except ValueError as error:
                shown = "..." if name == "hf_access_token" else text
                raise RequestError(f"{name}={shown}: {error}") from None
    others = {name: text for name, text in texts.items() if name not in OPTIONS}
    return Words(values, frozenset(texts) & frozenset(OPTIONS), others)


def _next(words: list[str], keys: frozenset[str]) -> tuple[str, str]:
    """Take one key and its value off the front of `words`."""
    word = words.pop(0)
    dashed = word.startswith("--")
    name, equals, text = word.removeprefix("--").partition("=")
    if name not in OPTIONS and name not in keys:
        raise RequestError(f"unknown word {word.split('=')[0]!r}{suggest(name, {*OPTIONS, *keys})}")
    if equals:
        return name, text
    option = OPTIONS.get(name)
    if option is not None and option.switch:
        alone = not words or not _is_bool(words[0])
        return name, "true" if alone else words.pop(0)
    if dashed and words and "=" not in words[0].split("/")[0] and not words[0].startswith("--"):
        return name, words.pop(0)
    raise RequestError(f"{name} has no value; write {'--' if dashed else ''}{name}=<value>")


def _is_bool(text: str) -> bool:
    try:
        parse_bool(text)
    except ValueError:
        return False
    return True


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for the names nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
