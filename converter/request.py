"""What a conversion is asked to do: the words of the command line, checked and made concrete."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter import places
from converter.errors import RequestError
from converter.hf.location import name_of, parse_location
from converter.hf.repository import NO_CACHE, Access
from converter.hf.spool import free_bytes
from converter.maxtext.devices import MAX_DEVICES
from converter.maxtext.layout import STEP
from converter.models import MODELS
from converter.rules import Family, Model
from converter.words import MAXTEXT_VERSION, Words, parse_bool, suggest

FORMAT = 1
"""Version of what is written for one request; part of its fingerprint."""


_MIN_CHUNK_BYTES = 8
"""One element of any dtype."""


@dataclass(frozen=True)
class AdapterRequest:
    """A LoRA adapter to convert.

    Attributes:
      source: local folder or hub id.
      revision: hub revision, None for the default branch or a folder.
      merge: add it to the model; else convert it alone.
      layout: of one alone: "maxtext", the arrays at the root of the tree, where MaxText's restore_lora_from_path
        looks for them; or "converter", where MaxText's converter puts them, below `params.params`.
    """

    source: str
    revision: str | None
    merge: bool
    layout: str


@dataclass(frozen=True)
class Request:
    """One conversion.

    Attributes:
      model_name: the name it was asked for by.
      source: local folder or hub id; of an adapter alone, where its base's config.json is, None for the geometry
        that is published under the model's name.
      revision: hub revision, None for the default branch or a folder.
      access: how remote sources are reached, the hub's token included.
      spool: folder for what is read more than once of a remote source, None for none.
      output: the place that gets `0/items`, on a disk or in a bucket.
      scan, scan_axis: whether layers are stacked, and on which axis.
      devices: simulated devices.
      save_dtype: numpy name of the dtype for parameters whose rule fixes none.
      ocdbt, zarr3, compression, chunk_bytes: storage.
      vocab_size: rows of the target's vocabulary, None for the family's own choice.
      maxtext_layers: decoder layers as MaxText counts them, None for all.
      multimodal: whether what is beside the text model is converted too.
      geometry: MaxText's other geometry words, to be held against config.json.
      memory_budget: bytes of chunks in flight, None for the default.
      threads: that fill, compress and write.
      if_exists: refuse, skip or overwrite.
      notes: what of the command line had no effect, a line each.
      adapter: the adapter that is converted alone or merged, if any.
    """

    model_name: str
    source: str | None
    revision: str | None
    access: Access
    spool: Path | None
    output: Path
    run_name: str
    scan: bool
    scan_axis: int
    devices: int
    save_dtype: str
    ocdbt: bool
    zarr3: bool
    compression: bool
    chunk_bytes: int
    vocab_size: int | None
    maxtext_layers: int | None
    multimodal: bool
    geometry: Mapping[str, str]
    memory_budget: int | None
    threads: int
    if_exists: str
    dry_run: bool
    report: Path | None
    notes: tuple[str, ...] = ()
    adapter: AdapterRequest | None = None

    @property
    def family(self) -> Family:
        return MODELS[self.model_name]

    @property
    def model(self) -> Model:
        return self.family.models[self.model_name]

    @property
    def step(self) -> Path:
        """The checkpoint's directory."""
        return self.output / STEP

    def content(self) -> dict[str, Any]:
        """What decides the bytes that are written, apart from the source."""
        adapter = self.adapter
        adapted = {"adapter": "merged" if adapter.merge else adapter.layout} if adapter else {}
        return {
            **adapted,
            "format": FORMAT,
            "family": self.family.name,
            "scan_layers": self.scan,
            "param_scan_axis": self.scan_axis,
            "simulated_cpu_devices_count": self.devices,
            "save_dtype": self.save_dtype,
            "checkpoint_storage_use_ocdbt": self.ocdbt,
            "checkpoint_storage_use_zarr3": self.zarr3,
            "compression": self.compression,
            "chunk_byte_size": self.chunk_bytes,
            "vocab_size": self.vocab_size,
            "base_num_decoder_layers": self.maxtext_layers,
            "use_multimodal": self.multimodal,
        }

    def fingerprint(self, source: Mapping[str, Any]) -> str:
        """Equal for requests that write the same bytes from the same source.

        Args:
          source: the identity of the source.
        """
        text = json.dumps({"request": self.content(), "source": source}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def make_request(words: Words) -> Request:
    """Check the words and make a request of them.

    Raises:
      RequestError: what is asked cannot be done.
    """
    values = words.values
    name = values["model_name"]
    if not name:
        raise RequestError("model_name is missing; `python -m converter models` lists the names")
    if name not in MODELS:
        raise RequestError(
            f"unknown model_name {name!r}{suggest(name, MODELS)}; `python -m converter models` lists them all"
        )
    family = MODELS[name]
    _check_environment(values)
    notes = _check_others(words, family)
    tower = family.tower if values["use_multimodal"] and not family.models[name].text_only else None
    if values["use_multimodal"] and tower is None:
        raise RequestError(f"{name} has no vision tower that MaxText holds: drop use_multimodal=true")
    reason = family.unscannable or (tower.scans if tower else "")
    if values["scan_layers"] and reason:
        raise RequestError(f"scan_layers=true: {reason}; give scan_layers=false")
    if values["save_dtype"] == "float8_e4m3fn":
        raise RequestError("save_dtype=float8_e4m3fn is not supported yet; give bfloat16 or float32")
    devices = values["simulated_cpu_devices_count"]
    if not 1 <= devices <= MAX_DEVICES:
        raise RequestError(f"simulated_cpu_devices_count={devices} is not within 1 to {MAX_DEVICES}")
    if values["chunk_byte_size"] < _MIN_CHUNK_BYTES:
        raise RequestError(f"chunk_byte_size={values['chunk_byte_size']} is below {_MIN_CHUNK_BYTES}")
    for key, least in (
        ("vocab_size", 1),
        ("base_num_decoder_layers", 1),
        ("threads", 1),
        ("param_scan_axis", 0),
    ):
        if values[key] is not None and values[key] < least:
            raise RequestError(f"{key}={values[key]} is below {least}")
    if values["param_scan_axis"] > 1:
        raise RequestError("param_scan_axis must be 0 or 1: some parameters have no further axis")
    if words.given & {"lazy_load_tensors", "eager_load_method"}:
        notes.append("lazy_load_tensors and eager_load_method have no effect: reading is streamed instead")
    if "hf_access_token" in words.given:
        notes.append("hf_access_token on a command line can be read by others; set HF_TOKEN instead")
    if "\\" in (values["base_output_directory"] or ""):
        # TensorStore takes it for a separator of directories.
        raise RequestError(f"base_output_directory={values['base_output_directory']}: no backslashes, please")
    adapter = _adapter(words)
    run_name = values["run_name"] or os.environ.get("JOBSET_NAME") or _default_run_name(name)
    output = places.parse_output("base_output_directory", values["base_output_directory"] or f"tmp/{run_name}")
    source = values["hf_model_path"] or family.models[name].hub
    if adapter and not adapter.merge:
        # Where MaxText's converter puts it.
        output = output / name / _adapter_name(adapter)
        source = values["hf_model_path"] or None
    return Request(
        model_name=name,
        source=source,
        revision=None if adapter and not adapter.merge else values["revision"],
        access=make_access(values),
        spool=make_spool(values["spool_dir"]),
        output=output,
        run_name=run_name,
        scan=values["scan_layers"],
        scan_axis=values["param_scan_axis"],
        devices=devices,
        save_dtype=values["save_dtype"],
        ocdbt=values["checkpoint_storage_use_ocdbt"],
        zarr3=values["checkpoint_storage_use_zarr3"],
        compression=values["compression"] == "zstd",
        chunk_bytes=values["chunk_byte_size"],
        vocab_size=values["vocab_size"],
        maxtext_layers=values["base_num_decoder_layers"],
        multimodal=values["use_multimodal"],
        geometry={key: text for key, text in words.others.items() if key in family.words},
        memory_budget=values["memory_budget"],
        threads=values["threads"] or len(os.sched_getaffinity(0)),
        if_exists=values["if_exists"],
        dry_run=values["dry_run"],
        report=places.parse("report", values["report"]) if values["report"] else None,
        notes=tuple(notes),
        adapter=adapter,
    )


def _adapter_name(adapter: AdapterRequest) -> str:
    try:
        return name_of(parse_location(adapter.source, adapter.revision))
    except RequestError as error:
        raise RequestError(f"hf_lora_adapter_path: {error}") from error


def _adapter(words: Words) -> AdapterRequest | None:
    """The adapter, by MaxText's words: alone, or merged where load_parameters_path is given too."""
    values = words.values
    source = _given(values["hf_lora_adapter_path"])
    merge = _given(values["load_parameters_path"])
    if source is None:
        if merge:
            raise RequestError(
                f"load_parameters_path={merge} means that an adapter is merged: give hf_lora_adapter_path, or drop it"
            )
        for key in words.given & {"adapter_layout", "adapter_revision"}:
            raise RequestError(f"{key} is for an adapter: give hf_lora_adapter_path, or drop it")
        return None
    if merge and "adapter_layout" in words.given:
        raise RequestError("adapter_layout is for an adapter alone: drop it or load_parameters_path")
    revision = values["adapter_revision"] or (None if merge else values["revision"])
    return AdapterRequest(source, revision, bool(merge), values["adapter_layout"])


def _given(text: str | None) -> str | None:
    """A word's text, None for those that stand for nothing."""
    return None if text in (None, *_NOTHING) else text


def _default_run_name(model_name: str) -> str:
    """MaxText's default (configs/types.py)."""
    return f"{model_name}_{datetime.datetime.now():%Y-%m-%d-%H-%M}"


def make_access(values: Mapping[str, Any]) -> Access:
    """How remote sources are reached, from the words for that.

    Raises:
      RequestError: the cache's folder cannot be one.
    """
    kept = values.get("cache_dir") or None
    if kept is not None and kept != NO_CACHE:
        if "://" in kept:
            raise RequestError(f"cache_dir={kept[:200]}: give a local folder")
        kept = str(places.local("cache_dir", kept))
        places.check_writable(Path(kept))
    token = values.get("hf_access_token") or os.environ.get("HF_TOKEN") or None
    return Access(token, kept, values["retry_seconds"])


def make_spool(text: str | None) -> Path | None:
    """The folder for what is read more than once of a remote source.

    Raises:
      RequestError: it cannot be that.
    """
    if text == NO_CACHE:
        return None
    if not text:
        return Path(tempfile.gettempdir())
    path = Path(text).expanduser()
    if free_bytes(path) == 0:
        raise RequestError(f"spool_dir={text}: give an existing directory on a disk that may be written to, or none")
    return path


def _check_environment(values: Mapping[str, Any]) -> None:
    if values["hardware"] != "cpu":
        raise RequestError(f"hardware={values['hardware']}: this converter runs on CPUs; give hardware=cpu or nothing")
    if not values["skip_jax_distributed_system"]:
        raise RequestError(
            "skip_jax_distributed_system=False: this converter runs in one process; give True or nothing"
        )


_MUST_BE_FALSE = ("fused_qkv", "fused_mlp", "share_kv_projections")
"""MaxText's words that, when true, would give the model other parameters than its converter writes."""

_NOTHING = ("", "''", '""', "null", "None")
"""How a word says that it is not given."""

_MUST_BE_EMPTY = {
    "quantization": "only unquantised parameters are written",
}


def _check_others(words: Words, family: Family) -> list[str]:
    """Refuse MaxText's words that would change the result in ways not supported; name the ones without effect."""
    unused = []
    for key, text in words.others.items():
        if key in family.words:
            continue
        if key in _MUST_BE_EMPTY and text not in _NOTHING:
            raise RequestError(f"{key}={text}: {_MUST_BE_EMPTY[key]}")
        hears = bool(words.values["use_multimodal"] and family.tower and family.tower.audio)
        if key == "use_audio" and _boolean(key, text) != hears:
            raise RequestError(
                f"use_audio={text}: here it must be {str(hears).lower()}, as use_multimodal and model ask"
            )
        if key in _MUST_BE_FALSE and _boolean(key, text):
            raise RequestError(f"{key}={text} gives the model other parameters than a conversion writes; drop it")
        if key == "decoder_block" and text != family.decoder_block:
            raise RequestError(f"decoder_block={text}: this model's is {family.decoder_block}")
        if key == "rope_type" and text != family.rope_type:
            raise RequestError(
                f"rope_type={text}: query and key of this model are laid out for rope_type={family.rope_type}"
            )
        unused.append(key)
    if not unused:
        return []
    return [f"known to MaxText {MAXTEXT_VERSION}, without effect on a conversion: {', '.join(sorted(unused))}"]


def _boolean(key: str, text: str) -> bool:
    try:
        return parse_bool(text)
    except ValueError as error:
        raise RequestError(f"{key}={text}: {error}") from None
