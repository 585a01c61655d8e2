"""What hostile files are tried on: a ground where code that runs leaves a mark, and a victim whose files are watched.

An attack is a function that hands dropmax something hostile. Each payload is first set off on purpose, so that a
missing mark means something.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command import dropmax


@dataclass(frozen=True)
class Ground:
    """Where an attack takes place: the attacker's files, a victim's, and the mark that hostile code leaves."""

    folder: Path
    victim: Path
    mark: Path

    @classmethod
    def make(cls, scratch: Path) -> Ground:
        """Clear the ground of an earlier attack."""
        shutil.rmtree(scratch, ignore_errors=True)
        ground = cls(scratch / "attacker", scratch / "victim", scratch / "mark")
        ground.folder.mkdir(parents=True)
        ground.victim.mkdir()
        (ground.victim / "diary.txt").write_text("nobody's business")
        return ground

    def wrongs(self) -> list[str]:
        """Return what should not have happened."""
        found = ["hostile code ran"] if self.mark.exists() else []
        diary = self.victim / "diary.txt"
        if [path.name for path in self.victim.iterdir()] != ["diary.txt"] or diary.read_text() != "nobody's business":
            found.append("the victim's files were changed")
        strangers = {path.name for path in self.mark.parent.iterdir()} - {"attacker", "victim", "mark"}
        return found + [f"{name!r} was written outside" for name in sorted(strangers)]


Attack = Callable[[Ground], object]


# --- payloads ---------------------------------------------------------------------------------------------------


class _Call:
    """Pickles as a call of something."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def payloads(mark: Path) -> dict[str, bytes]:
    """Return pickles that make the mark when they are loaded; each is tried out first."""
    touch = f"open({str(mark)!r}, 'w').close()"
    calls = {
        "eval": _Call(eval, touch),
        "exec": _Call(exec, touch),
        "system": _Call(os.system, f"touch '{mark}'"),
        "open": _Call(open, str(mark), "w"),
        "mkdir": _Call(os.mkdir, str(mark)),
        "nested": [{"epoch": 1}, (_Call(eval, touch),)],
    }
    found = {name: pickle.dumps(call, protocol=2) for name, call in calls.items()}
    # By hand: a name that is looked up through another module, in the oldest protocol there is.
    found["by hand"] = f"cbuiltins\neval\n(V{touch}\ntR.".encode()
    for name, payload in found.items():
        pickle.loads(payload)  # to see that it would work
        if not mark.exists():
            pytest.fail(f"the payload {name!r} is not armed")
        mark.rmdir() if mark.is_dir() else mark.unlink()
    return found


# --- the command line -------------------------------------------------------------------------------------------


def command(*arguments: object, terminal: bool = False) -> tuple[int, str]:
    """Run ``dropmax ARGUMENTS`` inside this process; return its exit code and all that it printed."""
    done = dropmax(*arguments, terminal=terminal)
    return done.returncode, done.stdout + ("" if terminal else done.stderr)
