"""``dropmax doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from dropmax.cli.options import AsJson, DataDir
from dropmax.workbench.terminal import console as wide_console

if TYPE_CHECKING:
    from dropmax.workbench.doctor import Report


def doctor(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show versions, devices, data found, extras and known problems; fails if dropmax cannot work at all."""
    from dropmax.workbench.doctor import examine

    if sys.stderr.isatty():
        print("Trying out torch, in processes of its own ...", file=sys.stderr)
    report = examine(data_dir)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    if not report.usable:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    console = wide_console()

    def table(title: str, rows: Iterable[Sequence[str]]) -> None:
        grid = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        for row in rows:
            grid.add_row("", *map(Text, row))
        console.print(grid)
        console.print()

    table("Versions", report.versions.items())
    machine = report.machine
    devices = ", ".join(machine["devices"]) or "unknown"
    threads = f"{machine['threads'] or 'unknown'} of {machine['cores']} cores"
    table("Machine", [("system", machine["system"]), ("devices", devices), ("threads", threads)])
    if report.data:
        found = [(line["name"], _found(line)) for line in report.data["sets"]]
        table(f"Data sets, looked for in {report.data['looked_in']}", found)
    extras = []
    for extra in report.extras:
        held = ", ".join(f"{package} {version}" for package, version in extra.versions.items())
        missing = f"missing {', '.join(extra.missing)}: {extra.pip}"
        extras.append((extra.name, extra.purpose, missing if extra.missing else held))
    table("Extras", extras)
    table("Places", [(place["what"], place["path"], _state(place)) for place in report.places])
    if not report.problems:
        console.print("No problem was found.")
    for problem in report.problems:
        kind = "BROKEN" if problem.essential else "Problem"
        console.print(Text(f"{kind}: {problem.what}. What to do: {problem.advice}."))


def _found(line: dict[str, Any]) -> str:
    if line["found"] is None:
        return "not found"
    return str(line["found"]) + (f" (without {', '.join(line['missing'])})" if line["missing"] else "")


def _state(place: dict[str, Any]) -> str:
    return f"writable, {place['free_bytes'] / 1e9:.1f} GB free" if place["writable"] else "cannot be written to"
