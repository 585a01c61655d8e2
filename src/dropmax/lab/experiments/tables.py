"""From results to a table: means, intervals, and which rows may be as good as the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dropmax.errors import InvalidValue, did_you_mean
from dropmax.lab.experiments.paper import COLUMNS, PAPER, ROWS, WHY_NOT
from dropmax.lab.experiments.plan import TUNING_SEED, Group, Plan
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.store import Store
from dropmax.lab.statistics import holm, paired_difference, t_interval
from dropmax.workbench.files import write_atomically

__all__ = ["DEFAULT_METRICS", "METRICS", "Cell", "Column", "Metric", "Table", "make_table", "write_tables"]


@dataclass(frozen=True)
class Metric:
    """How a metric is shown."""

    title: str
    factor: float = 1.0
    digits: int = 4


def _metrics() -> dict[str, Metric]:
    plain = {
        "error": Metric("test error (%)", 100.0, 2),
        "nll": Metric("test negative log-likelihood (nats)"),
        "ece": Metric("test expected calibration error (%, 15 bins)", 100.0, 2),
        "brier": Metric("test Brier score"),
        "aurc": Metric("test area under the risk-coverage curve (%)", 100.0, 3),
    }
    scaled = {
        f"{name}_scaled": replace(metric, title=f"{metric.title}, with a fitted temperature")
        for name, metric in plain.items()
    }
    return plain | scaled | {"set_size": Metric("mean size of test prediction sets of 95 %", 1.0, 2)}


#: Every metric a table can be made of. Those that end in ``_scaled`` are measured after fitting one temperature on the
#: held-out rows.
METRICS: dict[str, Metric] = _metrics()

#: The metrics of ``tables.md``.
DEFAULT_METRICS = ("error", "nll", "ece")

#: Rows with a corrected p-value above this are marked as not significantly different from the best.
LEVEL = 0.05


@dataclass(frozen=True)
class Cell:
    """One head on one data set.

    >>> cell = Cell(values={0: 2.0, 1: 4.0})
    >>> cell.mean, round(cell.half_width, 2)
    (3.0, 12.71)
    """

    values: dict[int, float] = field(default_factory=dict)  #: by seed, in the units shown
    note: str = ""  #: why there are no numbers, or fewer than planned
    paper: tuple[float, float] | None = None
    best: bool = False
    tied: bool = False  #: not significantly different from the best
    p_value: float | None = None  #: against the best, Holm-corrected

    @property
    def mean(self) -> float | None:
        """The mean over the seeds, where there are any."""
        return sum(self.values.values()) / len(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % t-interval, where there are two runs or more."""
        return t_interval(self.values.values())[1] if len(self.values) > 1 else None


@dataclass(frozen=True)
class Column:
    """A data set, and notes on its numbers."""

    data: str
    title: str
    stamp: str  #: recipe, and what was shortened


@dataclass(frozen=True)
class Table:
    """A metric of every row and column; :func:`make_table` makes one, the module ``render`` writes it."""

    title: str
    metric: str
    columns: tuple[Column, ...]
    rows: dict[str, str]  #: names to show, by variant
    cells: dict[tuple[str, str], Cell]  #: by (variant, data)
    notes: tuple[str, ...]
    provenance: dict[str, Any]


def make_table(store: Store, metric: str = "error", *, mode: str = "mean") -> Table:
    """Make the table of a metric from the results in a directory, for one way of prediction.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table
    >>> store = Store(tempfile.mkdtemp())
    >>> store.join(plan_table(["mnist-1k"]), "a doctest")
    >>> table = make_table(store)
    >>> table.cells["dropmax", "mnist-1k"].note, table.cells["dropmax", "awa"].note
    ('not run yet', 'images no longer distributed')
    """
    if metric not in METRICS:
        raise InvalidValue(
            f"unknown metric {metric!r}:{did_you_mean(metric, METRICS)} The metrics are {', '.join(METRICS)}"
        )
    plan, results = store.plan(), store.runs()
    by_group: dict[str, list[RunRecord]] = {}
    for result in results:
        by_group.setdefault(result.group, []).append(result)
    planned = {(group.variant, group.data): group for group in plan.groups}
    rows, columns = _rows(plan), _columns(plan)
    cells: dict[tuple[str, str], Cell] = {}
    for column in columns:
        for variant in rows:
            group = planned.get((variant, column.data))
            found = [] if group is None else by_group.get(group.key, [])
            paper = None if plan.is_study or metric != "error" else _papers(variant, column.data, group)
            if group is None:
                cells[variant, column.data] = Cell(note=WHY_NOT.get(column.data, "not run"), paper=paper)
            else:
                cells[variant, column.data] = replace(_cell(found, metric, mode, plan.runs), paper=paper)
        cells |= compared({key: cell for key, cell in cells.items() if key[1] == column.data})
    title = f"{_kind(plan)}: {METRICS[metric].title}, mode {mode}"
    commands = getattr(store.plan_record(), "commands", [])
    return Table(title, metric, columns, rows, cells, _notes(plan, metric), _provenance(commands, results))


def _kind(plan: Plan) -> str:
    if plan.is_study:
        return "Study"
    return "Table 1" if any(group.data in COLUMNS for group in plan.groups) else "Heads"


def _cell(found: list[RunRecord], metric: str, mode: str, planned: int) -> Cell:
    factor = METRICS[metric].factor
    measured = {r.seed: r.test[mode] for r in sorted(found, key=lambda r: r.seed) if mode in r.test}
    values = {seed: factor * numbers[metric] for seed, numbers in measured.items() if metric in numbers}
    failed = [result.reason for result in found if result.status == "failed"]
    note = "not measured" if measured and not values else _note(len(values), failed, planned)
    return Cell(values, note)


def _papers(variant: str, data: str, group: Group | None) -> tuple[float, float] | None:
    """Return the paper's number, unless what was run is not the paper's training set."""
    changed = group is not None and (group.recipe.data.name != data or group.recipe.data.train_size)
    return None if changed else PAPER.get(variant, {}).get(data)


def _note(done: int, failed: list[str], planned: int) -> str:
    if done == planned:
        return ""
    if not done:
        return f"failed: {failed[0]}" if failed else "not run yet"
    return f"{done} of {planned} runs" + (f", {len(failed)} failed" if failed else "")


def compared(column: dict[tuple[str, str], Cell]) -> dict[tuple[str, str], Cell]:
    """Mark the best of a column, and the rows a paired test cannot tell from it."""
    with_numbers = {key: cell for key, cell in column.items() if cell.mean is not None}
    if not with_numbers:
        return column
    best = min(with_numbers, key=lambda key: with_numbers[key].mean or 0.0)
    marked = column | {best: replace(column[best], best=True)}
    p_values = {}
    for key, cell in with_numbers.items():
        seeds = sorted(set(cell.values) & set(column[best].values))
        if key != best and len(seeds) > 1:
            pair = [cell.values[seed] for seed in seeds], [column[best].values[seed] for seed in seeds]
            p_values[key] = paired_difference(*pair).p_value
    for key, corrected in zip(p_values, holm(list(p_values.values())), strict=True):
        marked[key] = replace(column[key], p_value=corrected, tied=corrected > LEVEL)
    return marked


def _rows(plan: Plan) -> dict[str, str]:
    """Return the names to show: the paper's eight where one of its columns was asked for, then the others."""
    asked = {group.variant: group.variant for group in plan.groups}
    if plan.is_study:
        return asked
    if _kind(plan) == "Table 1":
        return dict(ROWS) | {variant: variant for variant in asked if variant not in ROWS}
    return {variant: ROWS.get(variant, variant) for variant in asked}


def _columns(plan: Plan) -> tuple[Column, ...]:
    recipes = {group.data: group.recipe_name for group in plan.groups}
    names = list(recipes)
    if _kind(plan) == "Table 1":
        names = [*COLUMNS, *(data for data in recipes if data not in COLUMNS)]
    shortened = []
    if plan.schedule_scale != 1:
        shortened.append(f"schedule x{plan.schedule_scale:g}")
    if plan.train_size:
        shortened.append(f"{plan.train_size:,} training examples")
    return tuple(
        Column(name, COLUMNS.get(name, name), ", ".join([recipes[name], *shortened]) if name in recipes else "")
        for name in names
    )


def _notes(plan: Plan, metric: str) -> tuple[str, ...]:
    notes = [f"Mean and 95 % t-interval over {plan.runs} run{'s' if plan.runs > 1 else ''}."]
    if metric == "error" and _kind(plan) == "Table 1":
        notes.append("In brackets: the paper's numbers.")
    notes.append(
        "Bold: the lowest mean of a column. †: not significantly different from it (paired t test over the seeds, "
        f"p > {LEVEL:g} after Holm's correction for the comparisons with the best in that column)."
    )
    notes.append(_tuning(plan))
    recipes = dict.fromkeys(f"{group.data} {group.recipe_name}" for group in plan.groups)
    notes.append(f"Recipes: {', '.join(recipes)}.")
    if plan.schedule_scale != 1:
        notes.append(f"Shortened: {plan.schedule_scale:g} times the recipe's epochs.")
    if plan.train_size:
        notes.append(f"Reduced: {plan.train_size:,} training examples.")
    if plan.overrides:
        notes.append("Changed: " + ", ".join(f"{name} = {value}" for name, value in plan.overrides.items()) + ".")
    if any(group.data == "awa2" for group in plan.groups):
        notes.append("AWA2 is not AWA, whose images were withdrawn: its numbers are not comparable with the paper's.")
    if metric.startswith("nll"):
        notes.append("A label of probability zero, which sparsemax gives, is charged 87.3 nats.")
    return tuple(notes)


def _tuning(plan: Plan) -> str:
    if plan.tuned_on:
        return f"Every row at the grid point that won on the hold-out set of {plan.tuned_on}."
    counts = sorted({len(group.points) for group in plan.groups})
    if counts == [0]:
        return "Not tuned: the recipes' values."
    return f"Each row tuned over {' and '.join(map(str, counts))} grid points on the hold-out set, seed {TUNING_SEED}."


def _provenance(commands: list[str], results: list[RunRecord]) -> dict[str, Any]:
    """Say where the numbers come from; the same results give the same words."""
    origins = [result.provenance for result in results if result.provenance.versions]
    versions = dict.fromkeys(", ".join(f"{k} {v}" for k, v in origin.versions.items()) for origin in origins)
    return {
        "command": commands,
        "commit": sorted({origin.commit or "unknown" for origin in origins}),
        "seeds": sorted({result.seed for result in results}),
        "versions": sorted(versions),
        "machine": sorted({f"{origin.machine.processor}, {origin.machine.cores} cores" for origin in origins}),
    }


def write_tables(store: Store, metrics: Sequence[str] = DEFAULT_METRICS, formats: Sequence[str] = ("md",)) -> list[str]:
    """Write ``tables.md`` (or ``.tex``) with a table per metric, and ``runs.csv``; return the names of the files.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table
    >>> store = Store(tempfile.mkdtemp())
    >>> store.join(plan_table(["mnist-1k"]), "a doctest")
    >>> write_tables(store)
    ['tables.md', 'runs.csv']
    """
    from dropmax.lab.experiments.render import FORMATS
    from dropmax.lab.results import to_csv

    for name in formats:
        if name not in FORMATS:
            raise InvalidValue(
                f"unknown format {name!r}:{did_you_mean(name, FORMATS)} The formats are {', '.join(FORMATS)}"
            )
    tables = [make_table(store, metric) for metric in metrics]
    pages = {f"tables.{name}": FORMATS[name](tables) for name in formats}
    pages["runs.csv"] = to_csv([*store.runs("tune"), *store.runs()])
    for name, content in pages.items():
        write_atomically(store.path / name, content)
    return list(pages)
