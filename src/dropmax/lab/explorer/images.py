"""Untrusted images, decoded with limits, and images for the page; nothing is written to disk."""

from __future__ import annotations

import base64
import io
import warnings

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dropmax.errors import DataError
from dropmax.workbench.data import mnist
from dropmax.workbench.data.images import as_input, has_too_many_passes, square

__all__ = ["FORMATS", "MOST_BYTES", "MOST_PIXELS", "as_digit", "as_trained", "open_upload", "png"]

MOST_BYTES = 10 * 2**20
MOST_PIXELS = 24_000_000  # about 170 MB while it is being decoded
#: What browsers show, and no format whose decoder starts other programs or reads other files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_upload(content: bytes) -> Image.Image:
    """Open an image from bytes, reading no more than its header; refuse other formats and too many pixels.

    >>> open_upload(b"GIF89a, or so it says")
    Traceback (most recent call last):
    dropmax.errors.DataError: this file is not an image that can be read; PNG, JPEG, WEBP, GIF and BMP can
    """
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
        raise DataError(
            f"this image has {image.width:,} x {image.height:,} pixels; "
            f"up to {MOST_PIXELS / 1e6:.0f} million can be read"
        )
    return image


def as_trained(image: Image.Image, input_shape: tuple[int, ...], stored_size: int) -> Tensor:
    """Return an opened image as uint8 (C, H, W), just as ``dropmax predict`` prepares a file.

    >>> buffer = io.BytesIO()
    >>> Image.new("RGB", (40, 20), "red").save(buffer, "PNG")
    >>> as_trained(open_upload(buffer.getvalue()), (3, 64, 64), 72)[:, 32, 32]
    tensor([255,   0,   0], dtype=torch.uint8)
    """
    try:
        pixels = square(image, stored_size)
    except Exception:
        raise DataError("this image is damaged: its header is fine, its pixels are not") from None
    return torch.from_numpy(np.ascontiguousarray(as_input(pixels, input_shape)))


def as_digit(image: Image.Image) -> Tensor:
    """Return an opened picture of one digit as MNIST would hold it, uint8 (1, 28, 28), as ``dropmax predict`` does.

    >>> picture = Image.new("L", (100, 100), 255)
    >>> picture.paste(0, (45, 10, 55, 90))  # a black stroke on white
    >>> as_digit(picture).sum(-1)[0, 14]
    tensor(765)
    """
    try:
        return torch.from_numpy(mnist.as_digit(image))[None]
    except DataError:
        raise
    except Exception:
        raise DataError("this image is damaged: its header is fine, its pixels are not") from None


def png(pixels: Tensor, most: int = 4096) -> str:
    """Return uint8 pixels (C, H, W) as a ``data:`` address of a PNG: in colour for C = 3, else the first channel.

    Sides longer than ``most`` are scaled down to it.

    >>> png(torch.zeros(1, 2, 2, dtype=torch.uint8))[:22]
    'data:image/png;base64,'
    """
    array = pixels.permute(1, 2, 0).numpy() if len(pixels) == 3 else pixels[0].numpy()
    buffer = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(array))
    image.thumbnail((most, most))
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
