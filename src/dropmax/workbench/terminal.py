"""What goes to a terminal, or to whatever standard output is piped into."""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: Control, format (these turn text around or hide it), surrogates, line and paragraph separators.
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
#: Characters per line where there is no terminal: rich would cut tables to 80.
_WIDE = 100_000


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

    Args:
        file: where to print; standard output by default.
        is_terminal: whether a terminal will show it; by default whether ``file`` is one.

    >>> import io
    >>> from rich.table import Table
    >>> table = Table("a column", box=None)
    >>> table.add_row("word " * 40)
    >>> piped = io.StringIO()
    >>> console(piped).print(table)
    >>> max(map(len, piped.getvalue().splitlines())) >= 200
    True
    """
    from rich.console import Console

    file = file or sys.stdout
    shown = file.isatty() if is_terminal is None else is_terminal
    if shown:
        return Console(file=file, highlight=False, force_terminal=True)
    return Console(file=file, highlight=False, width=_WIDE, soft_wrap=True)
