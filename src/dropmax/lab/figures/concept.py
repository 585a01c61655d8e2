"""Figure 1: two inputs of one class, the rivals each may be confused with, and the classes that draws keep."""

from __future__ import annotations

from typing import Any

import torch

from dropmax.heads.masked import sampled
from dropmax.lab.figures.runs import Run, picture
from dropmax.lab.figures.subject import NotDrawable, Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw", "same_class_other_rivals"]

CAPTION = (
    "The idea. Two test examples, each with the retain probabilities ρ that DropMax learned for it: the "
    "rival that stands out differs. Each draw keeps a class with its probability ρ, and only the classes that are kept "
    "(blue) take part in the softmax, whose answer stands at the right."
)
_DRAWS = 4


def same_class_other_rivals(run: Run) -> tuple[int, int]:
    """Return two examples, of one class if possible, whose strongest rivals differ and stand out most.

    They are answered correctly, with the truth's rho above all others, where there are such: a poor model has too few.
    """
    highest = run.outputs.retain.argmax(-1) == run.outputs.labels
    for allowed in (~run.wrong & highest, ~run.wrong, torch.ones_like(run.wrong)):
        if pairs := _pairs(run, allowed):
            return max(pairs)[2:]
    raise NotDrawable(f"needs two examples with different rivals, and {run.path} has none")


def _pairs(run: Run, allowed: torch.Tensor) -> list[tuple[bool, float, int, int]]:
    """Return (same class, how far the weaker rival stands out, index, index) of examples with different rivals."""
    chosen = allowed.nonzero().squeeze(-1)
    labels = run.outputs.labels[chosen]
    strength, rival = run.outputs.retain[chosen].scatter(-1, labels[:, None], -1.0).max(-1)
    best: dict[tuple[int, int], tuple[float, int]] = {}  # (class, rival): how far it stands out, and where
    rows = zip(chosen.tolist(), labels.tolist(), rival.tolist(), strength.tolist(), strict=True)
    for index, truth, k, value in rows:
        if value > best.get((truth, k), (-1.0, 0))[0]:
            best[truth, k] = value, index
    return [
        (truth == same, min(one[0], other[0]), one[1], other[1])
        for (truth, k), one in best.items()
        for (same, j), other in best.items()
        if k < j
    ]


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw the two examples, a row each."""
    plt = style.pyplot()
    run = subject.with_masks()
    chosen = same_class_other_rivals(run)
    generator = torch.Generator().manual_seed(0)
    figure, axes = plt.subplots(2, 3, figsize=(style.PAGE, 3.3), width_ratios=[1, 2.2, 3.2])
    for row, index in enumerate(chosen):
        image, bars, draws = axes[row]
        style.image(image, picture(run.test, index))
        truth = int(run.outputs.labels[index])
        image.set_title(style.plain(f"a {run.classes[truth]}", 14), fontsize=9, color=style.TRUTH, fontweight="bold")
        _bars(bars, run, index, truth)
        _draws(draws, run, index, truth, generator)
        if row == 0:
            bars.set_title("learned for this input", fontsize=9, loc="left")
            draws.set_title("classes kept in four draws → the answer", fontsize=9, loc="left")
    return (
        figure,
        f"Test examples {chosen[0]} and {chosen[1]} of {run.path.name}, chosen for how far their rivals stand out.",
    )


def _bars(axes: Any, run: Run, index: int, truth: int) -> None:
    rho = run.outputs.retain[index]
    rival = int(rho.scatter(0, torch.tensor([truth]), -1.0).argmax())
    axes.bar(range(len(rho)), rho.tolist(), color=style.profile_colours(range(len(rho)), truth, rival))
    axes.set(ylim=(0, 1), yticks=[0, 0.5, 1], ylabel="retain prob. ρ")
    style.class_ticks(axes, run.classes)
    axes.grid(axis="x", visible=False)


def _draws(axes: Any, run: Run, index: int, truth: int, generator: torch.Generator) -> None:
    from matplotlib.patches import Rectangle

    o, a = (values[0] for values in run.logits(rows=[index]))
    count = len(o)
    for row, (mask, probs) in enumerate(zip(*sampled(o, a.sigmoid(), _DRAWS, generator), strict=True)):
        answer = int(probs.argmax())
        for k in range(count):
            colour = style.BLUE if bool(mask[k]) else "#EEEEEE"
            axes.add_patch(Rectangle((k - 0.44, row - 0.38), 0.88, 0.76, color=colour, linewidth=0))
        words = f"→ {style.plain(run.classes[answer], 9)}  {float(probs[answer]):.2f}"
        colour = style.TRUTH if answer == truth else style.RED
        axes.text(count - 0.3, row, words, va="center", fontsize=8.5, color=colour, fontweight="bold")
    axes.set(xlim=(-0.6, 1.42 * count), ylim=(_DRAWS - 0.4, -0.6), yticks=[])
    style.class_ticks(axes, run.classes)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
