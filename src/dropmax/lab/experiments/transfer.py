"""Hyper-parameters chosen on one data set, used on another that is too expensive to tune on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dropmax.errors import InvalidValue
from dropmax.lab.experiments.plan import Group, Plan
from dropmax.lab.experiments.schedule import best_point
from dropmax.lab.experiments.store import Store

__all__ = ["tuned_from"]


def tuned_from(plan: Plan, source: Path | str) -> Plan:
    """Return the plan with every variant fixed at the grid point that won in the results at ``source``.

    Nothing is tuned again, and every variant takes its point from the same place, so that budgets stay equal. Where
    the winning learning rate belongs to another recipe it is taken as it is.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table, reproduce
    >>> tiny = {"training.epochs": 1, "data.train_size": 50, "data.validation_size": 50, "training.weight_decay": 0.0}
    >>> small = plan_table(["mnist-1k"], heads=["dropmax-qp"], runs=1, overrides=tiny)
    >>> where = tempfile.mkdtemp()
    >>> reproduce(small, where, workers=1, quiet=True).done  # three values of gamma, one run
    4
    >>> larger = tuned_from(plan_table(["mnist-5k"], heads=["dropmax-qp"]), where)
    >>> larger.count, larger.groups[0].recipe.head["gamma"] in (1.0, 0.1, 0.01)
    (5, True)
    """
    store = Store(source)
    there = store.plan()
    columns = sorted({f"{group.data}.{group.recipe_name}" for group in there.groups if group.points})
    if len(columns) != 1:
        found = f"{len(columns)} tuned columns ({', '.join(columns)})" if columns else "nothing that was tuned"
        raise InvalidValue(f"--tuned-from {source} holds {found}: name a directory with exactly one")
    tuned = {group.variant: group for group in there.groups if group.points}
    groups = tuple(_fixed(group, tuned, store) for group in plan.groups)
    return dataclasses.replace(plan, groups=groups, tuned_on=columns[0])


def _fixed(group: Group, tuned: dict[str, Group], store: Store) -> Group:
    source = tuned.get(group.variant)
    if source is None:
        raise InvalidValue(
            f"--tuned-from {store.path} has no tuned {group.variant!r}, only {', '.join(tuned)}: "
            "choose --heads from these"
        )
    there = store.records()
    results = [store.match(job, there[job.id]) for job in source.tune_jobs() if job.id in there]
    point = best_point(results)
    if len(results) < len(source.points) or point is None:
        raise InvalidValue(
            f"--tuned-from {store.path}: {len(results)} of {len(source.points)} grid points of {group.variant} are "
            f"done there{'' if point else ' and none succeeded'}: finish that table first"
        )
    recipe = group.recipe.override(point)
    if recipe.network["name"] != group.recipe.network["name"]:  # it may be one to import, and that is the user's to say
        raise InvalidValue(
            f"--tuned-from {store.path} chose the network {recipe.network['name']!r} for {group.variant}: name it "
            "yourself with --set network.name=... if you want it"
        )
    return dataclasses.replace(group, recipe=recipe, points=())
