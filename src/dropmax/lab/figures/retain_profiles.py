"""Figure 4: what the retain probabilities look like on easy and on hard inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropmax import exact
from dropmax.heads.masked import sampled
from dropmax.lab.figures.runs import Run, picture
from dropmax.lab.figures.subject import NotDrawable, Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw", "hardest"]

CAPTION = (
    "Retain probabilities of test examples; a green circle marks the truth, a red cross the base model's "
    "(softmax's) wrong answer. (a) ρ of easy examples: high for the truth, evenly low for the rest. (b) ρ of hard "
    "examples, which the base model gets wrong: the rivals in question stand out. (c) The approximate posterior "
    "q(z|x, y) of the same, (d) a mask drawn for each. (e) ρ averaged over the hard examples of each class. (f) "
    "Predictions for an easy and a hard example, a dot a sampled mask, over the exact mean and standard deviation "
    "(cut at 0 and 1)."
)
_ROWS, _DOTS = 8, 300


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw the six panels."""
    plt = style.pyplot()
    base, run = subject.pair()
    hard = hardest(base, _ROWS)
    if not hard:
        raise NotDrawable(f"needs test examples that softmax gets wrong, and {base.path} gets every one right")
    easy = _easiest(base, run, [int(base.outputs.labels[i]) for i in hard])
    generator = torch.Generator().manual_seed(0)
    rho, labels = run.outputs.retain, run.outputs.labels
    with torch.no_grad():
        q = run.head.posterior_probs(run.features()[hard], labels[hard])
    masks = (torch.rand(rho[hard].shape, generator=generator) < rho[hard]).float()

    figure = plt.figure(figsize=(style.PAGE, 6.1))
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.12, 1])
    axes = top.subplots(1, 6, width_ratios=[1, 5, 1, 5, 5, 5])
    _thumbnails(axes[0], run, easy)
    _profiles(axes[1], run, base, easy, rho[easy])
    _thumbnails(axes[2], run, hard)
    for column, values in ((3, rho[hard]), (4, q), (5, masks)):
        image = _profiles(axes[column], run, base, hard, values)
    for column, letter, title in ((1, "a", "ρ, easy"), (3, "b", "ρ, hard"), (4, "c", "q, hard"), (5, "d", "z, hard")):
        style.panel(axes[column], letter, title)
    top.colorbar(image, ax=axes, location="right", fraction=0.012, pad=0.008, ticks=[0, 0.5, 1])
    top.legend(handles=_key(), loc="outside lower center", ncols=2, fontsize=8, handletextpad=0.1)
    left, right = bottom.subfigures(1, 2, width_ratios=[1, 1.55])
    count = _averages(left, base, run)
    _distributions(right, base, run, easy[0], hard[0], generator)
    return figure, (
        f"Base model {base.path.name}, DropMax {run.path.name}. Hard: {count:,} of {len(labels):,} test examples; "
        "shown are those of each class whose truth the base model finds least likely. Easy: those both models are "
        "surest about, of the same classes."
    )


def _key() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], linestyle="", marker=mark, color=colour, fillstyle="none", markeredgewidth=1.6, label=words)
        for mark, colour, words in (("o", style.TRUTH, "the truth"), ("x", style.RED, "softmax's wrong answer"))
    ]


def hardest(base: Run, limit: int) -> list[int]:
    """Return test examples the base model gets wrong, one per class while there are any, the least likely truth first.

    Among as many classes as there are rows; within the result, in the order of the classes.
    """
    labels = base.outputs.labels
    wrong = base.wrong.nonzero().squeeze(-1)
    ordered = wrong[base.on_truth[wrong].argsort(stable=True)].tolist()
    taken: dict[int, int] = {}
    for index in ordered:
        taken[index] = sum(int(labels[i]) == int(labels[index]) for i in taken)  # how many of its class come before
    return sorted(sorted(ordered, key=lambda i: taken[i])[:limit], key=lambda i: int(labels[i]))


def _easiest(base: Run, run: Run, classes: list[int]) -> list[int]:
    """Return for each of the classes the next example that the less sure of the two models is surest about.

    The classes are those of the hard examples, so that the two columns show the same classes row by row.
    """
    labels = run.outputs.labels
    both = torch.minimum(base.on_truth, run.on_truth)
    orders = {k: both.masked_fill(labels != k, -1.0).argsort(descending=True, stable=True).tolist() for k in classes}
    seen: list[int] = []
    for k in classes:
        seen.append(next((i for i in orders[k] if i not in seen), orders[k][0]))
    return seen


def _thumbnails(axes: Any, run: Run, indices: list[int]) -> None:
    axes.set(xlim=(-0.5, 0.5), ylim=(len(indices) - 0.5, -0.5))
    for row, index in enumerate(indices):
        shown = picture(run.test, index)
        axes.imshow(shown, cmap="gray_r", extent=(-0.46, 0.46, row + 0.46, row - 0.46), interpolation="nearest")
    axes.set(xlim=(-0.5, 0.5), ylim=(len(indices) - 0.5, -0.5), aspect="auto")
    style.bare(axes)


def _profiles(axes: Any, run: Run, base: Run, indices: list[int], values: Tensor) -> Any:
    image = axes.imshow(values.numpy(), cmap=style.MASKS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for row, index in enumerate(indices):
        truth, said = int(run.outputs.labels[index]), int(base.outputs.predicted[index])
        style.mark_answers(axes, (truth, row), (said, row) if said != truth else None, size=5)
    style.class_ticks(axes, run.classes)
    axes.set(yticks=[], ylim=(len(indices) - 0.5, -0.5))
    axes.grid(False)
    return image


def _averages(figure: Any, base: Run, run: Run) -> int:
    """Draw the class averages of rho over the hard examples; return how many those are."""
    axes = figure.subplots()
    rho, labels = run.outputs.retain, run.outputs.labels
    # NaN, drawn blank, where a class has none.
    means = torch.stack([rho[base.wrong & (labels == k)].mean(0) for k in range(rho.shape[-1])])
    image = axes.imshow(means.numpy(), cmap=style.MASKS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    style.class_ticks(axes, run.classes, both=True)
    axes.set(xlabel="class $k$", ylabel="true class")
    axes.grid(False)
    style.panel(axes, "e", r"mean ρ, hard")
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, ticks=[0, 0.5, 1])
    return int(base.wrong.sum())


def _distributions(figure: Any, base: Run, run: Run, easy: int, hard: int, generator: torch.Generator) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for panel, index, title in ((axes[0], easy, "p(y|x), easy"), (axes[1], hard, "p(y|x), hard")):
        o, a = (x[0] for x in run.logits(rows=[index]))
        _, samples = sampled(o, a.sigmoid(), _DOTS, generator)
        mean, std = exact.predictive(o, a), exact.variance(o, a).sqrt()
        classes = torch.arange(len(o)).double()
        jitter = (torch.rand(samples.shape, generator=generator) - 0.5) * 0.62
        panel.plot(
            (classes + jitter).flatten(), samples.flatten(), ".", color=style.BLUE, markersize=2, alpha=0.25, mew=0
        )
        bars = torch.stack([torch.minimum(std, mean), torch.minimum(std, 1 - mean)])  # probabilities end at 0 and 1
        panel.errorbar(
            classes, mean, bars.numpy(), fmt="D", color="black", markersize=3, elinewidth=1.1, capsize=2.5,
            label="exact mean ± std",
        )  # fmt: skip
        truth, said = int(run.outputs.labels[index]), int(base.outputs.predicted[index])
        style.mark_answers(panel, (truth, 1.12), (said, 1.12) if said != truth else None)
        style.class_ticks(panel, run.classes)
        panel.set(xlim=(-0.7, len(o) - 0.3), ylim=(-0.07, 1.2), yticks=[0, 0.5, 1], xlabel="class $k$")
        panel.set_title(title, fontsize=9, loc="left")
    style.panel(axes[0], "f", "p(y|x), easy")
    axes[0].set_ylabel("probability")
    axes[0].legend(loc="center right", fontsize=7, handletextpad=0.3)
