"""Do a plan: what is missing, on an engine, into a directory, with a view of how long it takes; then the tables."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmax.errors import DataError, check_choice
from dropmax.lab.experiments.engines import Cluster, Local
from dropmax.lab.experiments.plan import TUNING_SEED, Job, Plan
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.tables import write_tables
from dropmax.lab.statistics import require_scipy
from dropmax.workbench.data import Dataset
from dropmax.workbench.recipes import DataOptions, Recipe
from dropmax.workbench.terminal import Status

__all__ = ["Outcome", "Progress", "estimate_seconds", "reproduce"]

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_TO_MEASURE = 0.4
#: A forward pass without gradients, against a whole training step.
_SHARE_OF_FORWARD = 0.35


@dataclass(frozen=True)
class Outcome:
    """What came of a plan."""

    done: int  #: runs with numbers
    found: int  #: of these and the failed, how many were there before
    failed: dict[str, str]  #: the reason each failed run gave


def reproduce(
    plan: Plan,
    out: Path | str,
    *,
    engine: Local | Cluster | None = None,
    data_dir: Path | str | None = None,
    modes: Sequence[str] | None = None,
    repair: bool = False,
    keep_runs: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Do what is missing of a plan and write the tables into ``out``.

    Args:
        plan: from :func:`plan_table` or :func:`plan_study`.
        out: a directory; what was done there before is not done again.
        engine: where runs are trained, by default one process per core of this machine.
        data_dir: where the publishers' data sets are.
        modes: ways of predicting to measure; by default all.
        repair: do damaged and failed runs again.
        keep_runs: keep the trained models, in ``out/models``.
        quiet: show no progress.

    >>> import tempfile
    >>> from dropmax.lab.experiments import Local, plan_table
    >>> tiny = {"training.epochs": 1, "data.train_size": 50, "data.validation_size": 50}
    >>> plan = plan_table(["mnist-1k"], heads=["softmax"], runs=1, tune=False, overrides=tiny)
    >>> reproduce(plan, tempfile.mkdtemp(), engine=Local(workers=1), quiet=True).done
    1
    """
    from dropmax.heads import MODES

    for mode in modes or ():
        check_choice("mode", mode, MODES)
    require_scipy()  # now, not after hours of training
    store, engine = Store(out), engine or Local()
    if not (repair and store.file.exists()):  # what is damaged cannot be compared
        store.check(plan)
    with store.locked():
        if repair:
            store.repair()
        schedule = Schedule(
            plan, store, repair=repair, keep_runs=keep_runs, on_group_done=lambda _: write_tables(store)
        )
        if schedule.left:
            progress = Progress(schedule, _estimates(plan, data_dir, engine), engine.size(), quiet=quiet)
            command = " ".join(["dropmax", *sys.argv[1:]])
            where = None if data_dir is None else str(Path(data_dir).expanduser().absolute())
            options = {"data_dir": where, "modes": None if modes is None else list(modes), "command": command}
            store.join(plan, command)  # only now: a mistake in the plan leaves nothing behind
            if not quiet:
                print("\n".join(_announcement(progress, engine.name)), file=sys.stderr, flush=True)
            _run(engine, progress, options)
        write_tables(store)
    failed = schedule.failed()
    return Outcome(len(schedule.results) - len(failed), schedule.found, failed)


def _estimates(plan: Plan, data_dir: Path | str | None, engine: Local | Cluster) -> dict[str, float]:
    """Measure. This also finds missing data and unknown options before any work."""
    try:
        return estimate_seconds(plan, data_dir)
    except DataError:
        if isinstance(engine, Cluster):  # the data may be on the cluster only
            return {}
        raise


def _run(engine: Local | Cluster, progress: Progress, options: dict[str, Any]) -> None:
    from dropmax.workbench.training import Interrupted

    schedule = progress.schedule
    try:
        with progress:
            engine.run(schedule, progress.show_runs, options)
    except KeyboardInterrupt:
        done = f"{len(schedule.results)} of {schedule.plan.count} runs done"
        raise Interrupted(f"stopped with {done}; the same command resumes from here") from None


def _announcement(progress: Progress, engine: str) -> list[str]:
    plan, estimates = progress.schedule.plan, progress.estimates
    tuning, runs = sum(len(group.points) for group in plan.groups), plan.runs * len(plan.groups)
    variants, columns = {group.variant for group in plan.groups}, {group.data for group in plan.groups}
    lines = [
        f"Plan: {len(variants)} {'variants' if plan.is_study else 'heads'} on {', '.join(sorted(columns))}: "
        + (f"{tuning} tuning runs (seed {TUNING_SEED}, hold-out set) and " if tuning else "")
        + f"{runs} runs (seeds 0 to {plan.runs - 1}); {len(progress.schedule.results)} are done."
    ]
    for group in plan.groups:
        seconds = f", about {_spell_seconds(estimates[group.key])} each" if group.key in estimates else ""
        lines.append(f"  {group.key}: {len(group.points)} + {plan.runs}{seconds}")
    left = progress.seconds_left()
    spelt = "" if left is None else f", about {_spell_seconds(left)} in all (measured on a few training steps)"
    return [*lines, f"{progress.workers} at a time ({engine}){spelt}."]


# --- how long it takes -----------------------------------------------------------------------------------------------


def estimate_seconds(plan: Plan, data_dir: Path | str | None = None) -> dict[str, float]:
    """Return the expected seconds of a run of each group by its key, from real training steps with one thread."""
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
    forward = _SHARE_OF_FORWARD * forward_rows * seconds / min(options.rows_per_step(len(data.train)), len(data.train))
    return options.epochs * len(session.batches) * seconds + forward


class Progress(Status):
    """Shows on standard error how far a schedule is; ``estimates`` are seconds per run by the key of its group.

    On a terminal that is one line per worker, elsewhere a line every half minute.
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
        return f"{text}, about {_spell_seconds(left)} left (until {end:%a %H:%M})"

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


def _spell_seconds(seconds: float) -> str:
    """Return a length of time as a person says it.

    >>> [_spell_seconds(s) for s in (8, 300, 9000, 400000)]
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
