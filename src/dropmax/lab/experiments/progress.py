"""How long a plan takes: an estimate from a few training steps, then what a person sees while it runs.

On a terminal that is one line per worker, elsewhere a line every half minute.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dropmax.lab.experiments.plan import Job, Plan
from dropmax.lab.experiments.schedule import Schedule
from dropmax.workbench.data import Dataset
from dropmax.workbench.recipes import DataOptions, Recipe
from dropmax.workbench.terminal import Status

__all__ = ["Progress", "estimate_seconds", "spell_seconds"]

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_TO_MEASURE = 0.4
#: A forward pass without gradients, against a whole training step.
_SHARE_OF_FORWARD = 0.35


def estimate_seconds(plan: Plan, data_dir: Path | str | None = None) -> dict[str, float]:
    """Return the expected seconds of a run of each group by its key, from real training steps with one thread.

    >>> from dropmax.lab.experiments.plan import plan_table
    >>> plan = plan_table(["mnist-1k"], heads=["softmax"], overrides={"training.epochs": 1})
    >>> list(estimate_seconds(plan))
    ['mnist-1k.released.softmax']
    """
    import torch

    from dropmax.workbench.training import load_data

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded: dict[DataOptions, Dataset] = {}
    found = {}
    try:
        for group in plan.groups:
            if group.recipe.data not in loaded:
                loaded[group.recipe.data] = load_data(group.recipe, data_dir)
            found[group.key] = _seconds_of_a_run(group.recipe, loaded[group.recipe.data])
    finally:
        torch.set_num_threads(threads)
    return found


def _seconds_of_a_run(recipe: Recipe, data: Dataset) -> float:
    from dropmax.workbench.training import Session

    options = recipe.training
    session = Session(recipe.override({"training.compile": False}), data)
    for group in session.optimizer.param_groups:
        group["lr"] = 0.0  # only the time is of interest
    steps, started, end = -1, 0.0, 0.0  # the first step allocates and plans, and does not count
    while steps < 2 or (end - started < _SECONDS_TO_MEASURE and steps < 99):
        for x, y in session.batches:
            total = session.loss(x, y)[0].total
            session.optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            session.optimizer.step()
            float(total.detach())  # wait for the device
            steps, end = steps + 1, time.perf_counter()
            if steps == 0:
                started = end
            if steps >= 2 and end - started >= _SECONDS_TO_MEASURE:
                break
    seconds = (end - started) / steps
    validations = -(-options.epochs // options.validate_every) + 1
    forward_rows = validations * len(data.validation) + len(data.test)
    forward = _SHARE_OF_FORWARD * forward_rows * seconds / min(options.batch_size, len(data.train))
    return options.epochs * len(session.batches) * seconds + forward


class Progress(Status):
    """Shows how far a schedule is, on standard error.

    Args:
        schedule: what is done.
        estimates: seconds a run of each group is expected to take, by its key.
        workers: how many runs are made side by side.
        quiet: say nothing.
    """

    def __init__(self, schedule: Schedule, estimates: dict[str, float], workers: int, *, quiet: bool = False) -> None:
        super().__init__(_SECONDS_BETWEEN_LINES, quiet=quiet)
        self.schedule, self.estimates, self.workers = schedule, estimates, workers

    def show_runs(self, busy: Sequence[tuple[Job, Path | None]]) -> None:
        """Show the runs under way; each comes with its scratch directory, where that can be looked into from here."""

        def lines() -> list[str]:
            rows = [(job, {} if work is None else _last_rows(work / "metrics.jsonl")) for job, work in busy]
            summary = self._summary([(job, row.get("epoch", 0)) for job, row in rows])
            return [summary, *(_spell(job, row) for job, row in rows)]

        self.show(lines)

    def _summary(self, under_way: Sequence[tuple[Job, int]]) -> str:
        done, failed = self.schedule.results, len(self.schedule.failed())
        text = f"{len(done)} of {self.schedule.plan.count} runs done" + (f", {failed} failed" if failed else "")
        left = self.seconds_left(under_way)
        if left is None:
            return text
        end = datetime.datetime.now() + datetime.timedelta(seconds=left)
        return f"{text}, about {spell_seconds(left)} left (until {end:%a %H:%M})"

    def seconds_left(self, under_way: Sequence[tuple[Job, int]] = ()) -> float | None:
        """Estimate the time to the end: the warm-up's guess, corrected by how the finished runs compare with theirs.

        Runs under way come with the epochs they have done. The end is no nearer than that of the longest of them.
        """
        plan, done = self.schedule.plan, self.schedule.results.values()
        expected = {group.key: self.estimates.get(group.key, 0.0) for group in plan.groups}
        total = sum(expected[group.key] * (len(group.points) + plan.runs) for group in plan.groups)
        if not total:
            return None
        gone, longest = sum(expected[result.group] for result in done), 0.0
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
