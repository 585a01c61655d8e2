"""What the masks do over training: whether rho comes to know the input, or every rival sinks to the same value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dropmax.lab.figures.subject import NotDrawable, Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw"]

CAPTION = (
    "Masks over training, on the hold-out set: the mean retain probability ρ of the target and of its rivals, the mean "
    "posterior g of rivals, and the terms of the loss, before their weights."
)

#: Where KL - H alone pulls the rho of a rival whose g is 0.
_SUNK = 0.2178


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw rho, g and the loss terms of every run with masks against the epoch."""
    plt = style.pyplot()
    masked = Subject([run for run in subject.runs if run.has_masks and any("masks" in row for row in run.log)])
    if not masked.runs:
        raise NotDrawable("needs a run that was measured on a hold-out set during training")
    figure, panels = plt.subplots(1, 3, figsize=(style.PAGE, 2.5))
    looks = masked.looks()
    for label, runs in masked.methods().items():
        colour, _ = style.look(looks[label])
        rows = [[row for row in run.log if "masks" in row] for run in runs]

        def band(panel: Any, value: Callable[[Any], float], line: Any, label: str | None = None) -> None:
            curves = [([row["epoch"] for row in each], [value(row) for row in each]) for each in rows]  # noqa: B023
            style.band(panel, curves, colour, line, label=label)  # noqa: B023

        band(panels[0], lambda row: row["masks"]["retain_target"], "-", style.plain(label, 60))
        band(panels[0], lambda row: row["masks"]["retain_rivals"], "--")
        band(panels[1], lambda row: row["masks"]["posterior_rivals"], "--")
        for term, line in (("kl", "-"), ("entropy", "--"), ("auxiliary", ":")):
            if all(term in row["validation"] for each in rows for row in each):
                band(panels[2], lambda row, term=term: row["validation"][term], line)  # type: ignore[misc]
    panels[0].axhline(_SUNK, color="0.6", linewidth=0.8, zorder=0)
    for panel, letter, title in zip(panels, "abc", ("ρ", "g of rivals", "terms (nats)"), strict=True):
        style.panel(panel, letter, title)
        panel.set(xlabel="epoch")
    for panel in panels[:2]:
        panel.set_ylim(0, 1)
    figure.legend(loc="outside upper center", ncol=2, fontsize=7)  # the methods, above all panels
    for line, who in (("-", "target"), ("--", "rivals")):
        panels[0].plot([], [], color="black", linestyle=line, label=who)
    for line, term in (("-", "KL"), ("--", "entropy"), (":", "auxiliary")):
        panels[2].plot([], [], color="black", linestyle=line, label=term)
    panels[0].legend(handles=panels[0].lines[-2:], fontsize=7)
    _scale_of_terms(panels[2])
    last = {label: runs[0].log[-1].get("masks", {}) for label, runs in masked.methods().items()}
    ends = "; ".join(
        f"{label}: ρ {row['retain_target']:.2f} / {row['retain_rivals']:.2f}, g {row['posterior_rivals']:.3f}"
        for label, row in last.items()
        if row
    )
    return (
        figure,
        f"The grey line is ρ = {_SUNK}, where KL - H pulls a rival whose g is 0. At the end, first seed: {ends}.",
    )


def _scale_of_terms(axes: Any) -> None:
    """Scale an axis by logarithms with plain numbers, and put its legend above the curves, where no grid line is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(
        fontsize=7, ncol=3, loc="upper center", columnspacing=0.9, handlelength=1.5, handletextpad=0.4, borderaxespad=0,
        frameon=True, facecolor="white", edgecolor="none", framealpha=1,
    )  # fmt: skip
