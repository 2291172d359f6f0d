"""Which layers of a repository go into which MaxText layer: scanned, unscanned, in cycles and remainders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from converter.errors import RequestError
from converter.rules import Config, Rule, Stack


@dataclass(frozen=True)
class Block:
    """The arrays of one MaxText layer, or of one stack of layers.

    Attributes:
      stack: the stack they belong to.
      target: prefix of their names.
      layers: numbers of the repository's layers, the first ones where several are merged: a single number, or an
        array of one or two axes which the parameters have too.
    """

    stack: Stack
    target: str
    layers: np.ndarray

    def holds(self, rule: Rule, config: Config) -> bool:
        """Whether the rule is for these layers.

        Raises:
          RequestError: it is for some of them only.
        """
        wanted = rule.layers.split()
        if not wanted:
            return True
        of_kind = set()
        for layer in self.layers.flat:
            kinds = self.stack.kinds(config, int(layer))
            of_kind.add(all((kind.lstrip("!") in kinds) != kind.startswith("!") for kind in wanted))
        if len(of_kind) > 1:
            numbers = ", ".join(map(str, self.layers.flat[:6]))
            raise RequestError(
                f"layers {numbers}, ... are of several kinds and cannot be scanned as one; give scan_layers=false"
            )
        return of_kind == {True}


def extent(stack: Stack, config: Config, layers: int) -> tuple[int, int]:
    """The first layer of a stack and the one after its last, of a model cut to `layers` layers."""
    total = min(int(config[stack.layers]), layers) if stack.layers == "num_hidden_layers" else int(config[stack.layers])
    first = min(int(config[stack.first]), total) if stack.first else 0
    return first, max(first, min(int(config[stack.end]), total) if stack.end else total)


def blocks(stack: Stack, config: Config, layers: int, *, scan: bool) -> Iterator[Block]:
    """The MaxText layers of a stack, in order.

    Args:
      layers: how many of the repository's decoder layers are converted.

    Raises:
      RequestError: they do not fill whole cycles.
    """
    first, end = extent(stack, config, layers)
    if (end - first) % stack.merged:
        raise RequestError(f"{end - first} layers cannot be held in groups of {stack.merged}, as MaxText holds them")
    numbers = np.arange(first, end, stack.merged)
    if not scan or stack.scanned == "":
        for i, number in enumerate(numbers):
            yield Block(stack, f"{stack.target}_{i + (0 if stack.restart else first)}", np.asarray(number))
        return
    prefix = stack.scanned or stack.target
    if not stack.slots:
        if len(numbers):
            yield Block(stack, prefix, numbers)
        return
    cycle = sum(slot.count for slot in stack.slots)
    whole = len(numbers) - len(numbers) % cycle
    if whole < len(numbers) and stack.remainder is None:
        raise RequestError(f"{len(numbers)} layers cannot be scanned in cycles of {cycle}; give scan_layers=false")
    cycles = numbers[:whole].reshape(-1, cycle)
    start = 0
    for slot in stack.slots:
        taken = cycles[:, start : start + slot.count]
        if whole:
            yield Block(stack, f"{prefix}.{slot.name}", taken if slot.count > 1 else taken[:, 0])
        start += slot.count
    for slot, number in zip(stack.slots, numbers[whole:], strict=False):
        yield Block(stack, f"{stack.remainder}.{slot.name}", np.asarray(number))
