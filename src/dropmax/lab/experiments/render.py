"""Tables as Markdown, LaTeX, plain values, and on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dropmax.lab.experiments.tables import METRICS, Cell, Table
from dropmax.workbench.terminal import console as wide_console

__all__ = ["FORMATS", "print_table", "to_dict", "to_markdown", "to_tex"]


def to_markdown(tables: Sequence[Table]) -> str:
    """Return tables in Markdown, each with its notes, and where the numbers come from in a block at the end."""
    lines: list[str] = []
    for table in tables:
        heads = [_heading(column.title, column.stamp) for column in table.columns]
        lines += [f"# {table.title}", "", "| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for variant, name in table.rows.items():
            cells = [_markdown_cell(table.cells[variant, c.data], METRICS[table.metric].digits) for c in table.columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += ["", " ".join(table.notes), ""]
    return "\n".join([*lines, "```", *_origin(tables[0]), "```"]) + "\n"


def _markdown_cell(found: Cell, digits: int) -> str:
    number = number_text(found, digits)
    number = f"**{number}**" if found.best else number
    paper = "" if found.paper is None else f"[{found.paper[0]:.2f} ± {found.paper[1]:.2f}]"
    note = found.note if not number else f"({found.note})" if found.note else ""
    text = " ".join(filter(None, [number + ("†" if found.tied else ""), note, paper]))
    return text.replace("|", "\\|").replace("<", "&lt;")


def to_tex(tables: Sequence[Table]) -> str:
    """Return tables as LaTeX tabulars, with where the numbers come from in comments."""
    lines = [f"% {line}" for line in _origin(tables[0])]
    for table in tables:
        digits = METRICS[table.metric].digits
        heads = [_tex(_heading(column.title, column.stamp)) for column in table.columns]
        lines += [f"% {table.title}", rf"\begin{{tabular}}{{l{'c' * len(heads)}}}", r"\hline"]
        lines += [" & ".join(["", *heads]) + r" \\", r"\hline"]
        for variant, name in table.rows.items():
            cells = [_tex_cell(table.cells[variant, column.data], digits) for column in table.columns]
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
        number = f"${number}${_TEX_DAGGER if found.tied else ''}"
        number += f" ({_tex(found.note)})" if found.note else ""
    return number + ("" if found.paper is None else rf" [${found.paper[0]:.2f}_{{\pm {found.paper[1]:.2f}}}$]")


#: Renderers by the ending of their files.
FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"md": to_markdown, "tex": to_tex}


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
    from rich.markup import escape

    digits = METRICS[table.metric].digits
    shown = [column for column in table.columns if column.stamp]
    grid = rich_table.Table(title=table.title, title_justify="left", box=None)
    grid.add_column("")
    has_paper = {c.data: any(table.cells[variant, c.data].paper for variant in table.rows) for c in shown}
    for column in shown:
        grid.add_column(f"{column.title}\n{column.stamp}", justify="right")
        if has_paper[column.data]:
            grid.add_column("paper", justify="right", style="dim")
    for variant, name in table.rows.items():
        texts = [escape(name)]
        for column in shown:
            found = table.cells[variant, column.data]
            number = escape(number_text(found, digits) or found.note)
            texts.append((f"[bold]{number}[/bold]" if found.best else number) + ("†" if found.tied else ""))
            if has_paper[column.data]:
                texts.append(f"{found.paper[0]:.2f} ± {found.paper[1]:.2f}" if found.paper else "")
        grid.add_row(*texts)
    console = wide_console()
    console.print(grid)
    for note in table.notes:
        console.print(escape(note), style="dim", soft_wrap=True)


def number_text(found: Cell, digits: int) -> str:
    """Return mean and interval; nothing where there are no numbers.

    >>> number_text(Cell({0: 2.0, 1: 4.0}), 1)
    '3.0 ± 12.7'
    """
    if found.mean is None:
        return ""
    interval = "" if found.half_width is None else f" ± {found.half_width:.{digits}f}"
    return f"{found.mean:.{digits}f}{interval}"


def _heading(title: str, stamp: str) -> str:
    return f"{title} ({stamp})" if stamp else title


def _origin(table: Table) -> list[str]:
    """Return lines that say where the numbers came from."""
    return [f"{name}: {' | '.join(map(str, value))}" for name, value in table.provenance.items()]


_TEX_DAGGER = r"$^{\dagger}$"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "†": r"$\dagger$"}
    special |= {char: "\\" + char for char in "&%$#_{}"} | {">": "$>$", "<": "$<$", "±": r"$\pm$"}
    return "".join(special.get(char, char) for char in text)
