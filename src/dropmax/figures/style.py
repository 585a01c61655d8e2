"""One look for every picture: colour-blind safe, readable in greyscale, legible at column width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dropmax.errors import MissingDependency
from dropmax.files import write_atomically

__all__ = ["BLUE", "GREY", "ORANGE", "RED", "TRUTH", "pyplot", "save"]

#: Okabe & Ito's palette; blue is dark and orange light when printed grey.
BLUE, ORANGE, TRUTH, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"

_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files and in our style; or say which extra brings it."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency.extra("matplotlib", "figures", "drawing pictures") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(_SETTINGS)
    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format its name ends in, whole or not at all."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip("."))
    write_atomically(path, buffer.getvalue())
    pyplot().close(figure)
