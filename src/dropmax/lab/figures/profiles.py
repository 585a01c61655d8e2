"""Figures 1, 4 and 5: the retain probabilities of single inputs beside their pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropmax import exact
from dropmax.heads.masked import sampled
from dropmax.lab.figures.runs import NotDrawable, Run, Subject, picture
from dropmax.workbench import style

__all__ = ["CONCEPT", "EXAMPLES", "PROFILES", "draw_concept", "draw_examples", "draw_profiles", "top_and_bottom"]

CONCEPT = (
    "The idea. Two test examples, each with the retain probabilities ρ that DropMax learned for it: the "
    "rival that stands out differs. Each draw keeps a class with its probability ρ, and only the classes that are kept "
    "(blue) take part in the softmax, whose answer stands at the right."
)
PROFILES = (
    "Retain probabilities of test examples; a green circle marks the truth, a red cross the base model's "
    "(softmax's) wrong answer. (a) ρ of easy examples: high for the truth, evenly low for the rest. (b) ρ of hard "
    "examples, which the base model gets wrong: the rivals in question stand out. (c) The approximate posterior "
    "q(z|x, y) of the same, (d) a mask drawn for each. (e) ρ averaged over the hard examples of each class. (f) "
    "Predictions for an easy and a hard example, a dot a sampled mask, over the exact mean and standard deviation "
    "(cut at 0 and 1)."
)
EXAMPLES = (
    "Test examples the base model (softmax) gets wrong, drawn at random from different classes, with DropMax's "
    "four highest and two lowest retain probabilities. Green and ○: the truth; red and ×: the base model's answer."
)
_DRAWS, _ROWS, _DOTS, _SHOWN = 4, 8, 300, 8


# --- Figure 1: two inputs, and what draws keep -----------------------------------------------------------------------


def draw_concept(subject: Subject) -> tuple[Any, str]:
    """Draw two inputs of one class, the rivals each may be confused with, and the classes that draws keep."""
    run = subject.with_masks()
    chosen = _different_rivals(run)
    generator = torch.Generator().manual_seed(0)
    figure, axes = style.pyplot().subplots(2, 3, figsize=(style.PAGE, 3.3), width_ratios=[1, 2.2, 3.2])
    for (image, bars, draws), index in zip(axes, chosen, strict=True):
        style.image(image, picture(run.test, index))
        truth = int(run.outputs.labels[index])
        image.set_title(style.plain(f"a {run.classes[truth]}", 14), fontsize=9, color=style.TRUTH, fontweight="bold")
        _draw_bars(bars, run, index, truth)
        _draw_masks(draws, run, index, truth, generator)
    axes[0, 1].set_title("learned for this input", fontsize=9, loc="left")
    axes[0, 2].set_title("classes kept in four draws → the answer", fontsize=9, loc="left")
    words = f"Test examples {chosen[0]} and {chosen[1]} of {run.path.name}, chosen for how far their rivals stand out."
    return figure, words


def _different_rivals(run: Run) -> tuple[int, int]:
    """Return two examples, of one class if possible, whose strongest rivals differ and stand out most.

    They are answered correctly, with the truth's rho above all others, unless a poor model has too few of these.
    """
    highest = run.outputs.retain.argmax(-1) == run.outputs.labels
    for allowed in (~run.wrong & highest, ~run.wrong, torch.ones_like(run.wrong)):
        if pairs := _pairs(run, allowed):
            return max(pairs)[2:]
    raise NotDrawable(f"needs two examples with different rivals, and {run.path} has none")


def _pairs(run: Run, allowed: Tensor) -> list[tuple[bool, float, int, int]]:
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


def _draw_bars(axes: Any, run: Run, index: int, truth: int) -> None:
    rho = run.outputs.retain[index]
    rival = int(rho.scatter(0, torch.tensor([truth]), -1.0).argmax())
    axes.bar(range(len(rho)), rho.tolist(), color=style.profile_colours(range(len(rho)), truth, rival))
    axes.set(ylim=(0, 1), yticks=[0, 0.5, 1], ylabel="retain prob. ρ")
    style.class_ticks(axes, run.classes)
    axes.grid(axis="x", visible=False)


def _draw_masks(axes: Any, run: Run, index: int, truth: int, generator: torch.Generator) -> None:
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


# --- Figure 4: easy and hard inputs ----------------------------------------------------------------------------------


def draw_profiles(subject: Subject) -> tuple[Any, str]:
    """Draw the six panels."""
    from matplotlib.lines import Line2D

    base, run = subject.pair()
    hard = _some_wrong(base, hardest(base, _ROWS))
    easy = _easiest(base, run, [int(base.outputs.labels[i]) for i in hard])
    generator = torch.Generator().manual_seed(0)
    rho, labels = run.outputs.retain, run.outputs.labels
    with torch.no_grad():
        q = run.head.posterior_probs(run.features()[hard], labels[hard])
    masks = (torch.rand(rho[hard].shape, generator=generator) < rho[hard]).float()

    figure = style.pyplot().figure(figsize=(style.PAGE, 6.1))
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.12, 1])
    axes = top.subplots(1, 6, width_ratios=[1, 5, 1, 5, 5, 5])
    _draw_thumbnails(axes[0], run, easy)
    _draw_profiles(axes[1], run, base, easy, rho[easy])
    _draw_thumbnails(axes[2], run, hard)
    for column, values in ((3, rho[hard]), (4, q), (5, masks)):
        image = _draw_profiles(axes[column], run, base, hard, values)
    for column, letter, title in ((1, "a", "ρ, easy"), (3, "b", "ρ, hard"), (4, "c", "q, hard"), (5, "d", "z, hard")):
        style.panel(axes[column], letter, title)
    top.colorbar(image, ax=axes, location="right", fraction=0.012, pad=0.008, ticks=[0, 0.5, 1])
    key = [
        Line2D([], [], linestyle="", marker=mark, color=colour, fillstyle="none", markeredgewidth=1.6, label=words)
        for mark, colour, words in (("o", style.TRUTH, "the truth"), ("x", style.RED, "softmax's wrong answer"))
    ]
    top.legend(handles=key, loc="outside lower center", ncols=2, fontsize=8, handletextpad=0.1)
    left, right = bottom.subfigures(1, 2, width_ratios=[1, 1.55])
    _draw_averages(left, base, run)
    _draw_distributions(right, base, run, easy[0], hard[0], generator)
    return figure, (
        f"Base model {base.path.name}, DropMax {run.path.name}. Hard: {int(base.wrong.sum()):,} of {len(labels):,} "
        "test examples; shown are those of each class whose truth the base model finds least likely. Easy: those both "
        "models are surest about, of the same classes."
    )


def _some_wrong(base: Run, chosen: list[int]) -> list[int]:
    if not chosen:
        raise NotDrawable(f"needs test examples that softmax gets wrong, and {base.path} gets every one right")
    return chosen


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
    """Return for each class, which are those of the hard examples, what the less sure of the models is surest about."""
    labels = run.outputs.labels
    both = torch.minimum(base.on_truth, run.on_truth)
    orders = {k: both.masked_fill(labels != k, -1.0).argsort(descending=True, stable=True).tolist() for k in classes}
    seen: list[int] = []
    for k in classes:
        seen.append(next((i for i in orders[k] if i not in seen), orders[k][0]))
    return seen


def _draw_thumbnails(axes: Any, run: Run, indices: list[int]) -> None:
    for row, index in enumerate(indices):
        shown = picture(run.test, index)
        axes.imshow(shown, cmap="gray_r", extent=(-0.46, 0.46, row + 0.46, row - 0.46), interpolation="nearest")
    axes.set(xlim=(-0.5, 0.5), ylim=(len(indices) - 0.5, -0.5), aspect="auto")
    style.bare(axes)


def _draw_profiles(axes: Any, run: Run, base: Run, indices: list[int], values: Tensor) -> Any:
    image = axes.imshow(values.numpy(), cmap=style.MASKS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for row, index in enumerate(indices):
        truth, said = int(run.outputs.labels[index]), int(base.outputs.predicted[index])
        style.mark_answers(axes, (truth, row), (said, row) if said != truth else None, size=5)
    style.class_ticks(axes, run.classes)
    axes.set(yticks=[], ylim=(len(indices) - 0.5, -0.5))
    axes.grid(False)
    return image


def _draw_averages(figure: Any, base: Run, run: Run) -> None:
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


def _draw_distributions(figure: Any, base: Run, run: Run, easy: int, hard: int, generator: torch.Generator) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for panel, index in zip(axes, (easy, hard), strict=True):
        o, a = (x[0] for x in run.logits(rows=[index]))
        _, samples = sampled(o, a.sigmoid(), _DOTS, generator)
        mean, std = exact.predictive(o, a), exact.variance(o, a).sqrt()
        classes = torch.arange(len(o)).double()
        x = (classes + (torch.rand(samples.shape, generator=generator) - 0.5) * 0.62).flatten()
        panel.plot(x, samples.flatten(), ".", color=style.BLUE, markersize=2, alpha=0.25, mew=0)
        bars = torch.stack([torch.minimum(std, mean), torch.minimum(std, 1 - mean)])  # probabilities end at 0 and 1
        panel.errorbar(
            classes, mean, bars.numpy(), fmt="D", color="black", markersize=3, elinewidth=1.1, capsize=2.5,
            label="exact mean ± std",
        )  # fmt: skip
        truth, said = int(run.outputs.labels[index]), int(base.outputs.predicted[index])
        style.mark_answers(panel, (truth, 1.12), (said, 1.12) if said != truth else None)
        style.class_ticks(panel, run.classes)
        panel.set(xlim=(-0.7, len(o) - 0.3), ylim=(-0.07, 1.2), yticks=[0, 0.5, 1], xlabel="class $k$")
    style.panel(axes[0], "f", "p(y|x), easy")
    axes[1].set_title("p(y|x), hard", fontsize=9, loc="left")
    axes[0].set_ylabel("probability")
    axes[0].legend(loc="center right", fontsize=7, handletextpad=0.3)


# --- Figure 5: the classes that rho puts first and last --------------------------------------------------------------


def draw_examples(subject: Subject) -> tuple[Any, str]:
    """Draw eight examples, each over its six bars."""
    base, run = subject.pair()
    wrong = base.wrong.nonzero().squeeze(-1)
    firsts: dict[int, int] = {}
    for index in wrong[torch.randperm(len(wrong), generator=torch.Generator().manual_seed(0))].tolist():
        firsts.setdefault(int(base.outputs.labels[index]), index)
    chosen = _some_wrong(base, list(firsts.values())[:_SHOWN])
    columns = 4
    rows = -(-len(chosen) // columns)
    size = (style.PAGE, 2.35 * rows)
    figure, axes = style.pyplot().subplots(2 * rows, columns, figsize=size, height_ratios=[1, 1.3] * rows)
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        image, bars = axes[2 * row : 2 * row + 2, column]
        if place >= len(chosen):
            image.set_visible(False)
            bars.set_visible(False)
            continue
        shown = picture(run.test, chosen[place])
        style.image(image, shown, "nearest" if shown.shape[0] <= 28 else "antialiased")
        _draw_extremes(bars, run, base, chosen[place])
    shown_truths = sum(int(run.outputs.labels[i]) in top_and_bottom(run.outputs.retain[i])[:4] for i in chosen)
    return figure, f"The truth is among the four highest in {shown_truths} of {len(chosen)}."


def top_and_bottom(rho: Tensor, top: int = 4, bottom: int = 2) -> list[int]:
    """Return the classes with the highest and the lowest retain probabilities, highest first."""
    order = rho.argsort(descending=True, stable=True).tolist()
    return [*order[:top], *order[len(order) - bottom :]]


def _draw_extremes(axes: Any, run: Run, base: Run, index: int) -> None:
    rho = run.outputs.retain[index]
    truth, said = int(run.outputs.labels[index]), int(base.outputs.predicted[index])

    def marked(k: int) -> str:
        name = style.plain(run.classes[k].replace("_", " "), 15)
        return ("○ " if k == truth else "× " if k == said else "") + name

    classes = top_and_bottom(rho)
    places = [0, 1, 2, 3, 4.6, 5.6]  # a gap between the highest and the lowest
    colours = style.profile_colours(classes, truth, said)
    axes.barh(places, rho[classes].tolist(), color=colours, height=0.8)
    axes.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0", "½", "1"], ylim=(6.1, -0.6))
    axes.set_xlabel("retain probability ρ", fontsize=7, labelpad=1)
    axes.set_yticks(places, [marked(k) for k in classes], fontsize=7.5)
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_color("black" if colour == style.PALE else colour)
    axes.tick_params(axis="x", labelsize=7, length=2)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    below = [(k, colour) for k, colour in ((said, style.RED), (truth, style.TRUTH)) if k not in classes]
    for place, (k, colour) in enumerate(below):  # neither among the highest nor the lowest: say where it is
        words = f"{marked(k)} is no. {int((rho > rho[k]).sum()) + 1}, {float(rho[k]):.2f}"
        axes.text(1, 1.02 + 0.13 * place, words, fontsize=7, color=colour, ha="right", transform=axes.transAxes)
