"""A plan as it is stored, and whether another one may share its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dropmax.errors import DropMaxError, RunError
from dropmax.lab.experiments.plan import Group, Plan
from dropmax.lab.experiments.records import GroupRecord, PlanRecord
from dropmax.workbench.recipes import recipe_from_dict

__all__ = ["difference", "normal", "refuse_other_plan", "to_plan", "to_record"]


def to_record(plan: Plan, commands: list[str] | None = None) -> PlanRecord:
    """Return a plan as it is stored."""
    return PlanRecord(
        kind="plan",
        format=2,
        study=plan.is_study,
        schedule_scale=plan.schedule_scale,
        train_size=plan.train_size,
        overrides=json.loads(json.dumps(plan.overrides)),
        tuned_on=plan.tuned_on,
        runs=plan.runs,
        groups={
            group.key: GroupRecord(
                data=group.data,
                recipe_name=group.recipe_name,
                variant=group.variant,
                recipe=normal(group.recipe.to_dict()),
                points=json.loads(json.dumps(group.points)),
            )
            for group in plan.groups
        },
        commands=commands or [],
    )


def to_plan(found: PlanRecord) -> Plan:
    """Return the plan that was stored."""
    groups = [
        Group(
            group.data,
            group.recipe_name,
            group.variant,
            recipe_from_dict(group.recipe, f"the plan of {key}"),
            tuple(group.points),
        )
        for key, group in found.groups.items()
    ]
    return Plan(
        tuple(groups),
        found.runs,
        found.schedule_scale,
        found.train_size,
        found.overrides,
        found.study,
        found.tuned_on,
    )


def refuse_other_plan(mine: PlanRecord, there: PlanRecord, path: Path) -> None:
    """Raise where two plans cannot share a directory, naming the first thing that differs."""

    def refuse(what: str) -> None:
        raise RunError(f"{path} holds results of a different plan: {what}; choose another place with --out")

    for key, option in (
        ("study", "--study"),
        ("schedule_scale", "--schedule-scale"),
        ("train_size", "--train-size"),
        ("overrides", "--set"),
        ("tuned_on", "--tuned-from"),
    ):
        differs = difference(getattr(mine, key), getattr(there, key))
        if differs is not None:
            refuse(f"{option}: {differs}")
    for key, group in mine.groups.items():
        for other in there.groups.values():
            if other.data == group.data and other.recipe_name != group.recipe_name:
                refuse(f"--recipe for {group.data}: {other.recipe_name!r} there, {group.recipe_name!r} here")
        if key not in there.groups:
            continue
        stored = there.groups[key]
        if group.points != stored.points:
            refuse(f"what is tuned for {key}: {len(stored.points)} points there, {len(group.points)} here")
        differs = difference(group.recipe, normal(stored.recipe))
        if differs is not None:
            refuse(f"{key}: {differs}")


def difference(mine: Any, there: Any, name: str = "") -> str | None:
    """Return the first difference of two plain values in words, or None."""
    if isinstance(mine, dict) and isinstance(there, dict):
        for key in dict.fromkeys([*mine, *there]):
            found = difference(mine.get(key), there.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    if mine == there:
        return None
    return f"{name}{' is ' if name else ''}{json.dumps(there)} there and {json.dumps(mine)} here"


def normal(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's tables as JSON knows them, with today's defaults for what an older version did not store."""
    try:
        full = recipe_from_dict(recipe, "a stored recipe").to_dict()
    except DropMaxError:
        full = recipe
    return dict(json.loads(json.dumps(full)))
