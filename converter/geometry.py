"""Hold a repository against a request: is it this model, which sizes does the target get, is every tensor used."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from converter.errors import RequestError
from converter.hf.quantised import Weights, read_scheme
from converter.mapping import Geometry, namer, stored_shapes, used_rules
from converter.request import Request
from converter.rules import Family
from converter.words import parse_bool, parse_count

_MAX_LAYERS = 10_000
"""No model has as many; what claims to is broken."""

_COMPARE_ELEMENTS = 4 << 20


def make_geometry(request: Request, config: Mapping[str, Any]) -> Geometry:
    """The sizes of the conversion, from config.json and the words that change or confirm them.

    Raises:
      RequestError: config.json is of another architecture, lacks a size, or disagrees with a word.
    """
    family = request.family
    filled = check_architecture(family, request.model_name, config, multimodal=request.multimodal)
    layers = _layers(request, filled)
    for word, text in request.geometry.items():
        _check_word(word, text, filled[family.words[word]])
    vocab_size = request.vocab_size or family.vocabulary.get(filled["vocab_size"], filled["vocab_size"])
    return Geometry(filled, vocab_size, layers, request.multimodal)


def check_architecture(family: Family, name: str, config: Mapping[str, Any], *, multimodal: bool) -> dict[str, Any]:
    """config.json with the family's defaults, once it is known to be of that family.

    Args:
      multimodal: whether what is beside the text model is wanted too.

    Raises:
      RequestError: it is not, or it is quantised in an unknown way, or a size is missing or no positive whole number.
    """
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(architectures, list) or (
        not set(map(str, architectures)) & set(family.architectures)
        if architectures
        else model_type not in family.model_types
    ):
        found = ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else model_type
        raise RequestError(
            f"config.json describes {found or 'no architecture'}, but {name} is {family.architectures[0]}"
        )
    read_scheme(config)
    try:
        filled = family.fill(config)
    except _SPOILED as error:
        raise _spoiled(error) from None
    _, stacks = family.parts(multimodal=multimodal)
    for stack in stacks:
        section = stack.layers.rpartition(".")[0]
        if section and section not in filled:
            raise RequestError(
                f"config.json has no {section}: the repository holds the text model alone; drop use_multimodal=true"
            )
        _check_size(stack.layers, filled.get(stack.layers), _MAX_LAYERS)
    if family.extra_layers and filled.get(family.extra_layers):
        _check_size(family.extra_layers, filled[family.extra_layers], _MAX_LAYERS)
    try:
        # Which rules hold where follows from kinds of layers, in any form that config.json has them.
        names = {name for rule in used_rules(family, filled, multimodal=multimodal) for name in rule.names}
    except _SPOILED as error:
        raise _spoiled(error) from None
    for key in sorted(family.dims[name] for name in names):
        if filled.get(key) is None:
            raise RequestError(f"config.json has no {key}, which {name} needs; is it another model?")
        _check_size(key, filled[key])
    return filled


_SPOILED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What reading a value of another type than transformers writes raises."""


def _spoiled(error: Exception) -> RequestError:
    text = f"{type(error).__name__}: {error}"[:200]
    return RequestError(f"config.json lacks or spoils a size or a kind of layers that others follow from: {text}")


def _check_size(key: str, value: object, most: int = 2**31) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < most:
        raise RequestError(f"config.json gives no usable {key}: {value!r}")


def _layers(request: Request, config: Mapping[str, Any]) -> int:
    """How many of the repository's layers are converted."""
    merged = request.family.merged
    layers = int(config[request.family.stacks[0].layers])
    if layers % merged:
        raise RequestError(f"config.json has {layers} layers; MaxText holds this model in groups of {merged}")
    if request.maxtext_layers is None:
        return layers
    if request.maxtext_layers > layers // merged:
        raise RequestError(
            f"base_num_decoder_layers={request.maxtext_layers}, but the repository has {layers // merged}"
            + (f" (MaxText counts groups of {merged} layers)" if merged > 1 else "")
        )
    return request.maxtext_layers * merged


def _check_word(word: str, text: str, actual: object) -> None:
    try:
        given: object = parse_bool(text) if isinstance(actual, bool) else parse_count(text)
    except ValueError as error:
        raise RequestError(f"{word}={text}: {error}") from None
    if given != actual:
        raise RequestError(f"{word}={text}, but config.json says {str(actual).lower()}; drop the word")


def check_tensors(family: Family, geometry: Geometry, weights: Weights, *, content: bool = True) -> None:
    """Every tensor of the repository must be used, known to be harmless, or equal to one that is used.

    Args:
      content: read tensors to see whether they are equal; else only dtype and shape are compared.

    Raises:
      RequestError: one is none of these.
    """
    tensors = weights.tensors
    used = stored_shapes(family, geometry.config, tensors, multimodal=geometry.multimodal)
    ignored = list(_ignored(family, geometry))
    actual = namer(family, tensors)
    twins = {actual(name): actual(twin) for name, twin in family.equal.items()}
    unused = sorted(set(tensors) - set(used))
    for name in unused:
        twin = twins.get(name)
        if twin is not None and twin in tensors:
            _check_equal(weights, name, twin, content, tied=bool(geometry.config["tie_word_embeddings"]))
        elif not any(re.fullmatch(pattern, name) for pattern in ignored):
            more = len(unused) - 1
            also = f" (and {more} more)" if more else ""
            raise RequestError(
                f"tensor {name[:200]}{also} of the repository has no place in {family.name}; is it another model?"
            )


def _ignored(family: Family, geometry: Geometry) -> Iterator[str]:
    """Regular expressions of tensors that this conversion leaves out."""
    yield from family.ignored
    if not geometry.multimodal:
        yield from family.beside
    if family.extra_layers:
        stack = family.stacks[0]
        first = int(geometry.config[stack.layers])
        for layer in range(first, first + int(geometry.config.get(family.extra_layers) or 0)):
            yield rf"(.*\.)?layers\.{layer}\..*"


def _check_equal(weights: Weights, name: str, twin: str, content: bool, *, tied: bool) -> None:
    repository, first, second = weights.repository, weights.tensors[name], weights.tensors[twin]
    equal = first.dtype == second.dtype and first.shape == second.shape and not {name, twin} & set(weights.encodings)
    if equal and content:
        count = math.prod(first.shape)
        parts = [slice(i, min(i + _COMPARE_ELEMENTS, count)) for i in range(0, count, _COMPARE_ELEMENTS)]
        equal = all(
            np.array_equal(
                repository.elements(name, part).view(np.uint8), repository.elements(twin, part).view(np.uint8)
            )
            for part in parts
        )
    if not equal and not tied:
        raise RequestError(f"{name} differs from {twin}, but MaxText has them as one in this model")
    if not equal:
        raise RequestError(
            f"config.json says that {name} is tied to {twin}, but the repository has both and they differ; "
            "set tie_word_embeddings to false in config.json if they are meant to"
        )
