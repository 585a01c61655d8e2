"""A data set: what a reader hands over, and how it becomes three splits in memory, with rows chosen by seed.

The draws must be the same on every machine and with every version of NumPy, or two people's "seed 3" are two data
sets. NumPy promises that only for its bit generators, so rows are ordered by raw PCG64 words and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dropmax.errors import DataError, InvalidType, InvalidValue

# Held-out test rows do not follow the run's seed: runs with different seeds are then measured on the same rows, and
# no run has trained on what another is tested on.
TEST_SEED = 0
TEST_SHARE = 0.2
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set: ``inputs`` and their ``labels``, row by row.

    >>> split = Split(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([3, 7]))
    >>> len(split), split.input_shape
    (2, (1, 28, 28))
    """

    inputs: torch.Tensor  #: uint8 images (N, C, H, W) with pixels 0..255, or float32 features (N, D)
    labels: torch.Tensor  #: int64 class indices (N,)
    crop: int | None = None  #: for images stored larger than the network sees them, the side of the square it sees
    shown: tuple[str, ...] = ()  #: for features of photographs or sentences, the file name or sentence of each row

    def __post_init__(self) -> None:
        if (self.inputs.dtype, self.inputs.ndim) not in ((torch.uint8, 4), (torch.float32, 2)):
            raise InvalidType(
                "inputs must be uint8 images (N, C, H, W) or float32 features (N, D), "
                f"not {self.inputs.dtype} of shape {tuple(self.inputs.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise InvalidType(
                f"labels must be int64 of shape (N,), not {self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        if len(self.inputs) != len(self.labels):
            raise DataError(f"a split needs one label per input, but has {len(self.inputs)} and {len(self.labels)}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_images(self) -> bool:
        """Whether the inputs are images rather than feature vectors."""
        return self.inputs.ndim == 4

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as the network sees it: (C, H, W) after cropping, or (D,)."""
        stored = tuple(self.inputs.shape[1:])
        return stored if self.crop is None else (stored[0], self.crop, self.crop)


@dataclass(frozen=True)
class HeldOut:
    """Rows of the training part that were set aside: which, how many of how many, and by which rule."""

    part: str  #: "test" or "validation"
    rule: str
    of: int
    rows: tuple[int | str, ...]  #: numbers of rows, counted from 0; names of files; or identifiers (``id_column``)

    def __str__(self) -> str:
        return f"{self.part}: {len(self.rows):,} of {self.of:,} rows held out ({self.rule})"


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set in three splits.

    >>> from dropmax.workbench.data import load
    >>> digits = load("mnist-1k")
    >>> digits.num_classes, digits.input_shape, len(digits.train), len(digits.validation), len(digits.test)
    (10, (1, 28, 28), 1000, 5000, 10000)
    """

    name: str  #: the name or path it was loaded by
    train: Split
    validation: Split  #: to choose settings on; may be empty
    test: Split  #: to report
    classes: tuple[str, ...]  #: their names; the label k means ``classes[k]``
    mean: tuple[float, ...]  #: over the training split, per channel (pixels scaled to 0..1) or per feature
    std: tuple[float, ...]  #: likewise; 1 for a constant channel or feature, so that dividing by it is harmless
    coarse: tuple[int, ...] | None = None  #: for CIFAR-100, the superclass index of each class
    coarse_classes: tuple[str, ...] | None = None  #: for CIFAR-100, the superclass names
    notes: tuple[str, ...] = ()  #: how the splits came about, one sentence each
    columns: tuple[str, ...] = ()  #: for tables with a header, the names of the features
    origin: str = ""  #: for features of a pretrained network, its description as JSON
    held_out: tuple[HeldOut, ...] = ()  #: rows set aside for testing and validation, where the publisher did not
    outside: torch.Tensor | None = None  #: inputs that belong to no class, where the file has some; never trained on

    def with_validation_trained_on(self) -> Dataset:
        """Return the data set with the rows of the validation split in the training split; mean and std stay."""
        train, held = self.train, self.validation
        inputs, labels = torch.cat([train.inputs, held.inputs]), torch.cat([train.labels, held.labels])
        whole = Split(inputs, labels, train.crop, train.shown + held.shown)
        return dataclasses.replace(self, train=whole, validation=Split(inputs[:0], labels[:0], train.crop))

    @property
    def num_classes(self) -> int:
        """The number of classes, K in the paper."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as the network sees it: (C, H, W) or (D,)."""
        return self.train.input_shape

    @property
    def is_images(self) -> bool:
        """Whether the inputs are images rather than feature vectors."""
        return self.train.is_images


def statistics(inputs: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and (population) standard deviation per channel of pixels scaled to 0..1, or per feature.

    Those of images come from counts of the pixel values: exact, fast and in little memory. A deviation of 0 is
    returned as 1.

    >>> statistics(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    ((2.0, 5.0), (1.0, 1.0))
    """
    if inputs.ndim == 2:
        # Block by block, in float64: all of it at once would take three times the memory of the data.
        rows = max(1, (1 << 22) // inputs.shape[1])
        blocks = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
        zero = torch.zeros(inputs.shape[1], dtype=torch.float64)
        mean = sum((block.double().sum(0) for block in blocks), zero) / len(inputs)
        variance = sum(((block.double() - mean).square().sum(0) for block in blocks), zero) / len(inputs)
    else:
        histogram = torch.zeros(inputs.shape[1], 256, dtype=torch.int64)
        for start in range(0, len(inputs), 1024):  # block by block: a memory-mapped set may not fit in memory
            for channel, counts in enumerate(histogram):
                counts += torch.bincount(inputs[start : start + 1024, channel].reshape(-1), minlength=256)
        share = histogram.double() / histogram.sum(1, keepdim=True)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(1)
    # Below 1e-12 is rounding of a constant, not spread.
    return tuple(mean.tolist()), tuple(value if value > 1e-12 else 1.0 for value in variance.sqrt().tolist())


def spell(names: Sequence[str], limit: int = 5) -> str:
    """Join names for a message, cutting a long list short: ``a, b, c and 7 more``."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


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

    def split(self, crop: int | None) -> Split:
        """Return the part as tensors."""
        shown = () if self.shown is None else tuple(self.shown.tolist())
        return Split(torch.from_numpy(self.inputs), torch.from_numpy(self.labels), crop, shown)


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
    >>> print(*assemble("mine", Parts(features, ("even", "odd")), seed=3).held_out, sep="\\n")
    test: 4 of 20 rows held out (20 % of each class, the same rows for every seed)
    validation: 2 of 20 rows held out (10 % of what is left, each class giving its share, chosen by seed 3)
    """
    _check_classes(name, parts)
    train, validation, test = parts.train, parts.validation, parts.test
    origin = np.arange(len(train))  # where each training row was in the file
    held_out: list[HeldOut] = []
    lone: list[str] = []

    def note(part: str, rule: str, rows: list[int]) -> None:
        named = rows if parts.names is None else [parts.names[row] for row in rows]
        held_out.append(HeldOut(part, rule, len(parts.train), tuple(named)))

    if test is None:
        kept, held = hold_out(train.labels, max(1, round(TEST_SHARE * len(train))), TEST_SEED)
        note("test", f"{100 * TEST_SHARE:.0f} % of each class, the same rows for every seed", held.tolist())
        lone = [parts.classes[k] for k in np.flatnonzero(np.bincount(train.labels) == 1)]
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
    notes = [f"only one row each, so trained on and never tested: {spell(lone)}"] if lone else []
    return Dataset(
        name, train.split(parts.crop), validation.split(parts.crop), test.split(parts.crop), parts.classes,
        *statistics(torch.from_numpy(train.inputs)), parts.coarse, parts.coarse_classes,
        (*parts.notes, *notes), parts.columns, parts.origin, tuple(held_out),
        None if parts.outside is None else torch.from_numpy(parts.outside),
    )  # fmt: skip


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
    """Return ``size`` distinct rows, ascending, with the classes as evenly represented as they can be."""
    word, rank, _ = _places(labels, seed)
    # Everyone's first member before anyone's second: dealing round by round is what makes it even.
    return np.sort(np.lexsort((word, rank))[:size])


def hold_out(labels: NDArray[np.int64], size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split rows into (kept, held out), both ascending, each class giving its share and keeping at least one row."""
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
