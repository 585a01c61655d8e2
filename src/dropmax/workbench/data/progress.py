"""Progress of long work: a bar on a terminal, a line now and then elsewhere; always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dropmax.workbench.terminal import printable

__all__ = ["progress"]

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(title: str, total: int | None, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show the progress of ``total`` units, "bytes" or things by name; yields a function to call with each advance.

    >>> with progress("counting", 3, "sheep") as advance:
    ...     advance(3)
    """
    title = printable(title)
    if sys.stderr.isatty():
        with _bar(title, total, unit, done) as advance:
            yield advance
    else:
        yield _lines(title, total, unit, done)


@contextmanager
def _bar(title: str, total: int | None, unit: str, done: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    )
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), *amount, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total, completed=done)
        yield lambda step: bars.advance(task, step)


def _lines(title: str, total: int | None, unit: str, done: int) -> Callable[[int], None]:
    start = printed = time.monotonic()
    first, count = done, done

    def advance(step: int) -> None:
        nonlocal count, printed
        count += step
        now = time.monotonic()
        if now - printed < _SECONDS_BETWEEN_LINES:
            return
        printed = now
        rate = (count - first) / (now - start)
        amount = f"{count / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s" if unit == "bytes" else f"{count:,} {unit}"
        left = f", {100 * count / total:.0f} %, {(total - count) / rate:,.0f} s left" if total and rate else ""
        print(f"{title}: {amount}{left}", file=sys.stderr, flush=True)

    return advance
