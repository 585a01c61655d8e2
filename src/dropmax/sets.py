"""Prediction sets: all classes an input could be, with a promised coverage.

A set holds the classes whose score is at most a threshold. The threshold is an order statistic of the scores that
the true classes of n calibration rows got. If the next row comes from the same source as these, its set holds its true
class with probability at least the coverage asked for, whatever the model and however wrong its probabilities (split
conformal prediction).
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import torch
from torch import Tensor

from dropmax.checks import (
    check_choice,
    check_count,
    check_flag,
    check_labels,
    check_probability,
    check_probs,
    check_weight,
)
from dropmax.errors import InvalidValue

__all__ = ["METHODS", "PredictionSets", "rows_needed"]

METHODS = ("lac", "aps", "raps")
_SHARE_FOR_GROUPING = 1 / 3  # of the rare classes' rows: they choose the groups, and calibrate nothing


def rows_needed(coverage: float) -> int:
    """Return the fewest calibration rows that can promise this coverage: c / (1 - c), rounded up.

    >>> rows_needed(0.95), rows_needed(0.99)
    (19, 99)
    """
    check_probability("coverage", coverage)
    exact = Fraction(str(coverage))
    return math.ceil(exact / (1 - exact))


class PredictionSets:
    """Sets of classes that hold the true one with a promised probability.

    ``fit`` takes probabilities (n, K) and labels of rows that did not train the model. ``predict`` returns a boolean
    (m, K): which classes each set holds. With the scores s_i of the true classes, the threshold is the
    ceil((n + 1) coverage)-th smallest. The true coverage, as calibration rows vary, then has a Beta(k, n + 1 - k)
    distribution, whose mean is at least ``coverage``.

    Args:
        coverage: the probability with which a set is to hold the true class.
        method: the score of class k. ``"lac"``: 1 - p_k, the smallest sets on average; a set may be empty, where no
            class fits. ``"aps"``: the probability of all classes up to and including k, most probable first, minus
            u p_k with u uniform in [0, 1]: sets grow with the difficulty of the input. ``"raps"``: that, plus
            ``penalty`` for each rank beyond ``k_reg``, which cuts the long tails of APS.
        by_class: promise the coverage for each class, not only on average over classes: each class has a threshold of
            its own. Classes with too few rows share one (see below).
        penalty: of RAPS.
        k_reg: of RAPS.
        seed: of u in APS and RAPS. Row i of every call has the same u.

    With ``by_class`` a class needs :func:`rows_needed` rows of its own. Rarer classes are put into groups of similar
    scores, each large enough, and the promise holds for each group. A third of their rows, drawn with ``seed``, choose
    the groups, and the rest calibrate: the same rows cannot do both. Classes without any row, and rare classes that do
    not make up a group, get the threshold of all rows. ``notes_`` says so in words, and ``fit`` warns.

    After ``fit``: ``thresholds_`` (K,), ``groups_`` (K,) which classes share a threshold (-1: that of all rows),
    ``scores_`` and ``labels_`` of the calibration rows, and ``notes_``.

    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    >>> sets = PredictionSets(coverage=0.6).fit(probs, torch.tensor([0, 0, 1]))
    >>> sets.predict(torch.tensor([[0.95, 0.05], [0.55, 0.45], [0.4, 0.6]]))  # neither class fits the second row
    tensor([[ True, False],
            [False, False],
            [False,  True]])
    """

    def __init__(
        self,
        coverage: float = 0.95,
        method: str = "lac",
        by_class: bool = False,
        *,
        penalty: float = 0.01,
        k_reg: int = 5,
        seed: int = 0,
    ) -> None:
        check_probability("coverage", coverage)
        check_choice("method", method, METHODS)
        check_flag("by_class", by_class)
        check_weight("penalty", penalty)
        check_count("k_reg", k_reg, least=0)
        check_count("seed", seed, least=0)
        self.coverage, self.method, self.by_class = coverage, method, by_class
        self.penalty, self.k_reg, self.seed = penalty, k_reg, seed

    def fit(self, probs: Tensor, labels: Tensor) -> PredictionSets:
        """Find the thresholds from held-out probabilities (n, K) and labels (n,); return self."""
        probs = check_probs(probs)
        labels = check_labels(labels, *probs.shape)
        scores = self.scores(probs, self._uniform(len(probs))).gather(1, labels[:, None])[:, 0]
        return self.fit_scores(scores, labels, probs.shape[1])

    def predict(self, probs: Tensor, coverage: float | None = None) -> Tensor:
        """Return which classes each row's set holds, boolean (m, K), at the coverage of ``fit`` or another."""
        if not hasattr(self, "thresholds_"):
            raise InvalidValue("these prediction sets have no threshold yet: call fit(probs, labels) first")
        thresholds = self.thresholds_
        if coverage is not None and coverage != self.coverage:
            other = PredictionSets(
                coverage, self.method, self.by_class, penalty=self.penalty, k_reg=self.k_reg, seed=self.seed
            )
            thresholds = other.fit_scores(self.scores_, self.labels_, len(thresholds)).thresholds_
        device = probs.device if isinstance(probs, Tensor) else None
        if isinstance(probs, Tensor) and probs.dim() == 2 and probs.shape[1] != len(thresholds):
            raise InvalidValue(f"probs have {probs.shape[1]} classes, but fit saw {len(thresholds)}")
        if isinstance(probs, Tensor) and probs.dim() == 2 and len(probs) == 0:
            return torch.zeros(probs.shape, dtype=torch.bool, device=device)
        probs = check_probs(probs)
        return (self.scores(probs, self._uniform(len(probs))) <= thresholds).to(device)

    def scores(self, probs: Tensor, u: Tensor) -> Tensor:
        """Return the score of every class (n, K): the lower, the sooner it is in the set. LAC ignores ``u`` (n,)."""
        if self.method == "lac":
            return 1 - probs
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        scores = ordered.cumsum(-1) - u[:, None] * ordered
        if self.method == "raps":
            rank = torch.arange(1, probs.shape[1] + 1, dtype=probs.dtype)
            scores = scores + self.penalty * (rank - self.k_reg).clamp_min(0)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def __repr__(self) -> str:
        return f"PredictionSets(coverage={self.coverage}, method={self.method!r}, by_class={self.by_class})"

    def _uniform(self, rows: int) -> Tensor:
        return torch.rand(rows, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)

    def fit_scores(self, scores: Tensor, labels: Tensor, num_classes: int) -> PredictionSets:
        """Find the thresholds from the scores (n,) of the true classes, as :meth:`fit` computes them; return self."""
        needed = rows_needed(self.coverage)
        if len(scores) < needed:
            raise InvalidValue(
                f"a coverage of {self.coverage} needs at least {needed} calibration rows, got {len(scores)}: "
                f"hold out more rows, or ask for at most {len(scores) / (len(scores) + 1):.4g}"
            )
        self.scores_, self.labels_ = scores, labels
        counts = labels.bincount(minlength=num_classes)
        self.groups_ = torch.full((num_classes,), -1)
        self.thresholds_ = self._quantile(scores).repeat(num_classes)
        if self.by_class:
            self._calibrate_by_class(counts, needed)
        self.notes_ = self._notes(counts)
        for note in self.notes_:
            warnings.warn(note, stacklevel=3)
        return self

    def _calibrate_by_class(self, counts: Tensor, needed: int) -> None:
        frequent = (counts >= needed).nonzero()[:, 0]
        for group, k in enumerate(frequent.tolist()):
            self.groups_[k] = group
            self.thresholds_[k] = self._quantile(self.scores_[self.labels_ == k])
        rare = (counts < needed)[self.labels_].nonzero()[:, 0]
        generator = torch.Generator().manual_seed(self.seed)
        rare = rare[torch.randperm(len(rare), generator=generator)]
        cut = int(len(rare) * _SHARE_FOR_GROUPING)
        choosing, calibrating = rare[:cut], rare[cut:]
        for group, classes in enumerate(self._group(choosing, calibrating, needed), start=len(frequent)):
            self.groups_[classes] = group
            members = calibrating[torch.isin(self.labels_[calibrating], classes)]
            self.thresholds_[classes] = self._quantile(self.scores_[members])

    def _group(self, choosing: Tensor, calibrating: Tensor, needed: int) -> list[Tensor]:
        """Put rare classes, ordered by their mean score among ``choosing``, into runs of enough calibrating rows."""
        num_classes = len(self.groups_)
        labels = self.labels_[choosing]
        counts = labels.bincount(minlength=num_classes)
        means = labels.bincount(self.scores_[choosing], minlength=num_classes) / counts
        order = means.argsort()[: int((counts > 0).sum())]  # NaN, where a class has no row, sorts last
        sizes = self.labels_[calibrating].bincount(minlength=num_classes)
        groups: list[list[int]] = [[]]
        for k in order.tolist():
            if sum(int(sizes[j]) for j in groups[-1]) >= needed:
                groups.append([])
            groups[-1].append(k)
        if sum(int(sizes[j]) for j in groups[-1]) < needed:  # too few were left for a group of their own
            rest = groups.pop()
            if groups:
                groups[-1] += rest
        return [torch.tensor(group) for group in groups]

    def _quantile(self, scores: Tensor) -> Tensor:
        """Return the ceil((n + 1) coverage)-th smallest score; the fraction keeps 0.07 * 100 from becoming 7.0...01."""
        k = math.ceil((len(scores) + 1) * Fraction(str(self.coverage)))
        return scores.kthvalue(k).values

    def _notes(self, counts: Tensor) -> tuple[str, ...]:
        missing = (counts == 0).nonzero()[:, 0].tolist()
        notes = []
        if missing:
            notes.append(
                f"{len(missing)} of {len(counts)} classes have no calibration row ({_listed(missing)}): "
                "their sets use the threshold of all rows, and no coverage is promised for them"
            )
        if self.by_class:
            pooled = ((self.groups_ < 0) & (counts > 0)).nonzero()[:, 0].tolist()
            if pooled:
                notes.append(
                    f"{len(pooled)} rare classes do not make up a group of {rows_needed(self.coverage)} calibration "
                    f"rows ({_listed(pooled)}): they use the threshold of all rows"
                )
            sizes = self.groups_[self.groups_ >= 0].bincount()
            shared = int(sizes[sizes > 1].sum())
            if shared:
                notes.append(
                    f"{shared} rare classes share {int((sizes > 1).sum())} thresholds: "
                    "the coverage is promised for each such group, not for each class in it"
                )
        return tuple(notes)


def _listed(classes: list[int]) -> str:
    shown = ", ".join(map(str, classes[:10]))
    return f"class {shown}" if len(classes) == 1 else f"classes {shown}" + (", ..." if len(classes) > 10 else "")
