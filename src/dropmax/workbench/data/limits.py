"""How much memory a small file may ask for."""

from __future__ import annotations

from pathlib import Path

from dropmax.errors import DataError

__all__ = ["refuse_bomb", "refuse_long"]

_LONGEST_LABEL = 255
# What a file may unpack to: this many bytes whatever its size, or beyond that, this many times its size. Tables that
# are mostly zeros pack better, and must then be stored unpacked: a bomb looks the same from outside.
_ALWAYS, _TIMES = 1 << 24, 100


def refuse_bomb(path: Path, size: int) -> None:
    """Raise where a file asks for far more memory than its own size, before any is taken.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "small.npz")
    >>> _ = path.write_bytes(bytes(1000))
    >>> refuse_bomb(path, 10**6)
    >>> refuse_bomb(path, 10**9)
    Traceback (most recent call last):
    dropmax.errors.DataError: ... would take 1,000 MB, more than 100 times its size: ...
    """
    if size > max(_ALWAYS, _TIMES * path.stat().st_size):
        raise DataError(
            f"{path} would take {size / 1e6:,.0f} MB, more than {_TIMES} times its size: if that is right, store it "
            "without compression"
        )


def refuse_long(where: str, name: str) -> None:
    """Labels become an array, in which every row takes the memory of the longest.

    >>> refuse_long("line 7", "a name")
    >>> refuse_long("line 7", "x" * 1000)
    Traceback (most recent call last):
    dropmax.errors.DataError: line 7: a label has 1,000 characters; use names of at most 255
    """
    if len(name) > _LONGEST_LABEL:
        raise DataError(f"{where}: a label has {len(name):,} characters; use names of at most {_LONGEST_LABEL}")
