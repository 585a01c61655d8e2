"""A table as Markdown, LaTeX, HTML, CSV, and on the terminal."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable
from typing import Any

from dropmax.lab.experiments.tables import METRICS, Cell, Table

__all__ = ["FORMATS", "to_csv", "to_dict", "to_html", "to_markdown", "to_tex"]


def to_markdown(table: Table) -> str:
    """Return the table in Markdown, with its provenance in a block at the end."""
    digits = METRICS[table.metric][2]

    def cell(found: Cell) -> str:
        number = _number(found, digits, " ± ")
        number = f"**{number}**" if found.best else number
        paper = "" if found.paper is None else f"[{found.paper[0]:.2f} ± {found.paper[1]:.2f}]"
        note = found.note if not number else f"({found.note})" if found.note else ""
        return (
            " ".join(filter(None, [number + ("†" if found.tied else ""), note, paper]))
            .replace("|", "\\|")
            .replace("<", "&lt;")
        )

    heads = [_heading(column.title, column.stamp) for column in table.columns]
    lines = [f"# {table.title}", "", "| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for variant, name in table.rows.items():
        cells = [cell(table.cells[variant, column.data]) for column in table.columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", " ".join(table.notes), "", "```", *_origin(table), "```"]
    return "\n".join(lines) + "\n"


def to_tex(table: Table) -> str:
    """Return the table as a LaTeX tabular, with its provenance in comments."""
    digits = METRICS[table.metric][2]

    def cell(found: Cell) -> str:
        if found.mean is None:
            number = rf"\emph{{{_tex(found.note)}}}"
        else:
            number = f"{found.mean:.{digits}f}"
            number = rf"\mathbf{{{number}}}" if found.best else number
            number += "" if found.half_width is None else rf"_{{\pm {found.half_width:.{digits}f}}}"
            number = f"${number}${_TEX_DAGGER if found.tied else ''}"
            number += f" ({_tex(found.note)})" if found.note else ""
        return number + ("" if found.paper is None else rf" [${found.paper[0]:.2f}_{{\pm {found.paper[1]:.2f}}}$]")

    heads = [_tex(_heading(column.title, column.stamp)) for column in table.columns]
    lines = [f"% {line}" for line in [table.title, *_origin(table)]]
    lines += [rf"\begin{{tabular}}{{l{'c' * len(heads)}}}", r"\hline", " & ".join(["", *heads]) + r" \\", r"\hline"]
    for variant, name in table.rows.items():
        cells = [cell(table.cells[variant, column.data]) for column in table.columns]
        lines.append(" & ".join([_tex(name), *cells]) + r" \\")
    lines += [r"\hline", r"\end{tabular}", "", r"\par\footnotesize", _tex(" ".join(table.notes))]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """Return the table as a page of its own, which loads nothing."""
    digits = METRICS[table.metric][2]

    def cell(found: Cell) -> str:
        number = html.escape(_number(found, digits, " ± "))
        number = f"<strong>{number}</strong>" if found.best else number
        number += "<sup>†</sup>" if found.tied else ""
        note = f'<span class="note">{html.escape(found.note)}</span>' if found.note else ""
        paper = "" if found.paper is None else f'<span class="paper">{found.paper[0]:.2f} ± {found.paper[1]:.2f}</span>'
        return "<td>" + "<br>".join(filter(None, [number, note, paper])) + "</td>"

    head = "".join(
        f"<th>{html.escape(column.title)}"
        + (f'<br><span class="note">{html.escape(column.stamp)}</span>' if column.stamp else "")
        + "</th>"
        for column in table.columns
    )
    body = "\n".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(cell(table.cells[variant, column.data]) for column in table.columns)
        + "</tr>"
        for variant, name in table.rows.items()
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    origin = html.escape("\n".join(_origin(table)))
    return _PAGE.format(title=html.escape(table.title), head=head, body=body, notes=notes, origin=origin)


def to_csv(table: Table) -> str:
    """Return a line a cell, after comment lines (``#``) with notes and provenance."""
    text = io.StringIO()
    for line in [table.title, *table.notes, *_origin(table)]:
        text.write(f"# {line}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for row in to_dict(table)["cells"]:
        writer.writerow(["" if row[name] is None else row[name] for name in _FIELDS])
    return text.getvalue()


_FIELDS: tuple[str, ...] = ("row", "data", "stamp", "mean", "half_width", "runs", "best", "tied", "p_value")
_FIELDS += ("paper_mean", "paper_half_width", "note")


def to_dict(table: Table) -> dict[str, Any]:
    """Return the table as plain values, for JSON."""
    cells = []
    for column in table.columns:
        for variant in table.rows:
            found = table.cells[variant, column.data]
            paper = found.paper or (None, None)
            cells.append(
                {
                    "row": variant,
                    "data": column.data,
                    "stamp": column.stamp,
                    "mean": found.mean,
                    "half_width": found.half_width,
                    "runs": len(found.values),
                    "values": {str(seed): value for seed, value in found.values.items()},
                    "best": found.best,
                    "tied": found.tied,
                    "p_value": found.p_value,
                    "paper_mean": paper[0],
                    "paper_half_width": paper[1],
                    "note": found.note,
                }
            )
    return {"title": table.title, "cells": cells, "notes": list(table.notes), "provenance": table.provenance}


def print_table(table: Table) -> None:
    """Print the columns that were asked for on standard output."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.markup import escape

    digits = METRICS[table.metric][2]
    shown = [column for column in table.columns if column.stamp]
    grid = rich_table.Table(title=table.title, title_justify="left", box=None)
    grid.add_column("")
    for column in shown:
        grid.add_column(f"{column.title}\n{column.stamp}", justify="right")
        if any(table.cells[variant, column.data].paper for variant in table.rows):
            grid.add_column("paper", justify="right", style="dim")
    for variant, name in table.rows.items():
        texts = [escape(name)]
        for column in shown:
            found = table.cells[variant, column.data]
            number = escape(_number(found, digits, " ± ") or found.note)
            texts.append((f"[bold]{number}[/bold]" if found.best else number) + ("†" if found.tied else ""))
            if found.paper:
                texts.append(f"{found.paper[0]:.2f} ± {found.paper[1]:.2f}")
        grid.add_row(*texts)
    console = Console(highlight=False)
    console.print(grid)
    for note in table.notes:
        console.print(escape(note), style="dim", soft_wrap=True)


#: Renderers by the ending of their files.
FORMATS: dict[str, Callable[[Table], str]] = {"md": to_markdown, "tex": to_tex, "html": to_html, "csv": to_csv}


def _number(found: Cell, digits: int, between: str) -> str:
    if found.mean is None:
        return ""
    interval = "" if found.half_width is None else f"{between}{found.half_width:.{digits}f}"
    return f"{found.mean:.{digits}f}{interval}"


def _heading(title: str, stamp: str) -> str:
    return f"{title} ({stamp})" if stamp else title


def _origin(table: Table) -> list[str]:
    """Return lines that say where the numbers came from."""
    return [
        f"{name}: {' | '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in table.provenance.items()
    ]


_TEX_DAGGER = r"$^{\dagger}$"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "†": r"$\dagger$"}
    special |= {char: "\\" + char for char in "&%$#_{}"} | {">": "$>$", "<": "$<$", "±": r"$\pm$"}
    return "".join(special.get(char, char) for char in text)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .35rem .8rem; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }}
tr > th:first-child {{ text-align: left; }}
.note {{ font-weight: normal; font-size: .8em; color: #666; }}
.paper {{ font-size: .8em; color: #666; }}
.paper::before {{ content: "paper "; }}
pre {{ white-space: pre-wrap; font-size: .8em; color: #555; }}
</style>
<h1>{title}</h1>
<table>
<thead><tr><th></th>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<ul>{notes}</ul>
<details><summary>Provenance</summary><pre>{origin}</pre></details>
</html>
"""
