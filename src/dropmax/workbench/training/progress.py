"""What a person sees while training: a bar with rate, time left and every term of the loss, or plain lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from dropmax.workbench.recipes import Recipe
from dropmax.workbench.terminal import printable

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 10.0
_SHORT = {"cross_entropy": "ce", "entropy": "H", "auxiliary": "aux", "total": "loss"}


class Progress:
    """Shows training on standard error: a rich bar on a terminal, a line every ten seconds elsewhere.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> with Progress(load_recipe("mnist-1k"), steps=10, quiet=True) as progress:
    ...     progress.step(0, 0, {"total": 1.0})
    """

    def __init__(self, recipe: Recipe, steps: int, first_epoch: int = 0, *, quiet: bool = False) -> None:
        self.title = printable(f"{recipe.head['name']} on {recipe.data.name}")
        self.epochs = recipe.training.epochs
        self.steps = steps
        self.done = self.first = first_epoch * steps
        self.quiet = quiet
        self.validation = ""
        self.started = self.printed = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich import progress as rich_progress
            from rich.console import Console

            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}", markup=False),
                rich_progress.BarColumn(bar_width=20),
                rich_progress.TextColumn("{task.fields[epoch]}/" + str(self.epochs)),
                rich_progress.TextColumn("{task.fields[rate]}"),
                rich_progress.TimeRemainingColumn(),
                rich_progress.TextColumn("{task.fields[terms]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=self.epochs * self.steps, completed=self.done, epoch=0, rate="", terms=""
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, epoch: int, step: int, terms: dict[str, float]) -> None:
        """Tell of a step and its loss terms."""
        self.done = epoch * self.steps + step + 1
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self.done,
                epoch=epoch + 1,
                rate=f"{self._rate():.0f} steps/s",
                terms=self._spell(terms) + self.validation,
            )
        elif time.monotonic() - self.printed >= _SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            left = (self.epochs * self.steps - self.done) / self._rate()
            print(
                f"{self.title}: epoch {epoch + 1}/{self.epochs}, {self._rate():.0f} steps/s, {left:.0f} s left, "
                f"{self._spell(terms)}{self.validation}",
                file=sys.stderr,
                flush=True,
            )

    def epoch(self, row: dict[str, Any]) -> None:
        """Tell of an epoch's row of the log."""
        if "validation" in row:
            self.validation = f" | validation error {100 * row['validation']['error']:.2f} %"

    def _rate(self) -> float:
        return (self.done - self.first) / max(1e-9, time.monotonic() - self.started)

    @staticmethod
    def _spell(terms: dict[str, float]) -> str:
        return " ".join(f"{_SHORT.get(name, name)} {value:.3f}" for name, value in terms.items())
