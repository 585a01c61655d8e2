"""Metrics against loops in plain Python, torchmetrics, and properties that must hold for any prediction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError

from dropmax import metrics
from dropmax.errors import InvalidType, InvalidValue
from tests.close import close

torch.set_num_threads(1)


def predictions(seed: int, n: int, k: int, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Random probabilities, many labels right. With ``ties`` they are eighths, so confidences and classes tie."""
    rng = np.random.default_rng(seed)
    eighths = rng.multinomial(8, np.full(k, 1 / k), size=n) / 8
    probs = eighths if ties else rng.dirichlet(np.full(k, 0.5), size=n)
    label = np.where(rng.random(n) < 0.6, probs.argmax(1), rng.integers(k, size=n))
    return torch.from_numpy(probs), torch.from_numpy(label)


any_predictions = st.builds(
    predictions, st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 14), ties=st.booleans()
)


# The same quantities, one number at a time.


def loop_prediction(row: list[float]) -> int:
    return row.index(max(row))


def loop_error(probs: list[list[float]], target: list[int]) -> float:
    return sum(loop_prediction(row) != t for row, t in zip(probs, target, strict=True)) / len(target)


def loop_top5_error(probs: list[list[float]], target: list[int]) -> float:
    rankings = [sorted(range(len(row)), key=lambda k: (-row[k], k)) for row in probs]
    return sum(t not in ranking[:5] for ranking, t in zip(rankings, target, strict=True)) / len(target)


def loop_nll(probs: list[list[float]], target: list[int]) -> float:
    return sum(
        -math.log(row[t]) if row[t] > 0 else 87.33654475055310 for row, t in zip(probs, target, strict=True)
    ) / len(target)


def loop_brier(probs: list[list[float]], target: list[int]) -> float:
    rows = zip(probs, target, strict=True)
    return sum((p - (k == t)) ** 2 for row, t in rows for k, p in enumerate(row)) / len(target)


def loop_ece(probs: list[list[float]], target: list[int], bins: int = 15) -> float:
    total = 0.0
    edges = np.linspace(0, 1, bins + 1).tolist()
    for b in range(bins):
        inside = [
            (max(row), loop_prediction(row) == t)
            for row, t in zip(probs, target, strict=True)
            if edges[b] <= max(row) < edges[b + 1] or (b == bins - 1 and max(row) >= 1)
        ]
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            accuracy = sum(right for _, right in inside) / len(inside)
            total += len(inside) / len(target) * abs(accuracy - confidence)
    return total


def loop_aurc(wrong_in_order: list[bool]) -> float:
    risks = [sum(wrong_in_order[: i + 1]) / (i + 1) for i in range(len(wrong_in_order))]
    return sum(risks) / len(risks)


@given(any_predictions)
@settings(max_examples=60, deadline=None)
def test_metrics_equal_their_loops(data: tuple[Tensor, Tensor]) -> None:
    probs, target = data
    rows, labels = probs.tolist(), target.tolist()
    assert metrics.error(probs, target) == pytest.approx(loop_error(rows, labels), abs=1e-12)
    assert metrics.nll(probs, target) == pytest.approx(loop_nll(rows, labels), rel=1e-9)
    assert metrics.brier(probs, target) == pytest.approx(loop_brier(rows, labels), abs=1e-12)
    assert metrics.ece(probs, target) == pytest.approx(loop_ece(rows, labels), abs=1e-12)
    if probs.shape[1] >= 5:
        assert metrics.top_k_error(probs, target) == pytest.approx(loop_top5_error(rows, labels), abs=1e-12)


def test_aurc_equals_its_loop_without_ties() -> None:
    probs, target = predictions(0, 300, 7)
    order = sorted(range(300), key=lambda i: -float(probs[i].max()))
    wrong = [int(probs[i].argmax()) != int(target[i]) for i in order]
    assert 0 < sum(wrong) < 300
    assert metrics.aurc(probs, target) == pytest.approx(loop_aurc(wrong), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_aurc_with_ties_is_the_mean_over_all_orders_that_confidence_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.choice([0.6, 0.8], size=7)
    wrong = rng.random(7) < 0.5
    probs = torch.from_numpy(np.stack([confidence, 1 - confidence], 1))
    target = torch.from_numpy(wrong.astype(np.int64))  # class 0 is predicted, so label 1 is a miss
    orders = [o for o in itertools.permutations(range(7)) if all(np.diff(confidence[list(o)]) <= 0)]
    areas = [loop_aurc([bool(wrong[i]) for i in order]) for order in orders]
    assert len(orders) > 1
    assert metrics.aurc(probs, target) == pytest.approx(sum(areas) / len(areas), abs=1e-12)


@pytest.mark.parametrize(("seed", "k", "bins"), [(0, 3, 15), (1, 10, 15), (2, 100, 15), (3, 10, 7)])
def test_ece_equals_torchmetrics(seed: int, k: int, bins: int) -> None:
    probs, target = predictions(seed, 2000, k)
    theirs = MulticlassCalibrationError(num_classes=k, n_bins=bins, norm="l1")(probs, target)  # in float32
    assert metrics.ece(probs, target, bins) == pytest.approx(float(theirs), abs=2e-6)


@given(any_predictions, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_examples_does_not_matter(data: tuple[Tensor, Tensor], random: object) -> None:
    probs, target = data
    order = list(range(len(target)))
    random.shuffle(order)  # type: ignore[attr-defined]
    before, after = metrics.evaluate(probs, target), metrics.evaluate(probs[order], target[order])
    assert after == pytest.approx(before, abs=1e-12)
    curves = metrics.risk_coverage_curve(probs, target)[1], metrics.risk_coverage_curve(probs[order], target[order])[1]
    close(*curves, terms=len(order), scale=1.0)


@given(any_predictions)
@settings(max_examples=60, deadline=None)
def test_bounds_and_relations(data: tuple[Tensor, Tensor]) -> None:
    probs, target = data
    values = metrics.evaluate(probs, target)
    assert ("top5_error" in values) == (probs.shape[1] > 10)
    assert all(0 <= values[name] <= 1 for name in values if name not in ("nll", "brier"))
    assert 0 <= values["brier"] <= 2
    assert 0 <= values["nll"] < math.inf
    assert values.get("top5_error", 0) <= values["error"]
    assert metrics.top_k_error(probs, target, k=1) == values["error"]
    assert metrics.top_k_error(probs, target, k=probs.shape[1]) == 0
    coverage, risk = metrics.risk_coverage_curve(probs, target)
    assert coverage.dtype == risk.dtype == torch.float64
    close(coverage, [(i + 1) / len(target) for i in range(len(target))])
    assert float(risk[-1]) == pytest.approx(values["error"], abs=1e-12)
    same_coverage, accuracy = metrics.accuracy_rejection_curve(probs, target)
    assert torch.equal(coverage, same_coverage)
    close(accuracy, 1 - risk)
    bins = metrics.reliability_bins(probs, target, bins=5)
    assert int(bins.count.sum()) == len(target)
    filled = bins.count > 0
    assert bool(((bins.edges[:-1] <= bins.confidence) & (bins.confidence <= bins.edges[1:] + 1e-12))[filled].all())
    assert bool(bins.accuracy[~filled].isnan().all())


def test_perfect_and_perfectly_wrong_predictions() -> None:
    target = torch.arange(12)
    right = metrics.evaluate(torch.eye(12), target)
    assert right == dict.fromkeys(["error", "nll", "brier", "ece", "aurc", "top5_error"], 0.0)
    wrong = metrics.evaluate(torch.eye(12).roll(1, 0), target)
    assert (wrong["error"], wrong["brier"], wrong["ece"], wrong["aurc"]) == (1, 2, 1, 1)
    assert wrong["nll"] == pytest.approx(-math.log(metrics.NLL_FLOOR))


def test_floor_is_the_callers_to_choose_and_spares_what_float32_can_hold() -> None:
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), floor=1e-3) == pytest.approx(math.log(1000))
    assert metrics.nll(torch.tensor([[1.0, 1e-37]]), torch.tensor([1])) == pytest.approx(37 * math.log(10), rel=1e-6)


def test_a_confidence_on_an_edge_belongs_to_the_bin_above_and_one_to_the_last() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    assert metrics.reliability_bins(probs, torch.tensor([0, 0, 0]), bins=4).count.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computation_is_in_float64_whatever_the_input(dtype: torch.dtype) -> None:
    probs = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).softmax(1).to(dtype).requires_grad_()
    target = torch.arange(50, dtype=torch.int32) % 30
    rows = probs.detach().double().tolist()
    assert metrics.nll(probs, target) == pytest.approx(loop_nll(rows, target.tolist()), rel=1e-12)
    assert metrics.brier(probs, target) == pytest.approx(loop_brier(rows, target.tolist()), rel=1e-12)
    assert metrics.ece(probs, target) == pytest.approx(loop_ece(rows, target.tolist()), rel=1e-12)


good, label = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([0, 1])
ALL_METRICS: list[Callable[[Tensor, Tensor], object]] = [
    metrics.error,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.aurc,
    metrics.top_k_error,
    metrics.risk_coverage_curve,
    metrics.accuracy_rejection_curve,
    metrics.reliability_bins,
    metrics.evaluate,
]


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    ("probs", "target", "kind", "message"),
    [
        (good[:0], label[:0], InvalidValue, r"nothing to measure: probs has shape \(0, 2\)"),
        (good[:, :0], label, InvalidValue, r"nothing to measure: probs has shape \(2, 0\)"),
        (good, label[:1], InvalidValue, r"one label for each of the 2 rows, got shape \(1,\)"),
        (good[0], label, InvalidValue, r"shape \(N, K\), got \(2,\)"),
        (good, label[:, None], InvalidValue, r"one label for each of the 2 rows, got shape \(2, 1\)"),
        (torch.tensor([[0.5, 0.5], [math.nan, 0.1]]), label, InvalidValue, r"probs\[1, 0\] = nan is not finite"),
        (torch.tensor([[0.5, math.inf], [0.9, 0.1]]), label, InvalidValue, r"probs\[0, 1\] = inf is not finite"),
        (torch.tensor([[1.5, -0.5], [0.9, 0.1]]), label, InvalidValue, r"probs\[0, 1\] = -0.5 is negative: are these"),
        (torch.tensor([[0.5, 0.5], [0.9, 0.4]]), label, InvalidValue, r"row 1 of probs sums to 1.3, not 1"),
        (torch.tensor([[0.5, 0.499], [0.9, 0.1]]), label, InvalidValue, r"row 0 of probs sums to 0.999, not 1"),
        (good, torch.tensor([0, 2]), InvalidValue, r"target\[1\] = 2 is not a class: with 2 classes labels are 0 to 1"),
        (good, torch.tensor([-1, 0]), InvalidValue, r"target\[0\] = -1 is not a class"),
        (good, label.float(), InvalidType, "integer class labels, got torch.float32"),
        (good, label.bool(), InvalidType, "integer class labels, got torch.bool"),
        (good.long(), label, InvalidType, "floating-point probabilities, got torch.int64"),
        (good.numpy(), label, InvalidType, "probs must be a torch.Tensor, got ndarray"),
        (good, [0, 1], InvalidType, "target must be a torch.Tensor, got list"),
    ],
)
def test_what_is_not_a_prediction_is_refused(
    metric: Callable[[Tensor, Tensor], object], probs: Tensor, target: Tensor, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        metric(probs, target)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: metrics.top_k_error(good, label, k=3), InvalidValue, "at most the number of classes, 2, got 3"),
        (lambda: metrics.top_k_error(good, label, k=0), InvalidValue, "k must be at least 1, got 0"),
        (lambda: metrics.ece(good, label, bins=0), InvalidValue, "bins must be at least 1, got 0"),
        (lambda: metrics.ece(good, label, bins=1.5), InvalidType, "bins must be a whole number, got 1.5"),
        (lambda: metrics.nll(good, label, floor=0.0), InvalidValue, "floor must lie between 0 and 1, got 0.0"),
    ],
)
def test_options_out_of_range_are_refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


@given(
    inside=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    outside=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    recall=st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0]),
)
def test_auroc_and_fpr_pair_by_pair(inside: list[int], outside: list[int], recall: float) -> None:
    wins = [(o > i) + (o == i) / 2 for o in outside for i in inside]
    a, b = torch.tensor(inside).float(), torch.tensor(outside).float()
    assert metrics.auroc(a, b) == pytest.approx(sum(wins) / len(wins), abs=1e-15)
    threshold = min(t for t in inside if sum(i <= t for i in inside) >= recall * len(inside) - 1e-9)
    assert metrics.fpr_at(a, b, recall) == sum(o <= threshold for o in outside) / len(outside)


def test_auroc_is_scikit_learns() -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    a, b = torch.randn(200), torch.randn(300) + 1
    labels = [0] * 200 + [1] * 300
    expected = sklearn_metrics.roc_auc_score(labels, torch.cat((a, b)).numpy())
    assert metrics.auroc(a, b) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("inside", "kind", "message"),
    [
        (torch.empty(0), InvalidValue, "at least one row"),
        (torch.zeros(2, 2), InvalidValue, r"got shape \(2, 2\)"),
        (torch.tensor([math.nan]), InvalidValue, "finite scores, got nan"),
        ([0.5], InvalidType, "inside must be a torch.Tensor"),
    ],
)
def test_bad_scores(inside: Tensor, kind: type[Exception], message: str) -> None:
    for metric in (metrics.auroc, metrics.fpr_at):
        with pytest.raises(kind, match=message):
            metric(inside, torch.ones(3))
    with pytest.raises(InvalidValue, match="recall must lie in"):
        metrics.fpr_at(torch.ones(2), torch.ones(2), recall=0.0)
