"""Images for pages: untrusted uploads, decoded with limits, and what lies behind a model's features; never on disk."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dropmax.errors import DataError
from dropmax.workbench.backbones import Backbone, Origin, reload_backbone
from dropmax.workbench.data import Split, mnist
from dropmax.workbench.data.images import as_input, decode, has_too_many_passes, square
from dropmax.workbench.training import TrainedModel

__all__ = ["FORMATS", "MOST_BYTES", "MOST_PIXELS", "Originals", "as_digit", "as_trained", "open_upload", "png"]

MOST_BYTES = 10 * 2**20
MOST_PIXELS = 24_000_000  # about 170 MB while it is being decoded
#: What browsers show, and no format whose decoder starts other programs or reads other files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_upload(content: bytes) -> Image.Image:
    """Open an image from bytes, reading no more than its header; refuse other formats and too many pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is the lower one
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise DataError(f"this image has too many pixels; up to {MOST_PIXELS / 1e6:.0f} million can be read") from None
    except Exception:  # Pillow raises almost anything on a damaged file, and all of it means the same
        named = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
        raise DataError(f"this file is not an image that can be read; {named} can") from None
    if image.format in ("JPEG", "MPO") and has_too_many_passes(content, image.width * image.height):
        raise DataError("this JPEG asks for more passes over its pixels than any sound one does")
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width:,} x {image.height:,} pixels"
        raise DataError(f"this image has {size}; up to {MOST_PIXELS / 1e6:.0f} million can be read")
    return image


def as_trained(image: Image.Image, input_shape: tuple[int, ...], stored_size: int) -> Tensor:
    """Return an opened image as uint8 (C, H, W), just as ``dropmax predict`` prepares a file."""
    try:
        pixels = square(image, stored_size)
    except Exception:
        raise DataError("this image is damaged: its header is fine, its pixels are not") from None
    return torch.from_numpy(np.ascontiguousarray(as_input(pixels, input_shape)))


def as_digit(image: Image.Image) -> Tensor:
    """Return an opened picture of one digit as MNIST would hold it, uint8 (1, 28, 28), as ``dropmax predict`` does."""
    try:
        return torch.from_numpy(mnist.as_digit(image))[None]
    except DataError:
        raise
    except Exception:
        raise DataError("this image is damaged: its header is fine, its pixels are not") from None


def png(pixels: Tensor, most: int = 4096) -> str:
    """Return uint8 pixels (C, H, W) as a ``data:`` address of a PNG: in colour for C = 3, else the first channel.

    Sides longer than ``most`` are scaled down to it.
    """
    array = pixels.permute(1, 2, 0).numpy() if len(pixels) == 3 else pixels[0].numpy()
    buffer = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(array))
    image.thumbnail((most, most))
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class Originals:
    """What a person wants to see in place of rows of features: the photographs and sentences they come from.

    A model without a pretrained network in front of it has none. ``split.shown`` names the rows, and photographs lie
    below ``root``.
    """

    def __init__(self, trained: TrainedModel, split: Split, root: Path | None) -> None:
        self._origin, self._shown, self._root = trained.origin, split.shown, root
        self.kind = Origin.from_json(trained.origin).kind if trained.origin else ""  #: "images", "text" or nothing

    @property
    def backbone(self) -> Backbone:
        """The pretrained network, for new photographs and sentences."""
        return reload_backbone(self._origin)

    def text(self, index: int) -> str | None:
        """Return the sentence behind a row."""
        return self._shown[index] if self.kind == "text" and self._shown else None

    def picture(self, index: int, side: int) -> NDArray[np.uint8] | None:
        """Return the centre square (3, side, side) of the photograph behind a row; None where it cannot be found."""
        if self.kind != "images" or self._root is None or not self._shown:
            return None
        name = PurePosixPath(self._shown[index])
        if name.is_absolute() or ".." in name.parts:  # a file of features may come from anybody
            return None
        try:
            return decode(self._root / name, side)
        except (DataError, OSError):
            return None
