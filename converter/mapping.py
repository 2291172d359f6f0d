"""From a family's rules and one repository's config.json to the parameters, piece by piece.

A `Parameter` is one MaxText array; its `Piece`s say which box of it is which box of which stored tensor. That is
all the streaming writer, the check and (read backwards) the way to Hugging Face need to know of a model.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np

from converter.errors import RequestError
from converter.hf.repository import NUMPY_DTYPES, WEIGHT_DTYPES
from converter.hf.safetensors import StoredTensor
from converter.layers import blocks
from converter.patterns import Axis, choice, evaluate, parse_axes, parse_pattern
from converter.rules import AddOne, Family, Form, HalvesToPairs, Rule, Scale

Box = tuple[slice, ...]

_slice = cache(slice)
"""Large models have many thousand boxes, most of the same slices."""


@dataclass(frozen=True)
class View:
    """How a part of a stored tensor is looked at so that its axes are the parameter's: reshape, pick, transpose.

    Attributes:
      split: sizes of the axes that the part is taken apart into, in stored order.
      order: the axis of `split` that is each axis of the view, picked and new ones left out.
      stacked: new axes of the view, of length one.
      picked: axis of `split` -> the only index of it that is seen.
      offset: elements of the tensor before the part.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    stacked: tuple[int, ...] = ()
    picked: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    def of(self, part: np.ndarray) -> np.ndarray:
        """A view, never a copy: splitting, picking and permuting axes needs none.

        Args:
          part: the stored elements from `offset` on, as many as `split` has.
        """
        picked = dict(self.picked)
        kept = [axis for axis in range(len(self.split)) if axis not in picked]
        seen = part.reshape(self.split)[tuple(picked.get(axis, slice(None)) for axis in range(len(self.split)))]
        return np.expand_dims(seen.transpose([kept.index(axis) for axis in self.order]), self.stacked)

    @cached_property
    def outer_axis(self) -> int:
        """The axis of the view that lies outermost in the file among those that are longer than one."""
        seen = sorted(self.order)
        if not seen:
            return 0
        return self.axis(next((axis for axis in seen if self.split[axis] > 1), seen[0]))

    @cached_property
    def stored_axes(self) -> tuple[int, ...]:
        """The axes of the view that are not new ones, as they lie in the file, the outermost first."""
        return tuple(self.axis(stored) for stored in sorted(self.order))

    def axis(self, stored: int) -> int:
        """The axis of the view that an axis of the split tensor becomes."""
        axis = self.order.index(stored)
        for stacked in self.stacked:
            axis += stacked <= axis
        return axis

    def narrowed(self, box: Box) -> tuple[slice, View, Box]:
        """What of the stored tensor must be at hand for a box of the view.

        Returns:
          The elements of the stored tensor, a range of whole rows of its first axis; how those are looked at; and
          where in that view the box is.
        """
        axis, part = self._row_axis, self.rows(box)
        if axis is None:
            return part, self, box
        count = box[axis].stop - box[axis].start
        view = replace(self, split=(count, *self.split[1:]), offset=0)
        return part, view, (*box[:axis], slice(0, count), *box[axis + 1 :])

    def rows(self, box: Box) -> slice:
        """The elements of the stored tensor that must be at hand for a box of the view: see `narrowed`."""
        if self._row_axis is None:
            return slice(self.offset, self.offset + self._row_elements)
        rows, inner = box[self._row_axis], self._row_elements
        return slice(self.offset + rows.start * inner, self.offset + rows.stop * inner)

    @cached_property
    def _row_axis(self) -> int | None:
        """The axis of the view that is the first one of the stored tensor; None where it is none of its axes."""
        return self.axis(0) if self.split and 0 in self.order else None

    @cached_property
    def _row_elements(self) -> int:
        """Elements of a row; of all where rows are not told apart."""
        return math.prod(self.split if self._row_axis is None else self.split[1:])

    def bounded(self, box: Box, shape: tuple[int, ...]) -> tuple[Box, View, Box]:
        """As `narrowed`, but in every axis of the stored tensor, for sources that must be decoded first.

        Args:
          shape: of the whole stored tensor.

        Returns:
          A box of the stored tensor that holds the box of the view and little else; how that box alone is looked at;
          and where in that view the box is.
        """
        picked = dict(self.picked)
        parts = [part for axis, part in enumerate(box) if axis not in self.stacked]
        wanted = [
            (picked[i], picked[i] + 1)
            if i in picked
            else (parts[self.order.index(i)].start, parts[self.order.index(i)].stop)
            for i in range(len(self.split))
        ]
        sizes, begins = list(self.split), [0] * len(self.split)
        stored: list[slice] = []
        offset, end = self.offset, len(self.split)
        for size in reversed(shape):
            # The axes of `split` that this one is taken apart into; of the outermost one perhaps a part only.
            first, inner = end, 1
            while first and inner < size:
                first -= 1
                inner *= self.split[first]
            offset, begin = divmod(offset, size)
            stored.append(_bound(range(first, end), wanted, sizes, begins, begin))
            end = first
        view = replace(
            self,
            split=tuple(sizes),
            picked=tuple((axis, index - begins[axis]) for axis, index in self.picked),
            offset=0,
        )
        moved = iter(begins[axis] for axis in self.order)
        within = []
        for axis, part in enumerate(box):
            start = 0 if axis in self.stacked else next(moved)
            within.append(slice(part.start - start, part.stop - start))
        return tuple(reversed(stored)), view, tuple(within)

    def extent(self, box: Box) -> tuple[int, int]:
        """The first element of the stored tensor that a box of the view touches, and the end of the last."""
        picked = dict(self.picked)
        parts = [part for axis, part in enumerate(box) if axis not in self.stacked]
        first = last = 0
        for axis, size in enumerate(self.split):
            if axis in picked:
                start = stop = picked[axis]
            else:
                part = parts[self.order.index(axis)]
                start, stop = part.start, part.stop - 1
            first, last = first * size + start, last * size + stop
        return self.offset + first, self.offset + last + 1


def _bound(axes: range, wanted: list[tuple[int, int]], sizes: list[int], begins: list[int], begin: int) -> slice:
    """The part of a stored axis that holds the wanted parts of the axes it is taken apart into.

    Args:
      begin: where on the stored axis the first of them begins.
      sizes, begins: by axis, changed to what of it is in that part.
    """
    inwards, step = list(axes), 1
    while inwards and wanted[inwards[-1]][1] - wanted[inwards[-1]][0] == 1 < sizes[inwards[-1]]:
        # One index of the innermost axis: every so many elements.
        axis = inwards.pop()
        begins[axis] = wanted[axis][0]
        begin += step * begins[axis]
        step *= sizes[axis]
        sizes[axis] = 1
    count, inner = 1, step * math.prod(sizes[axis] for axis in inwards)
    whole = False
    for axis in inwards:
        inner //= sizes[axis]
        if not whole:
            begins[axis], end = wanted[axis]
            begin += begins[axis] * inner
            sizes[axis] = end - begins[axis]
            whole = sizes[axis] > 1
        count *= sizes[axis]
    return slice(begin, begin + (count - 1) * step + 1, step) if step > 1 else slice(begin, begin + count)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter and the box of one stored tensor, seen through `view`, that fills it."""

    tensor: str
    view: View
    target: Box
    source: Box


@dataclass(frozen=True)
class Step:
    """One arithmetic operation on float32 values, or float64 ones if that is the operand's dtype, after the layout."""

    operation: Literal["multiply", "add"]
    operand: np.float32 | np.float64

    def apply(self, values: np.ndarray) -> None:
        """In place; `values` is of the operand's dtype or wider."""
        {"multiply": np.multiply, "add": np.add}[self.operation](values, self.operand, out=values)


@dataclass(frozen=True)
class Parameter:
    """One MaxText array and where its content comes from.

    Attributes:
      path: name below `params`, parts joined by ".", the collection first.
      shape: as stored by MaxText, scanned layers included.
      dtype: numpy dtype it is stored in.
      pieces: disjoint boxes.
      steps: arithmetic, the same for every piece.
      fill: value of what no piece covers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...]
    fill: float = 0.0


@dataclass(frozen=True)
class Geometry:
    """The sizes of one conversion: what the repository holds and what the target is to hold.

    Attributes:
      config: the repository's config.json with the family's defaults.
      vocab_size: rows of the target's vocabulary; rows beyond the repository's are zero, fewer cut it.
      layers: how many of the repository's layers, from the first on, are converted.
      multimodal: whether what is beside the text model is converted too.
    """

    config: Mapping[str, Any]
    vocab_size: int
    layers: int
    multimodal: bool = False


@dataclass(frozen=True)
class _Source:
    """One stored tensor's part in one parameter, layers left aside.

    Attributes:
      name: the tensor's, below its layer.
      stored_shape: of the whole tensor.
      target, source: boxes of the parameter and of the view.
    """

    name: str
    stored_shape: tuple[int, ...]
    view: View
    target: Box
    source: Box


class _Sizes:
    """The size of every dimension, in the repository and in the parameter."""

    def __init__(self, family: Family, config: Mapping[str, Any], vocab_size: int) -> None:
        self._family, self._config, self._vocab_size = family, config, vocab_size
        self._known: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        # Experts ask for the same few a hundred thousand times.
        if name not in self._known:
            chosen = choice(name)
            size = chosen[1] if chosen else evaluate(name, lambda part: int(self._config[self._family.dims[part]]))
            self._known[name] = size
        return self._known[name]

    def product(self, names: tuple[str, ...]) -> int:
        return math.prod(self[name] for name in names)

    def of_target(self, name: str) -> int:
        is_vocabulary = self._family.dims.get(name) == "vocab_size"
        return self._vocab_size if is_vocabulary else self[name]

    def axis(self, axis: Axis) -> int:
        """The length of a parameter's axis."""
        return self.product(axis.outer) * sum(math.prod(map(self.of_target, part)) for part in axis.parts)


def _segments(size: int, target_size: int, pairs: bool) -> list[tuple[slice, slice]]:
    """The (target, source) slices that fill one axis."""
    if pairs:
        half = size // 2
        return [(_slice(0, size, 2), _slice(0, half)), (_slice(1, size, 2), _slice(half, size))]
    common = min(size, target_size)
    return [(_slice(0, common), _slice(0, common))]


def _steps(rule: Rule, config: Mapping[str, Any]) -> tuple[Step, ...]:
    steps = []
    for op in rule.ops:
        match op:
            case Scale(factor, double):
                steps.append(Step("multiply", (np.float64 if double else np.float32)(factor(config))))
            case AddOne():
                steps.append(Step("add", np.float32(1)))
            case HalvesToPairs():
                pass
    return tuple(steps)


def _shape(rule: Rule, sizes: _Sizes) -> tuple[int, ...]:
    """Of the parameter, layers left aside."""
    return tuple(sizes.axis(axis) for axis in parse_pattern(rule.pattern).target)


def _named(form: Form) -> list[str]:
    """The dimensions that stand in the tensors' names."""
    return re.findall(r"\{(\w+)\}", form.source)


def _names(form: Form, sizes: _Sizes) -> Iterator[str]:
    """Every tensor that fills the parameter, by its name below its layer."""
    if not form.source:
        return
    named = _named(form)
    for values in np.ndindex(*(sizes[name] for name in named)):
        yield form.source.format(**dict(zip(named, values, strict=True)))


def _sources(rule: Rule, form: Form, sizes: _Sizes) -> Iterator[_Source]:
    """What fills the parameter, one entry for each tensor and each box."""
    if not form.source:
        return
    pattern = parse_pattern(form.pattern)
    named = _named(form)
    repeated = [name for axis in pattern.target for name in axis.outer]
    shape = _stored_shape(pattern.stored, sizes)
    rows = pattern.stored[0]
    start = sum(sizes.product(part) for part in rows.parts[: rows.chosen]) * math.prod(shape[1:])
    paired = {op.dim for op in rule.ops if isinstance(op, HalvesToPairs)}
    # One after the other: an absurd number of them ends at the first that is not there.
    for values in np.ndindex(*(sizes[name] for name in (*named, *repeated))):
        fixed = dict(zip((*named, *repeated), values, strict=True))
        view, per_axis = _view(pattern.stored, pattern.target, sizes, fixed, named, start, paired)
        name = form.source.format(**fixed)
        for combination in itertools.product(*per_axis):
            target, source = tuple(box for box, _ in combination), tuple(box for _, box in combination)
            yield _Source(name, shape, view, target, source)


def _view(
    stored: tuple[Axis, ...],
    target: tuple[Axis, ...],
    sizes: _Sizes,
    fixed: Mapping[str, int],
    named: list[str],
    start: int,
    paired: set[str],
) -> tuple[View, list[list[tuple[slice, slice]]]]:
    """How one tensor is looked at, and for every axis of the parameter the (target, source) slices that it fills.

    Args:
      fixed: name -> its value, for names in the tensor's name and those that repeat parts of an axis.
      start: elements before the part of the stored tensor that is meant.
    """
    split = [name for axis in stored for name in axis.names]
    indices = {i: chosen[0] for i, name in enumerate(split) if (chosen := choice(name))}
    indices |= {i: fixed[name] for i, name in enumerate(split) if name in fixed}
    while split and min(indices, default=-1) == 0:
        # What is picked of the outermost axis lies in one run: it is a matter of where the part begins.
        start += indices.pop(0) * sizes.product(tuple(split[1:]))
        split, indices = split[1:], {i - 1: index for i, index in indices.items()}
    free = [i for i in range(len(split)) if i not in indices]
    order, stacked, per_axis = [], [], []
    for position, axis in enumerate(target):
        (name,) = axis.names
        before = sum(math.prod(map(sizes.of_target, part)) for part in axis.parts[: axis.chosen])
        for outer in axis.outer:
            before += fixed[outer] * sum(sizes.product(part) for part in axis.parts)
        source = next((i for i in free if split[i] == name), None)
        if name in named or source is None:
            stacked.append(position)
            at = fixed.get(name, 0) + before
            per_axis.append([(_slice(at, at + 1), _slice(0, 1))])
            continue
        free.remove(source)
        order.append(source)
        segments = _segments(sizes[name], sizes.of_target(name), name in paired)
        per_axis.append([(_slice(to.start + before, to.stop + before, to.step), of) for to, of in segments])
    picked = tuple(sorted(indices.items()))
    return View(tuple(sizes[name] for name in split), tuple(order), tuple(stacked), picked, start), per_axis


def _stack(source: _Source, at: tuple[int, ...], axis: int) -> tuple[View, Box, Box]:
    """View and boxes with one more axis for each of the layers' indices, from `axis` on."""
    count = len(at)
    if not count:
        return source.view, source.target, source.source
    view = _stacked(source.view, axis, count)
    target = (*source.target[:axis], *(_slice(i, i + 1) for i in at), *source.target[axis:])
    return view, target, (*source.source[:axis], *(_slice(0, 1),) * count, *source.source[axis:])


@cache
def _stacked(view: View, axis: int, count: int) -> View:
    moved = [position + count * (position >= axis) for position in view.stacked]
    return replace(view, stacked=tuple(sorted([*moved, *range(axis, axis + count)])))


Namer = Callable[[str], str]
"""A tensor's name in the rules -> its name in the repository."""


def namer(family: Family, tensors: Mapping[str, Any]) -> Namer:
    """How the repository's names differ from those in the rules: by their beginnings."""
    actual = {}
    for prefix, alternatives in family.prefixes.items():
        found = (alternative for alternative in alternatives if any(name.startswith(alternative) for name in tensors))
        actual[prefix] = next(found, alternatives[0])

    def name(wanted: str) -> str:
        for prefix, alternative in actual.items():
            if wanted.startswith(prefix):
                return alternative + wanted.removeprefix(prefix)
        return wanted

    return name


@dataclass(frozen=True)
class _Placed:
    """A rule in one block of layers (none outside stacks), with the names of its tensors' beginnings."""

    rule: Rule
    path: str
    layers: np.ndarray | None
    source: Callable[[int, str], str]


def _placed(family: Family, geometry: Geometry, *, scan: bool) -> Iterator[_Placed]:
    """Every rule that holds, wherever it holds."""
    config = geometry.config
    rules, stacks = family.parts(multimodal=geometry.multimodal)

    def holds(rule: Rule) -> bool:
        return rule.when is None or rule.when(config)

    for rule in filter(holds, rules):
        yield _Placed(rule, f"{rule.collection}.{rule.target}", None, lambda _, name: name)
    for stack in stacks:
        for block in blocks(stack, config, geometry.layers, scan=scan):
            for rule in filter(holds, stack.rules):
                if block.holds(rule, config):
                    yield _Placed(
                        rule,
                        f"{rule.collection}.{block.target}.{rule.target}",
                        block.layers,
                        lambda layer, name, prefix=stack.source, at=rule.at: f"{prefix}{layer + at}.{name}",  # type: ignore[misc]
                    )


def used_rules(family: Family, config: Mapping[str, Any], *, multimodal: bool) -> Iterator[Rule]:
    """The rules that hold in a whole repository with this configuration."""
    layers = int(config[family.stacks[0].layers])
    yield from (placed.rule for placed in _placed(family, Geometry(config, 1, layers, multimodal), scan=False))


def stored_shapes(
    family: Family,
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor] | None = None,
    *,
    multimodal: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Every tensor that the rules read from a whole repository with this configuration, and its shape there.

    Args:
      config: with the family's defaults.
      tensors: what the repository holds; None for one that is stored as the rules' first forms say.
    """
    layers = int(config[family.stacks[0].layers])
    geometry = Geometry(config, int(config["vocab_size"]), layers, multimodal)
    sizes = _Sizes(family, config, geometry.vocab_size)
    name = namer(family, tensors or {})
    # Layers are alike, and a large model's experts are named once and not once in each.
    below: dict[Form, tuple[list[str], tuple[int, ...]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for placed in _placed(family, geometry, scan=False):
        layer = 0 if placed.layers is None else int(placed.layers)
        form = _form(placed, layer, sizes, name, tensors)
        if form not in below:
            below[form] = list(_names(form, sizes)), _stored_shape(parse_pattern(form.pattern).stored, sizes)
        names, shape = below[form]
        for each in names:
            shapes[name(placed.source(layer, each))] = shape
    return shapes


def integer_tensors(family: Family, config: Mapping[str, Any]) -> set[str]:
    """Of the tensors that `stored_shapes` names those that hold integers, in repositories as int64."""
    layers = int(config[family.stacks[0].layers])
    return {
        placed.source(0 if placed.layers is None else int(placed.layers), placed.rule.source)
        for placed in _placed(family, Geometry(config, 1, layers), scan=False)
        if placed.rule.dtype and np.dtype(placed.rule.dtype).kind == "i"
    }


def _form(placed: _Placed, layer: int, sizes: _Sizes, name: Namer, tensors: Mapping[str, StoredTensor] | None) -> Form:
    """In which of a rule's forms the repository has it."""
    rule = placed.rule
    forms = (Form(rule.source, rule.pattern), *rule.forms)
    if len(forms) == 1 or tensors is None:
        return forms[0]
    there = []
    for form in forms:
        source = next(_sources(rule, form, sizes))
        tensor = tensors.get(name(placed.source(layer, source.name)))
        if tensor is None:
            continue
        there.append(form)
        if tensor.shape != source.stored_shape:
            continue
        if form.beside is None:
            return form
        other = tensors.get(name(placed.source(layer, form.beside[0])))
        if other is None or other.shape == _stored_shape(parse_axes(form.beside[1]), sizes):
            return form
    return there[0] if there else forms[0]


def _stored_shape(axes: tuple[Axis, ...], sizes: _Sizes) -> tuple[int, ...]:
    return tuple(sum(sizes.product(part) for part in axis.parts) for axis in axes)


def parameters(
    family: Family,
    geometry: Geometry,
    tensors: Mapping[str, StoredTensor],
    *,
    save_dtype: np.dtype,
    scan: bool,
    scan_axis: int,
) -> list[Parameter]:
    """Every parameter of the target, in the order of its name.

    Args:
      tensors: what the repository holds, by name.
      save_dtype: dtype of every parameter whose rule fixes none.
      scan, scan_axis: whether layers are stacked, and on which axis.

    Raises:
      RequestError: a tensor is missing, or has another shape or an unsupported dtype.
    """
    sizes = _Sizes(family, geometry.config, geometry.vocab_size)
    name = namer(family, tensors)
    made: dict[str, Parameter] = {}
    for placed in _placed(family, geometry, scan=scan):
        rule = placed.rule
        dtype = np.dtype(rule.dtype) if rule.dtype else save_dtype
        layers = np.asarray(0) if placed.layers is None else placed.layers
        unit = _shape(rule, sizes)
        axis = min(scan_axis if rule.scan_axis is None else rule.scan_axis, len(unit))
        form = _form(placed, int(layers.flat[0]), sizes, name, tensors)
        pieces = []
        for source in _sources(rule, form, sizes):
            for at in np.ndindex(layers.shape):
                tensor = name(placed.source(int(layers[at]), source.name))
                _check(tensor, tensors, source.stored_shape, dtype)
                pieces.append(Piece(tensor, *_stack(source, at, axis)))
        if placed.path in made:
            first = made[placed.path]
            made[placed.path] = replace(first, pieces=(*first.pieces, *pieces))
            continue
        shape = (*unit[:axis], *layers.shape, *unit[axis:])
        steps = _steps(rule, geometry.config)
        made[placed.path] = Parameter(placed.path, shape, dtype, tuple(pieces), steps, rule.constant)
    return sorted(made.values(), key=lambda parameter: parameter.path)


def _check(name: str, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...], dtype: np.dtype) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        hint = "is it a complete checkpoint of this model?"
        if name.rpartition(".weight")[0].endswith("lm_head"):
            hint = "a model that takes its embedding for that has tie_word_embeddings=true in config.json"
        raise RequestError(f"tensor {name} is missing from the repository; {hint}")
    known = [code for code in WEIGHT_DTYPES if (NUMPY_DTYPES[code].kind == "i") == (dtype.kind == "i")]
    if tensor.dtype not in known:
        raise RequestError(f"tensor {name} has dtype {tensor.dtype}; only {', '.join(known)} can be converted")
    if tensor.shape != shape:
        hint = " (it looks transposed)" if tensor.shape == shape[::-1] else ""
        raise RequestError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}{hint}")
