"""What conversions cost on the pool and on a TPU slice. Prices and their sources are in prices.yaml."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.pool import MACHINE_TYPES
from jobs.catalogue import FOLDER, Model
from jobs.errors import RequestError

_HOURS_PER_MONTH = 730
_CONVERTED_BYTES_PER_PARAMETER = 2  # bfloat16


@dataclass(frozen=True)
class Cost:
    """One model, in hours and US dollars.

    Attributes:
      job_hours: the Job's own time.
      node_hours: what is paid for it, the node's start and end included.
      tpu_hours: of the slice.
      given: whether the time was given, not estimated.
    """

    model: str
    job_hours: float
    node_hours: float
    dollars: float
    tpu_hours: float
    tpu_dollars: float
    given: bool

    @property
    def saving_percent(self) -> float:
        """How much cheaper the pool is; negative if dearer."""
        return 100 * (1 - self.dollars / self.tpu_dollars)


@functools.cache
def prices() -> Mapping[str, Any]:
    """The price file."""
    loaded: Mapping[str, Any] = yaml.safe_load((FOLDER / "prices.yaml").read_text())
    return loaded


def node_price(machine_type: str) -> float:
    """Dollars an hour for one node of the pool and its disk.

    Raises:
      RequestError: no price is known.
    """
    series = prices()["pool"].get(machine_type.partition("-")[0])
    if machine_type not in MACHINE_TYPES or not isinstance(series, dict):
        raise RequestError(f"no price is known for {machine_type!r}; give --node-price")
    machine, disk = MACHINE_TYPES[machine_type], prices()["pool"]["disk"]
    per_month: float = disk["gb_month"] * disk["gb"]
    price: float = machine.vcpus * series["vcpu"] + machine.memory_gib * series["gib"] + per_month / _HOURS_PER_MONTH
    return price


def tpu_price() -> float:
    """Dollars an hour for the slice that conversions ran on before."""
    tpu = prices()["tpu"]
    price: float = tpu["chips"] * tpu["v5p"]["chip"]
    return price


def estimated_hours(model: Model) -> float:
    """How long a model's Job is taken to run where nobody measured it."""
    rates = prices()["estimate"]
    converted = model.parameters * _CONVERTED_BYTES_PER_PARAMETER
    seconds: float = (
        rates["start_seconds"]
        + model.source_bytes / rates["download_bytes_per_second"]
        + len(model.variants) * converted / rates["convert_bytes_per_second"]
        + converted / rates["check_bytes_per_second"]
    )
    return seconds / 3600


def costs(
    models: Sequence[Model],
    *,
    price: float,
    hours: Mapping[str, float] | None = None,
    tpu_hours: Mapping[str, float] | None = None,
) -> list[Cost]:
    """The cost of each model.

    Args:
      price: dollars an hour of a node.
      hours: of the Job, per model; estimated where absent.
      tpu_hours: of the slice, per model; as many as of the node where absent.
    """
    around = prices()["pool"]["minutes_around"] / 60
    table = []
    for model in models:
        given = (hours or {}).get(model.name)
        job = estimated_hours(model) if given is None else given
        tpu = (tpu_hours or {}).get(model.name, job + around)
        table.append(
            Cost(
                model=model.name,
                job_hours=job,
                node_hours=job + around,
                dollars=(job + around) * price,
                tpu_hours=tpu,
                tpu_dollars=tpu * tpu_price(),
                given=given is not None,
            )
        )
    return table


def total(table: Sequence[Cost]) -> Cost:
    """The sum."""
    return Cost(
        model="total",
        job_hours=sum(each.job_hours for each in table),
        node_hours=sum(each.node_hours for each in table),
        dollars=sum(each.dollars for each in table),
        tpu_hours=sum(each.tpu_hours for each in table),
        tpu_dollars=sum(each.tpu_dollars for each in table),
        given=all(each.given for each in table),
    )


def verdict(summed: Cost, price: float) -> str:
    """What is true of the claim that the pool is so much cheaper, for these times."""
    claim = prices()["claim_percent"]
    saving = summed.saving_percent
    kind = "given" if summed.given else "estimated"
    holds = "holds" if saving > claim else "does not hold"
    needed = summed.dollars / (1 - claim / 100) / tpu_price()
    word = "cheaper" if saving >= 0 else "dearer"
    return (
        f'"More than {claim} % cheaper" {holds} for these {kind} times: the pool is {abs(saving):.1f} % {word} '
        f"({summed.node_hours:.2f} node-hours at ${price:.2f} against {summed.tpu_hours:.2f} slice-hours at "
        f"${tpu_price():.2f}). It needs the slice to take more than {needed:.2f} hours for the same work."
    )


def read_times(path: str) -> dict[str, float]:
    """Measured hours per model from `status --json`: of each model the latest Job that was checked.

    Raises:
      RequestError: the file is something else.
    """
    try:
        entries = json.loads(Path(path).read_text())
        return {each["model"]: each["elapsed_seconds"] / 3600 for each in entries if each["state"] == "checked"}
    except OSError as error:
        raise RequestError(f"--times {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise RequestError(f"--times {path}: is not the output of `python -m jobs status --json`") from None
