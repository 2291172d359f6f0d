"""From a family's rules and one repository's config.json to the parameters, piece by piece.

A `Parameter` is one MaxText array; its `Piece`s say which box of it is which box of which stored tensor. That is
all the streaming writer, the check and (read backwards) the way to Hugging Face need to know of a model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from converter.errors import RequestError
from converter.hf.repository import NUMPY_DTYPES
from converter.hf.safetensors import StoredTensor
from converter.rules import AddOne, Axes, Family, HalvesToPairs, Rule, Scale, Stack, parse_pattern

Box = tuple[slice, ...]


@dataclass(frozen=True)
class View:
    """How a stored tensor is looked at so that its axes are the parameter's: reshape, transpose, new axes."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    stacked: tuple[int, ...] = ()

    def of(self, stored: np.ndarray) -> np.ndarray:
        """A view, never a copy: splitting and permuting axes needs none."""
        return np.expand_dims(stored.reshape(self.split).transpose(self.order), self.stacked)

    @cached_property
    def outer_axis(self) -> int:
        """The axis of the view that lies outermost in the file among those that are longer than one."""
        return self._axis(next((i for i, size in enumerate(self.split) if size > 1), 0))

    def narrowed(self, box: Box) -> tuple[slice, View, Box]:
        """What of the stored tensor must be at hand for a box of the view.

        Returns:
          The elements of the stored tensor, a range of whole rows of its first axis; how those are looked at; and
          where in that view the box is.
        """
        axis = self._axis(0)
        rows, inner = box[axis], math.prod(self.split[1:])
        view = View((rows.stop - rows.start, *self.split[1:]), self.order, self.stacked)
        within = (*box[:axis], slice(0, rows.stop - rows.start), *box[axis + 1 :])
        return slice(rows.start * inner, rows.stop * inner), view, within

    def _axis(self, stored: int) -> int:
        """The axis of the view that an axis of the split tensor becomes."""
        axis = self.order.index(stored)
        for stacked in self.stacked:
            axis += stacked <= axis
        return axis

    def extent(self, box: Box) -> tuple[int, int]:
        """The first element of the stored tensor that a box of the view touches, and the end of the last."""
        parts = [part for axis, part in enumerate(box) if axis not in self.stacked]
        first = last = 0
        for position, size in enumerate(self.split):
            part = parts[self.order.index(position)]
            first = first * size + part.start
            last = last * size + part.stop - 1
        return first, last + 1


@dataclass(frozen=True)
class Piece:
    """A box of a parameter and the box of one stored tensor, seen through `view`, that fills it."""

    tensor: str
    view: View
    target: Box
    source: Box


@dataclass(frozen=True)
class Step:
    """One arithmetic operation on float32 values, applied after the layout."""

    operation: Literal["multiply", "add"]
    operand: np.float32

    def apply(self, values: np.ndarray) -> None:
        """In place; `values` is float32."""
        {"multiply": np.multiply, "add": np.add}[self.operation](values, self.operand, out=values)


@dataclass(frozen=True)
class Parameter:
    """One MaxText array and where its content comes from. What no piece covers is zero.

    Attributes:
      path: name below `params.params`, parts joined by ".".
      shape: as stored by MaxText, scanned layers included.
      dtype: numpy dtype it is stored in.
      pieces: disjoint boxes.
      steps: arithmetic, the same for every piece.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Geometry:
    """The sizes of one conversion: what the repository holds and what the target is to hold.

    Attributes:
      config: the repository's config.json with the family's defaults.
      vocab_size: rows of the target's vocabulary; rows beyond the repository's are zero, fewer cut it.
      layers: how many of the repository's layers, from the first on, are converted.
    """

    config: Mapping[str, Any]
    vocab_size: int
    layers: int


def _segments(size: int, target_size: int, pairs: bool) -> list[tuple[slice, slice]]:
    """The (target, source) slices that fill one axis."""
    if pairs:
        half = size // 2
        return [(slice(0, size, 2), slice(0, half)), (slice(1, size, 2), slice(half, size))]
    common = min(size, target_size)
    return [(slice(0, common), slice(0, common))]


def _steps(rule: Rule, config: Mapping[str, Any]) -> tuple[Step, ...]:
    steps = []
    for op in rule.ops:
        match op:
            case Scale(factor):
                steps.append(Step("multiply", np.float32(factor(config))))
            case AddOne():
                steps.append(Step("add", np.float32(1)))
            case HalvesToPairs():
                pass
    return tuple(steps)


@dataclass(frozen=True)
class _Layout:
    """A rule made concrete: shapes and boxes of one source tensor within one (unstacked) parameter."""

    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    view: View
    boxes: tuple[tuple[Box, Box], ...]


def _layout(rule: Rule, family: Family, geometry: Geometry) -> _Layout:
    axes: Axes = parse_pattern(rule.pattern)
    size = {letter: int(geometry.config[family.dims[letter]]) for letter in axes.target}
    target_size = {
        letter: geometry.vocab_size if family.dims[letter] == "vocab_size" else size[letter] for letter in size
    }
    paired = {op.dim for op in rule.ops if isinstance(op, HalvesToPairs)}
    per_axis = [_segments(size[letter], target_size[letter], letter in paired) for letter in axes.target]
    return _Layout(
        stored_shape=tuple(math.prod(size[letter] for letter in group) for group in axes.stored),
        shape=tuple(target_size[letter] for letter in axes.target),
        view=View(tuple(size[letter] for letter in axes.split), axes.order),
        boxes=tuple(
            (tuple(target for target, _ in combination), tuple(source for _, source in combination))
            for combination in itertools.product(*per_axis)
        ),
    )


def _source_name(stack: Stack, layer: int, rule: Rule) -> str:
    return f"{stack.source}{stack.cycle * layer + rule.at}.{rule.source}"


def _rules(family: Family, config: Mapping[str, Any], rules: Iterable[Rule]) -> Iterator[Rule]:
    return (rule for rule in rules if rule.when is None or rule.when(config))


def stored_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the rules read from a whole repository with this configuration, and its shape there.

    Args:
      config: with the family's defaults.
    """

    def shape(rule: Rule) -> tuple[int, ...]:
        return tuple(
            math.prod(int(config[family.dims[letter]]) for letter in group)
            for group in parse_pattern(rule.pattern).stored
        )

    shapes = {rule.source: shape(rule) for rule in _rules(family, config, family.rules)}
    for stack in family.stacks:
        for layer in range(int(config[stack.layers]) // stack.cycle):
            for rule in _rules(family, config, stack.rules):
                shapes[_source_name(stack, layer, rule)] = shape(rule)
    return shapes


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
    config = geometry.config
    made: list[Parameter] = []

    def add(rule: Rule, path: str, layout: _Layout, names: list[str], stack_axis: int | None) -> None:
        for name in names:
            _check(name, tensors, layout.stored_shape)
        dtype = np.dtype(rule.dtype) if rule.dtype else save_dtype
        if stack_axis is None:
            shape, view = layout.shape, layout.view
            pieces = [Piece(names[0], view, target, source) for target, source in layout.boxes]
        else:
            shape = (*layout.shape[:stack_axis], len(names), *layout.shape[stack_axis:])
            view = View(layout.view.split, layout.view.order, (stack_axis,))
            pieces = [
                Piece(
                    name,
                    view,
                    (*target[:stack_axis], slice(i, i + 1), *target[stack_axis:]),
                    (*source[:stack_axis], slice(0, 1), *source[stack_axis:]),
                )
                for i, name in enumerate(names)
                for target, source in layout.boxes
            ]
        made.append(Parameter(path, shape, dtype, tuple(pieces), _steps(rule, config)))

    for rule in _rules(family, config, family.rules):
        add(rule, rule.target, _layout(rule, family, geometry), [rule.source], None)
    for stack in family.stacks:
        count = geometry.layers // stack.cycle
        for rule in _rules(family, config, stack.rules):
            layout = _layout(rule, family, geometry)
            names = [_source_name(stack, i, rule) for i in range(count)]
            if scan:
                axis = min(scan_axis, len(layout.shape))
                add(rule, f"{stack.target}.{rule.target}", layout, names, axis)
            else:
                for i, name in enumerate(names):
                    add(rule, f"{stack.target}_{i}.{rule.target}", layout, [name], None)
    return sorted(made, key=lambda parameter: parameter.path)


def _check(name: str, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise RequestError(f"tensor {name} is missing from the repository; is it a complete checkpoint of this model?")
    if tensor.dtype not in NUMPY_DTYPES:
        known = ", ".join(NUMPY_DTYPES)
        raise RequestError(f"tensor {name} has dtype {tensor.dtype}; only {known} can be converted")
    if tensor.shape != shape:
        hint = " (it looks transposed)" if tensor.shape == shape[::-1] else ""
        raise RequestError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}{hint}")
