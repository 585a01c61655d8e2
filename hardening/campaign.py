"""What a campaign is, and the file it leaves behind.

A campaign is a module of this package, named in :data:`CAMPAIGNS`, with

- ``run(*, short: bool, seed: int, scratch: Path) -> Outcome``: try to break one promise, in seconds when ``short``.

It never stops at the first failure: it counts them and keeps a few to look at.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dropmax.errors import RunError
from dropmax.workbench.files import write_atomically
from dropmax.workbench.provenance import provenance

#: Name of a campaign (and of its module) and the promise it tries to break.
CAMPAIGNS: dict[str, str] = {
    "kills": "a killed run goes on and ends in the same bytes",
    "files": "a malformed file ends in success or in our own error, in bounded time and memory",
    "hostile": "a hostile file runs nothing and writes nothing",
    "numerics": "finite input gives finite output near the reference; other input is reported",
    "determinism": "the same seed gives the same bytes",
    "endurance": "memory and open files stay flat over hours",
    "mutants": "a changed formula makes a test fail",
    "supply": "what is installed is known, licensed and pinned",
}

#: Failures written out in full; the rest are only counted.
KEPT_FAILURES = 20


@dataclass
class Outcome:
    """What a campaign tried and what came of it.

    ``tried`` counts the attempts and ``counts`` says what became of them, by kind. ``failures`` are broken promises,
    one line each that lets a reader try it again. ``details`` may hold tables for the documentation.
    """

    tried: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def count(self, kind: str, number: int = 1) -> None:
        """Count an attempt that ended as ``kind``."""
        self.tried += number
        self.counts[kind] = self.counts.get(kind, 0) + number

    def fail(self, line: str) -> None:
        """Note a broken promise; call :meth:`count` for the attempt as well."""
        self.failed += 1
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(line)


def result_path(out: Path, name: str, short: bool) -> Path:
    """Return where the outcome of a campaign goes."""
    return out / f"{name}{'.short' if short else ''}.json"


def check_replaceable(path: Path, name: str) -> None:
    """Refuse to replace a file that is not an earlier outcome of the same campaign."""
    if not path.exists():
        return
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError):
        earlier = None
    if not isinstance(earlier, dict) or earlier.get("campaign") != name:
        raise RunError(
            f"{path} exists and is not an outcome of the campaign {name!r}: move it away, or choose another --out"
        )


def write_outcome(path: Path, name: str, outcome: Outcome, command: str, seed: int, seconds: float) -> None:
    """Write an outcome with its origin."""
    content = {
        "campaign": name,
        "promise": CAMPAIGNS[name],
        "seconds": round(seconds, 1),
        **asdict(outcome),
        "provenance": provenance(command, [seed]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")
