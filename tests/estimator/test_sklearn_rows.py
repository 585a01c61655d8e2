"""The fit is a function of the weighted set of examples: copies are weights, and order does not matter."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

pytest.importorskip("sklearn", reason="needs scikit-learn (the extra `sklearn`)")

from hypothesis import given, settings
from hypothesis import strategies as st

from dropmax.sklearn_rows import class_weights, held_out_rows, merge_equal
from tests.close import close
from tests.estimator.estimators import Conv, quick, same_model

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.mark.parametrize("container", [np.asarray, sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"class_weight": "balanced"}, {"network": Conv}])
@pytest.mark.parametrize("head", ["dropmax", "dropmax-qp"])
def test_a_weight_is_a_number_of_copies_to_the_last_bit(
    iris: tuple[Any, Any], container: Callable[[Any], Any], options: dict[str, Any], head: str
) -> None:
    if os.environ.get("DROPMAX_TEST_MISALIGNED") == "1" and container is not np.asarray:
        pytest.skip("bits are promised for one alignment of memory, and only dense rows are misaligned here")
    X, y = iris
    counts = np.random.default_rng(0).integers(0, 4, len(y))
    order = np.random.default_rng(1).permutation(len(y))
    weighted = quick(batch_size=16, head=head, **options)
    weighted.fit(container(X), y, sample_weight=counts)
    repeated = quick(batch_size=16, head=head, **options).fit(
        X[order].repeat(counts[order], 0), y[order].repeat(counts[order])
    )
    assert same_model(weighted, repeated)
    close(weighted.predict_proba(container(X)), repeated.predict_proba(X), terms=X.shape[1], scale=10.0)


def test_the_scale_of_weights_does_not_matter_and_weights_do(iris: tuple[Any, Any]) -> None:
    X, y = iris
    weight = np.random.default_rng(0).uniform(0.1, 3, len(y))
    ours = quick().fit(X, y, weight).predict_proba(X)
    # Weights that differ by rounding; five passes of Adam make more of it.
    assert np.allclose(ours, quick().fit(X, y, 1000 * weight).predict_proba(X), rtol=0, atol=1e-5)
    assert not np.allclose(ours, quick().fit(X, y).predict_proba(X), atol=1e-3)


def test_class_weight_multiplies_sample_weight(iris: tuple[Any, Any]) -> None:
    X, y = iris
    weight = np.random.default_rng(0).uniform(0.1, 3, len(y))
    by_class = quick(class_weight={"setosa": 3.0, "virginica": 0.5}).fit(X, y, weight)
    by_row = quick().fit(X, y, weight * np.select([y == "setosa", y == "virginica"], [3.0, 0.5], 1.0))
    assert np.allclose(by_class.predict_proba(X), by_row.predict_proba(X), rtol=0, atol=1e-5)


def test_a_class_of_weight_zero_is_known_and_not_learned(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = quick(class_weight={"setosa": 0.0}, max_iter=100).fit(X, y)
    assert model.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert "setosa" not in model.predict(X)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.integers(0, 1), st.integers(1, 4)), min_size=1, max_size=12
    ),
    seed=st.integers(0, 5),
)
def test_merging_adds_the_weights_of_equal_examples(rows: list[tuple[int, int, int, int]], seed: int) -> None:
    expected: dict[tuple[float, float, int], float] = {}
    for a, b, label, weight in rows:
        expected[(a, b, label)] = expected.get((a, b, label), 0) + weight
    table = np.array(rows, dtype=float)[np.random.default_rng(seed).permutation(len(rows))]
    table[table == 0] *= -1  # minus zero is zero
    X, labels, weights = table[:, :2], table[:, 2].astype(int), table[:, 3]
    merged = merge_equal(X, labels, weights)
    found = {(*row, label): weight for row, label, weight in zip(*(part.tolist() for part in merged), strict=True)}
    assert found == expected
    assert len(merged[1]) == len(expected)
    in_order = merge_equal(np.array(rows, dtype=np.float32)[:, :2], *np.array(rows, dtype=int).T[2:])
    as_sparse = merge_equal(sparse.csr_array(X), labels, weights)
    assert np.array_equal(in_order[0], merged[0])
    assert np.array_equal(as_sparse[0].toarray(), merged[0])
    assert np.array_equal(as_sparse[1], in_order[1])


def test_merging_leaves_a_sparse_matrix_as_it_was() -> None:
    X = sparse.csr_array((np.array([1.0, 2.0, 0.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 2))
    merge_equal(X, np.array([0, 1]), np.ones(2))
    assert X.data.tolist() == [1.0, 2.0, 0.0]
    assert not X.has_canonical_format


def test_integers_and_other_simple_numbers_get_keys_of_their_own() -> None:
    grid = np.array(np.meshgrid(*[np.arange(-4, 5) / 2] * 5)).reshape(5, -1).T  # all different, with short mantissas
    merged = merge_equal(grid, np.zeros(len(grid), int), np.ones(len(grid)))
    assert len(merged[1]) == len(grid)
    swapped = np.array([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0], [3.0, 0.0]])
    assert len(merge_equal(swapped, np.zeros(4, int), np.ones(4))[1]) == 4


@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.9),
    seed=st.integers(0, 100),
)
def test_held_out_rows_leave_every_class_something_to_learn_from(labels: list[int], fraction: float, seed: int) -> None:
    y = np.array(labels)
    chosen = held_out_rows(y, fraction, np.random.RandomState(seed))
    assert set(y[~chosen]) == set(y)
    assert chosen.sum() <= max(1, round(fraction * len(y)))
    counts, held = np.bincount(y), np.bincount(y[chosen], minlength=y.max() + 1)
    if chosen.sum() == max(1, round(fraction * len(y))):  # nobody was short of rows: the shares differ by rounding
        assert all(abs(h - c * chosen.mean()) <= 1.5 + 0.5 * len(counts) for h, c in zip(held, counts, strict=True))


def test_balanced_gives_every_class_the_same_weight() -> None:
    labels, weight = np.array([0, 0, 1, 2, 2, 2]), np.array([1.0, 2, 1, 1, 1, 5])
    found = class_weights("balanced", np.arange(3), labels, weight)
    totals = np.bincount(labels, weight * found[labels])
    assert np.allclose(totals, weight.sum() / 3)


def test_the_objective_is_the_weighted_mean_of_the_heads_loss(iris: tuple[Any, Any]) -> None:
    X, y = iris
    weight = np.random.default_rng(0).uniform(0.1, 3, len(y))
    exact = {"likelihood": "exact"}  # which draws no masks
    model = quick(
        max_iter=1, batch_size=1000, learning_rate_init=1e-12, head_options=exact, early_stopping=False, dropout=0.0
    )
    model.fit(X, y, weight)
    mean = np.average(X, axis=0, weights=weight)
    scale = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weight))
    h = model.model_.net(torch.tensor((X - mean) / scale, dtype=torch.float32))
    target = torch.tensor([model.classes_.tolist().index(label) for label in y])
    losses = model.model_.head.loss(h, target, reduction="none").total.detach().numpy()
    assert model.loss_curve_[0] == pytest.approx((weight * losses).sum() / weight.sum(), rel=1e-5)
