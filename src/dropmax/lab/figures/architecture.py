"""Figure 2: what depends on what, while training and while testing."""

from __future__ import annotations

from typing import Any

from dropmax.lab.figures.runs import Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw"]

CAPTION = (
    "What depends on what. (a) DropMax (q = p) in training draws masks z from its retain probabilities ρ; only the "
    "target's mask is fixed at 1. (b) DropMax in training also learns a correction r: the posterior q has the "
    "logit of ρ, without its gradient (dashed), plus r, and r is taught the label. (c) At test time both keep ρ "
    "alone, sampled as masks or in their place. Circles are random, blue boxes learned, orange are terms of the "
    "loss."
)

_LEARNED = {"facecolor": "#D6E8F3", "edgecolor": style.BLUE}
_PLAIN = {"facecolor": "white", "edgecolor": "black"}
_LOSS = {"facecolor": "#FBE9C6", "edgecolor": style.ORANGE}
_LABEL = {"facecolor": "#D3EEE5", "edgecolor": style.TRUTH}

#: Node: its place, its text, its look, and whether it is round.
Node = tuple[tuple[float, float], str, dict[str, str], bool]


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw the three diagrams; no run is needed."""
    widths = [4.2, 5.9, 4.2]
    figure, axes = style.pyplot().subplots(1, 3, figsize=(style.PAGE, 2.7), width_ratios=widths)
    titles = ("DropMax (q = p), training", "DropMax, training", "both, testing")
    diagrams = (_qp_training, _training, _testing)
    for panel, letter, title, width, diagram in zip(axes, "abc", titles, widths, diagrams, strict=True):
        panel.set(xlim=(0, width), ylim=(-0.85, 4.1))
        style.bare(panel)
        style.panel(panel, letter, title)
        diagram(panel)
    return figure, ""


#: What training with q = p and testing have in common: places, letters, looks.
_TWO_MAPS: dict[str, Node] = {
    "x": ((0.3, 1.5), "x", _PLAIN, True),
    "h": ((1.15, 1.5), "h", _PLAIN, False),
    "rho": ((2.1, 2.4), "ρ", _LEARNED, False),
    "o": ((2.1, 0.55), "o", _LEARNED, False),
    "z": ((3.3, 2.4), "z", _PLAIN, True),
}
_PATHS = "x-h h-rho h-o rho-z z-p o-p"


def _qp_training(axes: Any) -> None:
    nodes: dict[str, Node] = {
        **_TWO_MAPS,
        "p": ((3.5, 0.55), "p(y|x, z)", _PLAIN, False),
        "y": ((3.3, 3.7), "y", _LABEL, True),
        "kl": ((1.35, 3.7), r"$-\log\rho_t-\gamma H$", _LOSS, False),
        "nll": ((3.5, -0.6), "cross entropy", _LOSS, False),
    }
    _diagram(axes, nodes, f"{_PATHS} y-z rho-kl p-nll")
    _note(axes, (3.42, 3.08), r"$z_t=1$", "left")


def _training(axes: Any) -> None:
    nodes: dict[str, Node] = {
        "x": ((0.3, 1.5), "x", _PLAIN, True),
        "h": ((1.15, 1.5), "h", _PLAIN, False),
        "r": ((2.3, 2.8), "r", _LEARNED, False),
        "rho": ((2.3, 1.72), "ρ", _LEARNED, False),
        "o": ((2.3, 0.35), "o", _LEARNED, False),
        "q": ((3.5, 2.4), "q", _PLAIN, False),
        "z": ((4.9, 2.4), "z", _PLAIN, True),
        "p": ((5.15, 0.35), "p(y|x, z)", _PLAIN, False),
        "y": ((4.9, 3.7), "y", _LABEL, True),
        "aux": ((2.3, 3.7), "auxiliary", _LOSS, False),
        "kl": ((3.75, 1.2), r"$\mathrm{KL}[q\,\|\,p]-H$", _LOSS, False),
        "nll": ((5.1, -0.6), "cross entropy", _LOSS, False),
    }
    _diagram(axes, nodes, "x-h h-r h-rho h-o r-q q-z z-p y-z o-p r-aux y-aux q-kl rho-kl rho-q p-nll")
    _note(axes, (5.02, 3.08), r"$z_t=1$", "left")


def _testing(axes: Any) -> None:
    _diagram(axes, {**_TWO_MAPS, "p": ((3.5, 0.55), "p(y|x)", _PLAIN, False)}, _PATHS)
    _note(axes, (2.5, 3.55), "z sampled or summed over,\nor ρ in its place", "center")


def _diagram(axes: Any, nodes: dict[str, Node], arrows: str) -> None:
    """Draw boxes, and arrows such as ``x-h`` between them."""
    boxes = {}
    for name, (place, text, look, is_round) in nodes.items():
        shape = "circle,pad=0.28" if is_round else "round,pad=0.32,rounding_size=0.12"
        boxes[name] = axes.text(
            *place, text, ha="center", va="center", fontsize=7.5 if len(text) > 4 else 10, zorder=3,
            bbox={"boxstyle": shape, "linewidth": 1.0, **look},
        )  # fmt: skip
    for start, end in (arrow.split("-") for arrow in arrows.split()):
        dashed = (start, end) == ("rho", "q")
        axes.annotate(
            "", xy=nodes[end][0], xytext=nodes[start][0],
            zorder=4,  # after the boxes, whose rims are known once they are drawn, and which the arrows end at
            arrowprops={
                "arrowstyle": "-|>", "linewidth": 1.0, "shrinkA": 1, "shrinkB": 1,
                "patchA": boxes[start].get_bbox_patch(), "patchB": boxes[end].get_bbox_patch(),
                "color": style.ORANGE if nodes[end][2] is _LOSS else "black",
                "linestyle": (0, (3, 2)) if dashed else "-",
            },
        )  # fmt: skip
    for name, parameters in (("rho", "θ"), ("o", "ψ"), ("r", "φ")):
        if name in nodes:  # the parameters of each learned map, under its box
            x, y = nodes[name][0]
            _note(axes, (x, y - 0.53), parameters, "center", style.BLUE)


def _note(axes: Any, place: tuple[float, float], text: str, side: str, colour: str = "black") -> None:
    axes.text(*place, text, ha=side, va="center", fontsize=8, color=colour)
