"""How a conversion and a check get at the source: a box of what fills a parameter, as an array."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from converter.hf.decoding import decode
from converter.hf.quantised import Weights
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
        return view.of(decode(weights.repository, encoding, stored, weights.dtype))[within]

    return read
