"""LoRA adapters of a family's models: where they belong in the base, and as MaxText parameters of their own.

An adapted linear layer of the repository is W + scale * B A. MaxText's adapter of a kernel is a pair of arrays beside
it, kernel_lora_a [inputs, rank] and kernel_lora_b [rank, outputs], heads flat. Where they come from follows from the
kernel's own rule: its pattern says which of the parameter's axes are inputs and which outputs, and in which order a
rotary embedding wants the latter. So a family is turned into one of adapters, whose rules go the usual way.

MaxText has one rank and one alpha for all adapters. Here a smaller rank is filled up with zeros, and a scale that
differs from what most pairs have is multiplied into B: W + (alpha / rank) * B A stays the same.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from converter.errors import RequestError
from converter.hf.adapter import Adapter, Pair
from converter.hf.safetensors import StoredTensor
from converter.mapping import Box, Geometry, Parameter, Piece, namer, parameters, stored_shapes
from converter.maxtext.layout import PARAMS
from converter.models import FAMILIES
from converter.patterns import Axis, choice, parse_pattern
from converter.reading import ReadBox
from converter.rules import Family, Form, HalvesToPairs, Rule, Scale, Stack

_WEIGHT = ".weight"
_RANK = "rank"
"""Dimension of the patterns, and key of the configuration, for what all adapters are filled up to."""


def check_base(family: Family, name: str, adapter: Adapter) -> None:
    """Refuse an adapter that says it was trained on a model of another family.

    Raises:
      RequestError: it does.
    """
    base = (adapter.base or "").lower()
    for other in FAMILIES:
        for known, model in other.models.items():
            if model.hub.lower() == base and not any(model.hub == own.hub for own in family.models.values()):
                raise RequestError(f"the adapter is for {adapter.base} ({known}), but {name} is another architecture")
    mapping = adapter.repository.config.get("auto_mapping") or {}
    found = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    known_classes = {architecture for other in FAMILIES for architecture in other.architectures}
    if found in known_classes and found not in family.architectures:
        raise RequestError(f"the adapter is for {found}, but {name} is {family.architectures[0]}")


def place(
    family: Family, geometry: Geometry, adapter: Adapter, tensors: Mapping[str, StoredTensor] | None
) -> dict[str, Pair]:
    """Every pair by the name of the tensor in the base that it is added to.

    Args:
      tensors: what the base holds; None where only the adapter is at hand.

    Raises:
      RequestError: the base has no such tensor, or in another shape.
    """
    held = tensors if tensors is not None else _weights(adapter)
    shapes = stored_shapes(family, geometry.config, held, multimodal=geometry.multimodal)
    placed = {}
    for module, pair in adapter.pairs.items():
        wanted = module + _WEIGHT
        name = next((name for name in _alternatives(family, wanted, held) if name in shapes), None)
        if name is None:
            beside = not geometry.multimodal and any(re.fullmatch(pattern, wanted) for pattern in family.beside)
            hint = "; give use_multimodal=true" if family.tower and beside else ""
            raise RequestError(
                f"the adapter of {module[:200]} has no place in {family.name}: it has no {wanted[:200]}{hint}"
            )
        if shapes[name] != (pair.outputs, pair.inputs):
            raise RequestError(
                f"the adapter of {module[:200]} is for [{pair.outputs}, {pair.inputs}], the base has "
                f"{list(shapes[name])}; is it for another model?"
                + ("" if tensors is not None else " hf_model_path says where the base's config.json is")
            )
        placed[name] = pair
    return placed


def _weights(adapter: Adapter) -> dict[str, StoredTensor]:
    """The tensors that the adapter is for, as far as it tells."""
    return {
        module + _WEIGHT: StoredTensor("", "BF16", (pair.outputs, pair.inputs), 0, 0)
        for module, pair in adapter.pairs.items()
    }


def _alternatives(family: Family, name: str, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """What a tensor may be called in a repository whose names begin otherwise than the adapter's."""
    yield name
    actual = namer(family, tensors)
    for prefix, others in family.prefixes.items():
        for other in (prefix, *others):
            if name.startswith(other):
                yield actual(prefix) + name.removeprefix(other)


@dataclass(frozen=True)
class Uniform:
    """An adapter with one rank and one alpha, as MaxText has them.

    Attributes:
      factors: tensor -> what it is multiplied with, left out where that is one.
    """

    rank: int
    alpha: float
    factors: Mapping[str, float]


def uniform(adapter: Adapter) -> Uniform:
    """The rank and alpha that MaxText is to be given, and what of the adapter must change for them."""
    pairs = adapter.pairs.values()
    rank = max(pair.rank for pair in pairs)
    (scale, _), *_ = Counter(pair.scale for pair in pairs).most_common(1)
    plain = all(pair.rank == rank and pair.scale == adapter.alpha / rank for pair in pairs)
    alpha = adapter.alpha if plain else scale * rank
    return Uniform(rank, alpha, {pair.b: pair.scale / scale for pair in pairs if pair.scale != scale})


def adapter_reader(read: ReadBox, factors: Mapping[str, float]) -> ReadBox:
    """Read boxes of an adapter whose scales are made one; what is multiplied comes in float64."""

    def multiplied(piece: Piece, box: Box) -> np.ndarray:
        content = read(piece, box)
        factor = factors.get(piece.tensor)
        return content if factor is None else content.astype(np.float64) * factor

    return multiplied


def adapter_parameters(
    family: Family,
    geometry: Geometry,
    adapter: Adapter,
    *,
    rank: int,
    save_dtype: np.dtype,
    scan: bool,
    scan_axis: int,
) -> list[Parameter]:
    """MaxText's parameters for an adapter alone; layers without one are zero in a stack, and absent otherwise.

    Raises:
      RequestError: something of it has no place in the model, or MaxText has no adapter there.
    """
    place(family, geometry, adapter, None)
    config = {**geometry.config, _RANK: rank}
    derived = _derived(family)
    tensors = adapter.repository.tensors
    shapes = stored_shapes(derived, config, tensors, multimodal=geometry.multimodal)
    for module, pair in adapter.pairs.items():
        if not any(name in shapes for name in _alternatives(family, pair.a, tensors)):
            raise RequestError(
                f"MaxText has no adapter of its own for {module[:200]}; merge it into the base: "
                "give load_parameters_path=merge too"
            )
    made = parameters(
        derived,
        replace(geometry, config=config),
        {name: StoredTensor("", "F32", shape, 0, 0) for name, shape in shapes.items()},
        save_dtype=save_dtype,
        scan=scan,
        scan_axis=scan_axis,
    )
    kept = []
    for parameter in made:
        pieces = tuple(_narrowed(piece, tensors[piece.tensor]) for piece in parameter.pieces if piece.tensor in tensors)
        if pieces:
            kept.append(replace(parameter, pieces=pieces))
    if not kept:
        raise RequestError("the adapter has nothing for the layers that are converted")
    return kept


def _narrowed(piece: Piece, tensor: StoredTensor) -> Piece:
    """A piece planned for the full rank, of a tensor that may have a smaller one."""
    is_a = piece.tensor.endswith(".lora_A.weight")
    at = 0 if is_a else len(piece.view.split) - 1
    full, rank = piece.view.split[at], tensor.shape[0 if is_a else 1]
    if rank == full:
        return piece
    view = replace(
        piece.view,
        split=(*piece.view.split[:at], rank, *piece.view.split[at + 1 :]),
        offset=piece.view.offset // full * rank,
    )
    axis = view.axis(at)
    part = (slice(0, rank),)
    target = (*piece.target[:axis], *part, *piece.target[axis + 1 :])
    return Piece(piece.tensor, view, target, (*piece.source[:axis], *part, *piece.source[axis + 1 :]))


def module_path(parameters: list[Parameter]) -> str:
    """MaxText's lora_module_path, a regular expression, for the modules that have an adapter."""
    found: dict[str, set[str]] = {}
    for parameter in parameters:
        *parents, _, _ = parameter.path.removeprefix(PARAMS).split(".")
        block = re.sub(r"_[0-9]+$", "", parents[1]) if len(parents) > 2 else ""
        found.setdefault(f"{parents[0]}/{block}", set()).add("/".join(parents[2 if block else 1 :]))
    return "|".join(
        f"{block}{'' if block.endswith('/') else '(?:_[0-9]+|/[0-9]+)?/'}({'|'.join(sorted(modules))})"
        for block, modules in sorted(found.items())
    )


def _derived(family: Family) -> Family:
    """A family whose parameters are the adapters of this one's kernels.

    Its tensors are called as the adapter's are, and its rank is the configuration's.
    """

    def rules(held: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(adapted for rule in held for adapted in _adapted(rule))

    def stacks(held: tuple[Stack, ...]) -> tuple[Stack, ...]:
        return tuple(replace(stack, rules=rules(stack.rules)) for stack in held)

    tower = family.tower and replace(family.tower, rules=rules(family.tower.rules), stacks=stacks(family.tower.stacks))
    dims = {**family.dims, _RANK: _RANK}
    return replace(family, rules=rules(family.rules), stacks=stacks(family.stacks), tower=tower, dims=dims)


def _adapted(rule: Rule) -> Iterator[Rule]:
    """The rules for both matrices of a kernel's adapter; none where MaxText cannot have one there."""
    if not rule.target.endswith(".kernel") or not rule.source or rule.collection != "params":
        return
    if any(not isinstance(op, HalvesToPairs | Scale) for op in rule.ops):
        return
    paired = {op.dim for op in rule.ops if isinstance(op, HalvesToPairs)}
    for side, ops in (("a", tuple(op for op in rule.ops if isinstance(op, HalvesToPairs))), ("b", rule.ops)):
        forms = [
            Form(form.source.removesuffix(_WEIGHT) + f".lora_{side.upper()}.weight", pattern)
            for form in (Form(rule.source, rule.pattern), *rule.forms)
            if (pattern := _pattern(form, side, paired))
        ]
        if not forms:
            return
        first, *others = forms
        yield replace(
            rule,
            target=f"{rule.target}_lora_{side}.value",
            source=first.source,
            pattern=first.pattern,
            ops=tuple(replace(op, double=True) if isinstance(op, Scale) else op for op in ops),
            forms=tuple(others),
        )


def _pattern(form: Form, side: str, paired: set[str]) -> str | None:
    """The pattern of one matrix of the adapter, from that of the kernel; None where there can be none."""
    kernel = parse_pattern(form.pattern)
    if len(kernel.stored) != 2 or "{" in form.source or not form.source.endswith(_WEIGHT):
        return None
    if any(len(axis.parts) > 1 or axis.outer for axis in kernel.target):
        # Several modules share the kernel; their adapters cannot be one.
        return None
    rows, columns = kernel.stored
    axis = columns if side == "a" else rows
    names = tuple(name for name in axis.names if not choice(name))
    if not names or tuple(name for (name,) in (target.names for target in kernel.target) if name in names) != names:
        return None
    if paired & set(names[:-1]):
        return None
    stored, target = _flat(axis, names, paired)
    return f"{_RANK} {stored} -> {target} {_RANK}" if side == "a" else f"{stored} {_RANK} -> {_RANK} {target}"


def _flat(axis: Axis, names: tuple[str, ...], paired: set[str]) -> tuple[str, str]:
    """An axis as it is stored, and as one axis of the adapter."""
    if paired & set(names) or len(axis.names) > len(names) > 1:
        # What is reordered or picked inside has no stride of its own: a piece for each of the outer ones.
        parts = [" ".join(part) for part in axis.parts]
        *outer, last = names
        target = f"({' '.join(outer)}: {last})" if outer else last
    else:
        parts = [" ".join((*(n for n in part if choice(n)), _product(_free(part)))) for part in axis.parts]
        if len(names) == 1:
            parts[axis.chosen] = " ".join(axis.names)
        target = _product(names)
    parts[axis.chosen] = f"<{parts[axis.chosen]}>" if len(parts) > 1 else parts[axis.chosen]
    return f"({' | '.join(parts)})", target


def _free(part: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in part if not choice(name))


def _product(lengths: tuple[str, ...]) -> str:
    """One length for several that follow each other; each may be a sum."""
    return "+".join("*".join(terms) for terms in itertools.product(*(length.split("+") for length in lengths)))
