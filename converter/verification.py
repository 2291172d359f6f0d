"""`verify`: read every array back from storage and hold it against the repository, chunk by chunk.

Each stored chunk is read by TensorStore and cut into the boxes that single tensors fill; a box is looked at through
the tensor's own axes and compared with it bit for bit. Where a rule does arithmetic, which rounding makes
irreversible, the source's values go through it again and the results are compared.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converter import memory, output
from converter.copying import boxes, copy_box
from converter.errors import CheckError, RequestError
from converter.families import FAMILIES, MODELS
from converter.fetching import tensors_held
from converter.geometry import check_architecture
from converter.hf.repository import Access, Repository, locate, open_repository
from converter.mapping import Box, Geometry, Parameter, parameters
from converter.maxtext.checkpoint import Checkpoint, StoredArray, find_checkpoint, stored_arrays
from converter.maxtext.layout import ROOT
from converter.progress import Meter
from converter.reading import ReadBox, box_reader
from converter.rules import Family
from converter.show import shape_text, table
from converter.stream import intersect

_FLIGHT_BYTES = 256 << 20
"""Of stored chunks read at a time, by all threads together; one chunk at least."""

_COMPARED_ELEMENTS = 8 << 20
"""Elements compared at a time."""


@dataclass(frozen=True)
class Difference:
    """What is wrong with one array."""

    name: str
    what: str


def run_verification(
    path: Path,
    *,
    source: str,
    revision: str | None,
    access: Access,
    spool: Path | None,
    model_name: str | None,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare, print the differences; 0 when there are none.

    Args:
      access, spool: as those of a conversion's request.

    Raises:
      CheckError: there are.
      RequestError: checkpoint or source are not what can be compared.
    """
    checkpoint = find_checkpoint(path)
    repository = open_repository(locate(source, revision=revision, access=access).fetch())
    stored = {array.name: array for array in stored_arrays(checkpoint)}
    name = model_name or _recorded_name(checkpoint)
    family = _family(name, repository)
    expected = _parameters(family, name or family.name, checkpoint, stored, repository)
    read = box_reader(repository)
    count = threads or len(os.sched_getaffinity(0))
    differences = list(_structure(expected, stored))
    wrong = {difference.name for difference in differences}
    comparable = [parameter for parameter in expected if ROOT + parameter.path not in wrong]
    total = sum(stored[ROOT + parameter.path].nbytes for parameter in comparable)
    with memory.Monitor() as monitor, Meter("verifying", total, monitor) as meter:
        for parameter in comparable:
            with tensors_held(repository, [piece.tensor for piece in parameter.pieces], spool, count):
                differences += _content(checkpoint, stored[ROOT + parameter.path], parameter, read, count, meter)
        if repository.remote is not None:
            repository.remote.check()
    if as_json:
        entries = [{"array": difference.name, "difference": difference.what} for difference in differences]
        print(json.dumps({"arrays": len(expected), "bytes": total, "differences": entries}, indent=1))
    elif differences:
        print(table(("array", "difference"), [(found.name, found.what) for found in differences]))
    else:
        print(f"{len(expected)} arrays, {total:,} bytes: all equal to {source}")
    if differences:
        raise CheckError(f"{len(differences)} of {len(expected)} arrays of {checkpoint.items} differ from {source}")
    return 0


def _recorded_name(checkpoint: Checkpoint) -> str | None:
    record = output.read_record(checkpoint.items.parent) or {}
    request = record.get("request")
    name = request.get("model_name") if isinstance(request, dict) else None
    return name if name in MODELS else None


def _family(name: str | None, repository: Repository) -> Family:
    if name is not None:
        if name not in MODELS:
            raise RequestError(f"unknown model_name {name!r}; `python -m converter models` lists the names")
        return MODELS[name]
    model_type = repository.config.get("model_type")
    fitting = [family for family in FAMILIES if family.model_type == model_type]
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
) -> list[Parameter]:
    """What the checkpoint should hold, in the sizes and dtype that it has."""
    config = check_architecture(family, name, repository.config)
    embedding = stored.get(f"{ROOT}token_embedder.embedding")
    if embedding is None:
        raise RequestError(f"{checkpoint.items} holds no MaxText parameters: no {ROOT}token_embedder.embedding")
    (stack,) = family.stacks
    prefix = f"{ROOT}{stack.target}"
    scan = any(array.startswith(f"{prefix}.") for array in stored)
    axis = 1
    layers = int(config[stack.layers])
    if scan:
        # A norm's scale is [embedding, layers] or, with param_scan_axis=0, [layers, embedding].
        rule = next(rule for rule in stack.rules if rule.pattern == "e -> e")
        scale = stored.get(f"{prefix}.{rule.target}")
        if scale is not None and len(scale.shape) == 2:
            axis = 0 if scale.shape[1] == config["hidden_size"] != scale.shape[0] else 1
            layers = scale.shape[axis] * stack.cycle
    else:
        numbers = {array.removeprefix(f"{prefix}_").partition(".")[0] for array in stored if array.startswith(prefix)}
        layers = len(numbers) * stack.cycle
    geometry = Geometry(config, embedding.shape[0], min(layers, int(config[stack.layers])))
    return parameters(
        family,
        geometry,
        repository.tensors,
        save_dtype=np.dtype(embedding.dtype),
        scan=scan,
        scan_axis=axis,
    )


def _structure(expected: list[Parameter], stored: Mapping[str, StoredArray]) -> Iterator[Difference]:
    names = {ROOT + parameter.path for parameter in expected}
    for name in sorted(set(stored) - names - {"step"}):
        yield Difference(name, "the source has nothing for it")
    for parameter in expected:
        array = stored.get(ROOT + parameter.path)
        if array is None:
            yield Difference(ROOT + parameter.path, "missing")
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

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(compare, blocks))
    count = sum(found for found, _ in results)
    if not count:
        return []
    first = min(at for _, at in results if at is not None)
    elements = int(np.prod(array.shape, dtype=np.int64))
    return [Difference(array.name, f"{count:,} of {elements:,} elements, the first at {list(first)}")]


def _expected(parameter: Parameter, box: Box, read: ReadBox) -> np.ndarray:
    """What a box of the parameter must hold."""
    content = np.zeros([part.stop - part.start for part in box], parameter.dtype)
    for piece in parameter.pieces:
        if found := intersect(piece, box):
            target, source = found
            copy_box(content[target], read(piece, source), parameter.steps)
    return content


def _blocks(array: StoredArray) -> Iterator[Box]:
    """Boxes of whole stored chunks."""
    starts = (range(0, size, chunk) for size, chunk in zip(array.shape, array.chunk_shape, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + chunk, size))
            for start, chunk, size in zip(corner, array.chunk_shape, array.shape, strict=True)
        )
