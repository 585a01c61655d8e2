"""Figures of training: losses (Figure 3), gradients (Appendix B), and what the masks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dropmax.lab.figures.runs import NotDrawable, Run, Subject, by_data, data_name
from dropmax.workbench import style

__all__ = ["CONVERGENCE", "GRADIENTS", "MASKS", "draw_convergence", "draw_gradients", "draw_masks"]

CONVERGENCE = "Cross entropy in training, pale on what is trained on and full on what is not."
GRADIENTS = (
    "Norm of the batch loss's gradient by the classifier's weights and biases ψ at each step of training, softmax "
    "against DropMax; the paper argues that DropMax's is smaller, so that learning is more stable. Thin: as "
    "recorded; thick: moving averages over a thirtieth of training."
)
MASKS = (
    "Masks over training, on the hold-out set: the mean retain probability ρ of the target and of its rivals, the mean "
    "posterior g of rivals, and the terms of the loss, before their weights."
)

_RECORDED = (
    "The batch's loss at each step, with ρ in place of the masks z that training draws; the full lines are the cross "
    "entropy of the whole test set."
)
_LOGGED = (
    "From the runs' logs, one point per epoch: the training curve of a head with masks is drawn with its masks z, the "
    "validation curve with ρ. Add --record for every step, the test set, and ρ in both."
)
#: Where KL - H alone pulls the rho of a rival whose g is 0.
_SUNK = 0.2178

#: Steps and values.
Curve = tuple[Sequence[float], Sequence[float]]


def draw_convergence(subject: Subject) -> tuple[Any, str]:
    """Draw train and held-out cross entropy of every head, one panel per data set, with a band over seeds."""
    groups = by_data(subject.runs)
    recorded = all(run in subject.recordings for run in subject.runs)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    width = style.PAGE if columns > 1 else 0.66 * style.PAGE
    figure, axes = style.pyplot().subplots(rows, columns, figsize=(width, 2.7 * rows), squeeze=False)
    for spare in axes.flat[len(groups) :]:
        spare.set_visible(False)
    band = False
    for place, (panel, group) in enumerate(zip(axes.flat, groups.values(), strict=False)):
        looks = Subject(group).looks()
        for label, runs in Subject(group).methods().items():
            colour, line = style.look(looks[label])
            train, held = zip(*((_recorded(subject, run) if recorded else _logged(run)) for run in runs), strict=True)
            band |= len(runs) > 1
            style.band(panel, train, colour, "-", alpha=0.45, linewidth=0.5)
            style.band(panel, held, colour, line, label=style.plain(label, 40))
        values = [y for line in panel.get_lines() for y in line.get_ydata() if y > 0]
        panel.set(xlabel="step", yscale="log" if max(values) > 10 * min(values) else "linear")
        panel.set_ylabel("cross entropy (nats)" if place % columns == 0 else "")
        panel.plot([], [], color="black", linewidth=1.6, label="test" if recorded else "validation")
        panel.plot([], [], color="black", linewidth=1.0, alpha=0.45, label="training")
        name = style.plain(data_name(group[0].recipe))
        if len(groups) > 1:
            style.panel(panel, chr(ord("a") + place), name)
        else:
            panel.set_title(name, fontsize=9)
        panel.legend(fontsize=7.5, ncol=2, loc="upper right")
    words = _LOGGED
    seeds = "Lines are means over seeds, bands go from the lowest to the highest." if band else "One seed: no band."
    if recorded:
        same = sum(subject.recordings[run].same_weights for run in subject.runs)
        words = _RECORDED
        seeds += f" {same} of {len(subject.runs)} repetitions ended with exactly the run's weights."
    return figure, f"{words} {seeds}"


def _recorded(subject: Subject, run: Run) -> tuple[Curve, Curve]:
    found = subject.recordings[run]
    return (found.steps, found.train), (found.test_steps, found.test)


def _logged(run: Run) -> tuple[Curve, Curve]:
    train = [(row["step"], row["train"].get("cross_entropy", row["train"]["total"])) for row in run.log]
    held = [(row["step"], row["validation"]["nll"]) for row in run.log if "validation" in row]
    return tuple(zip(*train, strict=True)), tuple(zip(*held, strict=True))  # type: ignore[return-value]


def draw_gradients(subject: Subject) -> tuple[Any, str]:
    """Draw the recorded gradient norms of softmax and DropMax."""
    base, masked = (run.label for run in subject.pair())
    figure, axes = style.pyplot().subplots(figsize=(0.66 * style.PAGE, 2.7))
    means = {}
    chosen = Subject(subject.recorded_pair())
    for label, runs in chosen.methods().items():
        colour, line = style.look(chosen.looks()[label])
        found = [subject.recordings[run] for run in runs]
        for one in found:
            axes.plot(one.steps, one.gradient_norm, color=colour, linewidth=0.5, alpha=0.3)
        smooth = [(one.steps, _smooth(one.gradient_norm)) for one in found]
        style.band(axes, smooth, colour, line, label=style.plain(label, 40))
        means[label] = float(np.mean([np.mean(one.gradient_norm) for one in found]))
    axes.set(xlabel="step", ylabel=r"$\|\partial\,\mathrm{loss}/\partial\psi\|$", yscale="log")
    axes.legend()
    return figure, (
        f"Mean over training: {base} {means[base]:.3g}, {masked} {means[masked]:.3g} "
        f"({means[masked] / means[base]:.2f} times as large)."
    )


def _smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages, shorter at the ends."""
    reach = max(1, len(values) // 60)
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]


def draw_masks(subject: Subject) -> tuple[Any, str]:
    """Draw rho, g and the loss terms of every run with masks against the epoch: does every rival sink alike?"""
    masked = Subject([run for run in subject.runs if run.has_masks and any("masks" in row for row in run.log)])
    if not masked.runs:
        raise NotDrawable("needs a run that was measured on a hold-out set during training")
    figure, panels = style.pyplot().subplots(1, 3, figsize=(style.PAGE, 2.5))
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
    words = f"The grey line is ρ = {_SUNK}, where KL - H pulls a rival whose g is 0. At the end, first seed: {ends}."
    return figure, words


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
