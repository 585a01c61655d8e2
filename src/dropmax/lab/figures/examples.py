"""Figure 5: pictures with the classes their retain probabilities put first and last."""

from __future__ import annotations

from typing import Any

import torch

from dropmax.lab.figures.runs import Run, picture
from dropmax.lab.figures.subject import NotDrawable, Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw", "top_and_bottom"]

CAPTION = (
    "Test examples the base model (softmax) gets wrong, drawn at random from different classes, with DropMax's "
    "four highest and two lowest retain probabilities. Green and ○: the truth; red and ×: the base model's answer."
)
_SHOWN = 8


def top_and_bottom(rho: torch.Tensor, top: int = 4, bottom: int = 2) -> list[int]:
    """Return the classes with the highest and the lowest retain probabilities, highest first.

    >>> top_and_bottom(torch.tensor([0.1, 0.9, 0.5, 0.2, 0.8, 0.7, 0.05]))
    [1, 4, 5, 2, 0, 6]
    """
    order = rho.argsort(descending=True, stable=True).tolist()
    return [*order[:top], *order[len(order) - bottom :]]


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw eight examples, each over its six bars."""
    plt = style.pyplot()
    base, run = subject.pair()
    chosen = _chosen(base)
    if not chosen:
        raise NotDrawable(f"needs test examples that softmax gets wrong, and {base.path} gets every one right")
    columns = 4
    rows = -(-len(chosen) // columns)
    figure, axes = plt.subplots(2 * rows, columns, figsize=(style.PAGE, 2.35 * rows), height_ratios=[1, 1.3] * rows)
    for spare in axes.flat:
        spare.set_visible(False)
    for place, index in enumerate(chosen):
        row, column = divmod(place, columns)
        image, bars = axes[2 * row, column], axes[2 * row + 1, column]
        image.set_visible(True)
        bars.set_visible(True)
        shown = picture(run.test, index)
        style.image(image, shown, "nearest" if shown.shape[0] <= 28 else "antialiased")
        _bars(bars, run, base, index)
    shown_truths = sum(int(run.outputs.labels[i]) in top_and_bottom(run.outputs.retain[i])[:4] for i in chosen)
    return figure, f"The truth is among the four highest in {shown_truths} of {len(chosen)}."


def _chosen(base: Run) -> list[int]:
    labels = base.outputs.labels
    wrong = base.wrong.nonzero().squeeze(-1)
    order = wrong[torch.randperm(len(wrong), generator=torch.Generator().manual_seed(0))].tolist()
    firsts: dict[int, int] = {}
    for index in order:
        firsts.setdefault(int(labels[index]), index)
    return list(firsts.values())[:_SHOWN]


def _bars(axes: Any, run: Run, base: Run, index: int) -> None:
    rho = run.outputs.retain[index]
    truth, said = int(run.outputs.labels[index]), int(base.outputs.predicted[index])
    classes = top_and_bottom(rho)
    # A gap between the highest and the lowest.
    places = [*range(4), *(4.6 + i for i in range(2))]
    colours = style.profile_colours(classes, truth, said)
    axes.barh(places, rho[classes].tolist(), color=colours, height=0.8)
    axes.set_ylim(6.1, -0.6)
    axes.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0", "½", "1"])
    axes.set_xlabel("retain probability ρ", fontsize=7, labelpad=1)
    names = [_marked(run.classes[k], k, truth, said) for k in classes]
    axes.set_yticks(places, names, fontsize=7.5)
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_color("black" if colour == style.PALE else colour)
    axes.tick_params(axis="x", labelsize=7, length=2)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    below = [(k, colour) for k, colour in ((said, style.RED), (truth, style.TRUTH)) if k not in classes]
    for place, (k, colour) in enumerate(below):  # neither among the highest nor the lowest: say where it is
        words = f"{_marked(run.classes[k], k, truth, said)} is no. {int((rho > rho[k]).sum()) + 1}, {float(rho[k]):.2f}"
        axes.text(1, 1.02 + 0.13 * place, words, fontsize=7, color=colour, ha="right", transform=axes.transAxes)


def _marked(name: str, k: int, truth: int, said: int) -> str:
    return ("○ " if k == truth else "× " if k == said else "") + style.plain(name.replace("_", " "), 15)
