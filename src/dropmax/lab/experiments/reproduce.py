"""Do a plan: what is missing, on an engine, into a directory; then the tables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmax.errors import DataError, check_choice
from dropmax.lab.experiments.cluster import Cluster
from dropmax.lab.experiments.estimate import estimate_seconds
from dropmax.lab.experiments.local import default_workers, run_locally
from dropmax.lab.experiments.plan import TUNING_SEED, Plan
from dropmax.lab.experiments.progress import Progress, spell_seconds
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.tables import write_tables
from dropmax.lab.statistics import require_scipy

__all__ = ["ENGINES", "Outcome", "reproduce"]

ENGINES = ("local", "ray")


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
    engine: str = "local",
    address: str = "auto",
    workers: int = 0,
    data_dir: Path | str | None = None,
    modes: Sequence[str] | None = None,
    repair: bool = False,
    keep_runs: bool = False,
    quiet: bool = False,
    command: str | None = None,
) -> Outcome:
    """Do what is missing of a plan and write the tables into ``out``.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table
    >>> tiny = {"training.epochs": 1, "data.train_size": 50, "data.validation_size": 50}
    >>> plan = plan_table(["mnist-1k"], heads=["softmax"], runs=1, tune=False, overrides=tiny)
    >>> reproduce(plan, tempfile.mkdtemp(), workers=1, quiet=True).done
    1
    """
    check_choice("engine", engine, ENGINES)
    _check_modes(modes)
    require_scipy()  # now, not after hours of training
    store = Store(out)
    if not (repair and store.file.exists()):  # what is damaged cannot be compared
        store.check(plan)
    command = command or " ".join(["dropmax", *sys.argv[1:]])
    with store.locked():
        if repair:
            store.repair()
        schedule = Schedule(
            plan,
            store,
            repair=repair,
            keep_runs=keep_runs,
            on_group_done=lambda group: write_tables(store),
        )
        if schedule.left:
            cluster = Cluster(address) if engine == "ray" else None
            number = workers or (cluster.size() if cluster is not None else default_workers())
            estimates = _estimates(schedule, data_dir, engine)
            store.join(plan, command)  # only now: a mistake in the plan leaves nothing behind
            if not quiet:
                _announce(schedule, estimates, number, engine)
            options: dict[str, Any] = {
                "data_dir": None if data_dir is None else str(Path(data_dir).expanduser().absolute()),
                "modes": None if modes is None else list(modes),
                "command": command,
            }
            with Progress(estimates, number, quiet=quiet) as progress, _interruptible(schedule):
                if cluster is not None:
                    cluster.run(schedule, progress, workers=workers, options=options)
                else:
                    run_locally(schedule, progress, workers=number, options=options)
        write_tables(store)
    failed = schedule.failed()
    return Outcome(len(schedule.results) - len(failed), schedule.found, failed)


@contextlib.contextmanager
def _interruptible(schedule: Schedule) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        from dropmax.workbench.training import Interrupted

        done = f"{len(schedule.results)} of {schedule.plan.count} runs done"
        raise Interrupted(f"stopped with {done}; the same command resumes from here") from None


def _estimates(schedule: Schedule, data_dir: Path | str | None, engine: str) -> dict[str, float]:
    """Measure. This also finds missing data and unknown options before any work."""
    try:
        return estimate_seconds(schedule.plan, data_dir)
    except DataError:
        if engine == "ray":  # the data may be on the cluster only
            return {}
        raise


def _announce(schedule: Schedule, estimates: dict[str, float], workers: int, engine: str) -> None:
    plan = schedule.plan
    tuning, runs = sum(len(group.points) for group in plan.groups), plan.runs * len(plan.groups)
    variants, columns = {group.variant for group in plan.groups}, {group.data for group in plan.groups}
    print(
        f"Plan: {len(variants)} {'variants' if plan.is_study else 'heads'} on {', '.join(sorted(columns))}: "
        + (f"{tuning} tuning runs (seed {TUNING_SEED}, hold-out set) and " if tuning else "")
        + f"{runs} runs (seeds 0 to {plan.runs - 1}); "
        f"{len(schedule.results)} are done.",
        file=sys.stderr,
    )
    for group in plan.groups:
        seconds = f", about {spell_seconds(estimates[group.key])} each" if group.key in estimates else ""
        print(f"  {group.key}: {len(group.points)} + {plan.runs}{seconds}", file=sys.stderr)
    left = Progress(estimates, workers).seconds_left(schedule)
    print(
        f"{workers} at a time ({engine})"
        + (f", about {spell_seconds(left)} in all (measured on a few training steps)." if left is not None else "."),
        file=sys.stderr,
        flush=True,
    )


def _check_modes(modes: Sequence[str] | None) -> None:
    from dropmax.heads import MODES

    for mode in modes or ():
        check_choice("mode", mode, MODES)
