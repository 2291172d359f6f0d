"""`verify`: read every array back from storage and hold it against the repository, chunk by chunk.

Stored chunks are read by TensorStore and cut into the boxes that single tensors fill; a box is looked at through
the tensor's own axes and compared with it bit for bit. Where a rule does arithmetic, which rounding makes
irreversible, the source's values go through it again and the results are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from converter import fetching, memory, output, places, termination
from converter.adapters import adapter_parameters, adapter_reader, place, uniform
from converter.copying import boxes, copy_box
from converter.errors import RequestError, Terminated
from converter.fetching import adapter_held, tensors_held
from converter.geometry import check_architecture
from converter.hf.adapter import Adapter, base_config, locate_adapter, open_adapter
from converter.hf.quantised import Weights, open_weights
from converter.hf.repository import Access, Repository, locate, open_repository
from converter.layers import blocks
from converter.mapping import Box, Geometry, Parameter, parameters
from converter.maxtext.checkpoint import Checkpoint, StoredArray, find_checkpoint, reading_back, stored_arrays
from converter.maxtext.layout import PARAMS, ROOT
from converter.merging import merging_reader
from converter.models import FAMILIES, MODELS
from converter.progress import Meter, Phases
from converter.reading import ReadBox, box_reader
from converter.rules import Config, Family
from converter.show import shape_text
from converter.stream import intersect

_FLIGHT_BYTES = 256 << 20
"""Of stored chunks read at a time, by all threads together; one chunk at least."""

_COMPARED_ELEMENTS = 8 << 20
"""Elements compared at a time."""

_TOGETHER_BYTES = 1 << 16
"""Chunks are read together up to this size: a norm's are a few bytes each, and every read has its price."""


@dataclass(frozen=True)
class Difference:
    """What is wrong with one array."""

    name: str
    what: str


@dataclass(frozen=True)
class Check:
    """What is to be held against what.

    Attributes:
      path: the checkpoint.
      source, revision, access, spool: the repository, as those of a conversion's request.
      model_name: None where checkpoint or config.json tell.
      threads: None for one per CPU.
      report: where the report goes, None for nowhere.
      adapter: that is merged, or that the checkpoint holds alone; `source` is its base.
      as_json: whether the findings are printed as JSON.
      adapter_revision: its commit on the hub.
    """

    path: Path
    source: str
    revision: str | None
    access: Access
    spool: Path | None
    model_name: str | None
    threads: int | None
    report: Path | None
    as_json: bool
    adapter: str | None = None
    adapter_revision: str | None = None

    @property
    def sources(self) -> str:
        """What it is held against, for people."""
        return f"{self.source} with {self.adapter}" if self.adapter else self.source


@dataclass(frozen=True)
class Findings:
    """What a check found.

    Attributes:
      repository: the model, or the adapter that the checkpoint holds alone.
      arrays: how many the checkpoint should hold.
      nbytes: of the arrays that were compared.
      adapter: that is merged, None for none.
    """

    checkpoint: Checkpoint
    repository: Repository
    arrays: int
    nbytes: int
    differences: tuple[Difference, ...]
    adapter: Repository | None

    def entry(self) -> dict[str, Any]:
        """For programs."""
        differences = [{"array": found.name, "difference": found.what} for found in self.differences]
        return {"arrays": self.arrays, "bytes": self.nbytes, "differences": differences}


def verify(check: Check, monitor: memory.Monitor, phases: Phases) -> Findings:
    """Compare.

    Raises:
      RequestError: checkpoint or source are not what can be compared.
    """
    with phases.phase("plan"):
        checkpoint = find_checkpoint(check.path)
        if check.report is not None:
            places.check_file(check.report)
        stored = {array.name: array for array in stored_arrays(checkpoint)}
        expected = _expectation(checkpoint, stored, check, phases)
        root, read, weights = expected.root, expected.read, expected.weights
        repository = weights.repository
        count = check.threads or len(os.sched_getaffinity(0))
        differences = list(_structure(expected.parameters, stored, root))
    wrong = {difference.name for difference in differences}
    comparable = [parameter for parameter in expected.parameters if root + parameter.path not in wrong]
    total = sum(stored[root + parameter.path].nbytes for parameter in comparable)
    with contextlib.ExitStack() as held, phases.phase("compare"), Meter("verifying", total, monitor) as meter:
        if expected.adapter is not None:
            held.enter_context(adapter_held(expected.adapter, check.spool, count))
        for parameter in comparable:
            with tensors_held(weights, [piece.tensor for piece in parameter.pieces], check.spool, count):
                differences += _content(checkpoint, stored[root + parameter.path], parameter, read, count, meter)
        if repository.remote is not None:
            repository.remote.check()
    return Findings(checkpoint, repository, len(expected.parameters), total, tuple(differences), expected.adapter)


@dataclass(frozen=True)
class _Expectation:
    """What a checkpoint should hold.

    Attributes:
      weights: what is read.
      root: how the names of its arrays begin.
      adapter: that is merged, None for none.
    """

    weights: Weights
    parameters: list[Parameter]
    read: ReadBox
    root: str
    adapter: Repository | None = None


def _expectation(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredArray],
    check: Check,
    phases: Phases,
) -> _Expectation:
    adapter, access = check.adapter, check.access
    request = (output.read_record(checkpoint.items.parent) or {}).get("request")
    record: dict[str, Any] = request if isinstance(request, dict) else {}
    name = check.model_name or (record["model_name"] if record.get("model_name") in MODELS else None)
    alone = any(array.endswith(".kernel_lora_a.value") for array in stored)
    if adapter is None:
        if alone or "adapter" in record:
            raise RequestError(f"{checkpoint.items} was made with an adapter: give it as --hf_lora_adapter_path")
    else:
        found = locate_adapter(adapter, revision=check.adapter_revision, access=access)
        if not alone:
            fetching.check_adapter(found, check.spool)
        opened = open_adapter(found.fetch())
        if alone:
            return _adapter_expectation(
                stored,
                base_config(check.source, revision=check.revision, access=access),
                opened,
                name,
                converted if isinstance(converted := record.get("base_num_decoder_layers"), int) else None,
            )
    located = locate(check.source, revision=check.revision, access=access)
    with phases.phase("download"):
        located = located.fetch()
    repository = open_repository(located)
    family = _family(name, repository.config)
    weights, geometry, expected = _parameters(family, name or family.name, checkpoint, stored, repository)
    read = box_reader(weights)
    if adapter is None:
        return _Expectation(weights, expected, read, ROOT)
    read = merging_reader(read, opened, place(family, geometry, opened, weights.tensors))
    return _Expectation(weights, expected, read, ROOT, opened.repository)


def _adapter_expectation(
    stored: Mapping[str, StoredArray],
    config: Mapping[str, Any],
    adapter: Adapter,
    name: str | None,
    maxtext_layers: int | None,
) -> _Expectation:
    """What a checkpoint of an adapter alone should hold: scanned or not, whichever comes nearer to what it does.

    Args:
      maxtext_layers: decoder layers that were converted, as MaxText counts them; None for all.
    """
    family = _family(name, config)
    tower = family.tower
    multimodal = tower is not None and any(f".{tower.target}" in f".{array}" for array in stored)
    filled = check_architecture(
        family, name or family.name, {**config, "quantization_config": None}, multimodal=multimodal
    )
    layers = maxtext_layers * family.merged if maxtext_layers else int(filled[family.stacks[0].layers])
    geometry = Geometry(filled, int(filled["vocab_size"]), layers, multimodal)
    settings = uniform(adapter)
    lora = [array for array in stored.values() if array.name.endswith(".value")]
    nested = lora[0].name.startswith(ROOT + PARAMS)
    made, refused = [], None
    for scan, axis in ((True, 1), (True, 0), (False, 1)):
        try:
            made.append(
                adapter_parameters(
                    family,
                    geometry,
                    adapter,
                    rank=settings.rank,
                    save_dtype=np.dtype(lora[0].dtype),
                    scan=scan,
                    scan_axis=axis,
                )
            )
        except RequestError as error:
            refused = error
    if refused is not None and not made:
        raise refused
    if not nested:
        made = [
            [replace(parameter, path=parameter.path.removeprefix(PARAMS)) for parameter in parameters]
            for parameters in made
        ]
    root = ROOT if nested else ""
    expected = min(made, key=lambda parameters: len(list(_structure(parameters, stored, root))))
    weights = open_weights(adapter.repository, np.dtype(lora[0].dtype))
    return _Expectation(weights, expected, adapter_reader(box_reader(weights), settings.factors), root)


def _family(name: str | None, config: Config) -> Family:
    if name is not None:
        if name not in MODELS:
            raise RequestError(f"unknown model_name {name!r}; `python -m converter models` lists the names")
        return MODELS[name]
    model_type = config.get("model_type")
    fitting = [family for family in FAMILIES if model_type in family.model_types]
    if len(fitting) != 1:
        known = ", ".join(next(iter(family.models)) for family in fitting) or "none known here"
        raise RequestError(f"config.json fits {len(fitting)} layouts ({known}, ...): give --model_name")
    return fitting[0]


def _parameters(
    family: Family,
    name: str,
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredArray],
    repository: Repository,
) -> tuple[Weights, Geometry, list[Parameter]]:
    """The source's tensors, their sizes, and what the checkpoint should hold, in the dtype that it has."""
    embedding = stored.get(f"{ROOT}{PARAMS}token_embedder.embedding")
    if embedding is None:
        raise RequestError(f"{checkpoint.items} holds no MaxText parameters: no {ROOT}{PARAMS}token_embedder.embedding")
    tower = family.tower
    multimodal = tower is not None and any(array.startswith(f"{ROOT}{PARAMS}{tower.target}") for array in stored)
    config = check_architecture(family, name, repository.config, multimodal=multimodal)
    scan, axis, layers = _stacking(family, config, stored)
    dtype = np.dtype(embedding.dtype)
    weights = open_weights(repository, dtype)
    geometry = Geometry(config, embedding.shape[0], layers, multimodal)
    made = parameters(
        family,
        geometry,
        weights.tensors,
        save_dtype=dtype,
        scan=scan,
        scan_axis=axis,
    )
    return weights, geometry, made


def _stacking(family: Family, config: Config, stored: Mapping[str, StoredArray]) -> tuple[bool, int, int]:
    """Whether layers are scanned in a checkpoint, on which axis, and how many of the repository's layers it holds.

    Told from the norm scales, which have one axis but for the layers: the largest model whose scales are all there.
    """
    total = int(config[family.stacks[0].layers])
    ways = ((True, 1), (True, 0), (False, 1))
    held = [_held(family, config, stored, scan=scan, axis=axis) for scan, axis in ways]
    best = max(range(len(ways)), key=held.__getitem__)
    if held[best]:
        return *ways[best], held[best]
    return any(name.startswith(f"{ROOT}{PARAMS}{family.stacks[0].target}.") for name in stored), 1, total


def _held(family: Family, config: Config, stored: Mapping[str, StoredArray], *, scan: bool, axis: int) -> int:
    """The most layers of which all norm scales are there; 0 for none."""
    for layers in range(int(config[family.stacks[0].layers]), 0, -1):
        try:
            scales = _scales(family, Geometry(config, 1, layers), scan=scan, axis=axis)
        except RequestError:
            # Not whole cycles.
            continue
        if all(name in stored and stored[name].shape == shape for name, shape in scales.items()):
            return layers
    return 0


def _scales(family: Family, geometry: Geometry, *, scan: bool, axis: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of the norm scales inside the layers."""
    found = {}
    for stack in family.stacks:
        for block in blocks(stack, geometry.config, geometry.layers, scan=scan):
            for rule in stack.rules:
                if rule.pattern == "e -> e" and rule.collection == "params" and block.holds(rule, geometry.config):
                    size, layers = int(geometry.config["hidden_size"]), block.layers.shape
                    shape = (size, *layers) if axis else (*layers, size)
                    found[f"{ROOT}{PARAMS}{block.target}.{rule.target}"] = shape
    return found


def _structure(expected: list[Parameter], stored: Mapping[str, StoredArray], root: str) -> Iterator[Difference]:
    names = {root + parameter.path for parameter in expected}
    for name in sorted(set(stored) - names - {"step"}):
        yield Difference(name, "the source has nothing for it")
    for parameter in expected:
        array = stored.get(root + parameter.path)
        if array is None:
            yield Difference(root + parameter.path, "missing")
        elif array.shape != parameter.shape:
            yield Difference(array.name, f"shape {shape_text(array.shape)}, not {shape_text(parameter.shape)}")
        elif np.dtype(array.dtype) != parameter.dtype:
            yield Difference(array.name, f"dtype {array.dtype}, not {parameter.dtype.name}")


def _content(
    checkpoint: Checkpoint,
    array: StoredArray,
    parameter: Parameter,
    read: ReadBox,
    threads: int,
    meter: Meter,
) -> list[Difference]:
    """Compare one array's content, block by block."""
    opened = checkpoint.open(array.name)
    blocks = list(_blocks(array))
    largest = max(np.prod([part.stop - part.start for part in block]) for block in blocks) * parameter.dtype.itemsize
    bits = np.dtype(f"u{parameter.dtype.itemsize}")
    workers = max(1, min(threads, int(_FLIGHT_BYTES // max(1, largest))))

    def compare(block: Box) -> tuple[int, tuple[int, ...] | None]:
        with reading_back(checkpoint.items):
            content = np.asarray(opened[block].read().result())
        count, first = 0, None
        for box in boxes(content.shape, _COMPARED_ELEMENTS):
            within = tuple(
                slice(whole.start + part.start, whole.start + part.stop) for whole, part in zip(block, box, strict=True)
            )
            unequal = content[box].view(bits) != _expected(parameter, within, read).view(bits)
            if unequal.any():
                count += int(np.count_nonzero(unequal))
                at = np.unravel_index(int(np.argmax(unequal)), unequal.shape)
                first = first or tuple(int(i) + part.start for i, part in zip(at, within, strict=True))
        meter.add(content.nbytes, 0)
        return count, first

    pool, waits = ThreadPoolExecutor(workers, thread_name_prefix="compare"), True
    try:
        results = []
        for result in pool.map(compare, blocks):
            termination.check()
            results.append(result)
    except Terminated:
        # A bucket that does not answer could hold up the end for minutes; nothing is being written.
        waits = False
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)
    count = sum(found for found, _ in results)
    if not count:
        return []
    first = min(at for _, at in results if at is not None)
    elements = int(np.prod(array.shape, dtype=np.int64))
    return [Difference(array.name, f"{count:,} of {elements:,} elements, the first at {list(first)}")]


def _expected(parameter: Parameter, box: Box, read: ReadBox) -> np.ndarray:
    """What a box of the parameter must hold."""
    content = np.full([part.stop - part.start for part in box], parameter.fill, parameter.dtype)
    for piece in parameter.pieces:
        if found := intersect(piece, box):
            target, source = found
            copy_box(content[target], read(piece, source), parameter.steps)
    return content


def _blocks(array: StoredArray) -> Iterator[Box]:
    """Boxes of whole stored chunks, small ones taken together."""
    shape, nbytes = list(array.chunk_shape), math.prod(array.chunk_shape) * np.dtype(array.dtype).itemsize
    for axis in reversed(range(len(shape))):
        count = max(1, min(-(-array.shape[axis] // shape[axis]), _TOGETHER_BYTES // max(1, nbytes)))
        shape[axis] *= count
        nbytes *= count
    starts = (range(0, size, part) for size, part in zip(array.shape, shape, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + part, size)) for start, part, size in zip(corner, shape, array.shape, strict=True)
        )
