"""Files that are whole or not there: written beside their place, flushed, and moved in one step."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dropmax.errors import RunError

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that whoever looks, at any moment, sees the old one or the new one, never a part.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_atomically(path, "hello")
    >>> path.read_text()
    'hello'
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
