"""Statistics of repeated runs against numpy and scipy, and what they say of values that are none."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmax import metrics
from dropmax.errors import InvalidType, InvalidValue, MissingDependency
from dropmax.lab import statistics

several = st.lists(st.floats(-1e3, 1e3).map(lambda value: round(value, 3)), min_size=2, max_size=12)


@given(several, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
@settings(max_examples=80, deadline=None)
def test_t_interval_equals_scipy(values: list[float], confidence: float) -> None:
    mean, half_width = statistics.t_interval(values, confidence)
    assert mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    expected = scipy.stats.t.ppf(0.5 + confidence / 2, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    assert half_width == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_the_interval_of_five_runs_has_the_papers_factor() -> None:
    values = [7.0, 7.2, 6.9, 7.1, 7.3]
    mean, half_width = statistics.t_interval(torch.tensor(values, dtype=torch.float64))
    assert mean == pytest.approx(7.1)
    assert half_width / (np.std(values, ddof=1) / 5**0.5) == pytest.approx(2.776, abs=5e-4)


@pytest.mark.parametrize("seed", range(4))
def test_paired_difference_equals_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=6), rng.normal(0.5, size=6)
    ours, theirs = statistics.paired_difference(a, b, 0.9), scipy.stats.ttest_rel(a, b)
    assert ours.mean == pytest.approx(np.mean(a - b), abs=1e-12)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert ours.interval == pytest.approx(tuple(theirs.confidence_interval(0.9)), rel=1e-9)


def test_paired_difference_of_runs_that_differ_by_a_constant() -> None:
    assert statistics.paired_difference([1, 2, 3], [1, 2, 3]) == (0.0, 0.0, 1.0)
    assert statistics.paired_difference([1, 2, 3], [0, 1, 2]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: statistics.t_interval([1.0]), InvalidValue, r"at least two numbers for an interval, got \[1.0\]"),
        (lambda: statistics.t_interval([1.0, math.nan]), InvalidValue, r"finite, got \[1.0, nan\]"),
        (lambda: statistics.t_interval([1.0, 2.0], 95), InvalidValue, "between 0 and 1, such as 0.95, got 95"),
        (lambda: statistics.t_interval("12"), InvalidType, "sequence of numbers, got '12'"),
        (lambda: statistics.t_interval(torch.eye(2)), InvalidType, "sequence of numbers"),
        (lambda: statistics.t_interval(3.0), InvalidType, "sequence of numbers, got 3.0"),
        (lambda: statistics.paired_difference([1, 2], [1, 2, 3]), InvalidValue, "pair up, got 2 and 3 values"),
    ],
)
def test_values_out_of_range_are_refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingDependency, match=r'needs scipy, .* pip install "dropmax\[lab\]"'):
        statistics.t_interval([1.0, 2.0])


def test_the_names_of_version_0_1_still_work() -> None:
    assert metrics.t_interval is statistics.t_interval
    assert metrics.paired_difference is statistics.paired_difference


@pytest.mark.parametrize(
    ("methods", "q"), [(3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)]
)  # q: Demšar (2006), table 5
def test_mean_ranks_equal_counting(methods: int, q: float) -> None:
    table = np.random.default_rng(methods).integers(0, 6, (14, methods))  # with ties
    ranks = statistics.mean_ranks([{str(k): float(value) for k, value in enumerate(row)} for row in table])
    below = (table[:, :, None] > table[:, None]).sum(2)
    level = (table[:, :, None] == table[:, None]).sum(2)
    assert list(ranks.mean.values()) == pytest.approx((below + (level + 1) / 2).mean(0))
    assert ranks.critical_difference == pytest.approx(q * (methods * (methods + 1) / (6 * 14)) ** 0.5, abs=1e-3)


@pytest.mark.parametrize("scores", [[], [{"a": 1.0, "b": 2.0, "c": 3.0}], [{"a": 1.0, "b": 2.0}] * 3])
def test_too_little_to_rank_is_an_error(scores: list[dict[str, float]]) -> None:
    with pytest.raises(InvalidValue, match="at least two data sets"):
        statistics.mean_ranks(scores)
