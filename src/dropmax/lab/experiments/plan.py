"""Which runs a table is made of: data set x head x grid point x seed, decided before the first one starts.

A :class:`Group` is one cell of the table. Its grid ``points`` are tuned on the hold-out set with one seed, and the best
one is then run with the seeds 0, 1, 2, ...
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dropmax.errors import InvalidValue, RunError, check_choice
from dropmax.imports import plain_name
from dropmax.lab.experiments.paper import ROWS
from dropmax.workbench.data import NAMES
from dropmax.workbench.data.loading import import_data, is_function, read_function
from dropmax.workbench.recipes import Recipe, is_known, load_recipe, recipe_for, recipe_from_dict

__all__ = ["TUNING_SEED", "Group", "Job", "Plan", "plan_table"]

#: The grid is tuned with this seed, which no run of the table uses.
TUNING_SEED = 1000
#: Seeds of a cell, and points of its grid, at most: every one of them is a training run.
MOST_RUNS = MOST_POINTS = 1000

#: ``"paper"`` is the paper's search and no more; ``"wide"`` gives every head the same number of points.
SEARCHES = ("wide", "paper")
#: Searched for every head on MNIST (Appendix C); elsewhere the paper fixes it.
WEIGHT_DECAYS = (0.0, 1e-5, 1e-4, 1e-3)
#: What is tuned of single heads, on every data set: of the first three by the paper (section 5).
OWN_OPTIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "sampled-softmax": ("head.fraction", (0.2, 0.4, 0.6)),
    "random-dropmax": ("head.retain", (0.2, 0.4, 0.6)),
    "dropmax-qp": ("head.gamma", (1.0, 0.1, 0.01)),
    "focal": ("head.gamma", (1.0, 2.0, 5.0)),
    "online-label-smoothing": ("head.soft_weight", (0.25, 0.5, 0.75)),
}
#: In the wide search, heads without an option of their own try these multiples of the recipe's learning rate.
LEARNING_RATES = (1 / 3, 1.0, 3.0)


@dataclass(frozen=True)
class Job:
    """One training run: everything a worker needs to know.

    >>> job = plan_table(["mnist-1k"], heads=["dropmax"], tune=False).groups[0].run_jobs({}, runs=1)[0]
    >>> job.id
    'runs/mnist-1k.released.dropmax.seed0'
    """

    kind: Literal["tune", "runs"]  #: "tune" never sees the test set
    data: str
    recipe_name: str
    variant: str
    recipe: Recipe
    point: dict[str, Any] = field(default_factory=dict)  #: grid values, by dotted name

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.recipe.training.seed

    @property
    def group(self) -> str:
        """The key of the group it belongs to."""
        return f"{self.data}.{self.recipe_name}.{self.variant}"

    @property
    def id(self) -> str:
        """A readable name, unique in a plan."""
        if self.kind == "runs":
            return f"runs/{self.group}.seed{self.seed}"
        values = (f"{v:g}" if isinstance(v, float) else str(v) for v in self.point.values())
        spelt = (re.sub(r"[^\w.+-]", "_", value) for value in values)
        names = (name.split(".")[-1] for name in self.point)
        return f"tune/{self.group}." + ",".join(map("=".join, zip(names, spelt, strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain values."""
        return {**vars(self), "recipe": self.recipe.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        """Rebuild a job that went through JSON."""
        return cls(**{**values, "recipe": recipe_from_dict(values["recipe"], f"a job of {values['variant']}")})


@dataclass(frozen=True)
class Group:
    """A data set and a variant: one cell of the table.

    >>> group = plan_table(["mnist-1k"], heads=["dropmax-qp"]).groups[0]
    >>> group.key, len(group.points), group.points[0]
    ('mnist-1k.released.dropmax-qp', 12, {'training.weight_decay': 0.0, 'head.gamma': 1.0})
    """

    data: str
    recipe_name: str  #: "paper" or "released"
    variant: str
    recipe: Recipe
    points: tuple[dict[str, Any], ...] = ()  #: grid to tune over; empty where nothing is tuned

    @property
    def key(self) -> str:
        """Its name, which the names of its runs begin with."""
        return f"{self.data}.{self.recipe_name}.{self.variant}"

    def tune_jobs(self) -> list[Job]:
        """Return one job per grid point; a recipe that holds nothing out holds out the usual part while tuning."""
        held = {"data.validation_size": -1} if self.recipe.data.validation_size == 0 else {}
        return [self._job("tune", point, {**held, "training.seed": TUNING_SEED}) for point in self.points]

    def run_jobs(self, point: Mapping[str, Any], runs: int) -> list[Job]:
        """Return the runs of the table at one grid point."""
        return [self._job("runs", point, {"training.seed": seed}) for seed in range(runs)]

    def _job(self, kind: Literal["tune", "runs"], point: Mapping[str, Any], also: Mapping[str, Any]) -> Job:
        recipe = self.recipe.override({**point, **also})
        return Job(kind, self.data, self.recipe_name, self.variant, recipe, dict(point))


@dataclass(frozen=True)
class Plan:
    """Every run of a table or a study.

    >>> plan = plan_table(["mnist-1k", "mnist-5k"], heads=["softmax", "dropmax"], runs=5)
    >>> len(plan.groups), plan.count
    (4, 68)
    """

    groups: tuple[Group, ...]
    runs: int = 5
    schedule_scale: float = 1.0
    train_size: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    is_study: bool = False
    tuned_on: str = ""  #: the column whose tuning was taken over, where one was

    def __post_init__(self) -> None:
        columns: dict[str, str] = {}
        for group in self.groups:
            name = columns.setdefault(group.data, group.recipe.data.name)
            if name != group.recipe.data.name:
                both = f"{name} and {group.recipe.data.name}"
                raise InvalidValue(f"{both} would both be the column {group.data!r}: rename one of them")
        ids = [job.id for group in self.groups for job in group.tune_jobs() + group.run_jobs({}, self.runs)]
        twice = next((name for name, later in itertools.pairwise(sorted(ids)) if name == later), None)
        if twice is not None:
            raise InvalidValue(f"two runs of the plan would both be called {twice!r}: rename a variant or a grid value")

    @property
    def count(self) -> int:
        """How many training runs it takes."""
        return sum(len(group.points) + self.runs for group in self.groups)


def plan_table(
    data: Sequence[str],
    *,
    recipe: str | None = None,
    heads: Sequence[str] | None = None,
    runs: int = 5,
    tune: bool | str = True,
    schedule_scale: float = 1.0,
    train_size: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan the paper's Table 1, or the columns and rows of it that are named.

    ``tune`` names the search, one of :data:`SEARCHES`; True is the wide one, False none.

    >>> plan_table(["mnist-1k"]).count  # 8 heads x (12 grid points + 5 runs)
    136
    """
    rows, overrides = _rows(heads), dict(overrides or {})
    if "head.name" in overrides:
        raise InvalidValue("--set head.name would make every row the same: choose rows with --heads")
    check_sizes(runs, schedule_scale, train_size)
    search = "wide" if tune is True else str(tune or "")
    if search:
        check_choice("search", search, SEARCHES)
    for name in [*data, str(overrides.get("data.name", ""))]:
        check_code({"data.name": name}, "the command", trust_code=True)  # typing it counts as trust
    groups = []
    for name in dict.fromkeys(data):
        recipe_name, found = resolve(name, recipe)
        budgets: dict[int, str] = {}
        for head in rows:
            changed = shortened(found.override({**overrides, "head.name": head}), schedule_scale, train_size)
            points = grid_points(search_grid(changed, search, overrides)) if search else ()
            column = column_name(changed.data.name)  # of the data that is run, whatever was overridden
            groups.append(Group(column, recipe_name, plain_name(head), changed.findable(), points))
            budgets.setdefault(len(points), groups[-1].variant)
        if search == "wide" and len(budgets) > 1:
            fewest, most = min(budgets), max(budgets)
            unequal = f"{budgets[fewest]} would be tuned over {fewest} points and {budgets[most]} over {most}"
            advice = "which is not a fair comparison: use --no-tune, or compare fewer --heads"
            raise InvalidValue(f"with these --set values {unequal}, {advice}")
    return Plan(tuple(groups), runs, schedule_scale, train_size, overrides)


def _rows(heads: Sequence[str] | None) -> list[str]:
    """Return the heads named in the order of the paper's table, then others; the paper's eight for None."""
    from dropmax.heads import FURTHER, HEADS, find_head

    if heads is None:
        return list(ROWS)
    for head in heads:
        find_head(head)
    return sorted(dict.fromkeys(heads), key=[*HEADS, *FURTHER, *heads].index)


def search_grid(recipe: Recipe, search: str, fixed: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what is searched for a recipe's head on its data, see docs/reproducing.md; ``fixed`` values are not."""
    grid: dict[str, list[Any]] = {}
    if column_name(recipe.data.name).startswith("mnist"):
        grid["training.weight_decay"] = list(WEIGHT_DECAYS)
    if recipe.head["name"] in OWN_OPTIONS:
        option, values = OWN_OPTIONS[recipe.head["name"]]
        grid[option] = list(values)
    elif search == "wide":
        rate = recipe.training.learning_rate
        grid["training.learning_rate"] = [float(f"{rate * factor:.4g}") for factor in LEARNING_RATES]
    return {name: values for name, values in grid.items() if name not in fixed}


def grid_points(grid: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], ...]:
    """Return every combination of a grid's values; an empty grid has none to choose from."""
    count = math.prod(map(len, grid.values()))
    if count > MOST_POINTS:
        raise InvalidValue(f"a grid of {count:,} points is more than anyone can train: leave at most {MOST_POINTS:,}")
    return tuple(dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if values)


def shortened(recipe: Recipe, schedule_scale: float, train_size: int) -> Recipe:
    """Scale the epochs (at least one is left; milestones are shares and follow) and limit the training set."""
    values: dict[str, Any] = {}
    if schedule_scale != 1:
        values["training.epochs"] = max(1, round(recipe.training.epochs * schedule_scale))
    if train_size:
        values["data.train_size"] = train_size
    return recipe.override(values)


def check_sizes(runs: int, schedule_scale: float, train_size: int) -> None:
    """Refuse numbers that make no plan."""
    if not 1 <= runs <= MOST_RUNS:
        limit = "at least 1" if runs < 1 else f"at most {MOST_RUNS:,}"
        raise InvalidValue(f"--runs must be {limit}, got {runs}")
    if not 0 < schedule_scale < math.inf:
        limit = "above 0, such as 0.1 for a tenth of the epochs"
        raise InvalidValue(f"--schedule-scale must be {limit}, got {schedule_scale}")
    if train_size < 0:
        raise InvalidValue(f"--train-size must be at least 1, or 0 for all, got {train_size}")


# --- from the name of a column to a recipe ---------------------------------------------------------------------------


def resolve(data: str | None, recipe: str | None, folder: Path = Path()) -> tuple[str, Recipe]:
    """Return the name of the recipe for a column, and the recipe, without the last fit on all rows.

    ``data`` is a data set, the user's own folder or file, or ``package.module:function``; None takes that of the recipe
    file. ``recipe`` is the name of one of the data set's recipes, or a ``.toml`` file. Paths begin at ``folder``.
    """
    changes: dict[str, Any] = {"training.refit": False}
    if recipe is not None and recipe.endswith(".toml"):
        path = folder / Path(recipe).expanduser()
        found = load_recipe(path)
        name = _plain(path.stem)
        changes["data.name"] = place(data or found.data.name, folder)
    elif data is None:
        raise InvalidValue("name the data, such as mnist-1k or a file of yours, or a recipe file that does")
    elif is_function(data):
        is_images = read_function(data).train.inputs.ndim == 4
        found = load_recipe("own-images" if is_images else "own-features", recipe)
        name = recipe or "default"
        changes |= {"data.name": data, "data.image_size": 0} | ({"data.augment": "none"} if is_images else {})
    else:
        full_name, found = recipe_for(place(data, folder), recipe)
        name = full_name.split(".", 1)[1]
    return name, found.override(changes)


def column_name(data: str) -> str:
    """Return what the column of some data is called; the user's own data never takes the name of a known data set."""
    if data in NAMES or is_known(data):
        return data
    name = data.replace(":", ".") if is_function(data) else _plain(Path(data).stem)
    return f"own-{name}" if name in NAMES or is_known(name) else name


def check_code(values: dict[str, Any], source: str, trust_code: bool) -> None:
    """Raise where a file names something to import without permission; import functions that give data."""
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if not name.endswith(".name") or not isinstance(each, str) or ":" not in each:
                continue
            if not trust_code:
                named = f"{each!r} ({name})"
                raise RunError(
                    f"{source} would import {named}, which runs that code: if you trust it, add --trust-code"
                )
            if name == "data.name" and is_function(each):
                import_data(each)


def place(data: str, folder: Path = Path()) -> str:
    """Return the absolute path of the user's own data, since workers may run elsewhere; names stay as they are."""
    if data in NAMES or is_known(data) or is_function(data):
        return data
    own = Path(data).expanduser()
    return next((str(path.absolute()) for path in (folder / own, own) if path.exists()), data)


def _plain(name: str) -> str:
    return re.sub(r"[^\w+-]+", "-", name) or "own"
