"""Results as pictures: every seed beside means and intervals, validation curves, critical-difference diagrams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dropmax.errors import InvalidValue, check_choice
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.tables import METRICS, Table, by_seed
from dropmax.lab.statistics import Ranks, mean_ranks
from dropmax.workbench import style

if TYPE_CHECKING:
    from dropmax.lab.experiments.compare import Difference

__all__ = ["cliques", "curves", "differences", "points", "ranks", "short_title"]

#: What a validation curve can show: a title, and the factor to its unit.
_CURVES = {"error": ("error on held-out rows (%)", 100.0), "nll": ("NLL on held-out rows (nats)", 1.0)}


def short_title(metric: str) -> str:
    """Return the title of a metric without the word "test"."""
    return METRICS[metric].title.removeprefix("test ")


def differences(a: str, b: str, found: Sequence[Difference]) -> Any:
    """Draw the paired differences of two variants, one point per seed, with mean and interval."""
    metrics = list(dict.fromkeys(difference.metric for difference in found))
    data = list(dict.fromkeys(difference.data for difference in found))
    size = (style.COLUMN * len(metrics), 1.2 + 0.6 * len(data))
    figure, panels = style.pyplot().subplots(1, len(metrics), figsize=size, squeeze=False, layout="constrained")
    for axes, metric in zip(panels[0], metrics, strict=True):
        axes.axvline(0, color=style.GREY, linewidth=1)
        for one in (one for one in found if one.metric == metric):
            color = style.TRUTH if one.is_significant else style.GREY
            _seeds(axes, -data.index(one.data), one.values, one.mean, one.half_width, color)
        axes.set_yticks([-i for i in range(len(data))], data)
        axes.set_ylim(-len(data) + 0.5, 0.5)
        axes.set_title(short_title(metric), fontsize=9)
    figure.suptitle(f"{a} less {b}", fontsize=10)
    return figure


def points(table: Table) -> Any | None:
    """Draw a table: one point per seed, a row per variant and a panel per data set, with means and intervals."""
    shown = [c for c in table.columns if any(table.cells[variant, c.data].values for variant in table.rows)]
    if not shown:
        return None
    rows = [variant for variant in table.rows if any(table.cells[variant, c.data].values for c in shown)]
    size = (1.5 + style.COLUMN * len(shown), 0.9 + 0.3 * len(rows))
    figure, panels = style.pyplot().subplots(1, len(shown), figsize=size, squeeze=False, sharey=True)
    for axes, column in zip(panels[0], shown, strict=True):
        for place, variant in enumerate(rows):
            cell = table.cells[variant, column.data]
            _seeds(axes, -place, cell.values, cell.mean, cell.half_width, style.RED)
        axes.set_yticks([-place for place in range(len(rows))], [style.plain(table.rows[name]) for name in rows])
        axes.set(xlabel=METRICS[table.metric].title, title=style.plain(column.title))
    return figure


def _seeds(
    axes: Any, y: float, values: Mapping[int, float], mean: float | None, half_width: float | None, color: str
) -> None:
    """Draw one row: a point per seed, and where there are any their mean and interval."""
    axes.plot(list(values.values()), [y] * len(values), "o", alpha=0.4, color=style.BLUE)
    if mean is not None:
        axes.errorbar(mean, y, xerr=half_width, fmt="D", capsize=3, markersize=4, color=color)


def curves(
    runs: Sequence[RunRecord], metrics: Sequence[str] = ("error", "nll"), names: Mapping[str, str] | None = None
) -> Any | None:
    """Draw validation metrics against the epoch: the mean over the seeds, and a band from the lowest to the highest.

    The runs are of one data set; ``names`` are the variants to draw and what to call them, by default all. The axis
    ends at 2.5 times the highest value at the end of training. Returns None where no run was measured in training.
    """
    for metric in metrics:
        check_choice("metric of a curve", metric, _CURVES)
    by_variant: dict[str, list[RunRecord]] = {}
    for record in runs:
        if len(record.curve) > 1:
            by_variant.setdefault(record.variant, []).append(record)
    chosen = names or {variant: variant for variant in by_variant}
    for variant in chosen:
        check_choice("variant with a curve", variant, list(by_variant))
    if not chosen:
        return None
    figure, panels = style.pyplot().subplots(1, len(metrics), figsize=(style.PAGE, 2.9), squeeze=False)
    for axes, metric in zip(panels[0], metrics, strict=True):
        title, factor = _CURVES[metric]
        ends = []
        for place, (variant, name) in enumerate(chosen.items()):
            lines = [
                ([row["epoch"] for row in record.curve], [factor * row["validation"][metric] for row in record.curve])
                for record in by_variant[variant]
            ]
            style.band(axes, lines, *style.look(place), label=style.plain(name, 40))
            ends += [values[-1] for _, values in lines]
        axes.set(xlabel="epoch", ylabel=title)
        axes.set_ylim(top=min(axes.get_ylim()[1], 2.5 * max(ends)))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, handlelength=3)
    return figure


def ranks(studies: Sequence[Sequence[RunRecord]], metrics: Sequence[str], names: Mapping[str, str]) -> Any:
    """Draw a critical-difference diagram per metric (Demšar, 2006): mean ranks over data sets, the best on the left.

    A bar joins methods whose mean ranks lie within Nemenyi's critical difference, which is drawn to scale. ``studies``
    are the finished runs on each data set, ``names`` the variants to rank and what to call them; ``**bold**`` is bold.
    """
    figure, panels = style.pyplot().subplots(
        len(metrics), 1, figsize=(style.PAGE, (0.9 + 0.11 * len(names)) * len(metrics) + 0.2), squeeze=False
    )
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        found = mean_ranks([_means(runs, metric, names) for runs in studies])
        _diagram(axes, found, f"{short_title(metric)}, {len(studies)} data sets")
    return figure


def _means(runs: Sequence[RunRecord], metric: str, names: Mapping[str, str]) -> dict[str, float]:
    check_choice("metric", metric, METRICS)
    found = {}
    for variant, name in names.items():
        values = by_seed((record for record in runs if record.variant == variant), metric).values()
        if not values:
            raise InvalidValue(f"{runs[0].data if runs else 'a study'} has no runs of {variant!r}: rank what all have")
        found[name] = math.fsum(values) / len(values)
    return found


def cliques(found: Ranks) -> list[tuple[float, float]]:
    """Return the longest stretches of mean ranks within the critical difference.

    >>> cliques(Ranks({"a": 1.0, "b": 1.5, "c": 2.5, "d": 4.0}, critical_difference=1.2, p_value=0.01))
    [(1.0, 1.5), (1.5, 2.5)]
    """
    stretches: list[tuple[float, float]] = []
    values = sorted(found.mean.values())
    for low in values:
        high = max(value for value in values if value - low <= found.critical_difference)
        if high > low and not any(high <= other for _, other in stretches):
            stretches.append((low, high))
    return stretches


def _diagram(axes: Any, found: Ranks, title: str) -> None:
    order = sorted(found.mean, key=found.mean.__getitem__)
    count, half = len(order), (len(order) + 1) // 2
    bars = cliques(found)
    first = -0.9 - 0.3 * len(bars)  # where the names begin, below the bars
    axes.set(xlim=(0.4, count + 0.6), ylim=(first - half + 0.4, 2.6))
    style.bare(axes)
    axes.hlines(0, 1, count, color="black", linewidth=0.9)
    for rank in range(1, count + 1):
        axes.vlines(rank, 0, 0.2, color="black", linewidth=0.9)
        axes.text(rank, 0.3, str(rank), ha="center", va="bottom", fontsize=7)
    for place, name in enumerate(order):
        left = place < half
        level = first - (place if left else count - 1 - place)
        end, side = (0.9, -0.06) if left else (count + 0.1, 0.06)
        axes.plot([found.mean[name]] * 2 + [end], [0, level, level], color=style.GREY, linewidth=0.8)
        shown, weight = style.plain(name.strip("*"), 40), "bold" if name.startswith("**") else "normal"
        words = f"{shown}  {found.mean[name]:.1f}" if left else f"{found.mean[name]:.1f}  {shown}"
        axes.text(end + side, level, words, ha="right" if left else "left", va="center", fontsize=8, fontweight=weight)
    for height, (low, high) in enumerate(bars):
        axes.hlines(-0.35 - 0.3 * height, low - 0.06, high + 0.06, color=style.BLUE, linewidth=3)
    width = min(found.critical_difference, count - 1.0)
    axes.plot([1, 1, 1, 1 + width, 1 + width, 1 + width], [1.5, 1.9, 1.7, 1.7, 1.9, 1.5], color="black", linewidth=0.9)
    wider = ", wider than this scale" if width < found.critical_difference else ""
    axes.text(1 + width / 2, 1.85, f"critical difference {found.critical_difference:.1f}{wider}", ha="center",
              va="bottom", fontsize=7)  # fmt: skip
    axes.set_title(title, fontsize=9)
