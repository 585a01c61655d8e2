"""Text that somebody else chose, made harmless; and the few tags a report is written with."""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["cut", "escape", "name", "picture_tag", "table"]


def escape(text: object) -> str:
    """Return a text as HTML shows it, in an element or an attribute; characters that show nothing are left out.

    >>> escape('<b onclick="x()">&')
    '&lt;b onclick=&quot;x()&quot;&gt;&amp;'
    """
    shown = "".join(c for c in str(text) if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Co"))
    return html.escape(shown, quote=True)


def cut(text: str, limit: int) -> str:
    """Return a text on one line, cut to ``limit`` characters.

    >>> cut("a very long name", 8)
    'a very …'
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def name(text: str, limit: int = 40, kind: str = "name") -> str:
    """Return a class's or file's name as an element of its own, so that writing from right to left stays inside it.

    >>> name("cat")
    '<bdi class="name">cat</bdi>'
    """
    title = f' title="{escape(text)}"' if len(text) > limit else ""
    return f'<bdi class="{kind}"{title}>{escape(cut(text, limit))}</bdi>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Return a table of cells that are HTML already; ``numbers`` are the columns to align at the right.

    >>> table(["a"], [["1"]], numbers=[0])  # doctest: +ELLIPSIS
    '<div class="wide"><table><thead>...<td class="n">1</td></tr></tbody></table></div>'
    """

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = [' class="n"' if column in numbers else "" for column in range(len(values))]
        return "".join(f"<{tag}{kind}>{value}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = cells("th", head)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def picture_tag(pixels: Any, alt: str) -> str:
    """Return an image, (H, W) or (H, W, 3) uint8, inside the page itself."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    height, width = pixels.shape[:2]
    small = ' class="pixels"' if max(height, width) <= 48 else ""
    return f'<img{small} src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(alt)}">'
