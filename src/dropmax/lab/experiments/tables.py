"""From results to a table: means, intervals, and which rows may be as good as the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dropmax.errors import check_choice
from dropmax.lab.experiments.paper import COLUMNS, PAPER, ROWS, WHY_NOT
from dropmax.lab.experiments.plan import TUNING_SEED, Group, Plan
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.schedule import edges_of
from dropmax.lab.experiments.store import Store
from dropmax.lab.statistics import holm, paired_by_seed, t_interval
from dropmax.workbench.files import write_atomically

__all__ = ["DEFAULT_METRICS", "METRICS", "Cell", "Column", "Metric", "Table", "by_seed", "make_table", "write_tables"]


@dataclass(frozen=True)
class Metric:
    """How a metric is shown."""

    title: str
    short: str  #: over a column beside those of other metrics
    factor: float = 1.0
    digits: int = 4


_PLAIN = {
    "error": Metric("test error (%)", "test error %", 100.0, 2),
    "nll": Metric("test negative log-likelihood (nats)", "NLL"),
    "ece": Metric("test expected calibration error (%, 15 bins)", "ECE %", 100.0, 2),
    "brier": Metric("test Brier score", "Brier"),
    "aurc": Metric("test area under the risk-coverage curve (%)", "AURC %", 100.0, 3),
}
#: Every metric a table can be made of. Those that end in ``_scaled`` are measured after fitting one temperature on the
#: held-out rows.
METRICS: dict[str, Metric] = {
    **_PLAIN,
    **{
        f"{name}_scaled": replace(one, title=f"{one.title}, with a fitted temperature", short=f"{one.short}, scaled")
        for name, one in _PLAIN.items()
    },
    "set_size": Metric("mean size of test prediction sets of 95 %", "set size at 95 %", 1.0, 2),
}
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

    kind: str  #: "Table 1", "Study" or "Heads"
    metric: str
    modes: str  #: in words, which way of predicting the rows show
    columns: tuple[Column, ...]
    rows: dict[str, str]  #: names to show, by variant
    cells: dict[tuple[str, str], Cell]  #: by (variant, data)
    notes: tuple[str, ...]
    provenance: dict[str, Any]

    @property
    def title(self) -> str:
        """What it shows."""
        return f"{self.kind}: {METRICS[self.metric].title}, {self.modes}"


def make_table(store: Store, metric: str = "error", *, modes: Sequence[str] = ("mean",)) -> Table:
    """Make the table of a metric from the results in a directory.

    Every further mode of prediction adds a row ``variant@mode`` below each variant that was measured in it.

    >>> import tempfile
    >>> from dropmax.lab.experiments import plan_table
    >>> store = Store(tempfile.mkdtemp())
    >>> store.join(plan_table(["mnist-1k"]), "a doctest")
    >>> table = make_table(store)
    >>> table.cells["dropmax", "mnist-1k"].note, table.cells["dropmax", "awa"].note
    ('not run yet', 'images no longer distributed')
    """
    from dropmax.heads import MODES

    check_choice("metric", metric, METRICS)
    for mode in modes:
        check_choice("mode", mode, MODES)
    plan, results = store.plan(), store.runs()
    planned = {(group.variant, group.data): group for group in plan.groups}
    rows, columns = _with_modes(_rows(plan), modes, results), _columns(plan)
    cells: dict[tuple[str, str], Cell] = {}
    for column in columns:
        here = {}
        for row in rows:
            variant, _, mode = row.partition("@")
            group = planned.get((variant, column.data))
            paper = None if plan.is_study or metric != "error" else _papers(variant, column.data, group)
            if group is None:
                cell = Cell(note=WHY_NOT.get(column.data, "not run"))
            else:
                of_group = sorted((r for r in results if r.group == group.key), key=lambda result: result.seed)
                cell = _cell(of_group, metric, mode or modes[0], plan.runs)
            here[row, column.data] = replace(cell, paper=paper)
        cells |= compared(here)
    words = f"mode {modes[0]}" + (" unless a row names another" if any("@" in row for row in rows) else "")
    commands = getattr(store.plan_record(), "commands", [])
    notes = _notes(plan, metric, results)
    return Table(_kind(plan), metric, words, columns, rows, cells, notes, _provenance(commands, results))


def _kind(plan: Plan) -> str:
    if plan.is_study:
        return "Study"
    return "Table 1" if any(group.data in COLUMNS for group in plan.groups) else "Heads"


def _cell(found: list[RunRecord], metric: str, mode: str, planned: int) -> Cell:
    """Return the numbers of some runs, and a note where there are none or fewer than planned."""
    values = by_seed(found, metric, mode)
    failed = [result.reason for result in found if result.status == "failed"]
    if len(values) == planned:
        note = ""
    elif values:
        note = f"{len(values)} of {planned} runs" + (f", {len(failed)} failed" if failed else "")
    elif any(mode in result.test for result in found):
        note = "not measured"
    else:
        note = f"failed: {failed[0]}" if failed else "not run yet"
    return Cell(values, note)


def by_seed(runs: Iterable[RunRecord], metric: str, mode: str = "mean") -> dict[int, float]:
    """Return a metric of some runs on the test set by their seeds, in the unit shown, where it was measured."""
    factor = METRICS[metric].factor if metric in METRICS else 1.0
    return {run.seed: factor * run.test[mode][metric] for run in runs if metric in run.test.get(mode, {})}


def _papers(variant: str, data: str, group: Group | None) -> tuple[float, float] | None:
    """Return the paper's number, unless what was run is not the paper's training set."""
    changed = group is not None and (group.recipe.data.name != data or group.recipe.data.train_size)
    return None if changed else PAPER.get(variant, {}).get(data)


def compared(column: dict[tuple[str, str], Cell]) -> dict[tuple[str, str], Cell]:
    """Mark the best of a column, and the rows a paired test cannot tell from it."""
    means = {key: cell.mean for key, cell in column.items() if cell.mean is not None}
    if not means:
        return column
    best = min(means, key=means.__getitem__)
    marked = column | {best: replace(column[best], best=True)}
    pairs = {key: paired_by_seed(column[key].values, column[best].values) for key in means if key != best}
    p_values = {key: pair.p_value for key, pair in pairs.items() if pair is not None}
    for key, corrected in zip(p_values, holm(list(p_values.values())), strict=True):
        marked[key] = replace(column[key], p_value=corrected, tied=corrected > LEVEL)
    return marked


def _rows(plan: Plan) -> dict[str, str]:
    """Return the names to show: the paper's eight where one of its columns was asked for, then the others."""
    asked = [group.variant for group in plan.groups]
    names = {} if plan.is_study else ROWS
    return {variant: names.get(variant, variant) for variant in [*(ROWS if _kind(plan) == "Table 1" else ()), *asked]}


def _with_modes(rows: dict[str, str], modes: Sequence[str], results: list[RunRecord]) -> dict[str, str]:
    """Return the rows, each followed by those of the further modes it was measured in."""
    measured = {(result.variant, mode) for result in results for mode in result.test}
    found = {}
    for variant, name in rows.items():
        found[variant] = name
        found |= {f"{variant}@{mode}": f"{name}, {mode}" for mode in modes[1:] if (variant, mode) in measured}
    return found


def _columns(plan: Plan) -> tuple[Column, ...]:
    recipes = {group.data: group.recipe_name for group in plan.groups}
    names = dict.fromkeys([*(COLUMNS if _kind(plan) == "Table 1" else ()), *recipes])
    shortened = [f"schedule x{plan.schedule_scale:g}"] if plan.schedule_scale != 1 else []
    shortened += [f"{plan.train_size:,} training examples"] if plan.train_size else []
    stamps = {data: ", ".join([recipe, *shortened]) for data, recipe in recipes.items()}
    return tuple(Column(name, COLUMNS.get(name, name), stamps.get(name, "")) for name in names)


def _notes(plan: Plan, metric: str, runs: list[RunRecord]) -> tuple[str, ...]:
    recipes = dict.fromkeys(f"{group.data} {group.recipe_name}" for group in plan.groups)
    changed = ", ".join(f"{name} = {value}" for name, value in plan.overrides.items())
    counts = " and ".join(map(str, sorted({len(group.points) for group in plan.groups})))
    tuned = f"Each row tuned over {counts} grid points on the hold-out set, seed {TUNING_SEED}."
    if plan.tuned_on:
        tuned = f"Every row at the grid point that won on the hold-out set of {plan.tuned_on}."
    elif counts == "0":
        tuned = "Not tuned: the recipes' values."
    winners = edges_of(plan, runs)
    on_edge = [f"{group.variant} on {group.data} ({'; '.join(words)})" for group, words in winners if words]
    notes = {
        f"Mean and 95 % t-interval over {plan.runs} run{'s' if plan.runs > 1 else ''}.": True,
        "In brackets: the paper's numbers.": metric == "error" and _kind(plan) == "Table 1",
        "Bold: the lowest mean of a column. †: not significantly different from it (paired t test over the seeds, "
        f"p > {LEVEL:g} after Holm's correction for the comparisons with the best in that column).": True,
        tuned: True,
        f"Recipes: {', '.join(recipes)}.": True,
        f"Shortened: {plan.schedule_scale:g} times the recipe's epochs.": plan.schedule_scale != 1,
        f"Reduced: {plan.train_size:,} training examples.": plan.train_size,
        f"Changed: {changed}.": changed,
        "AWA2 is not AWA, whose images were withdrawn: its numbers are not comparable with the paper's.": any(
            group.data == "awa2" for group in plan.groups
        ),
        "A label of probability zero, which sparsemax gives, is charged 87.3 nats.": metric.startswith("nll"),
        f"Winners on an edge of their grid: {', '.join(on_edge) or 'none'}.": metric == "error" and winners,
    }
    return tuple(note for note, applies in notes.items() if applies)


def _provenance(commands: list[str], results: list[RunRecord]) -> dict[str, Any]:
    """Say where the numbers come from; the same results give the same words."""
    origins = [result.provenance for result in results if result.provenance.versions]
    return {
        "command": commands,
        "commit": sorted({origin.commit or "unknown" for origin in origins}),
        "seeds": sorted({result.seed for result in results}),
        "versions": sorted({", ".join(f"{k} {v}" for k, v in origin.versions.items()) for origin in origins}),
        "machine": sorted({f"{origin.machine.processor}, {origin.machine.cores} cores" for origin in origins}),
    }


def write_tables(
    store: Store,
    metrics: Sequence[str] = DEFAULT_METRICS,
    formats: Sequence[str] = ("md",),
    *,
    modes: Sequence[str] = ("mean",),
) -> list[str]:
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
        check_choice("format", name, FORMATS)
    tables = [make_table(store, metric, modes=modes) for metric in metrics]
    pages = {f"tables.{name}": FORMATS[name](tables) for name in formats}
    pages["runs.csv"] = to_csv([*store.runs("tune"), *store.runs()])
    for name, content in pages.items():
        write_atomically(store.path / name, content)
    return list(pages)
