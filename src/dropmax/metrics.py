"""How good predictions are: error, likelihood, calibration, and accuracy when unsure ones are rejected.

Every function takes probabilities ``probs`` (N, K) and integer labels ``target`` (N,), checks both, and computes in
float64 whatever the dtype of the input. Fractions are in [0, 1], not in percent. Where two classes share the highest
probability, the one with the lower index is the prediction. The confidence of a prediction is its probability.
Rows must sum to one within 1e-4, or within 1e-2 where ``probs`` comes in a 16-bit dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dropmax.checks import check_count, check_labels, check_probs
from dropmax.errors import InvalidType, InvalidValue

__all__ = [
    "NLL_FLOOR",
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
    "reliability_bins",
    "risk_coverage_curve",
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
    check_count("k", k)
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
    check_count("bins", bins)
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


def __getattr__(name: str) -> Any:
    """Find the statistics of repeated runs, which were here until version 0.2, where they are now."""
    if name in ("PairedDifference", "paired_difference", "t_interval"):
        return getattr(import_module("dropmax.lab.statistics"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _mean(condition: Tensor) -> float:
    return float(condition.double().mean())


def _checked(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probs in float64 and target in int64, on the CPU, having checked that they are what they should be."""
    probs = check_probs(probs)
    return probs, check_labels(target, *probs.shape)
