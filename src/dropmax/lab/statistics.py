"""Statistics of repeated runs: intervals, paired tests, and Holm's correction for several of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from dropmax.errors import InvalidType, InvalidValue, optional

__all__ = [
    "PairedDifference",
    "Ranks",
    "holm",
    "mean_ranks",
    "paired_by_seed",
    "paired_difference",
    "require_scipy",
    "t_interval",
]


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
    stats, n = require_scipy(), len(numbers)
    factor = stats.t.ppf(0.5 + confidence / 2, n - 1)
    return math.fsum(numbers) / n, float(factor * stats.sem(numbers))


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
    if half_width == 0:
        return PairedDifference(mean, half_width, 1.0 if mean == 0 else 0.0)
    return PairedDifference(mean, half_width, float(require_scipy().ttest_1samp(differences, 0.0).pvalue))


def paired_by_seed(a: Mapping[int, float], b: Mapping[int, float]) -> PairedDifference | None:
    """Compare two methods over the seeds that both were run with; None where these are fewer than two.

    >>> paired_by_seed({0: 4.0, 1: 5.0, 2: 9.0}, {0: 3.0, 1: 4.0, 7: 1.0})
    PairedDifference(mean=1.0, half_width=0.0, p_value=0.0)
    """
    seeds = sorted(set(a) & set(b))
    return paired_difference([a[seed] for seed in seeds], [b[seed] for seed in seeds]) if len(seeds) > 1 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method for having made several comparisons.

    The i-th smallest of m is multiplied by m - i + 1; no corrected value is below one of a smaller p-value, or above 1.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, so_far = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = so_far
    return corrected


class Ranks(NamedTuple):
    """What :func:`mean_ranks` returns.

    >>> Ranks({"a": 1.0, "b": 2.0}, critical_difference=0.8, p_value=0.01).mean["a"]
    1.0
    """

    mean: dict[str, float]
    critical_difference: float
    p_value: float


def mean_ranks(scores: Sequence[Mapping[str, float]], level: float = 0.05) -> Ranks:
    """Rank methods on every data set, 1 for the lowest score, and compare their mean ranks (Demšar, 2006).

    Two of k methods differ at ``level`` if their mean ranks over N data sets are further apart than Nemenyi's critical
    difference ``q sqrt(k (k + 1) / (6 N))``, with q the studentized range over sqrt(2). ``p_value`` is Friedman's, for
    the hypothesis that all are alike.

    >>> ranks = mean_ranks([{"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 5, "c": 7}, {"a": 0.1, "b": 0.3, "c": 0.2}])
    >>> {name: round(rank, 2) for name, rank in ranks.mean.items()}, round(ranks.critical_difference, 2)
    ({'a': 1.0, 'b': 2.33, 'c': 2.67}, 1.91)
    """
    names = list(scores[0]) if scores else []
    if len(scores) < 2 or len(names) < 3 or any(set(row) != set(names) for row in scores):
        raise InvalidValue("mean_ranks needs at least two data sets with scores of the same three or more methods")
    stats, k = require_scipy(), len(names)
    columns = [_numbers(name, [row[name] for row in scores]) for name in names]
    means = stats.rankdata(list(zip(*columns, strict=True)), axis=1).mean(axis=0)
    q = stats.studentized_range.ppf(1 - level, k, math.inf) / math.sqrt(2)
    critical = float(q * math.sqrt(k * (k + 1) / (6 * len(scores))))
    return Ranks(
        dict(zip(names, map(float, means), strict=True)), critical, float(stats.friedmanchisquare(*columns)[1])
    )


def require_scipy() -> ModuleType:
    """Return ``scipy.stats``, or raise an error that names the extra which brings it."""
    stats: ModuleType = optional("scipy.stats", "lab", "comparing repeated runs")
    return stats


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
