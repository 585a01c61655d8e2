"""Tables as Markdown, LaTeX, plain values, and on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dropmax.lab.experiments.tables import METRICS, Cell, Column, Table
from dropmax.workbench.terminal import console as wide_console

__all__ = ["FORMATS", "number_text", "print_table", "to_dict", "to_markdown", "to_tex"]


def to_markdown(tables: Sequence[Table]) -> str:
    """Return tables in Markdown, with their notes, and where the numbers come from in a block at the end.

    Metrics of one data set stand side by side in one table; of several, each metric has a table of its own.
    """
    first, *others = tables
    if others and len(first.columns) == 1:
        (column,) = first.columns
        title = f"{first.kind}: {_heading(column)}, {first.modes}"
        heads = [METRICS[table.metric].short for table in tables]
        notes = dict.fromkeys(note for table in tables for note in table.notes)
        lines = _markdown_table(title, heads, [(table, column) for table in tables], first.rows, notes)
    else:
        lines = []
        for table in tables:
            heads = [_heading(column) for column in table.columns]
            lines += _markdown_table(table.title, heads, [(table, c) for c in table.columns], table.rows, table.notes)
    return "\n".join([*lines, "```", *_origin(first), "```"]) + "\n"


def _markdown_table(
    title: str, heads: list[str], places: list[tuple[Table, Column]], rows: dict[str, str], notes: Iterable[str]
) -> list[str]:
    """Return the lines of one table; ``places`` says which cells stand under each head."""
    lines = [f"# {title}", "", "| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for variant, name in rows.items():
        cells = [_markdown_cell(t.cells[variant, c.data], METRICS[t.metric].digits) for t, c in places]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", " ".join(notes), ""]


def _markdown_cell(found: Cell, digits: int) -> str:
    number = number_text(found, digits)
    number = f"**{number}**" if found.best else number
    note = found.note if not number else f"({found.note})" if found.note else ""
    paper = f"[{_paper(found)}]" if found.paper else ""
    text = " ".join(filter(None, [number + ("†" if found.tied else ""), note, paper]))
    return text.replace("|", "\\|").replace("<", "&lt;")


def to_tex(tables: Sequence[Table]) -> str:
    """Return tables as LaTeX tabulars, with where the numbers come from in comments."""
    lines = [f"% {line}" for line in _origin(tables[0])]
    for table in tables:
        heads = [_tex(_heading(column)) for column in table.columns]
        lines += [f"% {table.title}", rf"\begin{{tabular}}{{l{'c' * len(heads)}}}", r"\hline"]
        lines += [" & ".join(["", *heads]) + r" \\", r"\hline"]
        for variant, name in table.rows.items():
            cells = [_tex_cell(table.cells[variant, c.data], METRICS[table.metric].digits) for c in table.columns]
            lines.append(" & ".join([_tex(name), *cells]) + r" \\")
        lines += [r"\hline", r"\end{tabular}", "", r"\par\footnotesize", _tex(" ".join(table.notes)), ""]
    return "\n".join(lines)


def _tex_cell(found: Cell, digits: int) -> str:
    if found.mean is None:
        number = rf"\emph{{{_tex(found.note)}}}"
    else:
        number = f"{found.mean:.{digits}f}"
        number = rf"\mathbf{{{number}}}" if found.best else number
        number += "" if found.half_width is None else rf"_{{\pm {found.half_width:.{digits}f}}}"
        number = f"${number}$" + (r"$^{\dagger}$" if found.tied else "")
        number += f" ({_tex(found.note)})" if found.note else ""
    return number + ("" if found.paper is None else rf" [${found.paper[0]:.2f}_{{\pm {found.paper[1]:.2f}}}$]")


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "†": r"$\dagger$"}
    special |= {char: "\\" + char for char in "&%$#_{}"} | {">": "$>$", "<": "$<$", "±": r"$\pm$"}
    return "".join(special.get(char, char) for char in text)


#: Renderers by the ending of their files.
FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"md": to_markdown, "tex": to_tex}


def to_dict(table: Table) -> dict[str, Any]:
    """Return the table as plain values, for JSON."""
    cells = []
    for column in table.columns:
        for variant in table.rows:
            found = table.cells[variant, column.data]
            mean, half_width = found.paper or (None, None)
            about = {"row": variant, "data": column.data, "stamp": column.stamp}
            numbers = {name: getattr(found, name) for name in ("mean", "half_width", "best", "tied", "p_value", "note")}
            values = {str(seed): value for seed, value in found.values.items()}
            paper = {"paper_mean": mean, "paper_half_width": half_width}
            cells.append({**about, **numbers, "runs": len(values), "values": values, **paper})
    return {"title": table.title, "cells": cells, "notes": list(table.notes), "provenance": table.provenance}


def print_table(table: Table) -> None:
    """Print the columns that were asked for on standard output."""
    from rich import table as rich_table
    from rich.markup import escape

    grid = rich_table.Table("", title=table.title, title_justify="left", box=None)
    texts = {variant: [escape(name)] for variant, name in table.rows.items()}
    for column in (column for column in table.columns if column.stamp):
        cells = {variant: table.cells[variant, column.data] for variant in table.rows}
        grid.add_column(f"{column.title}\n{column.stamp}", justify="right")
        for variant, found in cells.items():
            number = escape(number_text(found, METRICS[table.metric].digits) or found.note)
            texts[variant].append((f"[bold]{number}[/bold]" if found.best else number) + ("†" if found.tied else ""))
        if any(found.paper for found in cells.values()):
            grid.add_column("paper", justify="right", style="dim")
            for variant, found in cells.items():
                texts[variant].append(_paper(found))
    for row in texts.values():
        grid.add_row(*row)
    console = wide_console()
    console.print(grid)
    for note in table.notes:
        console.print(escape(note), style="dim", soft_wrap=True)


def number_text(found: Cell, digits: int) -> str:
    """Return mean and interval; nothing where there are no numbers."""
    if found.mean is None:
        return ""
    return f"{found.mean:.{digits}f}" + ("" if found.half_width is None else f" ± {found.half_width:.{digits}f}")


def _paper(found: Cell) -> str:
    return "{:.2f} ± {:.2f}".format(*found.paper) if found.paper else ""


def _heading(column: Column) -> str:
    return f"{column.title} ({column.stamp})" if column.stamp else column.title


def _origin(table: Table) -> list[str]:
    """Return lines that say where the numbers came from."""
    return [f"{name}: {' | '.join(map(str, value))}" for name, value in table.provenance.items()]
