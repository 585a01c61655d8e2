"""Choosing rows by seed: balanced subsets and stratified hold-outs.

The draws must be the same on every machine and with every version of NumPy, or two people's "seed 3" are two data
sets. NumPy promises that only for its bit generators, so rows are ordered by raw PCG64 words and nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, InvalidValue

__all__ = ["balanced_subset", "hold_out"]


def balanced_subset(labels: NDArray[np.int64], size: int, seed: int) -> NDArray[np.int64]:
    """Return ``size`` distinct rows, ascending, with the classes as evenly represented as they can be.

    >>> labels = np.array([0, 0, 0, 0, 0, 1, 1, 2])
    >>> np.bincount(labels[balanced_subset(labels, 5, seed=0)])
    array([2, 2, 1])
    """
    if not 0 <= size <= len(labels):
        raise InvalidValue(f"asked for {size:,} rows, but there are {len(labels):,}")
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
