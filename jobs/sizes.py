"""What a Job's volumes and processes take of its node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jobs.catalogue import Model
from jobs.errors import RequestError
from jobs.settings import Settings

GIB = 2**30

SCRATCH_GIB = 2
"""sizeLimit of each of the volumes at HOME and TMPDIR."""

# Tokenizer and configuration files, and what a download adds to the weights while it runs.
_CACHE_FACTOR, _CACHE_GIB = 1.05, 1
# Python, JAX, TensorStore, the runtime's own share of the pod's memory.
_PROCESS_GIB = 8
# The converter needs up to 2.2 times its --memory_budget: chunks, their compressed form, what is being committed.
_BUDGET_FACTOR = 2.25
# A stored chunk has up to 2 GiB; beyond 48 GiB more chunks in flight gain nothing.
_LEAST_BUDGET_GIB, _MOST_BUDGET_GIB = 4, 48
# Both models of a parity check are in memory, in its dtype.
_CHECK_COPIES = 2
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# Logs and the container's own files lie on the node's disk too.
_LOGS_GIB = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of one Job, in GiB.

    Attributes:
      cache: sizeLimit of the volume of the Hugging Face cache.
      in_memory: whether that volume is memory, else the node's disk.
      budget: the converter's --memory_budget.
    """

    cache: int
    in_memory: bool
    budget: int


def cache_gib(source_bytes: int) -> int:
    """The size of a volume that holds a repository of so many bytes."""
    return math.ceil(source_bytes * _CACHE_FACTOR / GIB) + _CACHE_GIB


def check_gib(model: Model) -> int:
    """The memory of the parity check: the source's model and MaxText's."""
    return math.ceil(_CHECK_COPIES * model.parameters * _DTYPE_BYTES[model.check.dtype] / GIB) + _PROCESS_GIB


def sizes(model: Model, settings: Settings) -> Sizes:
    """Sizes of a model's Job on a pool.

    The cache is memory while it, and the larger of converter and check beside it, fit the pod's limit: memory of a
    volume counts against that limit for as long as the pod lives.

    Raises:
      RequestError: the model fits neither the pod's memory nor its disk.
    """
    cache = cache_gib(model.source_bytes)
    least = max(math.ceil(_LEAST_BUDGET_GIB * _BUDGET_FACTOR) + _PROCESS_GIB, check_gib(model))
    in_memory = cache + 2 * SCRATCH_GIB + least <= settings.memory_gib
    needed = cache + 2 * SCRATCH_GIB + _LOGS_GIB
    if not in_memory and needed > settings.storage_gib:
        raise RequestError(
            f"{model.name}: its download needs {needed} GiB, more than a pod's memory allows and more than its "
            f"{settings.storage_gib} GiB of disk; give the pool a larger diskSizeGb or local SSDs (localSsdCount)"
        )
    room = (settings.memory_gib - _PROCESS_GIB - (cache if in_memory else 0)) / _BUDGET_FACTOR
    budget = math.floor(min(max(room, _LEAST_BUDGET_GIB), _MOST_BUDGET_GIB))
    return Sizes(cache, in_memory, budget)
