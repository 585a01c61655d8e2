"""Files that are whole or not there: written beside their place, flushed, and moved in one step."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from dropmax.errors import RunError


class CannotWrite(RunError):
    """The disk is full or not writable, which says nothing about the run itself."""


def check_place(directory: Path) -> None:
    """Refuse a directory that cannot be made or written to, before hours of work."""
    existing = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "may not be written to" if existing.is_dir() else "is not a directory"
        raise CannotWrite(f"cannot write to {directory}: {existing} {why}; choose another --out")


def make_directory(path: Path, what: str = "directory") -> None:
    """Make a directory and those above it, or say in a line why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"cannot make the {what} {path}: {error.strerror or error}") from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file atomically: readers see the old one or the new one, never a part.

    What a process killed in the middle of this left beside the file is removed by the next that writes it.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        _remove_leftovers(path)
        descriptor, temporary = _temporary(path)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes files only their owner can read
            if os.name == "nt":
                file.close()  # Windows moves no open file; elsewhere the lock lasts until it is in its place
            os.replace(temporary, path)
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


@contextlib.contextmanager
def filling(path: Path) -> Iterator[Path]:
    """Yield a place beside a file that is written piece by piece; it takes the file's place once it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parse_json(text: str) -> Any:
    """Parse JSON; anything wrong with the text, too deep nesting included, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no file; a RunError says what is wrong with it."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds {found!r:.60}, not a table")
    return found


def _temporary(path: Path) -> tuple[int, str]:
    """Make the file beside the place, locked: that tells a writer at work from one that was killed."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another process took it for a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    """Delete the temporary files of this place whose writers are dead."""
    ours = re.compile(re.escape(f".{path.name}.") + r"[a-z0-9_]{8}\.tmp")
    for name in os.listdir(path.parent):
        if not ours.fullmatch(name):
            continue
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours to delete
            descriptor = os.open(path.parent / name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                is_left = lock(descriptor)
                if is_left and os.name != "nt":
                    os.unlink(path.parent / name)  # still locked: no process can begin to use it
            finally:
                os.close(descriptor)
            if is_left and os.name == "nt":  # Windows deletes no open file
                os.unlink(path.parent / name)


def lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, or its process dies; return whether that was possible."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:  # the file system, or the platform, has no locks
        return False
