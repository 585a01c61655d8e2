"""Names that somebody else chose, on a terminal: a terminal obeys control characters, and rich obeys brackets."""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]

#: Control, format (these turn text around or hide it), surrogates, line and paragraph separators.
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: object, *, keep: str = "") -> str:
    """Return a text with every character that a terminal would obey instead of show spelt out; but for ``keep``.

    >>> print(printable("wren\\x1b[31m.png"), printable("a\\u202eb"), printable("two\\nlines", keep="\\n"))
    wren\\x1b[31m.png a\\u202eb two
    lines
    """
    return "".join(
        c if c in keep or unicodedata.category(c) not in _OBEYED else c.encode("unicode_escape").decode()
        for c in str(text)
    )
