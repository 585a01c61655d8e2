"""What the readers of files share: labels as class indices, text as lines, and how much memory a file may ask for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, did_you_mean
from dropmax.workbench.data.dataset import spell

_LONGEST_LABEL = 255
# What a file may unpack to: this many bytes whatever its size, or beyond that, this many times its size. Tables that
# are mostly zeros pack better, and must then be stored unpacked: a bomb looks the same from outside.
_ALWAYS, _TIMES = 1 << 24, 100


def as_labels(path: Path, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return labels as int64 or strings; refuse anything but one whole number or name per row."""
    kind = values.dtype.kind
    if values.ndim != 1 or kind not in "biufU":
        raise DataError(
            f"{path}: {name} must be one label per row, whole numbers or strings, not {values.dtype} {values.shape}"
        )
    if kind == "U":
        return values
    fraction = ~(np.isfinite(values) & (values == np.round(values))) if kind == "f" else np.zeros(0, bool)
    if fraction.any():
        raise DataError(f"{path}: {name} holds {values[fraction][0]}; labels are whole numbers or names")
    if kind in "uf" and len(values) and not -(2.0**63) <= float(values.min()) <= float(values.max()) < 2.0**63:
        raise DataError(f"{path}: {name} holds {values.max()}, too large for the number of a class")
    return values.astype(np.int64)


def encode(
    path: Path, labels: dict[str, NDArray[Any]], named: NDArray[Any] | None = None
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Number the classes: as ``named`` lists them, or else the distinct training labels in sorted order."""
    first = next(iter(labels.values()))
    if len({values.dtype.kind for values in labels.values()}) > 1:
        raise DataError(f"{path} mixes whole numbers and strings as labels")
    if named is None:
        values = np.unique(first)
        classes = tuple(str(value) for value in values)
    else:
        if named.ndim != 1 or named.dtype.kind != "U" or not len(named) or len(np.unique(named)) != len(named):
            raise DataError(f"{path}: classes must be distinct strings, one per class")
        classes = tuple(str(name) for name in named)
        values = np.arange(len(named)) if first.dtype.kind == "i" else named
    order = np.argsort(values)
    encoded = {}
    for part, given in labels.items():
        place = np.searchsorted(values, given, sorter=order).clip(max=len(values) - 1)
        encoded[part] = order[place].astype(np.int64)
        strange = given[values[encoded[part]] != given]
        if len(strange):
            where = "the training labels" if named is None else f"the {len(classes)} classes"
            raise DataError(f"{path}: the label {strange[0]} of {part.replace('x', 'y', 1)} is not among {where}")
    return classes, encoded


def encode_as(path: Path, labels: NDArray[Any], classes: Sequence[str]) -> tuple[NDArray[np.int64], str]:
    """Number labels as a model with these ``classes`` does; with a note where numbers were taken as indices."""
    index = {name: k for k, name in enumerate(classes)}
    names = [str(label) for label in labels]
    named = labels.dtype.kind != "i" or any(name in index for name in names)
    if not named and len(labels) and labels.min() >= 0 and labels.max() < len(classes):
        return labels.astype(np.int64), f"{path} has numbers as labels: 0 is taken as {classes[0]!r}, and so on"
    strange = next((name for name in names if name not in index), None)
    if strange is not None:
        raise DataError(
            f"{path}: the label {strange!r} is none of the {len(classes)} classes of the model:"
            f"{did_you_mean(strange, classes)} They are {spell(list(classes))}"
        )
    return np.array([index[name] for name in names], np.int64), ""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the file system or the encoding refuses into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        at = f"{error.reason} at byte {error.start}"
        raise DataError(f"{path} is not UTF-8 text ({at}): save it as UTF-8") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    with reading(path), open(path, encoding="utf-8-sig") as stream:
        return [line.removesuffix("\n") for line in stream]


def digest(path: Path, algorithm: str) -> str:
    """Return the digest of a file's content, in hexadecimal."""
    found = hashlib.new(algorithm, usedforsecurity=False)
    with reading(path), open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def refuse_bomb(path: Path, size: int) -> None:
    """Raise where a file asks for far more memory than its own size, before any is taken."""
    if size > max(_ALWAYS, _TIMES * path.stat().st_size):
        raise DataError(
            f"{path} would take {size / 1e6:,.0f} MB, more than {_TIMES} times its size: if that is right, store it "
            "without compression"
        )


def refuse_long(where: str, name: str) -> None:
    """Refuse long labels: they become an array, in which every row takes the memory of the longest."""
    if len(name) > _LONGEST_LABEL:
        raise DataError(f"{where}: a label has {len(name):,} characters; use names of at most {_LONGEST_LABEL}")
