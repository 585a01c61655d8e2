"""Hostile files: each attack would leave a mark if it worked, and the marks are looked for.

An attack is a function that hands dropmax something hostile on a :class:`Ground` of its own and returns what came of
it. Whatever it says, the ground is looked over afterwards: code that ran has left its mark, and nobody may have touched
the victim. Each payload is first set off on purpose, so that a mark that is missing means something.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dropmax.errors import DropMaxError
from dropmax.workbench.progress import progress
from hardening.campaign import Outcome

__all__ = ["Attack", "Broken", "Ground", "attack_all", "attacks", "command", "payloads", "run"]


class Broken(Exception):
    """An attack got further than it may."""


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


Attack = Callable[[Ground], str]


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Try every attack; in the short form those with the first payload only."""
    outcome = Outcome()
    chosen = attacks(short)
    with progress("attacking with hostile files", len(chosen), "attacks") as advance:
        attack_all(outcome, chosen, scratch, advance)
    outcome.details["attacks"] = sorted(chosen)
    return outcome


def attacks(short: bool = False) -> dict[str, Attack]:
    """Return every attack by its name."""
    from hardening import hostile_code, hostile_places, hostile_text

    return {**hostile_code.attacks(short), **hostile_places.attacks(), **hostile_text.attacks(short)}


def attack_all(
    outcome: Outcome, chosen: dict[str, Attack], scratch: Path, advance: Callable[[int], None] = lambda step: None
) -> None:
    """Try the attacks and count what came of them."""
    cache = scratch / "cache"
    with _environment(DROPMAX_CACHE=str(cache)):
        for name, attack in chosen.items():
            ground = Ground.make(scratch / "ground")
            problems = []
            try:
                became = attack(ground)
            except DropMaxError:
                became = "refused"
            except Broken as error:
                became, problems = "broken", [str(error)]
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                became, problems = "other error", [f"{error!r} at {Path(place.filename).name}:{place.lineno}"]
            problems += ground.wrongs()
            outcome.count("broken" if problems else became)
            for problem in problems:
                outcome.fail(f"{name}: {problem}")
            advance(1)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


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
            raise Broken(f"the payload {name!r} is not armed")
        mark.rmdir() if mark.is_dir() else mark.unlink()
    return found


# --- the command line -------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        """Say what rich and the progress lines ask."""
        return True


def command(*arguments: object, terminal: bool = False) -> tuple[int, str]:
    """Run ``dropmax ARGUMENTS`` inside this process; return its exit code and all that it printed."""
    from dropmax.cli import main

    out = _Terminal() if terminal else io.StringIO()
    before, code = sys.argv, 0
    sys.argv = ["dropmax", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = before
    return code, out.getvalue()


def digest(path: Path) -> str:
    """Return a digest of a file, to see whether it changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
