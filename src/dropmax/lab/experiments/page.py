"""A table or study as one HTML page: tables, learning curves, every seed as a point, and the commands."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.render import number_text
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.tables import DEFAULT_METRICS, METRICS, Table, make_table
from dropmax.workbench import style

__all__ = ["make_page"]


def make_page(store: Store, metrics: Sequence[str] = DEFAULT_METRICS) -> str:
    """Return the page of the results in a directory. It loads nothing from elsewhere."""
    import jinja2

    tables = [make_table(store, metric) for metric in metrics]
    runs = [record for record in store.runs() if record.status == "done"]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("study.html.j2").read_text("utf-8"))
    css = resources.files("dropmax.lab.report").joinpath("report.css").read_text("utf-8")
    return template.render(
        css=css,
        name=store.path.resolve().name,
        tables=[(table, METRICS[table.metric], _points(table)) for table in tables],
        curves=[(data, picture) for data in _data(runs) if (picture := _curves(runs, data)) is not None],
        origin=tables[0].provenance,
        runs=runs,
        number=number_text,
    )


def _data(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(record.data for record in runs))


def _points(table: Table) -> str | None:
    """Draw one point per seed, a row per variant and a panel per data set, with means and intervals."""
    shown = [c for c in table.columns if any(table.cells[variant, c.data].values for variant in table.rows)]
    if not shown:
        return None
    rows = [variant for variant in table.rows if any(table.cells[variant, c.data].values for c in shown)]
    size = (1.5 + style.COLUMN * len(shown), 0.9 + 0.3 * len(rows))
    figure, panels = style.pyplot().subplots(1, len(shown), figsize=size, squeeze=False, sharey=True)
    for axes, column in zip(panels[0], shown, strict=True):
        for place, variant in enumerate(rows):
            cell = table.cells[variant, column.data]
            axes.plot(list(cell.values.values()), [-place] * len(cell.values), "o", color=style.BLUE, alpha=0.4)
            if cell.mean is not None:
                axes.errorbar(
                    cell.mean, -place, xerr=cell.half_width, fmt="D", color=style.RED, capsize=3, markersize=4
                )
        axes.set_yticks([-place for place in range(len(rows))], [style.plain(table.rows[name]) for name in rows])
        axes.set(xlabel=METRICS[table.metric].title, title=style.plain(column.title))
    return _image(figure)


def _curves(runs: Sequence[RunRecord], data: str) -> str | None:
    """Draw the validation error over the epochs, one thin line per seed."""
    chosen = [record for record in runs if record.data == data and record.curve]
    if not chosen:
        return None
    figure, axes = style.pyplot().subplots(figsize=(style.PAGE, 3.6))
    variants = list(dict.fromkeys(record.variant for record in chosen))
    for place, variant in enumerate(variants):
        color, line = style.look(place)
        for index, record in enumerate(r for r in chosen if r.variant == variant):
            rows = [(row["epoch"], 100 * row["validation"]["error"]) for row in record.curve]
            label = style.plain(variant) if index == 0 else None
            axes.plot(*zip(*rows, strict=True), color=color, linestyle=line, linewidth=0.9, alpha=0.7, label=label)
    axes.set(xlabel="epoch", ylabel="error on held-out rows (%)")
    axes.legend(fontsize=7, ncols=2)
    return _image(figure)


def _image(figure: Any) -> str:
    """Return a figure as a data URI, and close it."""
    content = style.encode(figure, "svg")
    style.pyplot().close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(content).decode()
