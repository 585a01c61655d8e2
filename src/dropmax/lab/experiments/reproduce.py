"""Do a plan: what is missing, on an engine, into a directory; then the tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmax.errors import DataError, check_choice
from dropmax.lab.experiments.engines import Cluster, Local
from dropmax.lab.experiments.plan import TUNING_SEED, Plan
from dropmax.lab.experiments.progress import Progress, estimate_seconds, spell_seconds
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.tables import write_tables
from dropmax.lab.statistics import require_scipy

__all__ = ["Outcome", "reproduce"]


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
            plan, store, repair=repair, keep_runs=keep_runs, on_group_done=lambda group: write_tables(store)
        )
        if schedule.left:
            progress = Progress(schedule, _estimates(plan, data_dir, engine), engine.size(), quiet=quiet)
            options: dict[str, Any] = {
                "data_dir": None if data_dir is None else str(Path(data_dir).expanduser().absolute()),
                "modes": None if modes is None else list(modes),
                "command": " ".join(["dropmax", *sys.argv[1:]]),
            }
            store.join(plan, options["command"])  # only now: a mistake in the plan leaves nothing behind
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
        seconds = f", about {spell_seconds(estimates[group.key])} each" if group.key in estimates else ""
        lines.append(f"  {group.key}: {len(group.points)} + {plan.runs}{seconds}")
    left = progress.seconds_left()
    spelt = "" if left is None else f", about {spell_seconds(left)} in all (measured on a few training steps)"
    return [*lines, f"{progress.workers} at a time ({engine}){spelt}."]
