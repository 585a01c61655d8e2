"""Reliability diagrams: whether a confidence of 80 % is right 80 times in a hundred."""

from __future__ import annotations

from typing import Any

import torch

from dropmax.lab.figures.runs import Run
from dropmax.lab.figures.subject import Subject
from dropmax.metrics import ece, reliability_bins
from dropmax.workbench import style

__all__ = ["CAPTION", "draw", "pooled"]

CAPTION = (
    "Accuracy against confidence in 15 bins, over the share of test examples in each bin. On the diagonal a model "
    "is as often right as it says; bars below it (hatched gap) are overconfident."
)
_MOST = 8


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw one diagram per head, its seeds pooled."""
    plt = style.pyplot()
    methods = dict(list(subject.methods().items())[:_MOST])
    columns = min(4, max(2, len(methods)))
    rows = -(-len(methods) // columns)
    figure = plt.figure(figsize=(min(style.PAGE, 2.35 * columns), 2.75 * rows))
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3.2, 1] * rows)
    for place, (label, runs) in enumerate(methods.items()):
        row, column = divmod(place, columns)
        top, bottom = (figure.add_subplot(grid[2 * row + i, column]) for i in (0, 1))
        probs, labels = pooled(runs)
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
        if column == 0:
            top.set_ylabel("accuracy")
            bottom.set_ylabel("share (%)")
        else:
            top.set_yticklabels([])
            bottom.set_yticklabels([])
    left_out = len(subject.methods()) - len(methods)
    return figure, f"{left_out} more heads are left out for want of room." if left_out else ""


def pooled(runs: list[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predictions and labels of several runs of one method, one after the other."""
    return torch.cat([run.outputs.probs for run in runs]), torch.cat([run.outputs.labels for run in runs])
