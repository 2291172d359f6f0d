"""The notation in which a rule says how the axes of a stored tensor become those of a parameter, after einops'.

`"(q d) e -> e q d"` reads a stored matrix of q*d rows and e columns and lays it out as [e, q, d]. Names are
dimensions; a number is an axis of that length. Beyond that:

* `q*d`, `n+r`, `ve/vh` in the place of a name: one axis, its length a product, a sum, a whole quotient.
* `x (1/2 f) e -> x e f`: of an axis of two, the second. It does not appear on the right.
* `(<k d> | k d | v w) e -> ...`: the first stored axis is three parts one after the other; this rule reads the one
  in angle brackets.
* `... -> e (k: <d> | d | w | w)`: the parameter's axis holds, k times, four parts of which this rule fills the first.
* A name on the right only is either a number, a new axis of length one, or stands in the tensor's name as `{x}`:
  each of its values is a tensor of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Axis:
    """One axis: parts that follow each other, of which one is meant; each a product of names, outermost first.

    Attributes:
      outer: names whose every combination repeats the parts; only in parameters.
    """

    parts: tuple[tuple[str, ...], ...]
    chosen: int = 0
    outer: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the part that is meant."""
        return self.parts[self.chosen]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: the stored tensor's axes and the parameter's."""

    stored: tuple[Axis, ...]
    target: tuple[Axis, ...]

    @property
    def names(self) -> set[str]:
        """Every dimension in it, numbers and choices left out."""
        axes = (*self.stored, *self.target)
        lengths = (length for axis in axes for part in (*axis.parts, axis.outer) for length in part)
        return {name for length in lengths for name in re.findall(r"[a-z]\w*", length)}


def evaluate(length: str, size: Callable[[str], int]) -> int:
    """The length of an axis: a name, a number, or sums of products of quotients of them."""

    def quotient(text: str) -> int:
        first, *others = (int(part) if part.isdigit() else size(part) for part in text.split("/"))
        for other in others:
            first //= other
        return first

    return sum(math.prod(map(quotient, term.split("*"))) for term in length.split("+"))


def choice(name: str) -> tuple[int, int] | None:
    """Of `"1/2"`: the index and how many there are."""
    index, _, count = name.partition("/")
    return (int(index), int(count)) if index.isdigit() and count.isdigit() else None


@cache
def parse_pattern(pattern: str) -> Pattern:
    """Parse a pattern.

    Raises:
      ValueError: it is malformed.
    """
    left, arrow, right = pattern.partition("->")
    parsed = Pattern(parse_axes(left), parse_axes(right))
    stored = [name for axis in parsed.stored for name in axis.names if not name[0].isdigit()]
    target = [name for axis in parsed.target for name in (*axis.outer, *axis.names) if not name[0].isdigit()]
    if (
        not arrow
        or len(set(stored)) != len(stored)
        or len(set(target)) != len(target)
        or not set(stored) <= set(target)
        or any(len(axis.parts) > 1 or axis.outer for axis in parsed.stored[1:])
        or any(len(axis.names) != 1 for axis in parsed.target)
    ):
        raise ValueError(f"malformed pattern {pattern!r}")
    return parsed


def parse_axes(side: str) -> tuple[Axis, ...]:
    """Parse one side of a pattern."""
    return tuple(_axis(group or name) for group, name in re.findall(r"\(([^()]*)\)|([^\s()]+)", side))


def _axis(text: str) -> Axis:
    outer, colon, parts = text.partition(":")
    texts = (parts if colon else text).split("|")
    marked = [i for i, part in enumerate(texts) if "<" in part]
    if len(marked) != (len(texts) > 1):
        raise ValueError(f"malformed axis {text!r}: one of its parts must stand in <>")
    return Axis(
        tuple(tuple(part.replace("<", " ").replace(">", " ").split()) for part in texts),
        marked[0] if marked else 0,
        tuple(outer.split()) if colon else (),
    )
