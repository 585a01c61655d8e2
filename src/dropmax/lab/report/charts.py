"""Matplotlib's figures as SVG inside the page, in the colours of its style sheet, so that dark and light both work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape

from dropmax.lab.figures.runs import NotDrawable, Subject
from dropmax.workbench import style

__all__ = ["chart", "confusion_image", "inline"]

#: Colours of the figures, and the variables of report.css that stand for them.
_VARIABLES = {
    "#000000": "--ink",
    "#ffffff": "--ground",
    "#b0b0b0": "--soft",
    "#999999": "--soft",
    style.GREY.lower(): "--soft",
    style.BLUE.lower(): "--blue",
    style.ORANGE.lower(): "--orange",
    style.TRUTH.lower(): "--green",
    style.RED.lower(): "--red",
}


def chart(draw: Callable[[Subject], tuple[Any, str]], subject: Subject, label: str) -> Markup | None:
    """Return one of the figures of :mod:`dropmax.lab.figures` as SVG, or None where it has nothing to show."""
    try:
        figure, _ = draw(subject)
    except NotDrawable:
        return None
    return inline(figure, label)


def inline(figure: Any, label: str) -> Markup:
    """Return a matplotlib figure as an ``<svg>`` element and close it. Text stays text."""
    plt = style.pyplot()
    with plt.rc_context({"svg.fonttype": "none"}):
        text = style.encode(figure, "svg", transparent=True).decode()
    plt.close(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r' id="[a-zA-Z]+[\w.]*_\d+"', "", text)  # figure_1, axes_1: once per picture, so not unique here
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(f": {colour}", f": var({variable})")
    return Markup(text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{escape(label)}" ', 1))


def confusion_image(counts: Any, classes: list[str]) -> Markup:
    """Return the confusion matrix of many classes as a picture: share of each true class, darker is more."""
    plt = style.pyplot()
    figure, axes = plt.subplots(figsize=(5.2, 4.6))
    share = counts / counts.sum(-1, keepdims=True).clip(1)
    image = axes.imshow(share, cmap=style.MASKS, vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="answer (number of the class)", ylabel="true class")
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    return inline(figure, f"Confusion matrix of {len(classes)} classes")
