"""Calibration: one temperature that makes probabilities mean what they say.

A temperature T divides the logits before the softmax. It changes no prediction, only how sure it is. It is fitted on
held-out rows, never on the rows that trained the model. Each way of predicting has a temperature of its own: the mean
prediction has logits, and the sum over all masks has probabilities, whose logarithms serve as logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dropmax.checks import NotFinite, check_labels, check_positive, check_probs
from dropmax.errors import InvalidType, InvalidValue
from dropmax.metrics import NLL_FLOOR
from dropmax.sets import PredictionSets, rows_needed

__all__ = ["TEMPERATURE_RANGE", "PredictionSets", "apply_temperature", "fit_temperature", "rows_needed"]

TEMPERATURE_RANGE = (1e-3, 1e3)
"""Every fitted temperature lies between these two."""

_PRECISION = 1e-9  # relative, of the fitted temperature
_BLOCK = 1 << 22  # numbers that are held in float64 at a time


def fit_temperature(logits: Tensor, labels: Tensor, *, from_probs: bool | None = None) -> float:
    """Return the temperature T that minimises the NLL of ``softmax(logits / T)``, to a relative 1e-6 or better.

    In beta = 1 / T the NLL is convex, with slope ``E_p[logit] - logit of the label`` and curvature ``Var_p[logit]``,
    averaged over the rows. Newton's method inside a shrinking bracket finds where the slope is zero.

    Some data have no finite optimum. Where the logits favour every label, the NLL falls for ever as T falls. T then
    stops where the mean NLL is ``log((n + 2) / (n + 1))`` for n rows: after n right answers of n, the rule of
    succession expects the next one to be right with probability (n + 1) / (n + 2). Where the logits speak against the
    labels, T stops at the upper end of :data:`TEMPERATURE_RANGE`. Where all logits of a row are equal T is 1.

    Args:
        logits: (n, K) finite logits, or with ``from_probs=True`` probabilities, whose logarithms are the logits.
            Probabilities below 1.2e-38 count as that.
        labels: (n,) integer classes.
        from_probs: say which of the two ``logits`` are. If None they are logits, and are refused if they look like
            probabilities: not negative, with rows that sum to 1.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> T = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))  # 98 % sure and 75 % right
    >>> apply_temperature(logits[:1], T)
    tensor([[0.7500, 0.2500]])
    """
    logits = _log_scores(logits, from_probs)
    if logits.ndim != 2 or logits.shape[1] < 2 or not len(logits):
        raise InvalidValue(f"logits must have shape (n, K) with n >= 1 rows and K >= 2 classes, got {logits.shape}")
    labels = check_labels(labels, *logits.shape)
    logits = logits.detach().cpu()
    if bool((logits == logits[:, :1]).all()):
        return 1.0
    low, high = (1 / T for T in reversed(TEMPERATURE_RANGE))
    beta = _minimise(logits, labels, low, high)
    floor = math.log1p(1 / (len(logits) + 1))
    if _nll(logits, labels, beta).value < floor:
        beta = _where_nll_is(floor, logits, labels, low, beta)
    return 1 / beta


def apply_temperature(logits: Tensor, temperature: float, *, from_probs: bool = False) -> Tensor:
    """Return ``softmax(logits / temperature)`` over the last dimension, in float32 at least.

    With ``from_probs=True``, ``logits`` are probabilities p and the result is proportional to ``p ** (1 / T)``.

    >>> apply_temperature(torch.tensor([[0.9, 0.1]]), 2.0, from_probs=True)
    tensor([[0.7500, 0.2500]])
    """
    check_positive("temperature", temperature)
    logits = _log_scores(logits, from_probs)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).softmax(-1)


class _Value(NamedTuple):
    """The mean NLL at one beta, with its first two derivatives in beta."""

    value: float
    slope: float
    curvature: float


def _nll(logits: Tensor, labels: Tensor, beta: float) -> _Value:
    total = torch.zeros(3, dtype=torch.float64)
    size = max(1, _BLOCK // logits.shape[1])
    for rows, target in zip(torch.split(logits, size), torch.split(labels, size), strict=True):
        below = rows.double()
        below = below - below.amax(-1, keepdim=True)  # nothing overflows, whatever beta is
        log_p = (beta * below).log_softmax(-1)
        p = log_p.exp()
        mean = (p * below).sum(-1)
        spread = (p * (below - mean[:, None]).square()).sum(-1)
        of_label = below.gather(1, target[:, None])[:, 0]
        nll = -log_p.gather(1, target[:, None])[:, 0]
        total += torch.stack((nll.sum(), (mean - of_label).sum(), spread.sum()))
    return _Value(*(total / len(logits)).tolist())


def _minimise(logits: Tensor, labels: Tensor, low: float, high: float) -> float:
    """Return the beta in [low, high] with the smallest NLL: Newton's steps, or halving where they leave the bracket."""
    for end, outside in ((low, 1), (high, -1)):
        if outside * _nll(logits, labels, end).slope >= 0:
            return end
    beta = 1.0
    while high / low > 1 + _PRECISION:
        _, slope, curvature = _nll(logits, labels, beta)
        low, high = (beta, high) if slope < 0 else (low, beta)
        step = beta - slope / curvature if curvature > 0 else math.nan
        if abs(step - beta) <= _PRECISION * beta:
            return min(max(step, low), high)
        beta = step if low < step < high else math.sqrt(low * high)
    return beta


def _where_nll_is(value: float, logits: Tensor, labels: Tensor, low: float, high: float) -> float:
    """Return the beta in [low, high], where the NLL falls, at which it has this value; ``low`` if it never has."""
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _nll(logits, labels, middle).value > value else (low, middle)
    return low


def _log_scores(scores: Tensor, from_probs: bool | None) -> Tensor:
    """Return finite logits: the scores themselves, or the logarithms of probabilities."""
    if not isinstance(scores, Tensor):
        raise InvalidType(f"logits must be a torch.Tensor, got {type(scores).__name__}: use torch.as_tensor")
    if not scores.is_floating_point():
        raise InvalidType(f"logits must be floating point, got {scores.dtype}: call .float() on them first")
    if from_probs:
        flat = scores.reshape(-1, scores.shape[-1]) if scores.dim() else scores
        if flat.numel() or scores.dim() < 2:
            check_probs(flat)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return wide.clamp_min(NLL_FLOOR).log()
    wrong = ~scores.isfinite()
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        value = scores[tuple(where)].item()
        raise NotFinite(f"logits hold {value} at {where}: drop such rows, or look for a network that has diverged")
    if from_probs is None and scores.numel() and scores.dim() and _look_like_probs(scores):
        raise InvalidValue(
            "the logits are not negative and their rows sum to 1, like probabilities: pass from_probs=True if that is "
            "what they are, and from_probs=False if they are logits"
        )
    return scores


def _look_like_probs(scores: Tensor) -> bool:
    return bool((scores >= 0).all()) and bool(((scores.sum(-1) - 1).abs() <= 1e-4).all())
