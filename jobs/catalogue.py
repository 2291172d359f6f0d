"""The catalogue: what a Job writes, how it is checked, and how long it may take, for each model.

`models.yaml` is the data, `catalogue.schema.json` its schema.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from jobs.errors import RequestError

FOLDER = Path(__file__).parent
_BYTES_PER_PARAMETER = 2  # of bfloat16 or float16, as nearly every repository is


@dataclass(frozen=True)
class Storage:
    """How a checkpoint is stored.

    Attributes:
      zarr3: zarr version 3, else 2.
      ocdbt: one database for all arrays, else a directory for each.
    """

    zarr3: bool
    ocdbt: bool


@dataclass(frozen=True)
class Check:
    """The parity check of logits against the source.

    Attributes:
      variant: the checkpoint that is checked.
      dtype: what both models compute in.
      max_kl_div: the largest divergence that passes.
      golden: file of reference logits; "" computes them on the fly.
    """

    variant: str
    dtype: str
    max_kl_div: float
    golden: str = ""


@dataclass(frozen=True)
class Model:
    """One entry.

    Attributes:
      name: MaxText's name.
      hub: repository on the Hugging Face hub.
      revision: branch, tag or commit there; "" is its default branch.
      parameters: in the repository, tied ones once.
      source_bytes: what is downloaded.
      tower: whether the repository has a vision tower that MaxText holds.
      scan: what MaxText can scan the layers of: "always" all checkpoints, "text" those without the tower, "never".
      task_group: id of the Airflow TaskGroup.
      variants: the checkpoints to write, in this order.
      storage, check: as above.
      time_limit_hours: of the running Job; the time it waits does not count.
      priority: WorkloadPriorityClass.
      nightly: whether the nightly pipeline converts it.
      supported: whether this version of the converter can convert it.
    """

    name: str
    hub: str
    revision: str
    parameters: int
    source_bytes: int
    tower: bool
    scan: str
    task_group: str
    variants: tuple[str, ...]
    storage: Storage
    check: Check
    time_limit_hours: float
    priority: str
    nightly: bool
    supported: bool


Catalogue = Mapping[str, Model]


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue that comes with this package."""
    return parse(yaml.safe_load((FOLDER / "models.yaml").read_text()))


def parse(data: Any) -> Catalogue:
    """Models by name from the parsed file.

    Raises:
      RequestError: the file breaks its schema, or contradicts itself.
    """
    schema = json.loads((FOLDER / "catalogue.schema.json").read_text())
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if errors:
        # A wrong value makes its whole object "unevaluated" too, which says less.
        error = min(errors, key=lambda each: each.validator == "unevaluatedProperties")
        raise RequestError(f"models.yaml: {'.'.join(map(str, error.absolute_path)) or 'top level'}: {error.message}")
    models = {name: _model(name, {**data["defaults"], **entry}) for name, entry in data["models"].items()}
    groups: dict[str, str] = {}
    for model in models.values():
        for variant in model.variants:
            if reason := _impossible(model, variant):
                raise RequestError(f"models.yaml: {model.name}: variant {variant} cannot be: {reason}")
        if model.check.variant not in model.variants:
            raise RequestError(f"models.yaml: {model.name}: check.variant {model.check.variant} is not written")
        if other := groups.get(model.task_group):
            raise RequestError(f"models.yaml: {model.name}: task_group {model.task_group} is {other}'s too")
        groups[model.task_group] = model.name
    return models


def pick(names: Iterable[str], models: Catalogue) -> list[Model]:
    """The models of these names, once each, in their order.

    Raises:
      RequestError: a name is not in the catalogue.
    """
    found = {}
    for name in names:
        if name not in models:
            near = difflib.get_close_matches(name, models, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "`python -m jobs list` shows the names"
            raise RequestError(f"unknown model {name!r}; {hint}")
        found[name] = models[name]
    return list(found.values())


def pick_variants(model: Model, wanted: Iterable[str]) -> tuple[str, ...]:
    """Those of the model's variants that are wanted, in the model's order; all of them if none is named.

    Raises:
      RequestError: the catalogue has no such variant of the model.
    """
    names = list(wanted)
    for name in names:
        if name not in model.variants:
            raise RequestError(f"{model.name} has no variant {name!r}; it has {', '.join(model.variants)}")
    return tuple(variant for variant in model.variants if not names or variant in names)


def _impossible(model: Model, variant: str) -> str:
    """Why MaxText has no such checkpoint of the model, or ""."""
    scanned, multimodal = variant.startswith("scanned"), variant.endswith("_multimodal")
    if multimodal and not model.tower:
        return "there is no vision tower that MaxText holds"
    if scanned and model.scan == "never":
        return "MaxText does not scan this model's layers"
    if scanned and multimodal and model.scan == "text":
        return "MaxText does not scan layers beside this model's vision tower"
    return ""


def _model(name: str, entry: Mapping[str, Any]) -> Model:
    return Model(
        name=name,
        hub=entry["hub"],
        revision=entry.get("revision", ""),
        parameters=entry["parameters"],
        source_bytes=round(entry["source_gb"] * 1e9)
        if "source_gb" in entry
        else entry["parameters"] * _BYTES_PER_PARAMETER,
        tower=entry.get("tower", False),
        scan=entry.get("scan", "always"),
        task_group=entry.get("task_group", name.replace(".", "_")),
        variants=tuple(entry["variants"]),
        storage=Storage(zarr3=entry["storage"]["format"] == "zarr3", ocdbt=entry["storage"]["ocdbt"]),
        check=Check(**entry["check"]),
        time_limit_hours=entry["time_limit_hours"],
        priority=entry["priority"],
        nightly=entry.get("nightly", False),
        supported=entry.get("supported", True),
    )
