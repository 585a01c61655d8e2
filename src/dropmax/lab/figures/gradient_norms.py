"""Appendix B, over training: how large the classifier's gradients are under softmax and under DropMax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dropmax.lab.figures.subject import Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw"]

CAPTION = (
    "Norm of the batch loss's gradient by the classifier's weights and biases ψ at each step of training, softmax "
    "against DropMax; the paper argues that DropMax's is smaller, so that learning is more stable. Thin: as "
    "recorded; thick: moving averages over a thirtieth of training."
)


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw the recorded gradient norms of the two heads."""
    plt = style.pyplot()
    base, masked = subject.pair()
    figure, axes = plt.subplots(figsize=(0.66 * style.PAGE, 2.7))
    means = {}
    chosen = Subject(subject.recorded_pair())
    for label, runs in chosen.methods().items():
        colour, line = style.look(chosen.looks()[label])
        found = [subject.recordings[run] for run in runs]
        for one in found:
            axes.plot(one.steps, one.gradient_norm, color=colour, linewidth=0.5, alpha=0.3)
        style.band(
            axes, [(r.steps, _smooth(r.gradient_norm)) for r in found], colour, line, label=style.plain(label, 40)
        )
        means[label] = float(np.mean([np.mean(r.gradient_norm) for r in found]))
    axes.set(xlabel="step", ylabel=r"$\|\partial\,\mathrm{loss}/\partial\psi\|$", yscale="log")
    axes.legend()
    ratio = means[masked.label] / means[base.label]
    return figure, (
        f"Mean over training: {base.label} {means[base.label]:.3g}, {masked.label} {means[masked.label]:.3g} "
        f"({ratio:.2f} times as large)."
    )


def _smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages, shorter at the ends."""
    reach = max(1, len(values) // 60)
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]
