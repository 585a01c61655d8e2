"""Several runs side by side: means and intervals over seeds, differences in pairs, and how numbers are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dropmax import metrics
from dropmax.lab.experiments.tables import LEVEL, Cell, compared
from dropmax.lab.figures.runs import Run, Subject
from dropmax.lab.statistics import PairedDifference, holm, paired_by_seed

__all__ = ["LEVEL", "METRICS", "Comparison", "Difference", "Metric", "compare"]


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its label, unit, factor and digits, and what it means.

    >>> METRICS["error"].show(0.0294), METRICS["nll"].show(0.0971, 0.0069)
    ('2.94 %', '0.0971 ± 0.0069')
    """

    label: str
    factor: float
    digits: int
    unit: str
    meaning: str

    def show(self, value: float, half_width: float | None = None, *, sign: str = "") -> str:
        """Write a value, and the half-width of its interval where there is one."""
        text = f"{self.factor * value:{sign}.{self.digits}f}"
        return text + ("" if half_width is None else f" ± {self.factor * half_width:.{self.digits}f}") + self.unit

    def show_difference(self, value: float, half_width: float | None = None) -> str:
        """Write a difference, with its sign; those of percentages are points."""
        unit = " points" if self.unit else ""
        return self.show(value, half_width, sign="+").replace("-", "−").removesuffix(self.unit) + unit


#: By the names of :func:`dropmax.metrics.evaluate`; of every one, less is better.
METRICS: dict[str, Metric] = {
    "error": Metric("error", 100, 2, " %", "How many answers are wrong."),
    "top5_error": Metric("top-5 error", 100, 2, " %", "How often the truth is not among the five likeliest answers."),
    "nll": Metric(
        "NLL", 1, 4, "",
        "Mean surprise at the truth, in nats: the negative logarithm of the probability it was given. It "
        "punishes being sure and wrong.",
    ),
    "brier": Metric(
        "Brier score", 1, 4, "",
        "Squared distance of the predicted probabilities from the truth, between 0 and 2: right and sure is best.",
    ),
    "ece": Metric(
        "ECE", 100, 2, " %",
        "Expected calibration error: how far confidence is from accuracy, on average over 15 bins of confidence.",
    ),
    "aurc": Metric(
        "AURC", 1, 5, "",
        "Area under the risk-coverage curve: the mean error when the least sure answers are rejected first. It "
        "rewards being unsure exactly where one is wrong.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A method minus the baseline, in one metric."""

    mean: float  #: of the differences, in pairs where seeds pair
    paired: PairedDifference | None  #: where two seeds or more pair
    p_value: float | None = None  #: Holm-corrected for the methods compared with the baseline in this metric


@dataclass(frozen=True)
class Comparison:
    """Every metric of every method, by seed; the best marked, and those a paired test cannot tell from it.

    ``cells[method, metric]``; ``differences[method, metric]`` to the ``baseline``, softmax where there is one.
    """

    methods: dict[str, list[Run]]
    looks: dict[str, int]  #: which line of the charts is whose
    metrics: tuple[str, ...]
    cells: dict[tuple[str, str], Cell]
    baseline: str
    differences: dict[tuple[str, str], Difference]
    notes: tuple[str, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """Measure runs on the test set and compare their methods; they must be of the same data."""
    methods = Subject(runs).methods()
    notes: list[str] = []
    measured: dict[str, dict[int, dict[str, float]]] = {}
    for method, members in methods.items():
        by_seed = measured.setdefault(method, {})
        for run in members:
            if run.seed in by_seed:
                notes.append(f"{run.path} has the method and seed of another run, and is left out of the means.")
            else:
                by_seed[run.seed] = metrics.evaluate(run.outputs.probs, run.outputs.labels)
    names = tuple(next(iter(next(iter(measured.values())).values())))
    cells: dict[tuple[str, str], Cell] = {}
    differences: dict[tuple[str, str], Difference] = {}
    baseline = next((m for m, members in methods.items() if members[0].head.name == "softmax"), next(iter(methods)))
    for metric in names:
        column = {
            (method, metric): Cell({seed: found[metric] for seed, found in by_seed.items()})
            for method, by_seed in measured.items()
        }
        cells |= compared(column)
        differences |= _differences(column, column[baseline, metric])
    return Comparison(methods, Subject(runs).looks(), names, cells, baseline, differences, tuple(notes))


def _differences(column: dict[tuple[str, str], Cell], base: Cell) -> dict[tuple[str, str], Difference]:
    found: dict[tuple[str, str], Difference] = {}
    for key, cell in column.items():
        if cell is not base:
            paired = paired_by_seed(cell.values, base.values)
            found[key] = Difference(paired.mean if paired else (cell.mean or 0.0) - (base.mean or 0.0), paired)
    p_values = {key: one.paired.p_value for key, one in found.items() if one.paired is not None}
    for key, p in zip(p_values, holm(list(p_values.values())), strict=True):
        found[key] = replace(found[key], p_value=p)
    return found
