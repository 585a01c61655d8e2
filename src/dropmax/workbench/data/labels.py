"""Labels of tables and arrays: whole numbers or names, turned into class indices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, did_you_mean
from dropmax.workbench.data.dataset import spell

__all__ = ["as_labels", "as_whole_numbers", "encode", "encode_as"]


def as_labels(path: Path, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return labels as int64 or strings; refuse anything but one whole number or name per row.

    >>> as_labels(Path("mine.npz"), "y", np.array([0.0, 2.0]))
    array([0, 2])
    """
    if values.ndim != 1 or values.dtype.kind not in "biufU":
        raise DataError(
            f"{path}: {name} must be one label per row, whole numbers or strings, not {values.dtype} {values.shape}"
        )
    if values.dtype.kind == "f":
        fraction = ~(np.isfinite(values) & (values == np.round(values)))
        if fraction.any():
            raise DataError(f"{path}: {name} holds {values[fraction][0]}; labels are whole numbers or names")
    if values.dtype.kind == "U":
        return values
    if (
        values.dtype.kind in "uf"
        and len(values)
        and not -(2.0**63) <= float(values.min()) <= float(values.max()) < 2.0**63
    ):
        raise DataError(f"{path}: {name} holds {values.max()}, too large for the number of a class")
    return values.astype(np.int64)


def encode(
    path: Path, labels: dict[str, NDArray[Any]], named: NDArray[Any] | None = None
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Number the classes: as ``named`` lists them, or else the distinct training labels in sorted order.

    >>> encode(Path("mine.csv"), {"all": np.array(["rose", "iris", "rose"])})
    (('iris', 'rose'), {'all': array([1, 0, 1])})
    """
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
        index = order[place]
        unknown = values[index] != given
        if unknown.any():
            where = "the training labels" if named is None else f"the {len(classes)} classes"
            raise DataError(
                f"{path}: the label {given[unknown][0]} of {part.replace('x', 'y', 1)} is not among {where}"
            )
        encoded[part] = index.astype(np.int64)
    return classes, encoded


def encode_as(path: Path, labels: NDArray[Any], classes: Sequence[str]) -> tuple[NDArray[np.int64], str]:
    """Number labels as a model with these ``classes`` does; with a note where numbers were taken as indices.

    >>> encode_as(Path("new.csv"), np.array(["rose", "iris"]), ("iris", "rose"))
    (array([1, 0]), '')
    """
    index = {name: k for k, name in enumerate(classes)}
    names = [str(label) for label in labels]
    named = labels.dtype.kind != "i" or any(name in index for name in names)
    if not named and len(labels) and labels.min() >= 0 and labels.max() < len(classes):
        return labels.astype(np.int64), f"{path} has numbers as labels: 0 is taken as {classes[0]!r}, and so on"
    for name in names:
        if name not in index:
            raise DataError(
                f"{path}: the label {name!r} is none of the {len(classes)} classes of the model:"
                f"{did_you_mean(name, classes)} They are {spell(list(classes))}"
            )
    return np.array([index[name] for name in names], np.int64), ""


def as_whole_numbers(labels: NDArray[Any]) -> NDArray[Any]:
    """Turn strings that are all whole numbers into numbers, so that 10 sorts after 9.

    >>> as_whole_numbers(np.array(["10", "9"]))
    array([10,  9])
    """
    try:
        return labels.astype(np.int64)
    except (ValueError, OverflowError):
        return labels
