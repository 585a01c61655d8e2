"""Which rows of a study differ over several data sets? ``python -m benchmarks.critical_difference STUDY... --out PNG``.

Each STUDY is a directory of ``dropmax reproduce`` with the same variants. Their means over the seeds are ranked on
every data set; a bar joins methods whose mean ranks differ by less than Nemenyi's critical difference.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from dropmax.lab.experiments import Store
from dropmax.lab.statistics import Ranks, mean_ranks
from dropmax.workbench import style

METRICS = {"error": "test error", "nll_scaled": "NLL, scaled", "aurc": "AURC"}


def scores(study: Path, metric: str) -> dict[str, float]:
    """Return the mean of a metric over the seeds, for each variant."""
    values: dict[str, list[float]] = {}
    for record in Store(study).runs():
        if record.status == "done":
            values.setdefault(record.variant, []).append(record.test["mean"][metric])
    return {variant: math.fsum(found) / len(found) for variant, found in values.items()}


def cliques(ranks: Ranks) -> list[tuple[float, float]]:
    """Return the longest stretches of mean ranks within the critical difference."""
    found: list[tuple[float, float]] = []
    values = sorted(ranks.mean.values())
    for low in values:
        high = max(value for value in values if value - low <= ranks.critical_difference)
        if high > low and not any(high <= other for _, other in found):
            found.append((low, high))
    return found


def draw(axes: Any, ranks: Ranks, title: str) -> None:
    """Draw the methods on a line of mean ranks, best on the left, with names below."""
    order = sorted(ranks.mean, key=ranks.mean.__getitem__)
    half = (len(order) + 1) // 2
    axes.set(xlim=(0.4, len(order) + 0.6), ylim=(-1.6 - half, 1.6))
    axes.axis("off")
    axes.hlines(0, 1, len(order), color="black", linewidth=0.9)
    for rank in range(1, len(order) + 1):
        axes.vlines(rank, 0, 0.15, color="black", linewidth=0.9)
        axes.text(rank, 0.25, str(rank), ha="center", va="bottom", fontsize=7)
    for place, name in enumerate(order):
        left = place < half
        level = -1.3 - (place if left else len(order) - 1 - place)
        end = 0.95 if left else len(order) + 0.05
        axes.plot([ranks.mean[name]] * 2 + [end], [0, level, level], color=style.GREY, linewidth=0.8)
        label = f"{name}  {ranks.mean[name]:.1f}" if left else f"{ranks.mean[name]:.1f}  {name}"
        bold = "bold" if name.startswith("dropmax") else "normal"
        axes.text(end, level, label, ha="right" if left else "left", va="center", fontsize=8, fontweight=bold)
    for height, (low, high) in enumerate(cliques(ranks)):
        axes.hlines(-0.25 - 0.2 * height, low - 0.05, high + 0.05, color=style.BLUE, linewidth=2.5)
    axes.set_title(f"{title} (critical difference {ranks.critical_difference:.1f})", fontsize=9)


def main() -> None:
    """Print mean ranks and draw one diagram per metric."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    plt = style.pyplot()
    figure, panels = plt.subplots(len(METRICS), 1, figsize=(style.PAGE, 2.0 * len(METRICS)))
    for axes, (metric, title) in zip(panels, METRICS.items(), strict=True):
        ranks = mean_ranks([scores(study, metric) for study in arguments.studies])
        print(title, {name: round(rank, 2) for name, rank in sorted(ranks.mean.items(), key=lambda item: item[1])})
        print(f"  critical difference {ranks.critical_difference:.2f}, Friedman p = {ranks.p_value:.2g}")
        draw(axes, ranks, title)
    figure.savefig(arguments.out, dpi=160, bbox_inches="tight")


if __name__ == "__main__":
    main()
