"""Progress of long work on standard error: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from dropmax.workbench.terminal import printable

_SECONDS_BETWEEN_LINES = 5.0


class Advance(Protocol):
    """What :func:`progress` yields: call it with the units done since the last call, and what to say beside them."""

    def __call__(self, step: int, note: str = "", /) -> None:
        """Show that ``step`` more units are done."""


@contextmanager
def progress(
    title: str, total: int | None, unit: str, done: int = 0, *, seconds: float | None = None, quiet: bool = False
) -> Iterator[Advance]:
    """Show the progress of ``total`` units, "bytes" or things by name; yields a function to call with each advance.

    Args:
        title: what is being done.
        total: how many units there are; None if unknown.
        unit: what is counted. "bytes" are shown as megabytes.
        done: units that were done before.
        seconds: the least time between two lines where there is no terminal; 5 by default.
        quiet: show nothing.

    >>> with progress("counting", 3, "sheep") as advance:
    ...     advance(3, "all of them")
    """
    title = printable(title)
    if quiet:
        yield lambda step, note="", /: None
    elif sys.stderr.isatty():
        with _bar(title, total, unit, done) as advance:
            yield advance
    else:
        yield _lines(title, total, unit, done, _SECONDS_BETWEEN_LINES if seconds is None else seconds)


@contextmanager
def _bar(title: str, total: int | None, unit: str, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{unit}, {task.speed:.3g}/s" if task.speed else unit)

    amount: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), Rate()]
    )
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn(20), *amount]
    columns += [TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False)]
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total, completed=done, note="")
        yield lambda step, note="", /: bars.update(task, advance=step, note=note)


def _lines(title: str, total: int | None, unit: str, done: int, seconds: float) -> Advance:
    start = printed = time.monotonic()
    first, count = done, done

    def advance(step: int, note: str = "", /) -> None:
        nonlocal count, printed
        count += step
        now = time.monotonic()
        if now - printed < seconds:
            return
        printed = now
        rate = (count - first) / max(now - start, 1e-9)
        amount = (
            f"{count / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s" if unit == "bytes" else f"{count:,} {unit}, {rate:.3g}/s"
        )
        left = f", {100 * count / total:.0f} %, {(total - count) / rate:,.0f} s left" if total and rate else ""
        print(f"{title}: {amount}{left}{', ' * bool(note)}{note}", file=sys.stderr, flush=True)

    return advance


class TrainingProgress:
    """The progress of training, with the epoch, the terms of the loss and the last validation error beside it.

    >>> with TrainingProgress("dropmax on mnist-1k", epochs=3, steps=10, quiet=True) as progress:
    ...     progress.step(0, 1, {"total": 1.0})
    """

    _SHORT: ClassVar = {"cross_entropy": "ce", "entropy": "H", "auxiliary": "aux", "total": "loss"}

    def __init__(self, title: str, epochs: int, steps: int, done: int = 0, *, quiet: bool = False) -> None:
        self.epochs, self.done, self.validation = epochs, done, ""
        self._shown = progress(title, epochs * steps, "steps", done, seconds=10.0, quiet=quiet)

    def __enter__(self) -> TrainingProgress:
        self._advance = self._shown.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._shown.__exit__(*error)

    def step(self, epoch: int, done: int, terms: dict[str, float]) -> None:
        """Tell of a step and its loss terms."""
        before, self.done = self.done, done
        spelt = " ".join(f"{self._SHORT.get(name, name)} {value:.3f}" for name, value in terms.items())
        self._advance(done - before, f"epoch {epoch + 1}/{self.epochs}, {spelt}{self.validation}")

    def epoch(self, row: dict[str, Any]) -> None:
        """Tell of an epoch's row of the log."""
        if "validation" in row:
            self.validation = f" | validation error {100 * row['validation']['error']:.2f} %"


class Status:
    """Several lines that change: rewritten in place on a terminal, the first three joined every ``seconds`` elsewhere.

    Args:
        seconds: the least time between two lines where there is no terminal.
        quiet: show nothing.

    >>> with Status(seconds=30) as status:
    ...     status.show(lambda: ["2 of 10 runs done", "softmax: epoch 3 of 40"])
    """

    def __init__(self, seconds: float, *, quiet: bool = False) -> None:
        self.seconds, self.quiet = seconds, quiet
        self.printed = time.monotonic()
        self._live: Any = None

    def __enter__(self) -> Status:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, lines: Callable[[], Sequence[str]]) -> None:
        """Show the lines that ``lines`` returns; it is called only when something is about to be shown."""
        if self.quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n  ".join(map(printable, lines()))))
        elif time.monotonic() - self.printed >= self.seconds:
            self.printed = time.monotonic()
            print("; ".join(map(printable, lines()[:3])), file=sys.stderr, flush=True)
