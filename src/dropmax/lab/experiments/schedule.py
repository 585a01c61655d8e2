"""Which run comes next: a head's grid first, then, once the best point is known, its runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidValue, RunError
from dropmax.lab.experiments.plan import Group, Job, Plan
from dropmax.lab.experiments.records import RunRecord, failure
from dropmax.lab.experiments.store import Store

__all__ = ["Schedule", "best_point", "edges", "edges_of", "tuned_from"]


class Schedule:
    """The jobs of a plan that are not done yet: runs before the grids of later heads, so that rows get finished.

    Runs at the former winner of a grid that has grown are done again, and with ``repair`` those that failed or do not
    fit the plan.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        repair: bool = False,
        keep_runs: bool = False,
        on_group_done: Callable[[Group], object] = lambda group: None,
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
            jobs = self._missing(group, group.tune_jobs())
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
        shortened = {"schedule_scale": self.plan.schedule_scale, "train_size": self.plan.train_size}
        result = result.model_copy(update=shortened)
        self.store.append(result)
        self.store.tidy(job, keep_run=self.keep_runs)
        self.results[job.id] = result
        waiting, group = self._open[job.group], self.groups[job.group]
        waiting.discard(job.id)
        if not waiting:
            (self._release if job.kind == "tune" else self.on_group_done)(group)

    def failed(self) -> dict[str, str]:
        """Return the runs that failed, and why."""
        return {name: result.reason for name, result in self.results.items() if result.status == "failed"}

    def _release(self, group: Group) -> None:
        """Make the runs of a group ready, at the best point of its grid."""
        tuning = [self.results[job.id] for job in group.tune_jobs()]
        point = best_point(tuning)
        jobs = self._missing(group, group.run_jobs(point or {}, self.plan.runs))
        if point is None and tuning:
            reason = f"none of the {len(tuning)} grid points could be trained: {tuning[0].reason}"
            for job in jobs:
                self.finished(job, failure(job, reason))
        else:
            self._ready["runs"] += jobs

    def _missing(self, group: Group, jobs: list[Job]) -> list[Job]:
        """Take note of the results that are there, and return the jobs that must run."""
        missing = []
        for job in jobs:
            result = self._there.get(job.id)
            # A run at a point that has lost meanwhile to one of a larger grid is no mistake: it is done again.
            lost = result is not None and result.point != job.point and result.point in group.points
            if result is None or lost or (self.repair and not self._is_usable(job, result)):
                missing.append(job)
                continue
            self.results[job.id] = self.store.match(job, result)
            self.store.tidy(job, keep_run=self.keep_runs)
            self.found += 1
        self._open[group.key] = {job.id for job in missing}
        return missing

    def _is_usable(self, job: Job, result: RunRecord) -> bool:
        try:
            return self.store.match(job, result).status != "failed"
        except RunError:
            return False


def best_point(tuning: Iterable[RunRecord]) -> dict[str, Any] | None:
    """Return the grid point with the lowest validation error, ties broken by validation NLL; None where all failed."""
    done = [result for result in tuning if result.status == "done"]
    scores = [(result.validation["mean"]["error"], result.validation["mean"]["nll"]) for result in done]
    return done[scores.index(min(scores))].point if done else None


def edges(points: Sequence[Mapping[str, Any]], winner: Mapping[str, Any]) -> list[str]:
    """Say which values of a winner of tuning are the lowest or the highest of its grid.

    The optimum may then lie beyond the grid. A lowest value of 0 is no edge: nothing that is tuned goes below it.
    """
    found = []
    for name, value in winner.items():
        tried = sorted({point[name] for point in points if isinstance(point.get(name), int | float)})
        if len(tried) > 1 and value in (tried[0], tried[-1]) and value != 0:
            end = "highest" if value == tried[-1] else "lowest"
            found.append(f"{name.rpartition('.')[2].replace('_', ' ')} {value:g}, the {end}")
    return found


def edges_of(plan: Plan, runs: Iterable[RunRecord]) -> list[tuple[Group, list[str]]]:
    """Return every group that was tuned and run, with what :func:`edges` says of its winner."""
    winners = {record.group: record.point for record in runs if record.point}
    return [(g, edges(g.points, winners[g.key])) for g in plan.groups if g.points and g.key in winners]


def tuned_from(plan: Plan, source: Path | str) -> Plan:
    """Return the plan with every variant fixed, untuned, at the grid point that won in the results at ``source``."""
    store = Store(source)
    tuned = [group for group in store.plan().groups if group.points]
    columns = sorted({f"{group.data}.{group.recipe_name}" for group in tuned})
    if len(columns) != 1:
        found = f"{len(columns)} tuned columns ({', '.join(columns)})" if columns else "nothing that was tuned"
        raise InvalidValue(f"--tuned-from {source} holds {found}: name a directory with exactly one")
    by_variant = {group.variant: group for group in tuned}
    groups = tuple(_fixed(group, by_variant, store) for group in plan.groups)
    return dataclasses.replace(plan, groups=groups, tuned_on=columns[0])


def _fixed(group: Group, tuned: dict[str, Group], store: Store) -> Group:
    """Return a group at the point that won in a store."""
    if group.variant not in tuned:
        others = f"no tuned {group.variant!r}, only {', '.join(tuned)}"
        raise InvalidValue(f"--tuned-from {store.path} has {others}: choose --heads from these")
    jobs, there = tuned[group.variant].tune_jobs(), store.records()
    results = [store.match(job, there[job.id]) for job in jobs if job.id in there]
    point = best_point(results)
    if len(results) < len(jobs) or point is None:
        done = f"{len(results)} of {len(jobs)} grid points of {group.variant} are done there"
        raise InvalidValue(
            f"--tuned-from {store.path}: {done}{'' if point else ' and none succeeded'}: finish that table first"
        )
    recipe = group.recipe.override(point)
    if recipe.network["name"] != group.recipe.network["name"]:  # it may be one to import, and that is the user's to say
        chose = f"chose the network {recipe.network['name']!r} for {group.variant}"
        advice = "name it yourself with --set network.name=... if you want it"
        raise InvalidValue(f"--tuned-from {store.path} {chose}: {advice}")
    return dataclasses.replace(group, recipe=recipe, points=())
