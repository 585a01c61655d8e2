"""MNIST: the 20,000 digits inside the package, the publisher's files, and pictures made to look like its digits.

The rule that chose the embedded digits (tools/make_embedded_mnist.py applies it): number the images of each digit in
the official training file 0 .. n-1; of these take the 1,000 numbered ``j * n // 1000``; even j are for training, odd
j for validation. The whole official test file follows, in its own order.
"""

from __future__ import annotations

import gzip
import lzma
import math
import os
import zlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dropmax.errors import DataError
from dropmax.workbench.data.dataset import Part, Parts

FILES = {"train-images": 3, "train-labels": 1, "t10k-images": 3, "t10k-labels": 1}  # and their dimensions
FOLDERS = ("mnist", "MNIST/raw", ".")
_DIGITS = tuple("0123456789")
SIDE, BOX = 28, 20  # of an image, and of the digit in it
#: Paler than this is not ink: the rim of an anti-aliased stroke should not widen its bounding box.
FAINTEST = 32
_HOLDS = {1: "labels (1 dimension)", 3: "images (3 dimensions)"}
_DEFLATE_LIMIT = 1032  # no deflate stream expands by more, so a header promising more is lying
_MOST = 1 << 28  # bytes; MNIST's largest file has 47 million, and a small gzip of zeros could have any number


class EmbeddedDigits(NamedTuple):
    """The digits inside the package, as arrays: images (N, 28, 28), labels (N,), rows of the official training file."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    train_rows: NDArray[np.uint16]
    validation_images: NDArray[np.uint8]
    validation_labels: NDArray[np.uint8]
    validation_rows: NDArray[np.uint16]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


@lru_cache(maxsize=1)
def embedded_digits() -> EmbeddedDigits:
    """Unpack the digits inside the package; takes about a fifth of a second, once per process.

    ``embedded/mnist-20k.xz`` is, unpacked: 20,000 images of 784 bytes (training, validation, test), 20,000 labels of
    one byte, then 10,000 little-endian 16-bit rows of the official training file (training, validation). The xz
    container carries a checksum of it all, which unpacking verifies.
    """
    packed = resources.files("dropmax.workbench.data").joinpath("embedded/mnist-20k.xz").read_bytes()
    try:
        # bytearray so that the arrays are writable: torch warns about tensors over read-only memory.
        memory = bytearray(lzma.decompress(packed))
    except lzma.LZMAError as error:
        raise DataError(
            f"the digits inside the package (mnist-20k.xz) are damaged ({error}): install it again"
        ) from error
    count = 20_000
    images = np.frombuffer(memory, np.uint8, count * 784).reshape(count, 28, 28)
    labels = np.frombuffer(memory, np.uint8, count, offset=count * 784)
    rows = np.frombuffer(memory, "<u2", 10_000, offset=count * 785)
    train, validation, test = slice(0, 5_000), slice(5_000, 10_000), slice(10_000, count)
    held = images[validation], labels[validation], rows[validation]
    return EmbeddedDigits(images[train], labels[train], rows[train], *held, images[test], labels[test])


def choose_embedded(labels: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Apply the rule at the top of this file to the official training labels: (training rows, validation rows)."""
    of_digits = [np.flatnonzero(labels == digit) for digit in range(10)]
    taken = np.stack([rows[np.arange(1000) * len(rows) // 1000] for rows in of_digits])
    return np.sort(taken[:, 0::2].ravel()), np.sort(taken[:, 1::2].ravel())


def read_embedded() -> Parts:
    """Return the digits inside the package; mnist-1k and mnist-5k are made of these and nothing else."""
    digits = embedded_digits()
    validation = _part(digits.validation_images, digits.validation_labels)
    test = _part(digits.test_images, digits.test_labels)
    return Parts(_part(digits.train_images, digits.train_labels), _DIGITS, validation, test)


def read_55k(data_dir: Path) -> Parts:
    """Read the publisher's files; the embedded validation images are held out, the 55,000 others train."""
    files = find_mnist(data_dir)
    missing = [f"{part}-idx{dimensions}-ubyte.gz" for part, dimensions in FILES.items() if part not in files]
    if missing:
        there = next(iter(files.values())).parent
        raise DataError(f"{there} lacks {', '.join(missing)}: run `dropmax data fetch mnist`")
    images, labels = read_mnist(files, "train")
    digits = embedded_digits()
    validation = digits.validation_rows.astype(np.int64)
    # The rows mean something only in the official file: a shuffled or shortened one would leak training images.
    if len(images) != 60_000 or not np.array_equal(images[validation], digits.validation_images):
        raise DataError(
            f"{files['train-images']} is not the official MNIST training file of 60,000 images in their official "
            "order: fetch it again with `dropmax data fetch mnist`"
        )
    train = np.setdiff1d(np.arange(60_000), validation, assume_unique=True)
    held_out = _part(images[validation], labels[validation])
    return Parts(_part(images[train], labels[train]), _DIGITS, held_out, _part(*read_mnist(files, "t10k")))


def _part(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Part:
    return Part(images[:, None], labels.astype(np.int64))


def find_mnist(data_dir: Path) -> dict[str, Path]:
    """Return which of the four official files are there, under either spelling, plain or gzipped."""
    found = {}
    for part, dimensions in FILES.items():
        spellings = (f"{part}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz"))
        candidates = (data_dir / folder / spelling for spelling in spellings for folder in FOLDERS)
        present = next((path for path in candidates if os.path.isfile(path)), None)
        if present is not None:
            found[part] = present
    return found


def read_mnist(files: dict[str, Path], half: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the images (N, 28, 28) and labels (N,) of one half, ``"train"`` or ``"t10k"``, of :func:`find_mnist`."""
    images, labels = files[f"{half}-images"], files[f"{half}-labels"]
    pixels, classes = read_idx(images, 3), read_idx(labels, 1)
    if pixels.shape[1:] != (28, 28):
        raise DataError(f"{images} holds images of {pixels.shape[1]}x{pixels.shape[2]}, but MNIST's are 28x28")
    if len(pixels) != len(classes):
        raise DataError(f"{images} holds {len(pixels):,} images, but {labels} holds {len(classes):,} labels")
    if classes.max() > 9:
        row = int(np.argmax(classes > 9))
        raise DataError(f"{labels} holds the label {classes[row]} at row {row:,}, but MNIST's labels are 0 to 9")
    return pixels, classes


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes with the given number of dimensions (1 for labels, 3 for images).

    The format is ``00 00 08 d``, then d big-endian sizes, then that many bytes. Whether it is gzipped is seen from its
    first bytes, not from its name. Nothing larger than what is in the file is ever allocated, whatever the header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=raw) as stream:
                    return _parse(stream, path, dimensions, size * _DEFLATE_LIMIT)  # type: ignore[arg-type]
            return _parse(raw, path, dimensions, size)
    except EOFError:
        raise DataError(f"{path} is cut short: the gzip stream ends early; fetch it again") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as an idx file: {error}") from error


def _parse(stream: BinaryIO, path: Path, dimensions: int, most: int) -> NDArray[np.uint8]:
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4:
        raise DataError(f"{path} is {'too short' if header else 'empty'}: an idx file of MNIST was expected")
    if header[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an idx file of bytes: it starts with {header[:4].hex(' ')}, not 00 00 08")
    if header[3] != dimensions:
        found = _HOLDS.get(header[3], f"{header[3]} dimensions")
        raise DataError(f"{path} holds {found} where {_HOLDS.get(dimensions, dimensions)} were expected")
    sizes = tuple(int(size) for size in np.frombuffer(header, ">u4", offset=4, count=(len(header) - 4) // 4))
    total = math.prod(sizes)
    if len(sizes) < dimensions or total > most:
        raise DataError(f"{path} is cut short: its header promises more bytes than the file can hold")
    if total > _MOST:
        raise DataError(f"{path} promises {total:,} bytes, but no file of MNIST has more than {_MOST:,}")
    if total == 0:
        raise DataError(f"{path} holds nothing: its header gives the sizes {sizes}")
    content = bytearray()
    while block := stream.read(min(1 << 20, total + 1 - len(content))):  # up to one byte too many
        content += block
    if len(content) != total:
        compared = "more" if len(content) > total else "fewer"
        raise DataError(f"{path} holds {compared} bytes than the {total:,} its header promises ({sizes})")
    return np.frombuffer(content, np.uint8).reshape(sizes)


# --- drawings and photographs of one digit ----------------------------------------------------------------------------


def is_like_mnist(name: str, input_shape: Sequence[int], classes: Sequence[str], brightness: float | None) -> bool:
    """Say whether a model was trained on digits as MNIST holds them: 28 x 28 pixels, light ink on black.

    ``brightness`` is the mean of the training pixels in [0, 1]. MNIST's is 0.13, that of other pictures higher.
    """
    if tuple(input_shape) != (1, SIDE, SIDE) or tuple(classes) != _DIGITS:
        return False
    return name.startswith("mnist") or (brightness is not None and brightness < 0.2)


def as_digit(image: Image.Image) -> NDArray[np.uint8]:
    """Return an opened picture of one digit as MNIST would hold it, uint8 (28, 28).

    Ink is what differs from the paper, and paper is the shade most of the rim has, or transparent. A picture of
    28 x 28 pixels with a black rim is MNIST's own form, and is returned as it is.
    """
    from dropmax.workbench.data.images import to_rgb  # which imports this module

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
    difference = np.abs(grey - paper)
    most = int(difference.max())
    if most < 24:
        raise DataError("this picture is one even shade: there is no digit to see")
    ink = difference * (255 / most)
    return as_mnist(np.where(ink < 51, 0, ink).astype(np.uint8))  # paper is never quite even


def as_mnist(ink: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a drawing (height, width), 0 for paper and 255 for ink, as a digit of MNIST (28, 28).

    Cut to the ink, scaled with its aspect kept until the longer side is 20 pixels (each new pixel is the mean over
    the area it covers), and moved by whole pixels until the centre of mass lies on pixel 14, that is in [13.5, 14.5),
    as in every image of MNIST; a shape too lopsided for that stops at the edge.
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
