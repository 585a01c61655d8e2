"""MNIST: the 20,000 digits inside the package, and the publisher's files for the rest.

The rule that chose the embedded digits (tools/make_embedded_mnist.py applies it): number the images of each digit in
the official training file 0 .. n-1; of these take the 1,000 numbered ``j * n // 1000``; even j are for training, odd
j for validation. The whole official test file follows, in its own order.
"""

from __future__ import annotations

import lzma
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError
from dropmax.workbench.data.idx import read_idx

__all__ = ["EmbeddedDigits", "choose_embedded", "embedded_digits", "find_mnist", "read_mnist"]

DIGITS = tuple("0123456789")
FILES = {"train-images": 3, "train-labels": 1, "t10k-images": 3, "t10k-labels": 1}  # and their dimensions
FOLDERS = ("mnist", "MNIST/raw", ".")
_TRAIN, _VALIDATION, _TEST = 5_000, 5_000, 10_000


@dataclass(frozen=True, eq=False)
class EmbeddedDigits:
    """The digits inside the package, as arrays: images (N, 28, 28), labels (N,), rows of the official training file.

    >>> digits = embedded_digits()
    >>> len(digits.train_images), len(digits.validation_images), len(digits.test_images)
    (5000, 5000, 10000)
    """

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

    >>> digits = embedded_digits()
    >>> [int(n) for n in np.bincount(digits.train_labels)] == [500] * 10
    True
    """
    packed = resources.files("dropmax.workbench.data").joinpath("embedded/mnist-20k.xz").read_bytes()
    try:
        content = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise DataError(
            f"the digits inside the package (mnist-20k.xz) are damaged ({error}): install it again"
        ) from error
    count = _TRAIN + _VALIDATION + _TEST
    # bytearray so that the arrays are writable: torch warns about tensors over read-only memory.
    memory = bytearray(content)
    images = np.frombuffer(memory, np.uint8, count * 784).reshape(count, 28, 28)
    labels = np.frombuffer(memory, np.uint8, count, offset=count * 784)
    rows = np.frombuffer(memory, "<u2", _TRAIN + _VALIDATION, offset=count * 785)
    train, validation, test = slice(0, _TRAIN), slice(_TRAIN, _TRAIN + _VALIDATION), slice(_TRAIN + _VALIDATION, count)
    return EmbeddedDigits(
        images[train], labels[train], rows[train],
        images[validation], labels[validation], rows[validation],
        images[test], labels[test],
    )  # fmt: skip


def choose_embedded(labels: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Apply the rule at the top of this file to the official training labels: (training rows, validation rows).

    >>> train, validation = choose_embedded(np.repeat(np.arange(10, dtype=np.uint8), 2000))
    >>> train[:3], validation[:3]
    (array([0, 4, 8]), array([ 2,  6, 10]))
    """
    train, validation = [], []
    for digit in range(10):
        of_digit = np.flatnonzero(labels == digit)
        taken = of_digit[np.arange(1000) * len(of_digit) // 1000]
        train.append(taken[0::2])
        validation.append(taken[1::2])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(validation))


def find_mnist(data_dir: Path) -> dict[str, Path]:
    """Return which of the four official files are there, under either spelling, plain or gzipped.

    Looked for in ``data_dir/mnist``, ``data_dir/MNIST/raw`` and ``data_dir`` itself.

    >>> find_mnist(Path("no such directory"))
    {}
    """
    found = {}
    for part, dimensions in FILES.items():
        spellings = (f"{part}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz"))
        candidates = [data_dir / folder / spelling for spelling in spellings for folder in FOLDERS]
        present = [path for path in candidates if os.path.isfile(path)]
        if present:
            found[part] = present[0]
    return found


def read_mnist(files: dict[str, Path], half: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the images (N, 28, 28) and labels (N,) of one half, ``"train"`` or ``"t10k"``, of :func:`find_mnist`.

    >>> read_mnist({"train-images": Path("no-such-file"), "train-labels": Path("none")}, "train")
    Traceback (most recent call last):
    dropmax.errors.DataError: no-such-file cannot be read as an idx file: ...
    """
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


def read_55k(files: dict[str, Path]) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Read MNIST-55K: 55,000 for training, the embedded validation images, the test images, and the labels of each.

    >>> read_55k({})
    Traceback (most recent call last):
    KeyError: 'train-images'
    """
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
    return [(images[train], labels[train]), (images[validation], labels[validation]), read_mnist(files, "t10k")]
