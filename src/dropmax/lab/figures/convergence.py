"""Figure 3: how fast each head learns, and whether it overfits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dropmax.lab.figures.runs import Run, by_data, data_name
from dropmax.lab.figures.subject import Subject
from dropmax.workbench import style

__all__ = ["CAPTION", "draw"]

CAPTION = "Cross entropy in training, pale on what is trained on and full on what is not."

_RECORDED = (
    "The batch's loss at each step, with ρ in place of the masks z that training draws; the full lines are the cross "
    "entropy of the whole test set."
)
_LOGGED = (
    "From the runs' logs, one point per epoch: the training curve of a head with masks is drawn with its masks z, the "
    "validation curve with ρ. Add --record for every step, the test set, and ρ in both."
)


#: Steps and values.
Curve = tuple[Sequence[float], Sequence[float]]


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw train and held-out cross entropy of every head, one panel per data set, with a band over seeds."""
    plt = style.pyplot()
    groups = by_data(subject.runs)
    recorded = all(run in subject.recordings for run in subject.runs)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    width = style.PAGE if columns > 1 else 0.66 * style.PAGE
    figure, axes = plt.subplots(rows, columns, figsize=(width, 2.7 * rows), squeeze=False)
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
    seeds = "Lines are means over seeds, bands go from the lowest to the highest." if band else "One seed: no band."
    return figure, f"{_RECORDED if recorded else _LOGGED} {seeds}{_fidelity(subject) if recorded else ''}"


def _recorded(subject: Subject, run: Run) -> tuple[Curve, Curve]:
    found = subject.recordings[run]
    return (found.steps, found.train), (found.test_steps, found.test)


def _logged(run: Run) -> tuple[Curve, Curve]:
    train = [(row["step"], row["train"].get("cross_entropy", row["train"]["total"])) for row in run.log]
    held = [(row["step"], row["validation"]["nll"]) for row in run.log if "validation" in row]
    return tuple(zip(*train, strict=True)), tuple(zip(*held, strict=True))  # type: ignore[return-value]


def _fidelity(subject: Subject) -> str:
    same = sum(subject.recordings[run].same_weights for run in subject.runs)
    return f" {same} of {len(subject.runs)} repetitions ended with exactly the run's weights."
