"""Drawings and photographs of one digit, as MNIST's makers would have stored them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dropmax.errors import DataError
from dropmax.workbench.data.images import to_rgb

SIDE, BOX = 28, 20
#: Paler than this is not ink: the rim of an anti-aliased stroke should not widen its bounding box.
FAINTEST = 32


def is_like_mnist(name: str, input_shape: Sequence[int], classes: Sequence[str], brightness: float | None) -> bool:
    """Say whether a model was trained on digits as MNIST holds them: 28 x 28 pixels, light ink on black.

    Args:
        name: of the data set.
        input_shape: of the network.
        classes: their names.
        brightness: mean of the training pixels, in [0, 1]; MNIST's is 0.13, that of pictures of other things higher.

    >>> is_like_mnist("scans", (1, 28, 28), [str(digit) for digit in range(10)], 0.12)
    True
    """
    if tuple(input_shape) != (1, SIDE, SIDE) or list(classes) != [str(digit) for digit in range(10)]:
        return False
    return name.startswith("mnist") or (brightness is not None and brightness < 0.2)


def as_digit(image: Image.Image) -> NDArray[np.uint8]:
    """Return an opened picture of one digit as MNIST would hold it, uint8 (28, 28).

    The ink is what differs from the paper, and the paper is the shade most of the rim has: dark on light or light on
    dark both work. Transparent pixels are paper. A picture of 28 x 28 pixels with a black rim is MNIST's own form, and
    is returned as it is.

    >>> picture = Image.new("L", (100, 100), 255)
    >>> picture.paste(0, (45, 10, 55, 90))  # a black stroke on white
    >>> int(as_digit(picture)[14].sum())
    765
    """
    image.draft("L", (560, 560))
    ImageOps.exif_transpose(image, in_place=True)
    image = image.convert("RGBA") if image.has_transparency_data else to_rgb(image)
    is_small = image.size == (SIDE, SIDE)
    image.thumbnail((560, 560), Image.Resampling.BOX)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    grey = np.asarray(image.convert("L")).astype(np.int16)
    paper = int(np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])))
    if is_small and paper == 0:
        return grey.astype(np.uint8)
    return as_mnist(_stretched(np.abs(grey - paper)))


def _stretched(difference: NDArray[np.int16]) -> NDArray[np.uint8]:
    """Scale the strongest ink to 255, and drop what is below a fifth of it: paper is never quite even."""
    most = int(difference.max())
    if most < 24:
        raise DataError("this picture is one even shade: there is no digit to see")
    ink = difference * (255 / most)
    return np.where(ink < 51, 0, ink).astype(np.uint8)


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
