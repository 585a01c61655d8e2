"""The demo's picture: how many digits each head gets wrong, how sure it was, and what DropMax saw in some of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dropmax.workbench import style
from dropmax.workbench.evaluation import Outputs

__all__ = ["SURE", "Contrast", "contrast", "draw_demo", "surest_mistakes"]

#: Above this probability an answer counts as sure.
SURE = 0.99
_COLUMNS = 8


@dataclass(frozen=True)
class Contrast:
    """Two models on the same examples, as counts."""

    examples: int
    wrong: tuple[int, int]  #: mistakes of the first model and of the second
    fixed: int  #: mistakes of the first that the second answers correctly
    broken: int  #: mistakes of the second that the first answers correctly
    sure_and_wrong: tuple[int, int]  #: mistakes made with a probability above :data:`SURE`

    def sentences(self) -> tuple[str, str]:
        """Return the headline and the line under it."""
        head = f"Of {self.examples:,} test digits, softmax gets {self.wrong[0]:,} wrong and DropMax {self.wrong[1]:,}"
        more = (
            f"DropMax fixes {self.fixed:,} of softmax's mistakes and makes {self.broken:,} new ones. Wrong with a "
            f"probability above {SURE:g}: {self.sure_and_wrong[0]:,} against {self.sure_and_wrong[1]:,}."
        )
        return head, more


def contrast(base: Outputs, other: Outputs) -> Contrast:
    """Count the mistakes of two models on the same examples."""
    wrong = [one.predicted != one.labels for one in (base, other)]
    sure = [bad & (one.probs.amax(-1) > SURE) for bad, one in zip(wrong, (base, other), strict=True)]
    return Contrast(
        len(base.labels),
        (int(wrong[0].sum()), int(wrong[1].sum())),
        int((wrong[0] & ~wrong[1]).sum()),
        int((~wrong[0] & wrong[1]).sum()),
        (int(sure[0].sum()), int(sure[1].sum())),
    )


def surest_mistakes(base: Outputs, chosen: Tensor, limit: int) -> list[int]:
    """Return the examples among ``chosen`` whose answer the base model was surest of, at most one per true class."""
    order = base.probs.amax(-1).masked_fill(~chosen, -1.0).argsort(descending=True, stable=True)
    first: dict[int, int] = {}
    for index in order[: int(chosen.sum())].tolist():
        first.setdefault(int(base.labels[index]), index)
    return list(first.values())[:limit]


def draw_demo(path: Path, images: Tensor, softmax: Outputs, dropmax: Outputs) -> None:
    """Draw the counts, the confidence of wrong answers, and digits that DropMax fixes and that both get wrong."""
    figure = style.pyplot().figure(figsize=(11, 9.2))
    parts = figure.subfigures(4, 1, height_ratios=[0.62, 1.75, 2.1, 2.1])
    found = contrast(softmax, dropmax)
    headline, more = found.sentences()
    parts[0].text(0.012, 0.66, headline, fontsize=17, fontweight="bold", va="center")
    parts[0].text(0.012, 0.16, more, fontsize=12, va="center", color="0.25")
    _confidence(parts[1], softmax, dropmax, found)
    wrong = [one.predicted != one.labels for one in (softmax, dropmax)]
    rule = "shown: of each class the one softmax is surest about, surest first"
    fixed = surest_mistakes(softmax, wrong[0] & ~wrong[1], _COLUMNS)
    both = surest_mistakes(softmax, wrong[0] & wrong[1], _COLUMNS)
    title = f"Softmax is wrong, DropMax is right: {found.fixed:,} digits"
    _row(parts[2], f"{title} ({rule})", fixed, images, softmax, dropmax)
    title = f"Both are wrong: {found.wrong[0] - found.fixed:,} digits"
    _row(parts[3], f"{title} ({rule})", both, images, softmax, dropmax, key=True)
    style.save(figure, path)


def _confidence(figure: Any, softmax: Outputs, dropmax: Outputs, found: Contrast) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    edges = [k / 20 for k in range(21)]
    looks = (("softmax", softmax, style.ORANGE), ("DropMax", dropmax, style.BLUE))
    for place, (panel, (name, outputs, colour)) in enumerate(zip(panels, looks, strict=True)):
        values = outputs.probs.amax(-1)[outputs.predicted != outputs.labels].clamp(max=1.0)
        sure = values > SURE
        panel.hist(
            [values[sure].numpy(), values[~sure].numpy()], edges, stacked=True, color=["black", colour],
            edgecolor="white", linewidth=0.8,
        )  # fmt: skip
        panel.set(xlim=(0.2, 1.0), xlabel="probability given to the wrong answer")
        panel.set_title(f"{name}: {found.wrong[place]:,} wrong answers", loc="left", fontsize=11, fontweight="bold")
        words = f"black: {found.sure_and_wrong[place]:,} with a probability above {SURE:g}"
        panel.text(0.03, 0.86, words, transform=panel.transAxes, fontsize=10.5)
        panel.grid(axis="x", visible=False)
    panels[0].set_ylabel("digits")
    panels[0].set_ylim(top=1.25 * panels[0].get_ylim()[1])  # room for the words above the bars
    panels[1].tick_params(labelleft=True)


def _row(
    figure: Any, title: str, chosen: list[int], images: Tensor, softmax: Outputs, dropmax: Outputs, *, key: bool = False
) -> None:
    axes = figure.subplots(2, _COLUMNS, height_ratios=[1.15, 1])
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.012, ha="left")
    for column in range(_COLUMNS):
        picture, profile = axes[0, column], axes[1, column]
        if column >= len(chosen):
            picture.set_visible(False)
            profile.set_visible(False)
            continue
        index = chosen[column]
        style.image(picture, images[index].squeeze(0).numpy())
        picture.set_title(" \n ", fontsize=9.5)  # room for the two lines below, each in its own colour
        for line, (name, one) in enumerate((("softmax", softmax), ("DropMax", dropmax))):
            said = int(one.predicted[index])
            words = f"{name} {said} ({float(one.probs[index].max()):.2f})"
            colour = style.TRUTH if said == int(one.labels[index]) else style.RED
            place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "fontsize": 8.5}
            picture.annotate(words, (0.5, 1.0), (0, 15 - 11 * line), color=colour, **place).set_in_layout(False)
        _profile(profile, index, softmax, dropmax)
        if column:
            profile.set_yticklabels([])
    if chosen:
        axes[1, 0].set_ylabel("retain\nprobability ρ", fontsize=8)
    if key:
        from matplotlib.patches import Patch

        names = {style.TRUTH: "the truth", style.RED: "softmax's wrong answer", style.PALE: "other"}
        handles = [Patch(color=colour, label=name) for colour, name in names.items()]
        figure.legend(handles=handles, loc="outside lower left", ncol=3, fontsize=9)


def _profile(axes: Any, index: int, softmax: Outputs, dropmax: Outputs) -> None:
    rho = dropmax.retain[index].tolist()
    truth, rival = int(dropmax.labels[index]), int(softmax.predicted[index])
    classes = range(len(rho))
    axes.bar(classes, rho, width=0.82, color=style.profile_colours(classes, truth, rival))
    axes.set(xticks=list(classes), ylim=(0, 1), yticks=[0, 0.5, 1], xlim=(-0.7, len(rho) - 0.3))
    axes.tick_params(labelsize=7, length=2)
    axes.grid(axis="x", visible=False)
