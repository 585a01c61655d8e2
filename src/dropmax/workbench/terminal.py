"""What goes to a terminal, or to whatever is in its place: safe text, tables, and the progress of long work."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: Control, format (these turn text around or hide it), surrogates, line and paragraph separators.
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
#: Characters per line where there is no terminal: rich would cut tables to 80.
_WIDE = 100_000
_SECONDS_BETWEEN_LINES = 5.0
_SHORT = {"cross_entropy": "ce", "entropy": "H", "auxiliary": "aux", "total": "loss"}


def printable(text: object, *, keep: str = "") -> str:
    """Return a text with control characters escaped, except for those in ``keep``.

    >>> print(printable("wren\\x1b[31m.png"), printable("a\\u202eb"), printable("two\\nlines", keep="\\n"))
    wren\\x1b[31m.png a\\u202eb two
    lines
    """
    return "".join(
        c if c in keep or unicodedata.category(c) not in _OBEYED else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def console(file: TextIO | None = None, *, is_terminal: bool | None = None) -> Console:
    """Return a console for tables: as wide as the terminal, and so wide that nothing is cut where there is none.

    ``is_terminal`` says whether a terminal will show it; by default ``file``, standard output, is asked.
    """
    from rich.console import Console

    file = file or sys.stdout
    if file.isatty() if is_terminal is None else is_terminal:
        return Console(file=file, highlight=False, force_terminal=True)
    return Console(file=file, highlight=False, width=_WIDE, soft_wrap=True)


# --- progress of long work, on standard error ------------------------------------------------------------------------


class Advance(Protocol):
    """What :func:`progress` yields: call it with the units done since the last call, and what to say beside them."""

    def __call__(self, step: int, note: str = "", /) -> None:
        """Show that ``step`` more units are done."""


@contextmanager
def progress(
    title: str, total: int | None, unit: str, done: int = 0, *, seconds: float | None = None, quiet: bool = False
) -> Iterator[Advance]:
    """Show the progress of ``total`` units, "bytes" or things by name; yields a function to call with each advance.

    It is a live bar on a terminal, and elsewhere a plain line every ``seconds`` (5). ``done`` units were done before.

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
    from rich import progress as rich
    from rich.console import Console
    from rich.text import Text

    class Rate(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            return Text(f"{unit}, {task.speed:.3g}/s" if task.speed else unit)

    amount: tuple[rich.ProgressColumn, ...] = rich.MofNCompleteColumn(), Rate()
    if unit == "bytes":
        amount = rich.DownloadColumn(), rich.TransferSpeedColumn()
    title_column, note = (rich.TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
    columns = (title_column, rich.BarColumn(20), *amount, rich.TimeRemainingColumn(), note)
    with rich.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total, completed=done, note="")
        yield lambda step, note="", /: bars.update(task, advance=step, note=note)


def _lines(title: str, total: int | None, unit: str, done: int, seconds: float) -> Advance:
    start = printed = time.monotonic()
    count = done

    def advance(step: int, note: str = "", /) -> None:
        nonlocal count, printed
        count += step
        now = time.monotonic()
        if now - printed < seconds:
            return
        printed = now
        rate = (count - done) / max(now - start, 1e-9)
        amount = f"{count:,} {unit}, {rate:.3g}/s"
        if unit == "bytes":
            amount = f"{count / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s"
        left = f", {100 * count / total:.0f} %, {(total - count) / rate:,.0f} s left" if total and rate else ""
        print(f"{title}: {amount}{left}{', ' * bool(note)}{note}", file=sys.stderr, flush=True)

    return advance


class TrainingProgress:
    """The progress of training, with the epoch, the terms of the loss and the last validation error beside it."""

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
        spelt = " ".join(f"{_SHORT.get(name, name)} {value:.3f}" for name, value in terms.items())
        self._advance(done - before, f"epoch {epoch + 1}/{self.epochs}, {spelt}{self.validation}")

    def epoch(self, row: dict[str, Any]) -> None:
        """Tell of an epoch's row of the log."""
        if "validation" in row:
            self.validation = f" | validation error {100 * row['validation']['error']:.2f} %"


class Status:
    """Lines that change: rewritten in place on a terminal; elsewhere the first three, joined, every ``seconds``."""

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
