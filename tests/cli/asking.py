"""Commands as a user types them, by what comes of them: an answer, JSON, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.command import dropmax


def answer(*arguments: object, cwd: Path | None = None) -> str:
    """Return what a command that succeeds prints on standard output."""
    done = dropmax(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def notes(*arguments: object, cwd: Path | None = None) -> str:
    """Return what a command that succeeds tells the person at the terminal, on standard error."""
    done = dropmax(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stderr


def as_json(*arguments: object, cwd: Path | None = None) -> Any:
    """Return what a command answers with ``--json``."""
    return json.loads(answer(*arguments, "--json", cwd=cwd))


def predicted(run: Path | str, *arguments: object, cwd: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of ``dropmax predict``."""
    return list(json.loads(answer("predict", run, *arguments, "--format", "json", cwd=cwd)))


def refusal(*arguments: object, cwd: Path | None = None) -> str:
    """Return what a command that is refused says: exit code 2, a last line of ours, no traceback, no answer."""
    done = dropmax(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("dropmax: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def refused_at_once(message: str, *arguments: object, cwd: Path) -> None:
    """Expect a refusal in one line, from a command that leaves nothing behind in the empty directory ``cwd``."""
    said = refusal(*arguments, cwd=cwd)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not list(cwd.iterdir()), "something was left behind"
