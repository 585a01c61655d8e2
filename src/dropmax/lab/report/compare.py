"""Several runs side by side: means and intervals over seeds, and differences in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dropmax import metrics
from dropmax.lab.experiments.tables import LEVEL, Cell, compared
from dropmax.lab.figures.runs import Run, Subject
from dropmax.lab.statistics import PairedDifference, holm, paired_difference

__all__ = ["LEVEL", "Comparison", "Difference", "compare"]


@dataclass(frozen=True)
class Difference:
    """A method minus the baseline, in one metric.

    Attributes:
        mean: of the differences, in pairs where seeds pair.
        paired: the paired test, where two seeds or more pair.
        p_value: Holm-corrected for the methods compared with the baseline in this metric.
    """

    mean: float
    paired: PairedDifference | None
    p_value: float | None


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
        differences |= _differences(column, baseline, metric)
    return Comparison(methods, Subject(runs).looks(), names, cells, baseline, differences, tuple(notes))


def _differences(column: dict[tuple[str, str], Cell], baseline: str, metric: str) -> dict[tuple[str, str], Difference]:
    base = column[baseline, metric].values
    found: dict[tuple[str, str], Difference] = {}
    for (method, _), cell in column.items():
        if method == baseline:
            continue
        seeds = sorted(set(cell.values) & set(base))
        if len(seeds) > 1:
            paired = paired_difference([cell.values[s] for s in seeds], [base[s] for s in seeds])
            found[method, metric] = Difference(paired.mean, paired, None)
        else:
            mean = sum(cell.values.values()) / len(cell.values) - sum(base.values()) / len(base)
            found[method, metric] = Difference(mean, None, None)
    tested = [key for key, one in found.items() if one.paired is not None]
    corrected = holm([found[key].paired.p_value for key in tested if found[key].paired])  # type: ignore[union-attr]
    for key, p in zip(tested, corrected, strict=True):
        found[key] = Difference(found[key].mean, found[key].paired, p)
    return found
