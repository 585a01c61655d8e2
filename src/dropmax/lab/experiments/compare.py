"""Two variants side by side, and a whole study as one HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from dropmax.errors import InvalidValue, check_choice
from dropmax.lab.experiments.pictures import curves, points, short_title
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.render import number_text
from dropmax.lab.experiments.store import Store
from dropmax.lab.experiments.tables import DEFAULT_METRICS, LEVEL, METRICS, by_seed, make_table
from dropmax.lab.statistics import holm, paired_by_seed
from dropmax.workbench import style

__all__ = ["Difference", "compare", "make_page", "print_comparison", "to_rows"]


@dataclass(frozen=True)
class Difference:
    """``a - b`` in one metric on one data set, in the units of the tables."""

    data: str
    metric: str
    values: dict[int, float]  #: by seed
    mean: float
    half_width: float
    p_value: float
    corrected: float  #: Holm's correction for all differences of the comparison

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p-value is below 5 %."""
        return self.corrected < LEVEL


def compare(store: Store, a: str, b: str, metrics: Sequence[str] = DEFAULT_METRICS) -> list[Difference]:
    """Return how variant ``a`` differs from variant ``b`` per data set and metric: paired over seeds, Holm-corrected.

    ``dropmax@exact`` is a variant in another prediction mode than the mean. Only seeds that both were run with count,
    as a seed decides the training examples too.
    """
    runs = [record for record in store.runs() if record.status == "done"]
    for name in (a, b):
        variant, _, mode = name.partition("@")
        check_choice("variant", variant, list(dict.fromkeys(record.variant for record in runs)))
        measured = dict.fromkeys(mode for record in runs if record.variant == variant for mode in record.test)
        check_choice(f"mode of {variant}", mode or "mean", list(measured))
    if a == b:
        raise InvalidValue(f"--compare needs two different variants, got {a!r} twice")
    for metric in metrics:
        check_choice("metric", metric, METRICS)

    def values(data: str, name: str, metric: str) -> dict[int, float]:
        variant, _, mode = name.partition("@")
        return by_seed((r for r in runs if (r.data, r.variant) == (data, variant)), metric, mode or "mean")

    found = []
    for data in _data(runs):
        for metric in metrics:
            first, second = (values(data, name, metric) for name in (a, b))
            pair = paired_by_seed(first, second)
            if pair is not None:
                by_pair = {seed: first[seed] - second[seed] for seed in sorted(set(first) & set(second))}
                found.append(Difference(data, metric, by_pair, *pair, corrected=pair.p_value))
    if not found:
        raise InvalidValue(f"{a} and {b} share no two seeds on any data set in {store.path}: run more --runs of both")
    corrected = holm([difference.p_value for difference in found])
    return [replace(difference, corrected=p) for difference, p in zip(found, corrected, strict=True)]


def to_rows(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """Return differences as plain values, for JSON."""
    return [{**vars(difference), "significant": difference.is_significant} for difference in differences]


def print_comparison(a: str, b: str, differences: Sequence[Difference]) -> None:
    """Print the differences on standard output."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.markup import escape

    grid = rich_table.Table(title=escape(f"{a} less {b}"), title_justify="left", box=None)
    for title in ("data", "metric", "difference", "seeds", "p", "p (Holm)"):
        grid.add_column(title, justify="left" if title in ("data", "metric") else "right")
    for found in differences:
        digits = METRICS[found.metric].digits
        number = f"{found.mean:+.{digits}f} ± {found.half_width:.{digits}f}"
        number = f"[bold]{number}[/bold]" if found.is_significant else number
        p_values = f"{found.p_value:.2g}", f"{found.corrected:.2g}"
        grid.add_row(escape(found.data), short_title(found.metric), number, str(len(found.values)), *p_values)
    console = Console(highlight=False)
    console.print(grid)
    note = f"Mean and 95 % t-interval of the paired differences over the seeds; negative favours {escape(a)}. "
    note += f"Bold: significant at {100 * LEVEL:g} % after Holm's correction for {len(differences)} comparisons."
    console.print(note, style="dim", soft_wrap=True)


def make_page(store: Store, metrics: Sequence[str] = DEFAULT_METRICS) -> str:
    """Return the results in a directory as one HTML page, which loads nothing from elsewhere."""
    import jinja2

    tables = [make_table(store, metric) for metric in metrics]
    runs = [record for record in store.runs() if record.status == "done"]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("study.html.j2").read_text("utf-8"))
    drawn = {data: _image(curves([record for record in runs if record.data == data])) for data in _data(runs)}
    return template.render(
        css=resources.files("dropmax.lab.report").joinpath("report.css").read_text("utf-8"),
        name=store.path.resolve().name,
        tables=[(table, METRICS[table.metric], _image(points(table))) for table in tables],
        curves=[(data, picture) for data, picture in drawn.items() if picture is not None],
        origin=tables[0].provenance,
        runs=runs,
        number=number_text,
    )


def _data(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(record.data for record in runs))


def _image(figure: Any | None) -> str | None:
    """Return a figure as a data URI, and close it; None of nothing."""
    if figure is None:
        return None
    content = style.encode(figure, "svg")
    style.pyplot().close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(content).decode()
