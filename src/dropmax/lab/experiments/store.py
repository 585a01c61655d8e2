"""The directory results go to: the plan they belong to, and one JSON file a run, whole or not there.

========================  ==========================================================================================
``plan.json``             what decides the results; another plan is refused
``tune/``, ``runs/``      one file a training run
``work/``                 runs in progress
``table*.*``              the tables
========================  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dropmax.errors import DropMaxError, RunError
from dropmax.lab.experiments.plan import Group, Job, Plan, check_sizes
from dropmax.lab.experiments.worker import FORMAT
from dropmax.workbench.files import CannotWrite, lock, parse_json, write_atomically
from dropmax.workbench.recipes import recipe_from_dict

__all__ = ["Store"]

_SECONDS_TO_WAIT_FOR_LOCK = 30.0

#: What a process that was killed before it had a plan may leave.
_BEGUN = re.compile(r"\.lock|\.plan\.json\.\w{8}\.tmp")


class Store:
    """Results in a directory.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> store.results()
    []
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    # --- the plan ------------------------------------------------------------------------------------------------

    def check(self, plan: Plan) -> None:
        """Raise where the results of a plan would not belong with those that are here; change nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is not a directory: choose another place with --out")
        there = self.plan_dict()
        if there is not None:
            if self._has_results():
                _compare(_plan_to_dict(plan), there, self.path)
        elif self.path.exists() and any(not _BEGUN.fullmatch(path.name) for path in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no plan.json: choose another place with --out")

    def join(self, plan: Plan, command: str) -> None:
        """Make the plan part of this directory's; one of which nothing was done yet is replaced."""
        self.check(plan)
        mine = {**_plan_to_dict(plan), "commands": [command]}
        there = self.plan_dict()
        if there is not None and self._has_results():
            mine["groups"] = there["groups"] | mine["groups"]
            mine["runs"] = max(there["runs"], mine["runs"])
            mine["commands"] = list(dict.fromkeys([*there["commands"], command]))
        # The plan first: whoever is killed here leaves either a directory as good as empty, or one with a plan.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if mine != there:
                write_atomically(self.path / "plan.json", json.dumps(mine, indent=1) + "\n")
            for folder in ("tune", "runs", "work"):
                (self.path / folder).mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make directories in {self.path}: {error.strerror or error}") from error

    def _has_results(self) -> bool:
        return any(True for kind in ("tune", "runs") for _ in (self.path / kind).glob("*.json"))

    def plan_dict(self) -> dict[str, Any] | None:
        """Return the plan of this directory as it is stored, or None where there is none."""
        file = self.path / "plan.json"
        if not file.exists():
            return None
        try:
            found = parse_json(file.read_text(encoding="utf-8"))
            _plan_from_dict(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RunError(f"{file} is damaged ({error!r}): restore it, or choose another place with --out") from error
        return dict(found)

    def plan(self) -> Plan:
        """Return the plan of this directory: all that was ever asked for here."""
        found = self.plan_dict()
        if found is None:
            raise RunError(
                f"there are no results in {self.path}: `dropmax reproduce mnist-1k --out {self.path}` makes some"
            )
        return _plan_from_dict(found)

    # --- results -------------------------------------------------------------------------------------------------

    def file(self, job: Job) -> Path:
        """Return where the result of a job is, or will be."""
        return self.path / f"{job.id}.json"

    def work(self, job: Job) -> Path:
        """Return where a job trains."""
        return self.path / "work" / job.id.replace("/", "-")

    def read(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a job, None where there is none yet; a damaged file raises and is named."""
        file = self.file(job)
        if not file.exists():
            return None
        result = _read(file)
        if result["job"] != job.id:
            raise RunError(f"{file} holds the result of {result['job']!r}: add --repair to do the run again")
        difference = _difference(_normal(job.recipe.to_dict()), _normal(result["recipe"]))
        if difference is not None:
            raise RunError(f"{file} was made with another recipe ({difference}): add --repair to do the run again")
        # The winning point is taken from results: it must be the one that was asked for, not what a file makes of it.
        difference = _difference(json.loads(json.dumps(job.point)), result["point"], "point")
        if difference is not None:
            raise RunError(f"{file} is that of another grid point ({difference}): add --repair to do the run again")
        return result

    def finish(self, job: Job, result: dict[str, Any], *, keep_run: bool = False) -> None:
        """Write the result of a job and delete its scratch directory, unless that is to be kept.

        The directory gets another name first: should we be killed in between, :meth:`tidy` knows that it may go.
        """
        work, ended = self.work(job), self._ended(job)
        if not keep_run and work.exists():
            try:
                shutil.rmtree(ended, ignore_errors=True)
                work.rename(ended)
            except OSError as error:
                raise CannotWrite(f"cannot rename {work}: {error.strerror or error}") from error
        self.write(job, result)
        if not keep_run:
            shutil.rmtree(ended, ignore_errors=True)

    def tidy(self, job: Job, *, done: bool) -> None:
        """Clear up after a process that was killed in :meth:`finish`."""
        work, ended = self.work(job), self._ended(job)
        if not done and ended.exists() and not work.exists():
            ended.rename(work)  # trained, but not measured for good
        shutil.rmtree(ended, ignore_errors=True)

    def _ended(self, job: Job) -> Path:
        work = self.work(job)
        return work.with_name(work.name + ",ended")

    def write(self, job: Job, result: dict[str, Any]) -> None:
        """Write the result of a job, with a digest of what it says."""
        write_atomically(self.file(job), json.dumps({**result, "sha256": _digest(result)}, indent=1) + "\n")

    def results(self, kind: str = "runs") -> list[dict[str, Any]]:
        """Return every result there is, in the order of their names."""
        return [_read(file) for file in sorted((self.path / kind).glob("*.json"))]

    # --- one at a time -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """Hold the directory; workers inherit the lock, so that it lasts until the last of them has gone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"cannot write in {self.path}: {error.strerror or error}") from error
        try:
            deadline = time.monotonic() + _SECONDS_TO_WAIT_FOR_LOCK
            while not lock(descriptor):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"another `dropmax reproduce` is at work in {self.path}: wait, or choose another --out"
                    )
                time.sleep(0.2)  # the workers of a driver that was killed take a moment to save and go
            yield descriptor if os.name == "posix" else None  # Windows hands no open files to other processes
        finally:
            os.close(descriptor)


def _read(file: Path) -> dict[str, Any]:
    try:
        result = parse_json(file.read_text(encoding="utf-8"))
        digest = result.pop("sha256")
        if result["format"] != FORMAT:
            raise ValueError(f"format {result['format']}, expected {FORMAT}")
        if digest != _digest(result):
            raise ValueError("it was changed after it was written")
        _check_result(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RunError(f"{file} is damaged ({reason}): add --repair to do the run again") from error
    return dict(result)


def _check_result(result: dict[str, Any]) -> None:
    """Raise ValueError or KeyError where a result lacks something, or a number is none: tables are made from these."""
    kinds = {"job": str, "group": str, "kind": str, "seed": int, "point": dict, "recipe": dict, "status": str}
    for key, kind in kinds.items():
        if type(result[key]) is not kind:
            raise ValueError(f"its {key} is {result[key]!r:.60}")
    if result["status"] not in ("done", "failed"):
        raise ValueError(f"its status is {result['status']!r:.60}")
    if result["status"] == "failed" and not isinstance(result["reason"], str):
        raise ValueError(f"its reason is {result['reason']!r:.60}")
    if not 0 <= result.get("seconds", 0.0) < math.inf:
        raise ValueError(f"it took {result['seconds']!r:.60} seconds")
    for part, needed in {"validation": {"error", "nll"}, "test": {"error", "nll", "ece"}}.items():
        if part not in result and (result["status"] == "failed" or (part == "test" and result["kind"] != "runs")):
            continue
        if not isinstance(result[part], dict):
            raise ValueError(f"its {part} is {result[part]!r:.60}")
        # What tables show and tuning compares; a run that failed may have got as far as this or not.
        if result["status"] == "done" and not needed <= result[part]["mean"].keys():
            raise ValueError(f"it lacks one of {', '.join(sorted(needed))} of {part}")
        for mode, values in result[part].items():
            for metric, value in values.items():
                if type(value) not in (int, float) or not math.isfinite(value):
                    raise ValueError(f"{part}.{mode}.{metric} is {value!r:.60}")
    if "provenance" in result:
        origin = result["provenance"]
        origin["versions"].items(), origin["machine"]["processor"], origin["machine"]["cores"]
        if not isinstance(origin["commit"], (str, type(None))):
            raise ValueError("its commit is no text")


def _digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def _plan_to_dict(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "study": plan.is_study,
        "schedule_scale": plan.schedule_scale,
        "train_size": plan.train_size,
        "overrides": plan.overrides,
        "tuned_on": plan.tuned_on,
        "runs": plan.runs,
        "groups": {
            group.key: {
                "data": group.data,
                "recipe_name": group.recipe_name,
                "variant": group.variant,
                "recipe": _normal(group.recipe.to_dict()),
                "points": list(group.points),
            }
            for group in plan.groups
        },
    }


def _plan_from_dict(found: dict[str, Any]) -> Plan:
    for key, kinds in _PLAN_KINDS.items():
        if type(found.get(key, "")) not in kinds:
            raise TypeError(f"{key} is {found.get(key)!r:.60}")
    if not all(isinstance(command, str) for command in found["commands"]):
        raise TypeError("commands must be texts")
    for values in found["groups"].values():
        for key in ("data", "recipe_name", "variant"):  # files bear these names
            if not _NAME.fullmatch(values[key]):
                raise ValueError(f"{key} is {values[key]!r:.60}")
    check_sizes(found["runs"], found["schedule_scale"], found["train_size"])
    groups = [
        Group(
            values["data"],
            values["recipe_name"],
            values["variant"],
            recipe_from_dict(values["recipe"], f"plan.json: {key}"),
            tuple(values["points"]),
        )
        for key, values in found["groups"].items()
    ]
    return Plan(
        tuple(groups),
        found["runs"],
        found["schedule_scale"],
        found["train_size"],
        found["overrides"],
        found["study"],
        found.get("tuned_on", ""),
    )


_NAME = re.compile(r"[\w.+-]+")
_PLAN_KINDS: dict[str, tuple[type, ...]] = {
    "study": (bool,),
    "schedule_scale": (int, float),
    "train_size": (int,),
    "overrides": (dict,),
    "tuned_on": (str,),
    "runs": (int,),
    "groups": (dict,),
    "commands": (list,),
}


def _compare(mine: dict[str, Any], there: dict[str, Any], path: Path) -> None:
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
        difference = _difference(mine[key], there.get(key, ""))
        if difference is not None:
            refuse(f"{option}: {difference}")
    for key, group in mine["groups"].items():
        for other in there["groups"].values():
            if other["data"] == group["data"] and other["recipe_name"] != group["recipe_name"]:
                refuse(f"--recipe for {group['data']}: {other['recipe_name']!r} there, {group['recipe_name']!r} here")
        if key not in there["groups"]:
            continue
        stored = there["groups"][key]
        difference = _difference(group["points"], stored["points"])
        if difference is not None:
            refuse(f"what is tuned for {key}: {len(stored['points'])} points there, {len(group['points'])} here")
        difference = _difference(group["recipe"], _normal(stored["recipe"]))
        if difference is not None:
            refuse(f"{key}: {difference}")


def _difference(mine: Any, there: Any, name: str = "") -> str | None:
    """Return the first difference of two plain values in words, or None."""
    if isinstance(mine, dict) and isinstance(there, dict):
        for key in dict.fromkeys([*mine, *there]):
            found = _difference(mine.get(key), there.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    if mine == there:
        return None
    return f"{name}{' is ' if name else ''}{json.dumps(there)} there and {json.dumps(mine)} here"


def _normal(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's tables as JSON knows them, with today's defaults for what an older version did not store."""
    try:
        full = recipe_from_dict(recipe, "a stored recipe").to_dict()
    except DropMaxError:
        full = recipe
    return dict(json.loads(json.dumps(full)))
