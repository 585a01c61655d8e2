"""One look for every picture: colour-blind safe, readable in greyscale, legible at column width."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dropmax.errors import optional
from dropmax.workbench.files import write_atomically

#: Okabe & Ito's palette; blue is dark and orange light when printed grey.
BLUE, ORANGE, TRUTH, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"
PALE = "#B8CFE0"  #: bars of classes that are neither the truth nor an answer

#: Widths in inches of a journal's column and of its page: drawn at these, text has the size it says.
COLUMN, PAGE = 3.4, 7.0

#: Colour and line style of the first head, the second, ...: the style says again what the colour says.
LOOKS: tuple[tuple[str, Any], ...] = (
    (ORANGE, "--"),
    (BLUE, "-"),
    (TRUTH, "-."),
    (RED, ":"),
    ("#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
    ("#56B4E9", (0, (1, 1))),
    ("#000000", (0, (8, 2))),
    (GREY, "-"),
)

#: Colour map of probabilities: white is 0, dark blue 1, in equal steps of lightness.
MASKS = "Blues"

FORMATS = ("png", "svg", "pdf")

_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": 150,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "dropmax",  # the same picture gives the same file
}


def look(place: int) -> tuple[str, Any]:
    """Return colour and line style of the method at a place among others; after eight they come again."""
    return LOOKS[place % len(LOOKS)]


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files and in our style; or say which extra brings it."""
    optional("matplotlib", "figures", "drawing pictures").use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(_SETTINGS)
    return plt


def encode(
    figure: Any, form: str, *, title: str = "", description: str = "", command: str = "", transparent: bool = False
) -> bytes:
    """Return a figure as the bytes of a file in one of :data:`FORMATS`, with where it comes from in its metadata."""
    about = {
        "png": {"Title": title, "Description": description, "Comment": command},
        "svg": {"Title": title, "Description": f"{description} Made by: {command}", "Date": None},
        "pdf": {"Title": title, "Subject": description, "Keywords": command, "CreationDate": None},
    }
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a class name in a script the font lacks
        figure.savefig(buffer, format=form, metadata=about[form] if title else None, transparent=transparent)
    return buffer.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format its name ends in, whole or not at all."""
    write_atomically(path, encode(figure, path.suffix.lstrip(".")))
    pyplot().close(figure)


def plain(text: str, limit: int = 24) -> str:
    """Return an untrusted name on one line, cut to ``limit`` characters, and never taken for mathematics.

    >>> plain("$x$\\nand more of it than fits", limit=12)
    '\\\\$x\\\\$ and mor…'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    cut = line if len(line) <= limit else line[: limit - 1] + "…"
    return cut.replace("$", r"\$")


def panel(axes: Any, letter: str, title: str) -> None:
    """Title a panel of a figure as papers do: a bold letter, then words."""
    axes.set_title(rf"$\bf{{({letter})}}$ {title}", fontsize=9, loc="left")


def bare(axes: Any) -> None:
    """Leave nothing but what is drawn: no ticks, grid or frame."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def image(axes: Any, shown: Any, interpolation: str = "nearest") -> None:
    """Show a picture, grey ones dark on white as on paper, and nothing around it."""
    axes.imshow(shown, cmap="gray_r", interpolation=interpolation)
    bare(axes)


def class_ticks(axes: Any, classes: Iterable[str], *, both: bool = False) -> None:
    """Name the classes along the x axis, upright unless they are digits or the like; with ``both`` along y too."""
    names = [plain(name, 9) for name in classes]
    axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=7)
    if both:
        axes.set_yticks(range(len(names)), names, fontsize=7)


def profile_colours(classes: Iterable[int], truth: int, rival: int) -> list[str]:
    """Return the colour of each class's bar: the truth, the rival or wrong answer, and all others pale."""
    return [TRUTH if k == truth else RED if k == rival else PALE for k in classes]


def band(axes: Any, curves: Sequence[tuple[Any, Any]], colour: str, line: Any, **look: Any) -> None:
    """Draw the mean of several (x, y) curves and a band from their lowest to their highest value."""
    grid = np.asarray(max((x for x, _ in curves), key=len), dtype=float)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    look = {"linewidth": 1.6, "alpha": 1.0, "rasterized": len(grid) > 5000} | look  # as a path it would take megabytes
    axes.plot(grid, values.mean(0), linestyle=line, color=colour, **look)
    if len(curves) > 1:
        pale = {"alpha": 0.18 * look["alpha"], "linewidth": 0, "rasterized": look["rasterized"]}
        axes.fill_between(grid, values.min(0), values.max(0), color=colour, **pale)


def outlined(width: float = 1.8) -> list[Any]:
    """Return the path effects that put a white rim around a mark, so that it shows on any ground."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=width, foreground="white")]


def mark_answers(axes: Any, truth: tuple[float, float], wrong: tuple[float, float] | None, size: float = 6) -> None:
    """Mark the truth with a green circle and a base model's wrong answer with a red cross, as the paper does."""
    rim = outlined(size / 2)
    axes.plot(*truth, "o", color=TRUTH, markersize=size, fillstyle="none", markeredgewidth=1.5, path_effects=rim)
    if wrong is not None:
        axes.plot(*wrong, "x", color=RED, markersize=size - 0.5, markeredgewidth=1.7, path_effects=rim)
