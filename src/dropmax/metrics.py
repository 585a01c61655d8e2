"""How good predictions are: error, likelihood, calibration, and what rejecting unsure ones buys.

Every function takes probabilities ``probs`` (N, K) and integer labels ``target`` (N,), checks both, and computes in
float64 whatever the dtype of the input. Fractions are in [0, 1], not in percent. Where two classes share the highest
probability, the one with the lower index is the prediction. The confidence of a prediction is its probability.
Rows must sum to one within 1e-4, or within 1e-2 where ``probs`` comes in a 16-bit dtype.

The end of the file has the statistics of repeated runs: ``t_interval`` and ``paired_difference``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dropmax.checks import check_labels, check_probs
from dropmax.errors import InvalidType, InvalidValue

__all__ = [
    "NLL_FLOOR",
    "PairedDifference",
    "ReliabilityBins",
    "accuracy_rejection_curve",
    "aurc",
    "auroc",
    "brier",
    "ece",
    "error",
    "evaluate",
    "fpr_at",
    "nll",
    "paired_difference",
    "reliability_bins",
    "risk_coverage_curve",
    "t_interval",
    "top_k_error",
]

NLL_FLOOR = torch.finfo(torch.float32).tiny
"""The smallest normal float32, 1.2e-38. No probability that float32 holds in full is altered by this floor, and a label
of probability zero costs 87.3 nats."""


def evaluate(probs: Tensor, target: Tensor) -> dict[str, float]:
    """Return error, nll, brier, ece and aurc, and for more than ten classes top5_error.

    >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    >>> {name: round(value, 3) for name, value in evaluate(probs, torch.tensor([0, 0])).items()}
    {'error': 0.5, 'nll': 0.511, 'brier': 0.37, 'ece': 0.35, 'aurc': 0.25}
    """
    metrics = {
        "error": error(probs, target),
        "nll": nll(probs, target),
        "brier": brier(probs, target),
        "ece": ece(probs, target),
        "aurc": aurc(probs, target),
    }
    if probs.shape[1] > 10:
        metrics["top5_error"] = top_k_error(probs, target, k=5)
    return metrics


def error(probs: Tensor, target: Tensor) -> float:
    """Return the fraction of examples whose most probable class is not the label.

    >>> error(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    probs, target = _checked(probs, target)
    return _mean(probs.argmax(1) != target)


def top_k_error(probs: Tensor, target: Tensor, k: int = 5) -> float:
    """Return the fraction of examples whose label is not among the ``k`` most probable classes.

    Classes of equal probability rank by their index, so that ``k=1`` is :func:`error`.

    >>> top_k_error(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]), k=2)
    0.5
    """
    probs, target = _checked(probs, target)
    k = _positive("k", k)
    if k > probs.shape[1]:
        raise InvalidValue(f"k must be at most the number of classes, {probs.shape[1]}, got {k}")
    of_label = probs.gather(1, target[:, None])
    before = torch.arange(probs.shape[1]) < target[:, None]
    rank = ((probs > of_label) | ((probs == of_label) & before)).sum(1)
    return _mean(rank >= k)


def nll(probs: Tensor, target: Tensor, floor: float = NLL_FLOOR) -> float:
    """Return the mean of ``-log max(probs[i, target[i]], floor)``, in nats.

    Sparsemax gives labels a probability of exactly zero, and so does any softmax that underflows; the floor keeps the
    result finite. Compare such numbers with care: each of these labels adds ``-log floor`` and nothing softer.

    >>> round(nll(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0])), 4)
    0.3466
    >>> round(nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])), 2)
    87.34
    """
    probs, target = _checked(probs, target)
    if not 0 < floor < 1:
        raise InvalidValue(f"floor must lie between 0 and 1, got {floor}")
    return float(-probs.gather(1, target[:, None]).clamp(min=floor).log().mean())


def brier(probs: Tensor, target: Tensor) -> float:
    """Return the mean over examples of ``sum_k (probs[i, k] - [target[i] == k])^2``, between 0 and 2.

    >>> round(brier(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), 6)
    0.08
    """
    probs, target = _checked(probs, target)
    one_hot = torch.zeros_like(probs).scatter_(1, target[:, None], 1.0)
    return float((probs - one_hot).square().sum(1).mean())


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """What :func:`reliability_bins` returns; empty bins have count 0 and NaN for confidence and accuracy.

    >>> bins = reliability_bins(torch.tensor([[0.9, 0.1]]), torch.tensor([0]), bins=2)
    >>> bins.edges.tolist(), bins.accuracy.tolist()
    ([0.0, 0.5, 1.0], [nan, 1.0])
    """

    edges: Tensor  # (bins + 1,)
    count: Tensor  # (bins,) integers
    confidence: Tensor  # (bins,) mean confidence
    accuracy: Tensor  # (bins,)


def reliability_bins(probs: Tensor, target: Tensor, bins: int = 15) -> ReliabilityBins:
    """Sort examples by confidence into bins of equal width; bin b is ``[b / bins, (b + 1) / bins)``, the last closed.

    >>> bins = reliability_bins(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]), bins=2)
    >>> bins.count.tolist(), round(float(bins.confidence[1]), 3), float(bins.accuracy[1])
    ([0, 2], 0.75, 0.5)
    """
    probs, target = _checked(probs, target)
    bins = _positive("bins", bins)
    confidence, predicted = probs.max(1).values, probs.argmax(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    # Inner edges only: a confidence that rounding has put a little over 1 stays in the last bin.
    index = torch.bucketize(confidence, edges[1:-1], right=True)
    count = torch.bincount(index, minlength=bins)
    sum_confidence = torch.bincount(index, weights=confidence, minlength=bins)
    sum_correct = torch.bincount(index, weights=(predicted == target).double(), minlength=bins)
    return ReliabilityBins(edges, count, sum_confidence / count, sum_correct / count)


def ece(probs: Tensor, target: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error: ``sum_b count_b / N * |accuracy_b - confidence_b|``.

    The bins are those of :func:`reliability_bins`: of equal width, by the confidence of the predicted class.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])), 3)
    0.35
    """
    reliability = reliability_bins(probs, target, bins)
    gap = torch.nan_to_num(reliability.accuracy - reliability.confidence).abs()  # an empty bin has no gap
    return float((reliability.count * gap).sum() / reliability.count.sum())


def risk_coverage_curve(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(coverage, risk)``: the error among the i most confident examples, for i = 1 .. N at coverage i / N.

    Examples of equal confidence could come in any order. The risk is the expected value over all their orders, so it
    does not depend on the order of the examples given.

    >>> coverage, risk = risk_coverage_curve(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    >>> coverage.tolist(), risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    probs, target = _checked(probs, target)
    confidence, order = probs.max(1).values.sort(descending=True)
    wrong = (probs.argmax(1) != target)[order].double()
    # In a random order of a group of ties the expected number of errors grows in a straight line across the group.
    _, group, size = torch.unique_consecutive(confidence, return_inverse=True, return_counts=True)
    errors = torch.bincount(group, weights=wrong)
    end = size.cumsum(0)
    kept = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    into_group = kept - (end - size)[group]
    expected_errors = (errors.cumsum(0) - errors)[group] + errors[group] * into_group / size[group]
    return kept / len(wrong), expected_errors / kept


def accuracy_rejection_curve(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(coverage, accuracy)``: the accuracy on what is left when the least confident examples are rejected.

    It is one minus :func:`risk_coverage_curve`, at the same coverages 1 / N .. 1.

    >>> coverage, accuracy = accuracy_rejection_curve(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    >>> coverage.tolist(), accuracy.tolist()
    ([0.5, 1.0], [1.0, 0.5])
    """
    coverage, risk = risk_coverage_curve(probs, target)
    return coverage, 1 - risk


def aurc(probs: Tensor, target: Tensor) -> float:
    """Return the area under the risk-coverage curve: the mean of its risk over the N coverages.

    Zero where every prediction is right; the error rate, on average, where confidence says nothing.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.25
    """
    _, risk = risk_coverage_curve(probs, target)
    return float(risk.mean())


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that an outside row scores higher than an inside row, ties counting one half.

    It is the area under the ROC curve of a score that is to be high for inputs unlike the training data: 1 where it
    separates them perfectly, 1/2 where it says nothing.

    >>> auroc(inside=torch.tensor([0.1, 0.2, 0.6]), outside=torch.tensor([0.6, 0.9]))
    0.9166666666666666
    """
    inside, outside = _scores("inside", inside), _scores("outside", outside)
    ordered = inside.sort().values
    below = torch.searchsorted(ordered, outside, right=False)
    up_to = torch.searchsorted(ordered, outside, right=True)
    return float((below + up_to).sum()) / (2 * len(inside) * len(outside))


def fpr_at(inside: Tensor, outside: Tensor, recall: float = 0.95) -> float:
    """Return the share of outside rows that pass as inside where the share ``recall`` of inside rows passes.

    A row passes if its score is at most the threshold, which is the smallest inside score that lets through at least
    this share of the inside rows.

    >>> fpr_at(inside=torch.tensor([0.1, 0.2, 0.6]), outside=torch.tensor([0.6, 0.9]))
    0.5
    """
    inside, outside = _scores("inside", inside), _scores("outside", outside)
    if not 0 < recall <= 1:
        raise InvalidValue(f"recall must lie in (0, 1], such as 0.95, got {recall}")
    threshold = inside.kthvalue(math.ceil(recall * len(inside) - 1e-9)).values
    return _mean(outside <= threshold)


def _scores(name: str, scores: Tensor) -> Tensor:
    """Return finite scores (n,) in float64 on the CPU."""
    if not isinstance(scores, Tensor):
        raise InvalidType(f"{name} must be a torch.Tensor, got {type(scores).__name__}: use torch.as_tensor")
    if scores.ndim != 1 or not len(scores):
        raise InvalidValue(f"{name} must hold one score for each of at least one row, got shape {tuple(scores.shape)}")
    scores = scores.detach().cpu().double()
    if not bool(scores.isfinite().all()):
        raise InvalidValue(f"{name} must hold finite scores, got {float(scores[~scores.isfinite()][0])}")
    return scores


def t_interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the mean of ``values`` and the half-width of its Student t interval, ``t s / sqrt(n)``.

    For five runs and 95 % the factor t is 2.776.

    >>> mean, half_width = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> round(mean, 3), round(half_width, 3)
    (3.0, 1.963)
    """
    numbers = _numbers("values", values)
    if not 0 < confidence < 1:
        raise InvalidValue(f"confidence must lie between 0 and 1, such as 0.95, got {confidence}")
    standard_error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    return statistics.fmean(numbers), _t_quantile(confidence, len(numbers) - 1) * standard_error


class PairedDifference(NamedTuple):
    """What :func:`paired_difference` returns: the mean of ``a - b``, its interval's half-width, and the p-value.

    >>> PairedDifference(mean=-0.5, half_width=0.25, p_value=0.01).interval
    (-0.75, -0.25)
    """

    mean: float
    half_width: float
    p_value: float

    @property
    def interval(self) -> tuple[float, float]:
        """The two ends of the interval."""
        return self.mean - self.half_width, self.mean + self.half_width


def paired_difference(a: Iterable[float], b: Iterable[float], confidence: float = 0.95) -> PairedDifference:
    """Compare two methods run on the same seeds or splits: Student's paired t test of ``a - b``, two-sided.

    Where every pair differs by the same amount the p-value is 1 if that amount is zero, and otherwise 0.

    >>> difference = paired_difference([4.1, 4.3, 3.9], [3.0, 3.1, 3.1])
    >>> round(difference.mean, 3), round(difference.p_value, 3)
    (1.033, 0.013)
    """
    first, second = _numbers("a", a), _numbers("b", b)
    if len(first) != len(second):
        raise InvalidValue(f"a and b must pair up, got {len(first)} and {len(second)} values")
    differences = [left - right for left, right in zip(first, second, strict=True)]
    mean, half_width = t_interval(differences, confidence)
    standard_error = statistics.stdev(differences) / math.sqrt(len(differences))
    if standard_error == 0:
        return PairedDifference(mean, half_width, 1.0 if mean == 0 else 0.0)
    return PairedDifference(mean, half_width, _t_two_sided(mean / standard_error, len(differences) - 1))


def _t_two_sided(t: float, df: int) -> float:
    """P(|T| > t) for Student's T: the regularised incomplete beta function I_x(df/2, 1/2) at x = df / (df + t^2)."""
    square = t * t
    if math.isinf(square):
        return 0.0
    return _incomplete_beta(df / 2, 0.5, df / (df + square), square / (df + square))


def _t_quantile(confidence: float, df: int) -> float:
    """Return t with P(|T| <= t) = confidence, by bisection, down to neighbouring floats."""
    tail = 1 - confidence
    low, high = 0.0, 1.0
    while _t_two_sided(high, df) > tail:
        low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return middle
        if _t_two_sided(middle, df) > tail:
            low = middle
        else:
            high = middle


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b), given also y = 1 - x, which the caller knows more precisely than a subtraction would give it."""
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # past here the fraction converges slowly: use I_x(a, b) = 1 - I_y(b, a)
        return 1 - _incomplete_beta(b, a, y, x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    return math.exp(log_front) / a * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1/(1 + d1/(1 + d2/(1 + ...))) of I_x(a, b), by Wallis's recurrence for convergents A/B.

    d_{2m} = m (b - m) x / ((a + 2m - 1)(a + 2m)) and d_{2m+1} = -(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1)).
    """
    # Convergents of 1 + d1/(1 + ...), scaled so that the denominator stays 1.
    top_before, bottom_before, top, value = 1.0, 0.0, 1.0, 1.0
    for n in range(1, 10_000):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        new_top, new_bottom = top + d * top_before, 1.0 + d * bottom_before
        top_before, bottom_before, top = top / new_bottom, 1.0 / new_bottom, new_top / new_bottom
        if abs(top - value) <= 1e-16 * abs(top):
            break
        value = top
    return 1 / top


def _numbers(name: str, values: Iterable[float]) -> list[float]:
    """Return at least two finite numbers."""
    try:
        if isinstance(values, str):
            raise TypeError
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch, of a row that is not one number
        raise InvalidType(f"{name} must be a sequence of numbers, got {values!r}") from None
    if len(numbers) < 2:
        raise InvalidValue(f"{name} needs at least two numbers for an interval, got {numbers}")
    if not all(math.isfinite(number) for number in numbers):
        raise InvalidValue(f"{name} must be finite, got {numbers}")
    return numbers


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be a positive integer, got {value!r}")
    if value < 1:
        raise InvalidValue(f"{name} must be a positive integer, got {value}")
    return value


def _mean(condition: Tensor) -> float:
    return float(condition.double().mean())


def _checked(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probs in float64 and target in int64, on the CPU, having checked that they are what they should be."""
    probs = check_probs(probs)
    return probs, check_labels(target, *probs.shape)
