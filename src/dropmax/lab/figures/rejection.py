"""Accuracy against rejection: how much accuracy rises when the least sure answers are left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from dropmax.lab.figures.subject import Subject
from dropmax.metrics import accuracy_rejection_curve, aurc
from dropmax.workbench import style

__all__ = ["CAPTION", "draw"]

CAPTION = (
    "Accuracy on the test examples that are left when the least confident answers are rejected. A curve that rises "
    "steeply belongs to a model that knows what it does not know."
)


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw accuracy on the rest against the share rejected, one line per head, with a band over seeds."""
    plt = style.pyplot()
    figure, axes = plt.subplots(figsize=(0.66 * style.PAGE, 2.8))
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
