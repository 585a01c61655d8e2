"""``dropmax data``: list data sets, download them, verify them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dropmax.cli.options import AsJson, DataDir, grid
from dropmax.workbench.terminal import console as wide_console
from dropmax.workbench.terminal import printable

app = typer.Typer(no_args_is_help=True, help="See, fetch and check data sets.")

_SHOWN = 20


@app.command("list")
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the data sets known by name, their sizes, and which are here."""
    from dropmax.workbench.data import data_directory, inventory

    held = inventory(data_dir)
    if as_json:
        print(json.dumps([asdict(line) for line in held], indent=2))
        return
    from rich.markup import escape

    numbers = ("classes", "train", "validation", "test")
    table = grid("name", *numbers, "found", right=numbers)
    for line in held:
        sizes = (line.classes, line.train, line.validation, line.test)
        found = "no" if line.found is None else escape(printable(line.found))
        if line.found is not None and line.missing:
            found += f" (without {', '.join(line.missing)})"
        table.add_row(line.name, *(f"{size:,}" for size in sizes), found)
    console = wide_console()
    console.print(table)
    console.print(
        f"\nLooked in {escape(printable(data_directory(data_dir)))}. `dropmax data fetch NAME` gets what is missing.",
        highlight=False,
    )


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help="Data sets to download, for example cifar-100.")],
    data_dir: DataDir = None,
) -> None:
    """Download data sets from their publishers, verify and unpack them."""
    from dropmax.workbench.data import check
    from dropmax.workbench.data import fetch as fetch_one

    damaged = False
    for name in names:
        place = fetch_one(name, data_dir)
        print(f"{name} is in {place}")
        problems = [finding for finding in check(name, data_dir) if finding.status in ("missing", "damaged")]
        for finding in problems[:_SHOWN]:
            print(printable(f"{finding.status}: {finding.what}: {finding.detail}"))
        damaged = damaged or bool(problems)
    if damaged:
        raise typer.Exit(1)


@app.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names or paths; by default, every data set found.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Verify data sets; fails if a file is damaged, or missing and needed."""
    from dropmax.workbench.data import check as check_one
    from dropmax.workbench.data import inventory

    # mnist-5k and mnist-55k have the same files as mnist-1k and mnist.
    twins = ("mnist-5k", "mnist-55k")
    chosen = names or [line.name for line in inventory(data_dir) if line.found and line.name not in twins]
    findings = {name: check_one(name, data_dir) for name in chosen}
    if as_json:
        print(json.dumps({name: [asdict(finding) for finding in found] for name, found in findings.items()}, indent=2))
    else:
        for name, found in findings.items():
            for finding in found[:_SHOWN]:
                print(printable(f"{name}: {finding.status}: {finding.what}: {finding.detail}"))
            if len(found) > _SHOWN:
                print(f"{name}: and {len(found) - _SHOWN:,} more")
    if any(finding.status in ("missing", "damaged") for found in findings.values() for finding in found):
        raise typer.Exit(1)
