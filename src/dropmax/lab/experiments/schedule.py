"""Which run comes next: a head's grid first, then, once the best point is known, its runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dropmax.errors import RunError
from dropmax.lab.experiments.plan import Group, Job, Plan
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.worker import failure

__all__ = ["Schedule", "best_point"]


class Schedule:
    """The jobs of a plan that are not done yet, handed out as they become ready.

    Runs go before the grids of later heads, so that rows of the table are finished one after the other.

    >>> import tempfile
    >>> from dropmax.lab.experiments.plan import plan_table
    >>> schedule = Schedule(plan_table(["mnist-1k"], heads=["softmax"]), Store(tempfile.mkdtemp()))
    >>> schedule.left, schedule.next().kind
    (17, 'tune')
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        repair: bool = False,
        on_group_done: Callable[[Group], object] = lambda group: None,
        keep_runs: bool = False,
    ) -> None:
        self.plan, self.store, self.repair, self.keep_runs = plan, store, repair, keep_runs
        self.on_group_done = on_group_done
        self.groups = {group.key: group for group in plan.groups}
        self.results: dict[str, RunRecord] = {}
        self.found = 0  #: results that were there already
        self._ready: dict[str, list[Job]] = {"runs": [], "tune": []}
        self._open: dict[str, set[str]] = {}  # group -> ids of its jobs that are not done
        self._there = store.records()
        for group in plan.groups:
            jobs = self._missing(group.tune_jobs())
            self._open[group.key] = {job.id for job in jobs}
            self._ready["tune"] += jobs
            if not jobs:
                self._release(group)

    @property
    def left(self) -> int:
        """How many jobs are not done."""
        return self.plan.count - len(self.results)

    def next(self) -> Job | None:
        """Return a job that can start now, or None: all are done, or wait for others that are under way."""
        jobs = self._ready["runs"] or self._ready["tune"]
        return jobs.pop(0) if jobs else None

    def finished(self, job: Job, result: RunRecord) -> None:
        """Keep the result of a job; a group whose grid is done has its runs released."""
        if job.id in self.results:  # a retry that came through twice
            return
        result = result.model_copy(
            update={"schedule_scale": self.plan.schedule_scale, "train_size": self.plan.train_size}
        )
        self.store.finish(job, result, keep_run=self.keep_runs)
        self.results[job.id] = result
        waiting = self._open[job.group]
        waiting.discard(job.id)
        if waiting:
            return
        if job.kind == "tune":
            self._release(self.groups[job.group])
        else:
            self.on_group_done(self.groups[job.group])

    def failed(self) -> dict[str, str]:
        """Return the runs that failed, and why."""
        return {name: result.reason for name, result in self.results.items() if result.status == "failed"}

    def _release(self, group: Group) -> None:
        tuning = [self.results[job.id] for job in group.tune_jobs()]
        point = best_point(tuning)
        jobs = self._missing(group.run_jobs(point or {}, self.plan.runs))
        self._open[group.key] = {job.id for job in jobs}
        if point is None and tuning:
            reason = f"none of the {len(tuning)} grid points could be trained: {tuning[0].reason}"
            for job in jobs:
                self.finished(job, failure(job, reason))
            return
        self._ready["runs"] += jobs

    def _missing(self, jobs: list[Job]) -> list[Job]:
        """Take note of the results that are there, and return the jobs that have none."""
        missing = []
        for job in jobs:
            result = self._stored(job)
            if result is None:
                missing.append(job)
                continue
            self.store.tidy(job, keep_run=self.keep_runs)
            self.results[job.id] = result
            self.found += 1
        return missing

    def _stored(self, job: Job) -> RunRecord | None:
        """Return the record of a job, or None where it must run; with --repair, failed runs must run again."""
        result = self._there.get(job.id)
        if result is None or (self.repair and result.status == "failed"):
            return None
        try:
            return self.store.match(job, result)
        except RunError:
            if not self.repair:
                raise
            return None


def best_point(tuning: list[RunRecord]) -> dict[str, Any] | None:
    """Return the grid point with the lowest validation error, ties broken by validation NLL; None where all failed."""
    best, lowest = None, (math.inf, math.inf)
    for result in tuning:
        if result.status == "done":
            found = result.validation["mean"]
            if (found["error"], found["nll"]) < lowest:
                best, lowest = result.point, (found["error"], found["nll"])
    return best
