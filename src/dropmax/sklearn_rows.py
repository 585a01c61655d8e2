"""What :mod:`dropmax.sklearn` trains on: each distinct example once, with its weight; dense and sparse alike."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.checks import check_choice, check_weight
from dropmax.errors import InvalidType, InvalidValue, MissingDependency

try:
    from scipy import sparse
except ImportError as error:
    raise MissingDependency.extra("scipy", "sklearn", "dropmax.sklearn") from error

__all__ = ["blocks", "check_known", "class_weights", "fit_scaler", "merge_equal"]

#: Rows looked at together outside training: enough to be fast, few enough to be dense for a moment.
_BLOCK = 2048


def blocks(X: Any) -> Iterator[Any]:
    """Yield the rows of an array or sparse matrix, some thousands at a time.

    >>> [len(block) for block in blocks(np.zeros((5000, 3)))]
    [2048, 2048, 904]
    """
    for start in range(0, X.shape[0], _BLOCK):
        yield X[start : start + _BLOCK]


def merge_equal(
    X: Any, labels: NDArray[np.intp], weight: NDArray[np.float64]
) -> tuple[Any, NDArray[np.intp], NDArray[np.float64]]:
    """Return each distinct (row, label) once, with the sum of its weights, in an order that depends on values only.

    The order is that of a digest of the row's non-zero numbers, which is the same for dense and sparse input.

    >>> X = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    >>> rows, labels, weight = merge_equal(X, np.array([0, 1, 0]), np.array([1.0, 1.0, 3.0]))
    >>> len(rows), dict(zip(labels.tolist(), weight.tolist())) == {0: 4.0, 1: 1.0}
    (2, True)
    """
    first: dict[bytes, int] = {}
    total: dict[bytes, float] = {}
    row = 0
    for block in blocks(X):
        block = sparse.csr_array(block, copy=True)  # the caller's matrix stays as it is
        block.sum_duplicates()
        block.eliminate_zeros()
        columns, values, ends = block.indices.astype(np.int64), block.data.astype(np.float64), block.indptr.tolist()
        for start, end in itertools.pairwise(ends):
            content = columns[start:end].tobytes() + values[start:end].tobytes() + int(labels[row]).to_bytes(8, "big")
            key = hashlib.blake2b(content, digest_size=16).digest()
            first.setdefault(key, row)
            total[key] = total.get(key, 0.0) + float(weight[row])
            row += 1
    order = sorted(first)
    rows = [first[key] for key in order]
    return X[rows], labels[rows], np.array([total[key] for key in order])


def fit_scaler(scaler: Any, X: Any, weight: NDArray[np.float64]) -> None:
    """Let a ``StandardScaler`` see weighted rows, a dense block at a time: sparse rows scale exactly as dense ones do.

    >>> from sklearn.preprocessing import StandardScaler
    >>> scaler = StandardScaler()
    >>> fit_scaler(scaler, sparse.csr_array([[0.0], [4.0]]), np.array([3.0, 1.0]))
    >>> scaler.mean_, scaler.var_
    (array([1.]), array([3.]))
    """
    for block, block_weight in zip(blocks(X), blocks(weight), strict=True):
        dense = block.toarray() if sparse.issparse(block) else block
        scaler.partial_fit(dense.astype(np.float64), sample_weight=block_weight)


def class_weights(
    given: Mapping[Any, float] | str | None, classes: NDArray[Any], labels: NDArray[Any], weight: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the weight of each class; "balanced" is sum of weights / (number of classes x sum in the class).

    >>> class_weights("balanced", np.array(["a", "b"]), np.array([0, 0, 0, 1]), np.ones(4))
    array([0.66666667, 2.        ])
    """
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
    """Refuse labels that are not among the classes.

    >>> check_known(["cat"], np.array(["cat", "dog"]))
    """
    known = set(classes.tolist())
    for label in labels:
        if label not in known:
            raise InvalidValue(f"{where} holds the label {label!r}, which is not among the classes {classes.tolist()}")
