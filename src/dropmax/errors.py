"""What goes wrong, in words the user can act on.

Every error this package raises on purpose derives from :class:`DropMaxError`, and also from the builtin a caller
would expect. The command line prints such an error as one line without a traceback; any other exception is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["DataError", "DropMaxError", "InvalidType", "InvalidValue", "MissingDependency", "RunError", "did_you_mean"]


class DropMaxError(Exception):
    """The base of every error raised on purpose by dropmax.

    >>> from dropmax import make_head
    >>> try:
    ...     make_head("softmacs", in_features=4, num_classes=3)
    ... except DropMaxError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    unknown head 'softmacs': did you mean 'softmax'? The heads are ...
    """


class InvalidValue(DropMaxError, ValueError):
    """An argument has the right type and a wrong value.

    >>> issubclass(InvalidValue, ValueError)
    True
    """


class InvalidType(DropMaxError, TypeError):
    """An argument has the wrong type or dtype.

    >>> issubclass(InvalidType, TypeError)
    True
    """


class DataError(DropMaxError, ValueError):
    """A data file is missing, damaged, or not what it claims to be.

    >>> issubclass(DataError, ValueError)
    True
    """


class RunError(DropMaxError, RuntimeError):
    """A run directory or checkpoint cannot be used, or training could not go on.

    >>> issubclass(RunError, RuntimeError)
    True
    """


class MissingDependency(DropMaxError, ImportError):
    """An optional dependency is not installed.

    >>> print(MissingDependency.extra("matplotlib", "figures", "drawing figures"))
    drawing figures needs matplotlib, which is not installed: pip install "dropmax[figures]"
    """

    @classmethod
    def extra(cls, package: str, extra: str, purpose: str) -> MissingDependency:
        """Name the package that is missing, what needs it, and the extra that brings it."""
        return cls(f'{purpose} needs {package}, which is not installed: pip install "dropmax[{extra}]"')


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return ``" did you mean 'x'?"`` for the valid name closest to ``name``, or nothing where none is close.

    >>> did_you_mean("temprature", ["temperature", "samples"])
    " did you mean 'temperature'?"
    >>> did_you_mean("zzz", ["temperature", "samples"])
    ''
    """
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.5)
    return f" did you mean {close[0]!r}?" if close else ""
