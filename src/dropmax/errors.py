"""What goes wrong, in words the user can act on.

Every error this package raises on purpose derives from :class:`DropMaxError`, and also from the builtin a caller
would expect. The command line prints such an error as one line without a traceback; any other exception is a bug.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable
from typing import Any

__all__ = [
    "DataError",
    "DropMaxError",
    "InvalidType",
    "InvalidValue",
    "MissingDependency",
    "RunError",
    "check_choice",
    "did_you_mean",
    "first_line",
    "optional",
    "unknown",
]


class DropMaxError(Exception):
    """The base of every error raised on purpose by dropmax.

    >>> from dropmax import make_head
    >>> try:
    ...     make_head("softmacs", in_features=4, num_classes=3)
    ... except DropMaxError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    unknown head 'softmacs': did you mean 'softmax'? Valid are softmax, ...
    """


class InvalidValue(DropMaxError, ValueError):
    """An argument has the right type but a wrong value."""


class InvalidType(DropMaxError, TypeError):
    """An argument has the wrong type or dtype."""


class DataError(DropMaxError, ValueError):
    """A data file is missing, damaged, or not what it claims to be."""


class RunError(DropMaxError, RuntimeError):
    """A run directory or checkpoint cannot be used, or training could not continue."""


class MissingDependency(DropMaxError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def extra(cls, package: str, extra: str, purpose: str) -> MissingDependency:
        """Name the package that is missing, what needs it, and the extra that brings it."""
        return cls(f'{purpose} needs {package}, which is not installed: pip install "dropmax[{extra}]"')


def optional(module: str, extra: str, purpose: str, *, package: str = "") -> Any:
    """Import a module of an optional package, or raise an error that names the extra which brings it.

    >>> optional("no_such.module", "figures", "drawing")
    Traceback (most recent call last):
    dropmax.errors.MissingDependency: drawing needs no_such, which is not installed: pip install "dropmax[figures]"
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency.extra(package or module.partition(".")[0], extra, purpose) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says anything, or the kind of error where none does.

    >>> first_line(OSError("\\n404: no such file\\nsee the log")), first_line(KeyboardInterrupt())
    ('404: no such file', 'KeyboardInterrupt')
    """
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return ``" did you mean 'x'?"`` for the valid name closest to ``name``, or nothing where none is close.

    >>> did_you_mean("temprature", ["temperature", "samples"])
    " did you mean 'temperature'?"
    >>> did_you_mean("zzz", ["temperature", "samples"])
    ''
    """
    names = {other.casefold(): other for other in valid}
    close = difflib.get_close_matches(str(name).casefold(), names, n=1, cutoff=0.5)
    return f" did you mean {names[close[0]]!r}?" if close else ""


def unknown(what: str, name: object, valid: Iterable[str], advice: str = "") -> str:
    """Return what to say about a name that is not valid: the name, the closest valid one, and all valid ones.

    >>> print(unknown("format", "jsn", ["csv", "json"], "separate several by commas"))
    unknown format 'jsn': did you mean 'json'? Valid are csv, json; separate several by commas
    """
    names = list(valid)
    listed = f"Valid are {', '.join(names)}" if names else "There are none"
    return f"unknown {what} {name!r}:{did_you_mean(name, names)} {listed}" + (f"; {advice}" if advice else "")


def check_choice(option: str, value: object, valid: Collection[str], advice: str = "") -> None:
    """Refuse a value that is not among the valid ones, and suggest the closest."""
    if value not in tuple(valid):
        raise InvalidValue(unknown(option, value, valid, advice))
