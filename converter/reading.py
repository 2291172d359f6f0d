"""How a conversion and a check get at the source: a box of what fills a parameter, as an array."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from converter.hf.repository import Repository
from converter.mapping import Box, Piece

ReadBox = Callable[[Piece, Box], np.ndarray]
"""Gives a box of a piece's view of its stored tensor, in the tensor's dtype."""


def box_reader(repository: Repository) -> ReadBox:
    """Read boxes from a repository."""

    def read(piece: Piece, box: Box) -> np.ndarray:
        part, view, within = piece.view.narrowed(box)
        return view.of(repository.elements(piece.tensor, part))[within]

    return read
