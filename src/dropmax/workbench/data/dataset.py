"""What a data set is here: three splits held in memory, and the facts needed to feed a network from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dropmax.errors import DataError, InvalidType


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set: ``inputs`` and their ``labels``, row by row.

    Args:
        inputs: uint8 images (N, C, H, W) with pixels 0..255, or float32 features (N, D).
        labels: int64 class indices (N,).
        crop: for images stored larger than the network sees them, the side of the square it sees; otherwise None.
        shown: for features of photographs or sentences, the file name or the sentence behind each row.

    >>> split = Split(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([3, 7]))
    >>> len(split), split.input_shape
    (2, (1, 28, 28))
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    crop: int | None = None
    shown: tuple[str, ...] = ()

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
        """The shape of one input as the network sees it: (C, H, W) after cropping, or (D,).

        >>> Split(torch.zeros(2, 3, 72, 72, dtype=torch.uint8), torch.tensor([0, 1]), crop=64).input_shape
        (3, 64, 64)
        """
        stored = tuple(self.inputs.shape[1:])
        return stored if self.crop is None else (stored[0], self.crop, self.crop)


@dataclass(frozen=True)
class HeldOut:
    """Rows of the training part that were set aside: which, how many of how many, and by which rule.

    >>> print(HeldOut("test", "20 % of each class, the same rows for every seed", 5, (0, 3)))
    test: 2 of 5 rows held out (20 % of each class, the same rows for every seed)
    """

    part: str  #: "test" or "validation"
    rule: str
    of: int
    rows: tuple[int | str, ...]  #: numbers of rows, counted from 0; names of files; or identifiers (``id_column``)

    def __str__(self) -> str:
        return f"{self.part}: {len(self.rows):,} of {self.of:,} rows held out ({self.rule})"


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set in three splits.

    Args:
        name: the name or path it was loaded by.
        train: the training split.
        validation: the split to choose settings on; may be empty.
        test: the split to report.
        classes: class names; the label k means ``classes[k]``.
        mean: per channel (pixels scaled to 0..1) or per feature, over the training split.
        std: likewise; a constant channel or feature has 1, so dividing by it is harmless.
        coarse: for CIFAR-100, the superclass index of each class.
        coarse_classes: for CIFAR-100, the superclass names.
        notes: what the reader should know about how the splits came about, one sentence each.
        columns: for tables with a header, the names of the features.
        held_out: which rows were set aside for testing and validation, where the publisher has not decided.
        origin: for features of a pretrained network, its description as JSON.
        outside: inputs that belong to no class, where the file has some; never trained on.

    >>> from dropmax.workbench.data import load
    >>> digits = load("mnist-1k")
    >>> digits.num_classes, digits.input_shape, len(digits.train), len(digits.validation), len(digits.test)
    (10, (1, 28, 28), 1000, 5000, 10000)
    """

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    coarse: tuple[int, ...] | None = None
    coarse_classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    origin: str = ""
    held_out: tuple[HeldOut, ...] = ()
    outside: torch.Tensor | None = None

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

    Equals ``x = inputs / 255; x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)`` for images, but counts pixel
    values, which is exact, fast and needs little memory. A standard deviation of 0 is returned as 1.

    >>> statistics(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    ((0.5,), (0.5,))
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
    """Join names for a message, cutting a long list short: ``a, b, c and 7 more``.

    >>> spell(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
