"""From result files to a table: means, intervals, and which rows may be as good as the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dropmax.lab.experiments.paper import COLUMNS, PAPER, ROWS, WHY_NOT
from dropmax.lab.experiments.plan import TUNING_SEED, Plan
from dropmax.lab.experiments.store import Store
from dropmax.metrics import paired_difference, t_interval
from dropmax.workbench.files import write_atomically

__all__ = ["METRICS", "Cell", "Column", "Table", "holm", "make_table", "write_tables"]

#: How each metric is shown: its name, a factor, digits after the point, and its files' stem.
METRICS: dict[str, tuple[str, float, int, str]] = {
    "error": ("test error (%)", 100.0, 2, "table"),
    "nll": ("test negative log-likelihood (nats)", 1.0, 4, "table-nll"),
    "ece": ("test expected calibration error (%, 15 bins)", 100.0, 2, "table-ece"),
}

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
    """A data set, and what its numbers have to be read with.

    >>> Column("mnist-1k", "MNIST-1K", "released, schedule x0.1").title
    'MNIST-1K'
    """

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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method for having made several comparisons.

    The i-th smallest of m is multiplied by m - i + 1; no corrected value is below one of a smaller p-value, or above 1.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, so_far = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = so_far
    return corrected


def make_table(store: Store, metric: str = "error", *, mode: str = "mean") -> Table:
    """Make the table of a metric from the results in a directory, for one way of prediction.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table
    >>> store = Store(tempfile.mkdtemp())
    >>> store.join(plan_table(["mnist-1k"]), "a doctest")
    >>> table = make_table(store)
    >>> table.cells["dropmax", "mnist-1k"].note, table.cells["dropmax", "awa"].note
    ('not run yet', 'images withdrawn')
    """
    plan, results = store.plan(), store.results()
    name, factor, _, _ = METRICS[metric]
    planned = {(group.variant, group.data): group for group in plan.groups}
    by_group: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_group.setdefault(result["group"], []).append(result)
    rows = {group.variant: group.variant for group in plan.groups} if plan.is_study else dict(ROWS)
    columns = _columns(plan)
    cells: dict[tuple[str, str], Cell] = {}
    for column in columns:
        for variant in rows:
            group = planned.get((variant, column.data))
            paper = PAPER.get(variant, {}).get(column.data) if metric == "error" and not plan.is_study else None
            if group is None:
                cells[variant, column.data] = Cell(note=WHY_NOT.get(column.data, "not run"), paper=paper)
                continue
            found = sorted(by_group.get(group.key, []), key=lambda result: int(result["seed"]))
            values = {r["seed"]: factor * r["test"][mode][metric] for r in found if mode in r.get("test", {})}
            failed = [result["reason"] for result in found if result["status"] == "failed"]
            cells[variant, column.data] = Cell(values, _note(len(values), failed, plan.runs), paper)
        cells |= compared({key: cell for key, cell in cells.items() if key[1] == column.data})
    title = f"{'Study' if plan.is_study else 'Table 1'}: {name}, mode {mode}"
    return Table(title, metric, columns, rows, cells, _notes(plan, metric), _provenance(store, results))


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


def _columns(plan: Plan) -> tuple[Column, ...]:
    recipes = {group.data: group.recipe_name for group in plan.groups}
    names = list(recipes) if plan.is_study else [*COLUMNS, *(data for data in recipes if data not in COLUMNS)]
    shortened = []
    if plan.schedule_scale != 1:
        shortened.append(f"schedule x{plan.schedule_scale:g}")
    if plan.train_size:
        shortened.append(f"{plan.train_size:,} training examples")
    return tuple(
        Column(name, COLUMNS.get(name, name.upper()), ", ".join([recipes[name], *shortened]) if name in recipes else "")
        for name in names
    )


def _notes(plan: Plan, metric: str) -> tuple[str, ...]:
    counts = sorted({len(group.points) for group in plan.groups})
    tuned = " and ".join(map(str, counts))
    notes = [f"Mean and 95 % t-interval over {plan.runs} run{'s' if plan.runs > 1 else ''}."]
    if metric == "error" and not plan.is_study:
        notes.append("Beside our numbers: the paper's.")
    notes.append(
        "Bold: the lowest mean of a column. †: not significantly different from it (paired t test over the seeds, "
        f"p > {LEVEL:g} after Holm's correction for the comparisons with the best in that column)."
    )
    if plan.tuned_on:
        notes.append(f"Every row at the grid point that won on the hold-out set of {plan.tuned_on}.")
    elif counts == [0]:
        notes.append("Not tuned: the recipes' values.")
    else:
        notes.append(f"Each row tuned over {tuned} grid points on the hold-out set, with seed {TUNING_SEED}.")
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
    if metric == "nll":
        notes.append("A label of probability zero, which sparsemax gives, is charged 87.3 nats.")
    return tuple(notes)


def _provenance(store: Store, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Say where the numbers come from; the same results give the same words."""
    origins = [result["provenance"] for result in results if "provenance" in result]
    versions = dict.fromkeys(", ".join(f"{k} {v}" for k, v in origin["versions"].items()) for origin in origins)
    return {
        "command": (store.plan_dict() or {}).get("commands", []),
        "commit": sorted({origin["commit"] or "unknown" for origin in origins}),
        "seeds": sorted({result["seed"] for result in results}),
        "versions": sorted(versions),
        "machine": sorted({f"{o['machine']['processor']}, {o['machine']['cores']} cores" for o in origins}),
    }


def write_tables(store: Store) -> list[str]:
    """Write the tables of every metric in every format; return the names of the files.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table
    >>> store = Store(tempfile.mkdtemp())
    >>> store.join(plan_table(["mnist-1k"]), "a doctest")
    >>> write_tables(store)[:4]
    ['table.md', 'table.tex', 'table.html', 'table.csv']
    """
    from dropmax.lab.experiments.render import FORMATS

    written = []
    for metric, (_, _, _, stem) in METRICS.items():
        table = make_table(store, metric)
        for ending, render in FORMATS.items():
            write_atomically(store.path / f"{stem}.{ending}", render(table))
            written.append(f"{stem}.{ending}")
    return written
