"""Two variants side by side: the difference of each metric, paired over the seeds, with Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidValue, check_choice
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.tables import DEFAULT_METRICS, LEVEL, METRICS
from dropmax.lab.statistics import holm, paired_difference
from dropmax.workbench import style

__all__ = ["Difference", "compare", "draw", "print_comparison"]


@dataclass(frozen=True)
class Difference:
    """``a - b`` in one metric on one data set, in the units of the tables.

    >>> Difference("mnist-1k", "error", "mean", {0: -1.0, 1: -1.2}, -1.1, 1.27, 0.06, 0.06).is_significant
    False
    """

    data: str
    metric: str
    mode: str
    values: dict[int, float]  #: by seed
    mean: float
    half_width: float
    p_value: float
    corrected: float  #: Holm's correction for all differences of the comparison

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p-value is below 5 %."""
        return self.corrected < LEVEL


def compare(
    store: Store, a: str, b: str, metrics: Sequence[str] = DEFAULT_METRICS, *, mode: str = "mean"
) -> list[Difference]:
    """Return how variant ``a`` differs from variant ``b``, per data set and metric.

    Only seeds that both were run with count, as a seed decides the training examples too.
    """
    runs = [record for record in store.runs() if record.status == "done"]
    variants = list(dict.fromkeys(record.variant for record in runs))
    for name in (a, b):
        check_choice("variant", name, variants)
    if a == b:
        raise InvalidValue(f"--compare needs two different variants, got {a!r} twice")
    for metric in metrics:
        check_choice("metric", metric, METRICS)
    found = []
    for data in dict.fromkeys(record.data for record in runs):
        for metric in metrics:
            values = [_by_seed(runs, data, variant, metric, mode) for variant in (a, b)]
            seeds = sorted(set(values[0]) & set(values[1]))
            if len(seeds) > 1:
                first, second = ([each[seed] for seed in seeds] for each in values)
                pair = paired_difference(first, second)
                by_seed = {seed: values[0][seed] - values[1][seed] for seed in seeds}
                found.append(Difference(data, metric, mode, by_seed, *pair, corrected=pair.p_value))
    if not found:
        raise InvalidValue(f"{a} and {b} share no two seeds on any data set in {store.path}: run more --runs of both")
    corrected = holm([difference.p_value for difference in found])
    return [replace(difference, corrected=p) for difference, p in zip(found, corrected, strict=True)]


def _by_seed(runs: Sequence[RunRecord], data: str, variant: str, metric: str, mode: str) -> dict[int, float]:
    chosen = [record.test[mode] for record in runs if (record.data, record.variant) == (data, variant)]
    seeds = [record.seed for record in runs if (record.data, record.variant) == (data, variant)]
    factor = METRICS[metric].factor
    return {seed: factor * found[metric] for seed, found in zip(seeds, chosen, strict=True) if metric in found}


def to_rows(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """Return differences as plain values, for JSON."""
    return [{**vars(difference), "significant": difference.is_significant} for difference in differences]


def print_comparison(a: str, b: str, differences: Sequence[Difference]) -> None:
    """Print the differences on standard output."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.markup import escape

    grid = rich_table.Table(title=escape(f"{a} less {b}"), title_justify="left", box=None)
    for title in ("data", "metric", "difference", "seeds", "p", "p (Holm)"):
        grid.add_column(title, justify="left" if title in ("data", "metric") else "right")
    for found in differences:
        digits = METRICS[found.metric].digits
        number = f"{found.mean:+.{digits}f} ± {found.half_width:.{digits}f}"
        grid.add_row(
            escape(found.data),
            METRICS[found.metric].title.removeprefix("test "),
            f"[bold]{number}[/bold]" if found.is_significant else number,
            str(len(found.values)),
            f"{found.p_value:.2g}",
            f"{found.corrected:.2g}",
        )
    console = Console(highlight=False)
    console.print(grid)
    console.print(
        "Mean and 95 % t-interval of the paired differences over the seeds; negative favours "
        f"{escape(a)}. Bold: significant at {100 * LEVEL:g} % after Holm's correction for {len(differences)} "
        "comparisons.",
        style="dim",
        soft_wrap=True,
    )


def draw(a: str, b: str, differences: Sequence[Difference], path: Path) -> None:
    """Draw the differences, one point per seed, with mean and interval, into an image file."""
    metrics = list(dict.fromkeys(difference.metric for difference in differences))
    data = list(dict.fromkeys(difference.data for difference in differences))
    size = (style.COLUMN * len(metrics), 1.2 + 0.6 * len(data))
    figure, panels = style.pyplot().subplots(1, len(metrics), figsize=size, squeeze=False, layout="constrained")
    for axes, metric in zip(panels[0], metrics, strict=True):
        axes.axvline(0, color=style.GREY, linewidth=1)
        for difference in (found for found in differences if found.metric == metric):
            y = -data.index(difference.data)
            axes.plot(list(difference.values.values()), [y] * len(difference.values), "o", alpha=0.4, color=style.BLUE)
            color = style.TRUTH if difference.is_significant else style.GREY
            axes.errorbar(difference.mean, y, xerr=difference.half_width, fmt="D", capsize=4, color=color)
        axes.set_yticks([-i for i in range(len(data))], data)
        axes.set_ylim(-len(data) + 0.5, 0.5)
        axes.set_title(METRICS[metric].title.removeprefix("test "), fontsize=9)
    figure.suptitle(f"{a} less {b}", fontsize=10)
    style.save(figure, path)
