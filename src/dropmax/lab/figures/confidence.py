"""Whether confidence can be believed: reliability diagrams, and accuracy against rejection."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dropmax.lab.figures.runs import Subject
from dropmax.metrics import accuracy_rejection_curve, aurc, ece, reliability_bins
from dropmax.workbench import style

__all__ = ["REJECTION", "RELIABILITY", "draw_rejection", "draw_reliability"]

RELIABILITY = (
    "Accuracy against confidence in 15 bins, over the share of test examples in each bin. On the diagonal a model "
    "is as often right as it says; bars below it (hatched gap) are overconfident."
)
REJECTION = (
    "Accuracy on the test examples that are left when the least confident answers are rejected. A curve that rises "
    "steeply belongs to a model that knows what it does not know."
)
_MOST = 8


def draw_reliability(subject: Subject) -> tuple[Any, str]:
    """Draw one diagram per head, its seeds pooled."""
    methods = dict(list(subject.methods().items())[:_MOST])
    columns = min(4, max(2, len(methods)))
    rows = -(-len(methods) // columns)
    figure = style.pyplot().figure(figsize=(min(style.PAGE, 2.35 * columns), 2.75 * rows))
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3.2, 1] * rows)
    for place, (label, runs) in enumerate(methods.items()):
        row, column = divmod(place, columns)
        top, bottom = (figure.add_subplot(grid[2 * row + i, column]) for i in (0, 1))
        probs = torch.cat([run.outputs.probs for run in runs])
        labels = torch.cat([run.outputs.labels for run in runs])
        bins = reliability_bins(probs, labels)
        centres, width = (bins.edges[:-1] + bins.edges[1:]) / 2, float(bins.edges[1] - bins.edges[0])
        accuracy, confidence = bins.accuracy, bins.confidence
        some = bins.count > 0
        top.bar(centres[some].numpy(), accuracy[some].numpy(), 0.92 * width, color=style.BLUE, linewidth=0)
        low, gap = torch.minimum(accuracy, confidence)[some], (accuracy - confidence)[some].abs()
        hatched = {"facecolor": "none", "edgecolor": style.RED, "hatch": "/////", "lw": 0.6}
        top.bar(centres[some], gap, 0.92 * width, bottom=low.numpy(), **hatched)
        top.plot([0, 1], [0, 1], "--", color="black", linewidth=0.9)
        top.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], xticklabels=[])
        top.set_title(f"{style.plain(label, 24)}\nECE {100 * ece(probs, labels):.2f} %", fontsize=8.5)
        share = 100 * bins.count / bins.count.sum()
        bottom.bar(centres.numpy(), share.numpy(), 0.92 * width, color=style.GREY, linewidth=0)
        bottom.set(xlim=(0, 1), ylim=(0, 100), xticks=[0, 0.5, 1], yticks=[0, 100], xlabel="confidence")
        for axes, name in ((top, "accuracy"), (bottom, "share (%)")):
            if column == 0:
                axes.set_ylabel(name)
            else:
                axes.set_yticklabels([])
    left_out = len(subject.methods()) - len(methods)
    return figure, f"{left_out} more heads are left out for want of room." if left_out else ""


def draw_rejection(subject: Subject) -> tuple[Any, str]:
    """Draw accuracy on the rest against the share rejected, one line per head, with a band over seeds."""
    figure, axes = style.pyplot().subplots(figsize=(0.66 * style.PAGE, 2.8))
    rejected = np.linspace(0, 0.6, 241)
    areas = []
    looks = subject.looks()
    for label, runs in subject.methods().items():
        colour, line = style.look(looks[label])
        curves = []
        for run in runs:
            coverage, accuracy = accuracy_rejection_curve(run.outputs.probs, run.outputs.labels)
            curves.append((100 * rejected, 100 * np.interp(1 - rejected, coverage.numpy(), accuracy.numpy())))
        style.band(axes, curves, colour, line, label=style.plain(label, 40))
        mean = float(np.mean([aurc(run.outputs.probs, run.outputs.labels) for run in runs]))
        areas.append(f"{label} {mean:.4f}")
    axes.set(xlabel="rejected (%)", ylabel="accuracy on the rest (%)", xlim=(0, 60))
    axes.legend(loc="lower right")
    return figure, f"Area under the risk-coverage curve (less is better): {', '.join(areas)}."
