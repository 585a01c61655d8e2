"""What a figure is drawn from: the runs on a data set, and which of them play which part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dropmax.errors import RunError
from dropmax.lab.figures.recording import Recording
from dropmax.lab.figures.runs import Run

__all__ = ["NotDrawable", "Subject"]


class NotDrawable(RunError):
    """The runs meet a figure's needs but hold nothing to show; the message says what is missing."""


@dataclass(frozen=True)
class Subject:
    """Runs to draw, and recordings of them where there are any."""

    runs: Sequence[Run]
    recordings: dict[Run, Recording] = field(default_factory=dict)

    @property
    def masked(self) -> Run | None:
        """The run whose masks are shown: of DropMax before its variants, the one with a softmax partner first."""
        chosen = [run for run in self.runs if run.has_masks]
        seeds = {run.seed for run in self.runs if run.head.name == "softmax"}
        # min keeps the order given among equals
        return min(chosen, key=lambda run: (run.head.name != "dropmax", run.seed not in seeds), default=None)

    @property
    def base(self) -> Run | None:
        """The softmax run it is compared with, of the same seed where there is one."""
        masked = self.masked
        chosen = [run for run in self.runs if run.head.name == "softmax"]
        return min(chosen, key=lambda run: masked is not None and run.seed != masked.seed, default=None)

    def with_masks(self) -> Run:
        """Return :attr:`masked`, where :meth:`Needs.missing <dropmax.lab.figures.registry.Needs.missing>` found it."""
        if self.masked is None:
            raise RunError("no run here has a head that learns masks")
        return self.masked

    def pair(self) -> tuple[Run, Run]:
        """Return :attr:`base` and :attr:`masked`, likewise."""
        if self.base is None:
            raise RunError("no run here has the head softmax")
        return self.base, self.with_masks()

    def methods(self) -> dict[str, list[Run]]:
        """Return the runs of each method, softmax first, the others as given."""
        found: dict[str, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.head.name != "softmax"):
            found.setdefault(run.label, []).append(run)
        return found

    def looks(self) -> dict[str, int]:
        """Return each method's place in :data:`dropmax.workbench.style.LOOKS`; the first is softmax's own."""
        methods = self.methods()
        first = 0 if any(runs[0].head.name == "softmax" for runs in methods.values()) else 1
        return {label: place for place, label in enumerate(methods, start=first)}

    def recorded_pair(self) -> list[Run]:
        """Return the softmax and dropmax runs whose training is compared: every seed of the two methods."""
        if self.base is None or self.masked is None:
            return []
        labels = (self.base.label, self.masked.label)
        return [run for run in self.runs if run.label in labels]
