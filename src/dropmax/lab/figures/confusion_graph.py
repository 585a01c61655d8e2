"""The confusion graph: classes linked where prediction sets hold both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropmax.lab.figures.runs import Subject
from dropmax.workbench import style
from dropmax.workbench.evaluation import Outputs

__all__ = ["CAPTION", "Link", "around_a_circle", "draw", "links"]

CAPTION = (
    "Classes linked where one input could be either: the wider the link, the larger the share of test examples said to "
    "be one of the two whose prediction set holds the other, which needs no labels. Where no set holds two classes, "
    "the width is the number of mistakes."
)
#: More links than this, or more classes, and it cannot be read.
MOST_LINKS, MOST_CLASSES = 30, 24


@dataclass(frozen=True)
class Link:
    """Two classes: the share of examples answered as either whose set holds the other, and measured mistakes."""

    first: int
    second: int
    flagged: float
    mistakes: int


def links(outputs: Outputs, *, classes: int = MOST_CLASSES, limit: int = MOST_LINKS) -> list[Link]:
    """Return the strongest links, strongest first, among at most ``classes`` classes.

    A rival is flagged where the prediction set of an example holds it beside the answer. Where no set holds two
    classes, the links are the pairs that are mistaken for one another.
    """
    answers = outputs.predicted
    count = outputs.probs.shape[-1]
    flagged = torch.zeros(count, count)
    for answer, rivals in zip(answers.tolist(), outputs.confusable(), strict=True):
        for rival in rivals:
            flagged[answer, rival] += 1
    mistakes = torch.zeros(count, count)
    mistakes.index_put_((outputs.labels, answers), torch.ones(len(answers)), accumulate=True)
    mistakes.fill_diagonal_(0)
    both_flagged, both_mistakes = flagged + flagged.T, mistakes + mistakes.T
    predicted = answers.bincount(minlength=count).float()
    share = both_flagged / (predicted[:, None] + predicted[None]).clamp(min=1)
    strength = share if bool(share.any()) else both_mistakes
    upper = strength.triu(1).flatten()
    found: list[Link] = []
    seen: set[int] = set()
    for place in upper.argsort(descending=True, stable=True)[: 20 * limit].tolist():
        if upper[place] <= 0 or len(found) == limit:
            break
        i, j = divmod(place, count)
        if len(seen | {i, j}) <= classes:
            seen |= {i, j}
            found.append(Link(i, j, float(share[i, j]), int(both_mistakes[i, j])))
    return found


def around_a_circle(found: list[Link], every: int = 0) -> list[int]:
    """Return the classes of some links in an order that puts linked ones side by side; also classes 0 .. every - 1.

    It goes from class to class along the strongest link that leads to a new one.
    """
    order: list[int] = []
    waiting = list(dict.fromkeys([k for link in found for k in (link.first, link.second)] + list(range(every))))
    while waiting:
        here = order[-1] if order else None
        pairs = [(link.first, link.second) for link in found]
        nexts = [j if i == here else i for i, j in pairs if here in (i, j)]
        chosen = next((k for k in nexts if k in waiting), waiting[0])
        waiting.remove(chosen)
        order.append(chosen)
    return order


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw the graph of one run, classes around a circle."""
    run = subject.with_masks()
    found = links(run.outputs)
    few = len(run.classes) <= MOST_CLASSES
    order = around_a_circle(found, len(run.classes) if few else 0)
    figure, axes = style.pyplot().subplots(figsize=(0.66 * style.PAGE, 0.66 * style.PAGE))
    places = {k: 2 * math.pi * i / max(1, len(order)) for i, k in enumerate(order)}
    by_sets = any(link.flagged for link in found)  # else by mistakes
    strengths = [100 * link.flagged if by_sets else float(link.mistakes) for link in found]
    for link, strength in reversed([*zip(found, strengths, strict=True)]):  # the strongest on top
        x, y = _arc(places[link.first], places[link.second])
        axes.plot(x, y, color=style.BLUE, solid_capstyle="round", **_look(strength / max(strengths)))
    long = max((len(run.classes[k]) for k in order), default=1) > 3
    for k, angle in places.items():
        right, up = math.cos(angle), math.sin(angle)
        axes.plot([right], [up], "o", color="white", markeredgecolor="black", markersize=6, zorder=3)
        turned = math.degrees(angle)
        flip = 90 < turned < 270
        axes.text(
            1.07 * right, 1.07 * up, style.plain(run.classes[k].replace("_", " "), 18),
            rotation=(turned + 180 if flip else turned) if long else 0, rotation_mode="anchor",
            ha=("right" if flip else "left") if long else "center", va="center", fontsize=8,
        )  # fmt: skip
    reach = 1.6 if long else 1.2
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    style.bare(axes)
    if not found:
        return figure, "No prediction set holds a second class, and no test example is mistaken."
    unit = " %" if by_sets else ""
    for weight in (1.0, 0.5, 0.1):
        axes.plot([], [], color=style.BLUE, label=f"{weight * max(strengths):.2g}{unit}", **_look(weight))
    title = "test examples of one taken for the other"
    if by_sets:
        title = "of the examples answered as either,\nthe share whose set holds the other"
    figure.legend(loc="outside lower center", ncol=3, fontsize=8, title=title, title_fontsize=8, handlelength=3)
    names = run.classes
    strongest = ", ".join(
        f"{names[one.first]} and {names[one.second]} ({strength:.3g}{unit or ' mistakes'})"
        for one, strength in zip(found[:5], strengths, strict=False)
    )
    left_out = "" if few else f" Shown are the {len(found)} strongest links among {len(order)} of {len(names)} classes."
    return figure, f"{run.path.name}. The strongest: {strongest}.{left_out}"


def _look(weight: float) -> dict[str, float]:
    return {"linewidth": 0.6 + 5.4 * weight, "alpha": 0.25 + 0.65 * weight}


def _arc(start: float, end: float) -> tuple[Tensor, Tensor]:
    """Return a curve between two places on the circle that bends towards its middle."""
    t = torch.linspace(0, 1, 40)
    ends = [torch.tensor([math.cos(angle), math.sin(angle)]) for angle in (start, end)]
    middle = 0.35 * (ends[0] + ends[1])
    curve = ((1 - t) ** 2)[:, None] * ends[0] + (2 * t * (1 - t))[:, None] * middle + (t**2)[:, None] * ends[1]
    return curve[:, 0], curve[:, 1]
