"""What a person sees while a plan runs: one line per worker on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dropmax.lab.experiments.plan import Job
from dropmax.lab.experiments.schedule import Schedule
from dropmax.workbench.progress import Status

__all__ = ["Progress", "spell_seconds"]

_SECONDS_BETWEEN_LINES = 30.0


class Progress(Status):
    """Shows how far a schedule is, on standard error.

    Args:
        estimates: seconds a run of each group is expected to take, by its key.
        workers: how many runs go on side by side.
        quiet: say nothing.

    >>> with Progress({}, workers=2, quiet=True) as progress:
    ...     progress.workers
    2
    """

    def __init__(self, estimates: dict[str, float], workers: int, *, quiet: bool = False) -> None:
        super().__init__(_SECONDS_BETWEEN_LINES, quiet=quiet)
        self.estimates, self.workers = estimates, workers

    def __enter__(self) -> Progress:
        super().__enter__()
        return self

    def show_runs(self, schedule: Schedule, busy: Sequence[tuple[Job, Path | None]]) -> None:
        """Show the runs under way; each comes with its scratch directory, where that can be looked into from here."""

        def lines() -> list[str]:
            rows = [(job, {} if work is None else _last_rows(work / "metrics.jsonl")) for job, work in busy]
            summary = self._summary(schedule, [(job, row.get("epoch", 0)) for job, row in rows])
            return [summary, *(_spell(job, row) for job, row in rows)]

        self.show(lines)

    def _summary(self, schedule: Schedule, under_way: Sequence[tuple[Job, int]]) -> str:
        failed = len(schedule.failed())
        text = f"{len(schedule.results)} of {schedule.plan.count} runs done" + (f", {failed} failed" if failed else "")
        left = self.seconds_left(schedule, under_way)
        if left is None:
            return text
        end = datetime.datetime.now() + datetime.timedelta(seconds=left)
        return f"{text}, about {spell_seconds(left)} left (until {end:%a %H:%M})"

    def seconds_left(self, schedule: Schedule, under_way: Sequence[tuple[Job, int]] = ()) -> float | None:
        """Estimate the time to the end: the warm-up's guess, corrected by how the finished runs compare with theirs.

        Runs under way come with the epochs they have done. The end is no nearer than that of the longest of them.
        """
        expected = {group.key: self.estimates.get(group.key, 0.0) for group in schedule.plan.groups}
        total = sum(expected[group.key] * (len(group.points) + schedule.plan.runs) for group in schedule.plan.groups)
        if not total:
            return None
        done = list(schedule.results.values())
        gone = sum(expected[result.group] for result in done)
        longest = 0.0
        for job, epochs in under_way:
            share = min(1.0, epochs / job.recipe.training.epochs)
            gone += expected[job.group] * share
            longest = max(longest, expected[job.group] * (1 - share))
        timed = [result for result in done if result.status == "done" and not result.resumed]
        guess = sum(expected[result.group] for result in timed)
        factor = sum(result.seconds for result in timed) / guess if guess else 1.0
        return max(0.0, (total - gone) / self.workers, longest) * factor


def spell_seconds(seconds: float) -> str:
    """Return a length of time as a person says it.

    >>> [spell_seconds(s) for s in (8, 300, 9000, 400000)]
    ['8 s', '5 min', '2.5 h', '4.6 days']
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def _spell(job: Job, row: dict[str, Any]) -> str:
    name = job.id.split("/", 1)[1]
    if not row:
        return name
    text = f"{name}: epoch {row['epoch']}/{job.recipe.training.epochs}"
    return text + (f", validation error {100 * row['error']:.2f} %" if "error" in row else "")


def _last_rows(log: Path) -> dict[str, Any]:
    """Return the epoch a run is in, and the last validation error, from the end of its log."""
    try:
        with open(log, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, Any] = {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # the cut first line, or one being written
            continue
        found.setdefault("epoch", row["epoch"])
        if "validation" in row:
            return found | {"error": row["validation"]["error"]}
    return found
