"""What a line of ``results.jsonl`` holds: a :class:`RunRecord` per training run, a :class:`PlanRecord` per command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError, model_validator
from typing_extensions import Self

from dropmax.errors import DropMaxError
from dropmax.lab.experiments.plan import MOST_RUNS, Group, Job, Plan
from dropmax.workbench.files import parse_json
from dropmax.workbench.recipes import recipe_from_dict

__all__ = ["PlanRecord", "Provenance", "Record", "RunRecord", "difference", "failure", "normal", "parse"]

#: Directories get these names, so a file may not choose just any text.
Name = Annotated[str, Field(pattern=r"^[\w.+-]+$")]
#: Metrics by prediction mode and name, such as ``["mean"]["error"]``.
Metrics = dict[str, dict[str, float]]


class Record(BaseModel):
    """What both kinds have in common: unknown keys, wrong types and numbers that are not finite are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def to_json(self) -> str:
        """Return the record as one line, with the keys that were set."""
        return json.dumps(self.model_dump(exclude_unset=True))


class Machine(Record):
    """Where a run was made."""

    model_config = ConfigDict(extra="allow")
    processor: str = "unknown"
    cores: int = 1


class Provenance(Record):
    """What made a run: enough to make it again."""

    model_config = ConfigDict(extra="allow")
    command: str | None = None
    commit: str | None = None
    date: str = ""
    seeds: list[int] = []
    versions: dict[str, str] = {}
    machine: Machine = Machine()


class RunRecord(Record):
    """One training run.

    >>> found = {"error": 0.03, "nll": 0.1}
    >>> about = {"data": "mnist-1k", "recipe_name": "released", "variant": "softmax", "seed": 1000, "recipe": {}}
    >>> record = RunRecord(kind="tune", job="tune/a", status="done", validation={"mean": found}, **about)
    >>> record.group, RunRecord.model_validate_json(record.to_json()) == record
    ('mnist-1k.released.softmax', True)
    """

    kind: Literal["tune", "runs"]  #: "tune" never sees the test set
    job: str  #: unique in a plan; of two records of one job the later one counts
    data: Name
    recipe_name: Name
    variant: Name
    seed: NonNegativeInt
    status: Literal["done", "failed"]
    reason: str = ""  #: why it failed
    point: dict[str, Any] = {}  #: grid values, by dotted name
    schedule_scale: float = 1.0
    train_size: NonNegativeInt = 0
    recipe: dict[str, Any]
    resumed: bool = False
    seconds: NonNegativeFloat = 0.0
    examples: dict[str, NonNegativeInt] = {}
    validation: Metrics = {}
    test: Metrics = {}
    temperature: dict[str, float] = {}  #: by prediction mode, fitted on the held-out rows
    last_row: dict[str, Any] = {}  #: the last line of the training log
    curve: list[dict[str, Any]] = []  #: the lines of the log with validation metrics
    provenance: Provenance = Provenance()

    @property
    def group(self) -> str:
        """The cell of the table it belongs to."""
        return f"{self.data}.{self.recipe_name}.{self.variant}"

    @model_validator(mode="after")
    def _has_what_tables_show(self) -> Self:
        if self.status == "failed":
            if not self.reason:
                raise ValueError("a failed run needs a reason")
            return self
        needed: dict[str, tuple[str, ...]] = {"test": ("error", "nll", "ece")} if self.kind == "runs" else {}
        if self.kind == "tune" or self.examples.get("validation") != 0:
            needed["validation"] = ("error", "nll")
        for part, names in needed.items():
            missing = [name for name in names if name not in getattr(self, part).get("mean", {})]
            if missing:
                raise ValueError(f"{part}.mean lacks {', '.join(missing)}")
        return self


def about(job: Job) -> dict[str, Any]:
    """Return what the record of a job begins with."""
    return {**json.loads(json.dumps(job.to_dict())), "job": job.id, "seed": job.seed}


def failure(job: Job, reason: str) -> RunRecord:
    """Return the record of a job that could not be done."""
    return RunRecord(**about(job), status="failed", reason=reason)


class GroupRecord(Record):
    """One cell of the planned table."""

    data: Name
    recipe_name: Name
    variant: Name
    recipe: dict[str, Any]
    points: list[dict[str, Any]] = []


class PlanRecord(Record):
    """What was asked for in a directory so far; the last one in the file counts."""

    kind: Literal["plan"] = "plan"
    format: Literal[2] = 2
    study: bool = False
    schedule_scale: Annotated[float, Field(gt=0)] = 1.0
    train_size: NonNegativeInt = 0
    overrides: dict[str, Any] = {}
    tuned_on: str = ""  #: the column whose tuning was taken over, where one was
    runs: Annotated[int, Field(gt=0, le=MOST_RUNS)] = 5
    groups: dict[str, GroupRecord] = {}
    commands: list[str] = []

    @classmethod
    def of(cls, plan: Plan, commands: list[str]) -> PlanRecord:
        """Return a plan as it is stored."""
        groups = {
            group.key: {**vars(group), "recipe": normal(group.recipe.to_dict()), "points": list(group.points)}
            for group in plan.groups
        }
        values = {key: value for key, value in vars(plan).items() if key != "is_study"}
        stored = {"kind": "plan", "format": 2, "study": plan.is_study, **values, "groups": groups, "commands": commands}
        return cls.model_validate(json.loads(json.dumps(stored)))

    def plan(self) -> Plan:
        """Return the plan that was stored."""
        groups = [
            Group(**{**dict(group), "recipe": recipe_from_dict(group.recipe, f"the plan of {key}"),
                     "points": tuple(group.points)})
            for key, group in self.groups.items()
        ]  # fmt: skip
        settings = self.model_dump(include={"runs", "schedule_scale", "train_size", "overrides", "tuned_on"})
        return Plan(tuple(groups), is_study=self.study, **settings)

    def differences(self, there: PlanRecord) -> Iterator[str]:
        """Say why this plan cannot share a directory with another one, if it cannot."""
        options = {"study": "--study", "schedule_scale": "--schedule-scale", "train_size": "--train-size"}
        for key, option in {**options, "overrides": "--set", "tuned_on": "--tuned-from"}.items():
            if differs := difference(getattr(self, key), getattr(there, key)):
                yield f"{option}: {differs}"
        for key, group in self.groups.items():
            for other in there.groups.values():
                if other.data == group.data and other.recipe_name != group.recipe_name:
                    yield f"--recipe for {group.data}: {other.recipe_name!r} there, {group.recipe_name!r} here"
            stored = there.groups.get(key, group)
            grown = bool(stored.points) and all(point in group.points for point in stored.points)
            if group.points != stored.points and not grown:  # what a smaller grid found is part of a larger one
                yield f"what is tuned for {key}: {len(stored.points)} points there, {len(group.points)} here"
            if differs := difference(group.recipe, normal(stored.recipe)):
                yield f"{key}: {differs}"


def parse(line: bytes) -> PlanRecord | RunRecord:
    """Return what a line holds; a ValueError says in a few words what is wrong with it."""
    found = parse_json(line.decode())
    kind = PlanRecord if isinstance(found, dict) and found.get("kind") == "plan" else RunRecord
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))) from None


def difference(mine: Any, there: Any, name: str = "") -> str:
    """Return the first difference of two plain values in words, such as "x is 9 there and 7 here", or nothing."""
    if isinstance(mine, dict) and isinstance(there, dict):
        keys = dict.fromkeys([*mine, *there])
        found = (difference(mine.get(key), there.get(key), f"{name}.{key}".lstrip(".")) for key in keys)
        return next(filter(None, found), "")
    if mine == there:
        return ""
    return f"{name}{' is ' if name else ''}{json.dumps(there)} there and {json.dumps(mine)} here"


def normal(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's tables as JSON knows them, with today's defaults for what an older version did not store."""
    with contextlib.suppress(DropMaxError):  # then it is compared as it is
        recipe = recipe_from_dict(recipe, "a stored recipe").to_dict()
    return dict(json.loads(json.dumps(recipe)))
