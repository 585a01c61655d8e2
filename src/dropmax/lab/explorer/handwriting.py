"""From a drawing to what MNIST's makers would have made of it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError

__all__ = ["as_mnist"]

SIDE, BOX = 28, 20
#: Paler than this is no ink: the rim of an anti-aliased stroke should not widen its bounding box.
FAINTEST = 32


def as_mnist(ink: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a drawing (height, width), 0 for paper and 255 for ink, as a digit of MNIST (28, 28).

    Cut to the ink, scaled with its aspect kept until the longer side is 20 pixels (each new pixel is the mean over
    the area it covers), and moved by whole pixels until the centre of mass lies on pixel 14, that is in [13.5, 14.5),
    as in every image of MNIST; a shape too lopsided for that stops at the edge.

    >>> drawing = np.zeros((280, 280), np.uint8)
    >>> drawing[40:240, 130:150] = 255  # an upright stroke, 200 x 20
    >>> digit = as_mnist(drawing)
    >>> np.argwhere(digit).min(0), np.argwhere(digit).max(0)
    (array([ 4, 13]), array([23, 14]))
    """
    rows, columns = (np.flatnonzero((ink >= FAINTEST).any(axis)) for axis in (1, 0))
    if not len(rows):
        raise DataError("there is nothing drawn")
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.float64)
    longer = max(cut.shape)
    height, width = (max(1, math.floor(BOX * side / longer + 0.5)) for side in cut.shape)
    small = _shares(height, cut.shape[0]) @ cut @ _shares(width, cut.shape[1]).T
    top, left = (_offset(small.sum(axis)) for axis in (1, 0))
    digit = np.zeros((SIDE, SIDE), np.uint8)
    digit[top : top + height, left : left + width] = np.floor(small + 0.5).astype(np.uint8)
    return digit


def _shares(new: int, old: int) -> NDArray[np.float64]:
    """Return the matrix (new, old) that averages ``old`` pixels over the stretch each of ``new`` pixels covers."""
    edges = np.arange(new + 1)[:, None] * (old / new)
    starts = np.arange(old)[None, :]
    overlap = np.minimum(edges[1:], starts + 1) - np.maximum(edges[:-1], starts)
    shares: NDArray[np.float64] = overlap.clip(0) * (new / old)
    return shares


def _offset(mass: NDArray[np.float64]) -> int:
    centre = float(mass @ np.arange(len(mass)) / mass.sum())
    # Even shapes have their centre between two pixels, where rounding errors must not decide.
    return min(max(0, math.ceil(SIDE / 2 - 0.5 - centre - 1e-9)), SIDE - len(mass))
