"""Records without training, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmax.lab.experiments import Job, Plan, RunRecord, Store
from dropmax.lab.experiments.records import failure

PROVENANCE = {
    "commit": "0123abc",
    "versions": {"python": "3.11", "torch": "2.13"},
    "machine": {"processor": "abacus", "cores": 2},
}


def result(
    job: Job, error: float = 0.05, nll: float = 0.2, ece: float = 0.01, exact: bool = False, **more: float
) -> RunRecord:
    """What a worker answers, with these numbers; those of the exact mode are half as large."""
    found = {"mean": {"error": error, "nll": nll, "ece": ece, "brier": 0.1, "aurc": 0.01, **more}}
    if exact:
        found["exact"] = {name: value / 2 for name, value in found["mean"].items()}
    values: dict[str, Any] = failure(job, "x").model_dump(exclude_unset=True)
    values |= {"status": "done", "reason": "", "seconds": 1.0, "validation": found, "provenance": PROVENANCE}
    return RunRecord.model_validate(values | ({"test": found} if job.kind == "runs" else {}))


def fill(path: Path, plan: Plan, errors: Mapping[tuple[str, str], Sequence[float]], command: str = "dropmax") -> Store:
    """Return a directory with the runs of an untuned plan: an error for each seed, by (variant, data)."""
    store = begun(path, plan, command)
    for group in plan.groups:
        jobs = group.run_jobs({}, plan.runs)
        for job, error in zip(jobs, errors.get((group.variant, group.data), ()), strict=False):
            store.append(result(job, error=error, nll=10 * error))
    return store


def begun(path: Path, plan: Plan, command: str = "dropmax") -> Store:
    """Return a directory with a plan of which nothing was done yet."""
    store = Store(path)
    store.join(plan, command)
    return store
