"""The language of a family file: rules that say where every MaxText parameter comes from.

A rule names a MaxText parameter, the Hugging Face tensor it comes from, and how the axes of one become the axes
of the other, in the notation of einops: `"(q d) e -> e q d"` reads a stored matrix of q*d rows and e columns and
lays it out as [e, q, d]. Letters are dimensions; a family says which key of config.json gives each its size.
From one rule come the shapes, the plan and both directions of a conversion: axes are only ever split and
permuted, which loses nothing, and what else happens to the numbers is a `Scale` or an `AddOne`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
"""config.json with the family's defaults filled in."""


@dataclass(frozen=True)
class HalvesToPairs:
    """Reorder axis `dim` for rotary embedding: the repository has [x0, x1, .., y0, ..], the target [x0, y0, x1, ..].

    Source: MaxText's LLaMARotaryEmbedding (layers/embeddings.py), which rotates neighbours as Meta's code does.
    """

    dim: str


@dataclass(frozen=True)
class Scale:
    """Multiply by a number that depends on the geometry, in float32."""

    factor: Callable[[Config], float]


@dataclass(frozen=True)
class AddOne:
    """Add 1 in float32: the repository stores a norm scale w as an offset, the target stores 1 + w."""


Op = HalvesToPairs | Scale | AddOne


@dataclass(frozen=True)
class Rule:
    """One MaxText parameter and the tensor it comes from.

    Attributes:
      target: parameter name below its stack or, outside stacks, below the root; parts joined by ".".
      source: tensor name below the stack's source prefix or, outside stacks, the whole name.
      pattern: axes of the stored tensor -> axes of the parameter, each a letter of `Family.dims`.
      ops: what else happens, in order.
      at: which of the stack's `cycle` source layers this rule reads.
      dtype: the parameter's dtype where it does not follow `--save_dtype`.
      when: the rule holds only for configurations for which this is true.
    """

    target: str
    source: str
    pattern: str
    ops: tuple[Op, ...] = ()
    at: int = 0
    dtype: str | None = None
    when: Callable[[Config], bool] | None = None


@dataclass(frozen=True)
class Stack:
    """A run of equal layers: stacked into one array when scanned, one array per layer when not.

    Scanned, a rule's parameter is `<target>.<rule>` with the layers on the scan axis; unscanned it is
    `<target>_<i>.<rule>`. MaxText layer i reads the source layers `cycle * i + rule.at`.
    """

    target: str
    source: str
    rules: tuple[Rule, ...]
    cycle: int = 1
    layers: str = "num_hidden_layers"


@dataclass(frozen=True)
class Model:
    """A name a user can give, and what is published under it.

    Attributes:
      hub: repository on the Hugging Face hub that the name stands for.
      config: the keys of that repository's config.json that give its geometry. Never used to convert (the
        repository's own file is); it serves listings, benchmarks and the command that loads a result.
      maxtext: what MaxText 0.2.5 has under this name: "converter" (it converts it too), "model" (a model
        configuration only), or "" (nothing: its load command spells the geometry out).
      note: what a user of this name should know.
    """

    hub: str
    config: Mapping[str, Any]
    maxtext: str = ""
    note: str = ""


@dataclass(frozen=True)
class Family:
    """An architecture: every rule that turns its repositories into MaxText parameters.

    Attributes:
      name: the family's own name.
      decoder_block: MaxText's name for it.
      architectures, model_type: what config.json says of a repository of this family.
      defaults: what transformers assumes where config.json is silent; a function is given the configuration.
      dims: letter -> key of config.json.
      rules, stacks: the parameters outside and inside layers.
      ignored: regular expressions of tensors that carry no weights.
      equal: tensor -> tensor it must equal where both are present although a rule reads only the second.
      vocabulary: vocabulary size in the repository -> in MaxText, where MaxText fixes another.
      rope_type: MaxText's `rope_type` that the layout of query and key is for.
      words: MaxText's word for a geometry fact -> the key of config.json that must agree with it.
      models: the names this family answers to.
    """

    name: str
    decoder_block: str
    architectures: tuple[str, ...]
    model_type: str
    defaults: Mapping[str, Any]
    dims: Mapping[str, str]
    rules: tuple[Rule, ...]
    stacks: tuple[Stack, ...]
    models: Mapping[str, Model]
    words: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    equal: Mapping[str, str] = field(default_factory=dict)
    vocabulary: Mapping[int, int] = field(default_factory=dict)
    rope_type: str = "default"

    def fill(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with defaults where a key is absent or null."""
        filled = {key: value for key, value in config.items() if value is not None}
        for key, default in self.defaults.items():
            if key not in filled:
                filled[key] = default(filled) if callable(default) else default
        return filled


@dataclass(frozen=True)
class Axes:
    """A parsed pattern: the stored axes, each a product of letters, and the parameter's axes."""

    stored: tuple[tuple[str, ...], ...]
    target: tuple[str, ...]

    @property
    def split(self) -> tuple[str, ...]:
        """The stored axes taken apart into single letters, in stored order."""
        return tuple(letter for group in self.stored for letter in group)

    @property
    def order(self) -> tuple[int, ...]:
        """The transposition that brings the split axes into the parameter's order."""
        return tuple(self.split.index(letter) for letter in self.target)


def parse_pattern(pattern: str) -> Axes:
    """Parse `"(q d) e -> e q d"`.

    Raises:
      ValueError: the pattern is malformed or its sides differ in letters.
    """
    left, arrow, right = pattern.partition("->")
    tokens = re.findall(r"\(([^()]*)\)|(\S+)", left)
    stored = tuple(tuple(group.split()) if group else (letter,) for group, letter in tokens)
    target = tuple(right.split())
    axes = Axes(stored, target)
    if not arrow or sorted(axes.split) != sorted(target) or len(set(target)) != len(target):
        raise ValueError(f"malformed pattern {pattern!r}")
    return axes
