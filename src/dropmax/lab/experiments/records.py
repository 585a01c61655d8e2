"""What a line of ``results.jsonl`` holds: a :class:`RunRecord` per training run, a :class:`PlanRecord` per command."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from typing_extensions import Self

__all__ = ["GroupRecord", "PlanRecord", "Provenance", "Record", "RunRecord"]

#: Directories bear these names, so a file may not choose just any text.
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
    runs: Annotated[PositiveInt, Field(le=1000)] = 5
    groups: dict[str, GroupRecord] = {}
    commands: list[str] = []
