"""What a reader hands over, and how it becomes a data set with three splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data.dataset import Dataset, HeldOut, Split, spell, statistics
from dropmax.workbench.data.splits import balanced_subset, hold_out

__all__ = ["Part", "Parts", "assemble"]

# Held-out test rows do not follow the run's seed: runs with different seeds are then measured on the same rows, and
# no run has trained on what another is tested on.
TEST_SEED = 0
TEST_SHARE = 0.2
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Part:
    """Inputs and integer labels as NumPy arrays, perhaps memory-mapped."""

    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    shown: NDArray[np.str_] | None = None  #: the file name or sentence behind each row of features

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: NDArray[np.int64]) -> Part:
        """Return these rows, or the part itself, still memory-mapped, where that is all of them in order.

        >>> Part(np.zeros((2, 5), np.float32), np.array([0, 1])).rows(np.array([1])).labels
        array([1])
        """
        if len(rows) == len(self):
            return self
        shown = None if self.shown is None else self.shown[rows]
        return Part(np.asarray(self.inputs[rows]), self.labels[rows], shown)


@dataclass(frozen=True, eq=False)
class Parts:
    """What was read: a training part, perhaps the publisher's validation and test parts, and the names of classes."""

    train: Part
    classes: tuple[str, ...]
    validation: Part | None = None
    test: Part | None = None
    crop: int | None = None
    coarse: tuple[int, ...] | None = None
    coarse_classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  #: names of the features, for tables with a header
    names: Mapping[str, Sequence[str]] | None = None  #: of the rows of "train": files, or identifiers
    origin: str = ""  #: the backbone the features came from, see :class:`dropmax.workbench.backbones.Origin`
    outside: NDArray[Any] | None = None  #: inputs that belong to no class


def assemble(
    name: str, parts: Parts, *, seed: int = 0, train_size: int | None = None, validation_size: int | None = None
) -> Dataset:
    """Make the three splits: hold out what is missing, cut to the sizes asked for, and measure the training split.

    ``validation_size`` is a number of rows, 0 for none; None takes the publisher's part, or else 10 %.

    >>> features = Part(np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2)
    >>> data = assemble("mine", Parts(features, ("even", "odd")), seed=3)
    >>> len(data.train), len(data.validation), len(data.test)
    (14, 2, 4)
    >>> print(*data.held_out, sep="\\n")
    test: 4 of 20 rows held out (20 % of each class, the same rows for every seed)
    validation: 2 of 20 rows held out (10 % of what is left, each class giving its share, chosen by seed 3)
    """
    check_classes(name, parts)
    train, validation, test = parts.train, parts.validation, parts.test
    origin = np.arange(len(train))  # where each training row was in the file
    held_out: list[HeldOut] = []
    if test is None:
        kept, held = hold_out(train.labels, max(1, round(TEST_SHARE * len(train))), TEST_SEED)
        rule = f"{100 * TEST_SHARE:.0f} % of each class, the same rows for every seed"
        held_out.append(_held_out("test", rule, parts, origin[held]))
        train, test, origin = train.rows(kept), train.rows(held), origin[kept]
    if validation is None:
        size = round(VALIDATION_SHARE * len(train)) if validation_size is None else validation_size
        kept, held = hold_out(train.labels, size, seed)
        share = f"{100 * VALIDATION_SHARE:.0f} % of what is left" if validation_size is None else "as many as asked for"
        if size:
            held_out.append(
                _held_out(
                    "validation", f"{share}, each class giving its share, chosen by seed {seed}", parts, origin[held]
                )
            )
        train, validation = train.rows(kept), Part(np.asarray(train.inputs[held]), train.labels[held])
    elif validation_size is not None:
        validation = validation.rows(_cut(name, "validation_size", validation, validation_size, seed))
    if train_size is not None:
        if train_size < len(parts.classes):
            raise InvalidValue(f"train_size must be at least {len(parts.classes)}, one row per class, not {train_size}")
        train = train.rows(_cut(name, "train_size", train, train_size, seed))
    mean, std = statistics(torch.from_numpy(train.inputs))
    return Dataset(
        name=name,
        train=_split(train, parts.crop),
        validation=_split(validation, parts.crop),
        test=_split(test, parts.crop),
        classes=parts.classes,
        mean=mean,
        std=std,
        coarse=parts.coarse,
        coarse_classes=parts.coarse_classes,
        notes=parts.notes,
        columns=parts.columns,
        origin=parts.origin,
        held_out=tuple(held_out),
        outside=None if parts.outside is None else torch.from_numpy(parts.outside),
    )


def _held_out(part: str, rule: str, parts: Parts, rows: NDArray[np.int64]) -> HeldOut:
    names = (parts.names or {}).get("train")
    chosen = rows.tolist()
    return HeldOut(part, rule, len(parts.train), tuple(chosen if names is None else [names[row] for row in chosen]))


def check_classes(name: str, parts: Parts) -> None:
    """Raise where there are fewer than two classes, or a class is tested or validated on but never trained on.

    >>> check_classes("mine", Parts(Part(np.zeros((2, 5), np.float32), np.array([0, 0])), ("cat",)))
    Traceback (most recent call last):
    dropmax.errors.DataError: mine has the one class 'cat': a classifier needs at least two
    """
    trained = np.bincount(parts.train.labels, minlength=len(parts.classes)) > 0
    if len(parts.classes) < 2:
        raise DataError(f"{name} has the one class {parts.classes[0]!r}: a classifier needs at least two")
    for part, called in ((parts.validation, "validation"), (parts.test, "test")):
        if part is not None:
            unknown = [parts.classes[k] for k in np.unique(part.labels) if not trained[k]]
            if unknown:
                raise DataError(f"{name} has classes in its {called} part that are not in training: {spell(unknown)}")
    if not trained.all():
        missing = [label for label, there in zip(parts.classes, trained, strict=True) if not there]
        raise DataError(f"{name} has classes without a training example: {spell(missing)}")


def _split(part: Part, crop: int | None) -> Split:
    shown = () if part.shown is None else tuple(part.shown.tolist())
    return Split(torch.from_numpy(part.inputs), torch.from_numpy(part.labels), crop, shown)


def _cut(name: str, option: str, part: Part, size: int, seed: int) -> NDArray[np.int64]:
    if not 0 <= size <= len(part):
        raise InvalidValue(f"{option} must be 0 to {len(part):,} for {name}, not {size:,}")
    return balanced_subset(part.labels, size, seed)
