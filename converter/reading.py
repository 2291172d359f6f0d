"""How a conversion and a check get at the source: a box of what fills a parameter, as an array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from converter.hf import decoding
from converter.hf.quantised import Weights
from converter.hf.repository import NUMPY_DTYPES
from converter.hf.safetensors import StoredTensor
from converter.mapping import Box, Piece

ReadBox = Callable[[Piece, Box], np.ndarray]
"""Gives a box of a piece's view of its stored tensor, in the tensor's dtype."""


def box_reader(weights: Weights) -> ReadBox:
    """Read boxes of a repository's tensors; of quantised ones no more is decoded than the box needs."""

    def read(piece: Piece, box: Box) -> np.ndarray:
        encoding = weights.encodings.get(piece.tensor)
        if encoding is None:
            part, view, within = piece.view.narrowed(box)
            return view.of(weights.repository.elements(piece.tensor, part))[within]
        stored, view, within = piece.view.bounded(box, encoding.shape)
        return view.of(decoding.decode(weights.repository, encoding, stored, weights.dtype))[within]

    return read


def ranges(weights: Weights, piece: Piece, box: Box) -> Iterator[tuple[StoredTensor, int, int]]:
    """What `box_reader` reads for a box: stored tensors, and the bytes of their files."""
    encoding = weights.encodings.get(piece.tensor)
    if encoding is None:
        parts: Iterable[tuple[str, slice]] = [(piece.tensor, piece.view.rows(box))]
    else:
        parts = decoding.ranges(encoding, piece.view.bounded(box, encoding.shape)[0])
    for name, part in parts:
        tensor = weights.repository.tensors[name]
        size = NUMPY_DTYPES[tensor.dtype].itemsize
        if part.start < part.stop:
            yield tensor, tensor.offset + part.start * size, tensor.offset + part.stop * size
