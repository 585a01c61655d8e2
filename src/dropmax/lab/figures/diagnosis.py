"""The picture of a diagnosis: posterior, sampling error, and the two ways to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dropmax.lab.diagnostics import Diagnosis
from dropmax.workbench import style

__all__ = ["draw_diagnosis"]


def draw_diagnosis(path: Path, found: Diagnosis, title: str) -> None:
    """Draw q against the true posterior, Monte Carlo's error against S, and mean against exact prediction."""
    plt = style.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), width_ratios=[1.1, 1.1, 1])
    figure.suptitle(title, fontsize=10)
    _posterior(axes[0], found)
    _sampling(axes[1], found)
    _modes(axes[2], found)
    style.save(figure, path)


def _posterior(axes: Any, found: Diagnosis) -> None:
    true, q = zip(*found.marginals, strict=True)
    axes.plot([0, 1], [0, 1], color=style.GREY, linewidth=1)
    axes.plot(true, q, ".", color=style.BLUE, markersize=3, alpha=0.35)
    axes.set(
        title="Rivals' masks given the label",
        xlabel="true posterior $p(z_k=1\\,|\\,x,y)$",
        ylabel="$q(z_k=1\\,|\\,x,y)$",
        xlim=(0, 1),
        ylim=(0, 1),
    )


def _sampling(axes: Any, found: Diagnosis) -> None:
    samples = [row["samples"] for row in found.monte_carlo]
    errors = [row["rms_error"] for row in found.monte_carlo]
    axes.loglog(samples, errors, "o-", color=style.BLUE)
    for row in found.monte_carlo:
        axes.annotate(
            f"{row['time_ratio']:.2g}× exact's time",
            (row["samples"], row["rms_error"]),
            textcoords="offset points",
            xytext=(6, 5) if row["samples"] < 1000 else (-4, -14),
            ha="left" if row["samples"] < 1000 else "right",
            fontsize=7.5,
        )
    axes.set(title="Monte Carlo against exact", xlabel="masks sampled, S", ylabel="rms error of a probability")
    axes.set_xlim(0.7, 4000)
    axes.set_ylim(min(errors) / 2, max(errors) * 2.5)


def _modes(axes: Any, found: Diagnosis) -> None:
    names = ["error %", "ECE %", "NLL × 10"]
    factors = {"error": 100, "ece": 100, "nll": 10}
    for place, (mode, colour, hatch) in enumerate([("mean", style.BLUE, ""), ("exact", style.ORANGE, "//")]):
        values = [factor * found.modes[mode][key] for key, factor in factors.items()]
        positions = [i + 0.38 * (place - 0.5) for i in range(3)]
        bars = axes.bar(positions, values, width=0.36, color=colour, hatch=hatch, label=mode, edgecolor="white")
        axes.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=7.5)
    axes.set(title="Mean and exact prediction", xticks=range(3), xticklabels=names)
    axes.grid(False)
    axes.legend()
