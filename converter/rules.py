"""The language of a family file: rules that say where every MaxText parameter comes from.

A rule names a MaxText parameter, the Hugging Face tensor it comes from, and how the axes of one become the axes
of the other (patterns.py has the notation). A family says which key of config.json gives each dimension its size.
From one rule come the shapes, the plan and both directions of a conversion: axes are only ever split, permuted and
cut, which loses nothing, and what else happens to the numbers is a `Scale` or an `AddOne`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from converter.patterns import parse_pattern

Config = Mapping[str, Any]
"""config.json with the family's defaults filled in, its text model's keys at the root, the others' as "a.b"."""


@dataclass(frozen=True)
class HalvesToPairs:
    """Reorder axis `dim` for rotary embedding: the repository has [x0, x1, .., y0, ..], the target [x0, y0, x1, ..].

    Source: MaxText's LLaMARotaryEmbedding (layers/embeddings.py), which rotates neighbours as Meta's code does.
    """

    dim: str


@dataclass(frozen=True)
class Scale:
    """Multiply by a number that depends on the geometry, in float32 or else, if `double`, in float64."""

    factor: Callable[[Config], float]
    double: bool = False


@dataclass(frozen=True)
class AddOne:
    """Add 1 in float32: the repository stores a norm scale w as an offset, the target stores 1 + w."""


Op = HalvesToPairs | Scale | AddOne


@dataclass(frozen=True)
class Form:
    """Another way in which repositories store what a rule reads.

    Attributes:
      source, pattern: as in `Rule`.
      beside: name and axes of a tensor that must be there too, where the shape alone leaves two forms possible.
    """

    source: str
    pattern: str
    beside: tuple[str, str] | None = None


@dataclass(frozen=True)
class Rule:
    """One MaxText parameter, or one part of it, and the tensor it comes from.

    Attributes:
      target: parameter name below its stack or, outside stacks, below the collection; parts joined by ".". Rules
        of the same target each fill a part of it.
      source: tensor name below the stack's source prefix or, outside stacks, the whole name. `{x}` in it stands
        for every value of dimension x. Empty: no tensor, every element is `constant`.
      pattern: axes of the stored tensor -> axes of the parameter.
      ops: what else happens, in order.
      at: which of the stack's `merged` source layers this rule reads.
      dtype: the parameter's dtype where it does not follow `--save_dtype`.
      when: the rule holds only for configurations for which this is true.
      layers: the rule holds only for layers of these kinds, as the stack tells them: "own !global" for what is the
        first and not the second.
      forms: other ways in which it is stored; the first whose tensor is there, in the right shape, counts.
      collection: MaxText's collection of variables.
      scan_axis: the axis on which layers are stacked, where it is not the usual one.
      constant: value of elements that come from no tensor.
    """

    target: str
    source: str
    pattern: str
    ops: tuple[Op, ...] = ()
    at: int = 0
    dtype: str | None = None
    when: Callable[[Config], bool] | None = None
    layers: str = ""
    forms: tuple[Form, ...] = ()
    collection: str = "params"
    scan_axis: int | None = None
    constant: float = 0.0

    @property
    def names(self) -> set[str]:
        """The dimensions that its patterns speak of."""
        return set().union(
            *(parse_pattern(pattern).names for pattern in (self.pattern, *(f.pattern for f in self.forms)))
        )


def rules(*table: tuple[str, str, str], prefix: str = "", source: str = "", **options: Any) -> tuple[Rule, ...]:
    """Rules from rows of target, source and pattern; the rest is the same for all of them."""
    return tuple(Rule(f"{prefix}{target}", f"{source}{name}", pattern, **options) for target, name, pattern in table)


def affine(target: str, source: str, pattern: str, bias: str, name: str = "kernel") -> tuple[Rule, ...]:
    """A matrix, or with name="scale" a norm, and its bias."""
    return rules((f"{target}.{name}", f"{source}.weight", pattern), (f"{target}.bias", f"{source}.bias", bias))


@dataclass(frozen=True)
class Slot:
    """The layers at one place of a scanned cycle: `count` neighbours, stacked on an axis of their own if several."""

    name: str
    count: int = 1


def slots(name: str, count: int) -> tuple[Slot, ...]:
    """`count` places of a cycle with a layer each."""
    return tuple(Slot(f"{name}_{i}") for i in range(count))


@dataclass(frozen=True)
class Stack:
    """A run of layers: stacked into one array when scanned, one array per layer when not.

    Unscanned, a rule's parameter is `<target>_<i>.<rule>`. Scanned it is `<scanned>.<rule>` with the layers on the
    scan axis; with slots `<scanned>.<slot>.<rule>`, where layer i belongs to the slot at i modulo the cycle.

    Attributes:
      target: prefix of the parameters' names.
      source: prefix of the tensors' names, followed by the layer's number and ".".
      merged: how many layers of the repository one MaxText layer holds.
      layers: key of config.json that counts the repository's layers.
      first, end: keys of config.json between which this stack's layers lie; None for all.
      restart: whether unscanned layers are counted from this stack's first.
      scanned: prefix when scanned; None: like `target`; "": never scanned.
      slots: the places of one cycle; empty where all layers are alike.
      remainder: prefix of the layers after the last whole cycle, one array each; None: there may be none.
      kinds: what kinds a layer of the repository is of.
    """

    target: str
    source: str
    rules: tuple[Rule, ...]
    merged: int = 1
    layers: str = "num_hidden_layers"
    first: str | None = None
    end: str | None = None
    restart: bool = False
    scanned: str | None = None
    slots: tuple[Slot, ...] = ()
    remainder: str | None = None
    kinds: Callable[[Config, int], set[str]] = lambda config, layer: set()


@dataclass(frozen=True)
class Tower:
    """What a multimodal conversion adds to the text model.

    Attributes:
      rules, stacks: its parameters.
      target: how all of their names begin, to tell whether a checkpoint has it.
      scans: why layers cannot be scanned with it, or "".
      audio: whether MaxText's `use_audio` goes with it.
    """

    rules: tuple[Rule, ...]
    stacks: tuple[Stack, ...]
    target: str = "vision_encoder"
    scans: str = ""
    audio: bool = False


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
      text_only: the repository has no tower, though its family's others have one.
    """

    hub: str
    config: Mapping[str, Any]
    maxtext: str = ""
    note: str = ""
    text_only: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture: every rule that turns its repositories into MaxText parameters.

    Attributes:
      name: the family's own name.
      decoder_block: MaxText's name for it.
      architectures, model_types: what config.json says of a repository of this family.
      defaults: what transformers assumes where config.json is silent, and derived sizes; a function is given the
        configuration.
      dims: dimension of the patterns -> key of config.json.
      rules, stacks: the parameters outside and inside layers.
      text: where in config.json the text model's keys are, parts joined by "."; "" for the root.
      tower: what `use_multimodal=true` adds; None for a text model.
      prefixes: how a tensor's name begins in the rules -> how it may begin in repositories; the first that any
        tensor begins with counts.
      ignored: regular expressions of tensors that carry nothing that MaxText has a place for.
      beside: regular expressions of tensors that a text-only conversion leaves out.
      extra_layers: key of config.json that counts further layers, for predicting several tokens, which MaxText's
        model leaves out.
      equal: tensor -> tensor it must equal where both are present although a rule reads only the second.
      vocabulary: vocabulary size in the repository -> in MaxText, where MaxText fixes another.
      rope_type: MaxText's `rope_type` that the layout of query and key is for.
      unscannable: why this model's layers cannot be scanned, or "".
      words: MaxText's word for a geometry fact -> the key of config.json that must agree with it.
      models: the names this family answers to.
      checked: which of its scanned, unscanned and multimodal conversions are known to equal MaxText's own.
    """

    name: str
    decoder_block: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    dims: Mapping[str, str]
    rules: tuple[Rule, ...]
    stacks: tuple[Stack, ...]
    words: Mapping[str, str]
    text: str = ""
    tower: Tower | None = None
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    extra_layers: str | None = None
    equal: Mapping[str, str] = field(default_factory=dict)
    vocabulary: Mapping[int, int] = field(default_factory=dict)
    rope_type: str = "default"
    unscannable: str = ""
    models: Mapping[str, Model] = field(default_factory=dict)
    checked: tuple[str, ...] = ()

    @property
    def merged(self) -> int:
        """How many layers of the repository MaxText counts as one."""
        return self.stacks[0].merged

    def parts(self, *, multimodal: bool) -> tuple[tuple[Rule, ...], tuple[Stack, ...]]:
        """The rules and stacks of a conversion with or without what is beside the text model."""
        if not multimodal or self.tower is None:
            return self.rules, self.stacks
        return (*self.rules, *self.tower.rules), (*self.stacks, *self.tower.stacks)

    def fill(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration, flat: the text model's keys at the root, defaults where one is absent or null."""
        text: Any = config
        for part in filter(None, self.text.split(".")):
            text = text.get(part) if isinstance(text, Mapping) and isinstance(text.get(part), Mapping) else {}
        filled = dict(_flat(config))
        filled |= {key: value for key, value in text.items() if value is not None}
        for key, default in self.defaults.items():
            if key not in filled:
                value = default(filled) if callable(default) else default
                if value is not None:
                    filled[key] = value
        return filled


def _flat(config: Mapping[str, Any], prefix: str = "", depth: int = 4) -> list[tuple[str, Any]]:
    """Every key, of nested objects as "a.b"."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if value is not None:
            found.append((prefix + key, value))
        if isinstance(value, Mapping) and depth:
            found += _flat(value, f"{prefix}{key}.", depth - 1)
    return found
