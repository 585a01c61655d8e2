"""Calibration: one temperature that makes probabilities mean what they say.

A temperature T divides the logits before the softmax. It changes no prediction, only how sure it is. It is fitted on
held-out rows, never on the rows that trained the model. Each way of predicting has a temperature of its own: the mean
prediction has logits, and the sum over all masks has probabilities, whose logarithms serve as logits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dropmax.checks import NotFinite, check_labels, check_positive, check_probs
from dropmax.errors import InvalidType, InvalidValue
from dropmax.metrics import NLL_FLOOR, nll
from dropmax.outside import SCORES
from dropmax.sets import PredictionSets, rows_needed

__all__ = [
    "COVERAGES",
    "TEMPERATURE_RANGE",
    "Calibration",
    "PredictionSets",
    "apply_temperature",
    "fit_temperature",
    "rows_needed",
]

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


#: Coverages that are measured and stored, and those of which the highest with small sets is the default.
COVERAGES = (0.99, 0.95, 0.90)
_DEFAULTS = tuple(percent / 100 for percent in range(99, 89, -1))
_MEAN_SIZE = 2.0  # classes in a set on average that people still read

#: The share of ordinary rows that may be called unlike anything the model was trained on.
_FALSE_ALARMS = 0.01


@dataclass(frozen=True)
class Calibration:
    """What held-out rows say about a model: which way of predicting is *the* answer, its temperature, its sets.

    Make one with :meth:`fit`. It holds no probabilities but those given to the labels of the held-out rows, from which
    prediction sets (LAC) of any coverage follow.

    >>> probs = torch.tensor([[0.98, 0.02], [0.98, 0.02], [0.98, 0.02], [0.98, 0.02]])
    >>> found = Calibration.fit({"mean": probs}, torch.tensor([0, 0, 0, 1]))
    >>> found.apply(probs[:1])
    tensor([[0.7500, 0.2500]])
    """

    mode: str  #: the answer: ``"mean"`` or ``"exact"``
    temperatures: Mapping[str, float]  #: of each mode
    nll: Mapping[str, float]  #: of each mode with its temperature, on the held-out rows
    num_classes: int
    labels: tuple[int, ...]  #: of the held-out rows
    on_label: tuple[float, ...]  #: the probability the answer gives them
    coverage: float | None  #: of prediction sets unless told otherwise; None where there are too few rows for any
    outside: Mapping[str, float] = field(default_factory=dict)  #: limits of outside scores; none of too few rows
    by_class: bool = False  #: whether sets have a threshold for each class, and so promise their coverage for each
    source: str = "held-out rows"  #: where the rows came from, in words

    @classmethod
    def fit(
        cls,
        probs: Mapping[str, Tensor],
        labels: Tensor,
        *,
        outside: Mapping[str, Tensor] | None = None,
        by_class: bool = False,
        source: str = "held-out rows",
    ) -> Calibration:
        """Fit a temperature to the probabilities (n, K) of each mode, and choose the mode with the lowest NLL.

        ``outside`` are outside scores (n,) of the rows by kind (:meth:`dropmax.Head.outside_score`). Each gets a limit
        such that at most 1 % of the rows exceed any of them.
        """
        if not probs:
            raise InvalidValue("there are no probabilities to calibrate: give those of at least one mode")
        temperatures, scaled = {}, {}
        for mode, given in probs.items():
            temperatures[mode] = fit_temperature(given, labels, from_probs=True)
            scaled[mode] = apply_temperature(given, temperatures[mode], from_probs=True).cpu()
        labels = labels.detach().cpu()
        losses = {mode: nll(p, labels) for mode, p in scaled.items()}
        best = min(losses, key=lambda mode: losses[mode])  # of equals the first, the cheaper one
        chosen = scaled[best]
        on_label = tuple(chosen.double().gather(1, labels.long()[:, None])[:, 0].tolist())
        found = cls(
            best,
            temperatures,
            losses,
            chosen.shape[1],
            tuple(labels.tolist()),
            on_label,
            coverage=None,
            outside=_limits(outside or {}),
            by_class=by_class,
            source=source,
        )
        if by_class:
            found._check_by_class()
        possible = [c for c in _DEFAULTS if len(labels) >= rows_needed(c)]
        small = [c for c in possible if float(found.sets(chosen, c).sum(-1).double().mean()) <= _MEAN_SIZE]
        return replace(found, coverage=next(iter(small or possible[-1:]), None))

    def apply(self, probs: Tensor, mode: str | None = None) -> Tensor:
        """Return the probabilities of a mode with its temperature: proportional to ``p ** (1 / T)``.

        Drawn masks (``"mc"``) estimate the exact prediction, so they get its temperature.
        """
        name = self.mode if mode is None else {"mc": "exact"}.get(mode, mode)
        temperature = self.temperatures.get(name, self.temperatures[self.mode])  # a head without masks has one mode
        wide = probs if probs.dtype == torch.float64 else probs.float()
        return (wide.clamp_min(NLL_FLOOR).log() / temperature).softmax(-1)

    def thresholds(self, coverage: float | None = None) -> tuple[float, ...]:
        """Return the least probability with which each class is in the set of this coverage."""
        return tuple((1 - self._sets(coverage).thresholds_).tolist())

    def sets(self, probs: Tensor, coverage: float | None = None) -> Tensor:
        """Return the prediction sets (LAC) of calibrated probabilities: boolean (n, K)."""
        return self._sets(coverage).predict(probs)

    def notes(self, coverage: float | None = None) -> tuple[str, ...]:
        """Return what is to be said of sets of this coverage, such as classes without a held-out row."""
        return self._sets(coverage).notes_

    @property
    def reason(self) -> str:
        """Why this mode is the answer, in words."""
        with_T = f"temperature {self.temperatures[self.mode]:.4g}, fitted on {len(self.labels):,} {self.source}"
        others = ", ".join(f"{mode} {value:.4f}" for mode, value in self.nll.items() if mode != self.mode)
        why = f", as its NLL there is {self.nll[self.mode]:.4f} (against {others})" if others else ""
        return f"mode {self.mode}{why}; {with_T}{'; sets by class' if self.by_class else ''}"

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON without those of single rows.

        ``thresholds`` are those of :meth:`thresholds`: one number for all classes, or with ``by_class`` one for each.
        """
        possible = [c for c in COVERAGES if len(self.labels) >= rows_needed(c)]
        thresholds = {str(c): list(self.thresholds(c)) for c in possible}
        return {
            "mode": self.mode,
            "reason": self.reason,
            "temperatures": dict(self.temperatures),
            "nll": dict(self.nll),
            "rows": len(self.labels),
            "source": self.source,
            "num_classes": self.num_classes,
            "coverage": self.coverage,
            "outside": dict(self.outside),
            "by_class": self.by_class,
            "thresholds": thresholds if self.by_class else {c: each[0] for c, each in thresholds.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return :meth:`summary` with what single rows got; :meth:`from_dict` reads it."""
        return {**self.summary(), "labels": list(self.labels), "on_label": list(self.on_label)}

    @classmethod
    def from_dict(cls, values: Any, num_classes: int) -> Calibration:
        """Read what :meth:`to_dict` returned; a ValueError says what is wrong with anything else."""
        try:
            if "by_class" not in values:  # written when there was one outside score, and no sets by class
                energy = values["outside"]
                values = {**values, "by_class": False, "outside": {} if energy is None else {"energy": energy}}
            found = cls(
                values["mode"],
                {str(mode): float(T) for mode, T in values["temperatures"].items()},
                {str(mode): float(value) for mode, value in values["nll"].items()},
                values["num_classes"],
                tuple(values["labels"]),
                tuple(map(float, values["on_label"])),
                values["coverage"],
                values["outside"],
                values["by_class"],
                values["source"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"its calibration lacks or garbles {error}") from error
        low, high = TEMPERATURE_RANGE
        if not {found.mode} <= set(found.temperatures) == set(found.nll) <= {"mean", "exact"}:
            raise ValueError(f"its calibration has the mode {found.mode!r:.60}")
        if not all(low <= T <= high for T in found.temperatures.values()):
            raise ValueError(f"its calibration has a temperature outside {low:g} to {high:g}")
        if found.num_classes != num_classes or len(found.labels) != len(found.on_label) or not found.labels:
            raise ValueError("its calibration is that of another model")
        if not all(type(k) is int and 0 <= k < num_classes for k in found.labels):
            raise ValueError("its calibration holds labels that are not classes")
        if not all(0 <= p <= 1 for p in found.on_label) or not all(map(math.isfinite, found.nll.values())):
            raise ValueError("its calibration holds numbers that are not probabilities")
        if not isinstance(found.source, str):
            raise ValueError(f"its calibration comes from {found.source!r:.60}")
        if not _are_limits(found.outside):
            raise ValueError(f"its calibration has the outside scores {found.outside!r:.60}")
        if type(found.by_class) is not bool:
            raise ValueError(f"its calibration has sets by class: {found.by_class!r:.60}")
        if found.coverage not in (None, *_DEFAULTS) or (
            found.coverage and len(found.labels) < rows_needed(found.coverage)
        ):
            raise ValueError(f"its calibration has the coverage {found.coverage!r:.60}")
        return found

    def _sets(self, coverage: float | None) -> PredictionSets:
        coverage = self.coverage if coverage is None else coverage
        if coverage is None:
            raise InvalidValue(
                f"{len(self.labels)} calibration rows are too few for prediction sets: hold out more rows, at least "
                f"{rows_needed(COVERAGES[-1])}"
            )
        scores = 1 - torch.tensor(self.on_label, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # see notes
            sets = PredictionSets(coverage, by_class=self.by_class)
            return sets.fit_scores(scores, torch.tensor(self.labels), self.num_classes)

    def _check_by_class(self) -> None:
        """Refuse rows of which no class, and no group of classes, has enough for a threshold of its own."""
        least = COVERAGES[-1]
        if len(self.labels) < rows_needed(least) or bool((self._sets(least).groups_ < 0).all()):
            raise InvalidValue(
                f"sets by class need {rows_needed(least)} held-out rows of some class, or of a group of rare classes, "
                f"and none has as many among {len(self.labels)} rows of {self.num_classes} classes: "
                "hold out more rows, or leave out by_class (--by-class)"
            )


def _limits(outside: Mapping[str, Tensor]) -> dict[str, float]:
    """Return a limit of each score, all at the same rank, such that at most 1 % of the rows exceed any of them.

    There are none of fewer than 99 rows.
    """
    scores = {kind: values.double().cpu() for kind, values in outside.items()}
    rows = min(map(len, scores.values()), default=0)
    if rows < rows_needed(1 - _FALSE_ALARMS):
        return {}
    highest = torch.stack([values.argsort(stable=True).argsort() for values in scores.values()]).amax(0)
    rank = int(highest.kthvalue(math.ceil((rows + 1) * (1 - Fraction(str(_FALSE_ALARMS))))).values)
    return {kind: float(values.sort().values[rank]) for kind, values in scores.items()}


def _are_limits(values: Any) -> bool:
    return isinstance(values, dict) and all(
        kind in SCORES and type(limit) is float and math.isfinite(limit) for kind, limit in values.items()
    )


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
    may_be_probs = from_probs is None and scores.dim() > 0 and scores.numel() > 0 and bool((scores >= 0).all())
    if may_be_probs and bool(((scores.sum(-1) - 1).abs() <= 1e-4).all()):
        raise InvalidValue(
            "the logits are not negative and their rows sum to 1, like probabilities: pass from_probs=True if that is "
            "what they are, and from_probs=False if they are logits"
        )
    return scores
