"""What :mod:`dropmax.sklearn` trains on: each distinct example once, with its weight; dense and sparse alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropmax.checks import check_choice, check_weight
from dropmax.errors import InvalidType, InvalidValue, MissingDependency

try:
    from scipy import sparse
except ImportError as error:
    raise MissingDependency.extra("scipy", "sklearn", "dropmax.sklearn") from error

__all__ = ["Examples", "blocks", "check_known", "class_weights", "fit_scaler", "held_out_rows", "merge_equal"]

#: Numbers that are dense at a time outside training: enough to be fast, few enough for sparse rows with many columns.
_NUMBERS = 2**20


def blocks(X: Any, size: int | None = None) -> Iterator[Any]:
    """Yield the rows of an array or sparse matrix, some at a time.

    >>> [len(block) for block in blocks(np.zeros((5000, 512)))]
    [2048, 2048, 904]
    """
    size = size or max(1, _NUMBERS // X.shape[1])
    for start in range(0, X.shape[0], size):
        yield X[start : start + size]


def dense(rows: Any) -> NDArray[Any]:
    """Return an array or a sparse matrix as an array."""
    found: NDArray[Any] = rows.toarray() if sparse.issparse(rows) else rows
    return found


def merge_equal(
    X: Any, labels: NDArray[np.intp], weight: NDArray[np.float64]
) -> tuple[Any, NDArray[np.intp], NDArray[np.float64]]:
    """Return each distinct (row, label) once, with the sum of its weights, in an order that depends on values only.

    The order is that of 128-bit keys made of the row's numbers, the same for dense and sparse input.

    >>> X = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    >>> rows, labels, weight = merge_equal(X, np.array([0, 1, 0]), np.array([1.0, 1.0, 3.0]))
    >>> len(rows), dict(zip(labels.tolist(), weight.tolist())) == {0: 4.0, 1: 1.0}
    (2, True)
    """
    keys = np.concatenate([_keys(block) for block in blocks(X)])
    keys += _mixed(np.stack([labels, labels + 2**32], 1).astype(np.uint64))
    whole = keys.view([("high", np.uint64), ("low", np.uint64)]).ravel()
    _, rows, example = np.unique(whole, return_index=True, return_inverse=True)
    total: NDArray[np.float64] = np.bincount(example.ravel(), weight, minlength=len(rows)).astype(
        np.float64, copy=False
    )
    return X[rows], labels[rows], total


def _keys(rows: Any) -> NDArray[np.uint64]:
    """Return two 64-bit keys per row: sums, modulo 2^64, of scrambled (column, number) pairs."""
    numbers = np.add(dense(rows), 0.0, dtype=np.float64)  # which turns -0.0 into 0.0
    columns = np.arange(1, numbers.shape[1] + 1, dtype=np.uint64)
    pairs = _mixed(numbers.view(np.uint64) ^ _mixed(columns))
    return np.stack([pairs.sum(1), _mixed(pairs).sum(1)], 1)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers one to one (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def held_out_rows(labels: NDArray[np.intp], fraction: float, random: np.random.RandomState) -> NDArray[np.bool_]:
    """Choose about ``fraction`` of the rows, the same share of every class, and never the last row of a class."""
    order = random.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # by class, at random within each
    counts = np.bincount(labels)
    rank = np.arange(len(labels)) - (counts.cumsum() - counts)[labels[order]]
    size = counts[labels[order]]
    # The first of a class to go is the one with the smallest share of it; ties fall at random.
    share = np.where(rank < size - 1, (rank + random.random_sample(len(labels))) / size, np.inf)
    chosen = np.zeros(len(labels), bool)
    best = np.argsort(share, kind="stable")[: max(1, round(fraction * len(labels)))]
    chosen[order[best[np.isfinite(share[best])]]] = True
    return chosen


class Examples:
    """Standardised rows, class indices and weights as tensors; sparse rows become dense one batch at a time."""

    def __init__(self, X: Any, labels: NDArray[Any], weight: NDArray[Any], scaler: Any, device: str) -> None:
        self.scaler, self.device = scaler, device
        self._rows = X if sparse.issparse(X) else standardised(X, scaler, device)
        self.labels = torch.as_tensor(labels, device=device)
        plain = bool((weight == 1).all())
        self.weight = None if plain else torch.as_tensor(weight, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield rows, labels and weights (None where all are 1) in this order; rows are copies."""
        for rows in torch.split(order.to(self.device), size):
            if isinstance(self._rows, Tensor):
                x = self._rows.index_select(0, rows)  # x[rows] takes five times as long
            else:
                x = standardised(self._rows[rows.cpu().numpy()], self.scaler, self.device)
            yield x, self.labels.index_select(0, rows), None if self.weight is None else self.weight[rows]


def standardised(rows: Any, scaler: Any, device: str) -> Tensor:
    """Return rows as a dense float32 tensor of its own, less their mean and divided by their standard deviation."""
    array = dense(rows)
    if scaler is not None:
        array = (array - scaler.mean_) / scaler.scale_
    return torch.tensor(array, dtype=torch.float32, device=device)


def fit_scaler(scaler: Any, X: Any, weight: NDArray[np.float64]) -> None:
    """Let a ``StandardScaler`` see weighted rows, a dense block at a time: sparse rows scale as dense ones do."""
    start = 0
    for block in blocks(X):
        rows = dense(block).astype(np.float64)
        scaler.partial_fit(rows, sample_weight=weight[start : start + len(rows)])
        start += len(rows)


def class_weights(
    given: Mapping[Any, float] | str | None, classes: NDArray[Any], labels: NDArray[Any], weight: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the weight of each class; "balanced" is sum of weights / (number of classes x sum in the class)."""
    if given is None:
        return np.ones(len(classes))
    if isinstance(given, str):
        check_choice("class_weight", given, ("balanced",))
        in_class = np.bincount(labels, weight, minlength=len(classes))
        return np.asarray(weight.sum() / (len(classes) * in_class), dtype=np.float64)
    if not isinstance(given, Mapping):
        raise InvalidType(f"class_weight must be a dict from label to weight or 'balanced', got {given!r}")
    check_known(given, classes, "class_weight")
    for label, value in given.items():
        check_weight(f"class_weight[{label!r}]", value.item() if isinstance(value, np.generic) else value)
    return np.array([given.get(label, 1.0) for label in classes.tolist()], dtype=np.float64)


def check_known(labels: Iterable[Any], classes: NDArray[Any], where: str = "y") -> None:
    """Refuse labels that are not among the classes."""
    known = set(classes.tolist())
    for label in labels:
        if label not in known:
            raise InvalidValue(f"{where} holds the label {label!r}, which is not among the classes {classes.tolist()}")
