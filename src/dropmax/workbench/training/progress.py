"""What a person sees of training: :func:`dropmax.workbench.progress.progress` with epochs and the terms of the loss."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from dropmax.workbench.progress import progress
from dropmax.workbench.recipes import Recipe

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 10.0
_SHORT = {"cross_entropy": "ce", "entropy": "H", "auxiliary": "aux", "total": "loss"}


class Progress:
    """Shows training on standard error: a bar on a terminal, a line every ten seconds elsewhere.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> with Progress(load_recipe("mnist-1k"), steps=10, quiet=True) as progress:
    ...     progress.step(0, 1, {"total": 1.0})
    """

    def __init__(self, recipe: Recipe, steps: int, steps_done: int = 0, *, quiet: bool = False) -> None:
        self.title = f"{recipe.head['name']} on {recipe.data.name}"
        self.epochs, self.steps, self.quiet = recipe.training.epochs, steps, quiet
        self.done = steps_done
        self.validation = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        total = self.epochs * self.steps
        shown = progress(self.title, total, "steps", self.done, seconds=_SECONDS_BETWEEN_LINES, quiet=self.quiet)
        self._advance = self._stack.enter_context(shown)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def step(self, epoch: int, steps_done: int, terms: dict[str, float]) -> None:
        """Tell of a step and its loss terms."""
        before, self.done = self.done, steps_done
        spelt = " ".join(f"{_SHORT.get(name, name)} {value:.3f}" for name, value in terms.items())
        self._advance(self.done - before, f"epoch {epoch + 1}/{self.epochs}, {spelt}{self.validation}")

    def epoch(self, row: dict[str, Any]) -> None:
        """Tell of an epoch's row of the log."""
        if "validation" in row:
            self.validation = f" | validation error {100 * row['validation']['error']:.2f} %"
