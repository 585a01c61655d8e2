"""What a reader hands over, and how it becomes a data set with three splits: rows chosen by seed.

The draws must be the same on every machine and with every version of NumPy, or two people's "seed 3" are two data
sets. NumPy promises that only for its bit generators, so rows are ordered by raw PCG64 words and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data.dataset import Dataset, HeldOut, Split, spell, statistics

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
        """Return these rows, or the part itself, still memory-mapped, where that is all of them in order."""
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
    names: Sequence[str] | None = None  #: of the rows of ``train``: files, or identifiers
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
    _check_classes(name, parts)
    train, validation, test = parts.train, parts.validation, parts.test
    origin = np.arange(len(train))  # where each training row was in the file
    held_out: list[HeldOut] = []
    notes: tuple[str, ...] = ()

    def note(part: str, rule: str, rows: list[int]) -> None:
        named = rows if parts.names is None else [parts.names[row] for row in rows]
        held_out.append(HeldOut(part, rule, len(parts.train), tuple(named)))

    if test is None:
        kept, held = hold_out(train.labels, max(1, round(TEST_SHARE * len(train))), TEST_SEED)
        note("test", f"{100 * TEST_SHARE:.0f} % of each class, the same rows for every seed", held.tolist())
        lone = [parts.classes[k] for k in np.flatnonzero(np.bincount(train.labels) == 1)]
        notes = (f"only one row each, so trained on and never tested: {spell(lone)}",) if lone else ()
        train, test, origin = train.rows(kept), train.rows(held), origin[kept]
    if validation is None:
        size, share = round(VALIDATION_SHARE * len(train)), f"{100 * VALIDATION_SHARE:.0f} % of what is left"
        if validation_size is not None:
            size, share = validation_size, "as many as asked for"
        kept, held = hold_out(train.labels, size, seed)
        if size:
            note("validation", f"{share}, each class giving its share, chosen by seed {seed}", origin[held].tolist())
        train, validation = train.rows(kept), train.rows(held)
    elif validation_size is not None:
        validation = _cut(name, "validation_size", validation, validation_size, seed)
    if train_size is not None:
        if train_size < len(parts.classes):
            raise InvalidValue(f"train_size must be at least {len(parts.classes)}, one row per class, not {train_size}")
        train = _cut(name, "train_size", train, train_size, seed)
    mean, std = statistics(torch.from_numpy(train.inputs))
    trained, validated, tested = (_split(part, parts.crop) for part in (train, validation, test))
    return Dataset(
        name, trained, validated, tested, parts.classes, mean, std, parts.coarse, parts.coarse_classes,
        (*parts.notes, *notes), parts.columns, parts.origin, tuple(held_out),
        None if parts.outside is None else torch.from_numpy(parts.outside),
    )  # fmt: skip


def _split(part: Part, crop: int | None) -> Split:
    shown = () if part.shown is None else tuple(part.shown.tolist())
    return Split(torch.from_numpy(part.inputs), torch.from_numpy(part.labels), crop, shown)


def _check_classes(name: str, parts: Parts) -> None:
    """Raise where there are fewer than two classes, or a class is tested or validated on but never trained on."""
    if len(parts.classes) < 2:
        raise DataError(f"{name} has the one class {parts.classes[0]!r}: a classifier needs at least two")
    trained = np.bincount(parts.train.labels, minlength=len(parts.classes)) > 0
    for part, called in ((parts.validation, "validation"), (parts.test, "test")):
        untrained = [] if part is None else [parts.classes[k] for k in np.unique(part.labels) if not trained[k]]
        if untrained:
            raise DataError(f"{name} has classes in its {called} part that are not in training: {spell(untrained)}")
    if not trained.all():
        missing = [parts.classes[k] for k in np.flatnonzero(~trained)]
        raise DataError(f"{name} has classes without a training example: {spell(missing)}")


def _cut(name: str, option: str, part: Part, size: int, seed: int) -> Part:
    if not 0 <= size <= len(part):
        raise InvalidValue(f"{option} must be 0 to {len(part):,} for {name}, not {size:,}")
    return part.rows(balanced_subset(part.labels, size, seed))


def balanced_subset(labels: NDArray[np.int64], size: int, seed: int) -> NDArray[np.int64]:
    """Return ``size`` distinct rows, ascending, with the classes as evenly represented as they can be.

    >>> labels = np.array([0, 0, 0, 0, 0, 1, 1, 2])
    >>> np.bincount(labels[balanced_subset(labels, 5, seed=0)])
    array([2, 2, 1])
    """
    word, rank, _ = _places(labels, seed)
    # Everyone's first member before anyone's second: dealing round by round is what makes it even.
    return np.sort(np.lexsort((word, rank))[:size])


def hold_out(labels: NDArray[np.int64], size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split rows into (kept, held out), both ascending, each class giving its share and keeping at least one row.

    >>> labels = np.repeat([0, 1], [10, 20])
    >>> kept, held = hold_out(labels, 6, seed=0)
    >>> np.bincount(labels[held]), len(kept)
    (array([2, 4]), 24)
    """
    word, rank, count = _places(labels, seed)
    order = np.lexsort((word, (rank + 0.5) / count))
    order = order[rank[order] < count[order] - 1]
    if not 0 <= size <= len(order):
        raise DataError(
            f"cannot hold out {size:,} of {len(labels):,} rows: every class keeps at least one for training, "
            f"so at most {len(order):,} can be held out"
        )
    held = np.sort(order[:size])
    return np.setdiff1d(np.arange(len(labels)), held, assume_unique=True), held


def _places(labels: NDArray[np.int64], seed: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """For each row: a random word, its place in the random order of its class, and the size of its class."""
    if seed < 0:
        raise InvalidValue(f"seed must not be negative, not {seed}")
    word = np.random.PCG64(seed).random_raw(len(labels))
    by_class = np.lexsort((word, labels))
    counts = np.bincount(labels) if len(labels) else np.zeros(0, np.int64)
    starts = np.cumsum(counts) - counts
    rank = np.empty(len(labels), np.int64)
    rank[by_class] = np.arange(len(labels)) - starts[labels[by_class]]
    return word, rank, counts[labels].astype(np.int64)
