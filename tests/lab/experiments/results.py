"""Result files without training, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropmax.lab.experiments import Job, Plan, Store

PROVENANCE = {
    "commit": "0123abc",
    "versions": {"python": "3.11", "torch": "2.13"},
    "machine": {"processor": "abacus", "cores": 2},
}


def result(job: Job, error: float = 0.05, nll: float = 0.2, ece: float = 0.01) -> dict[str, Any]:
    """What a worker answers, with these numbers."""
    found = {"mean": {"error": error, "nll": nll, "ece": ece, "brier": 0.1, "aurc": 0.01}}
    return {
        "format": 1,
        "job": job.id,
        "status": "done",
        "group": job.group,
        "kind": job.kind,
        "seed": job.seed,
        "point": job.point,
        "recipe": job.recipe.to_dict(),
        "resumed": False,
        "seconds": 1.0,
        "validation": found,
        "provenance": PROVENANCE,
    } | ({"test": found} if job.kind == "runs" else {})


def fill(store: Store, plan: Plan, errors: Mapping[tuple[str, str], Sequence[float]], command: str = "dropmax") -> None:
    """Write the runs of an untuned plan: an error for each seed, by (variant, data)."""
    store.join(plan, command)
    for group in plan.groups:
        jobs = group.run_jobs({}, plan.runs)
        for job, error in zip(jobs, errors.get((group.variant, group.data), ()), strict=False):
            store.write(job, result(job, error=error, nll=10 * error))
