"""Docstrings are written for `help()`: say in Markdown what they say in reStructuredText."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Turn roles into code and ``::`` at the end of a line into a colon."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object once it is known."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(":", text)
