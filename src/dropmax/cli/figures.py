"""``dropmax figures``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dropmax.cli.options import DataDir, MovedData, Threads, TrustCode, grid, names, use_threads
from dropmax.workbench.terminal import console, printable

if TYPE_CHECKING:
    from dropmax.lab.figures.registry import Made


def figures(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories: softmax and dropmax on the same data show most.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the pictures and captions.md.")] = Path("figures"),
    only: Annotated[
        list[str] | None,
        typer.Option(help="Make just this figure; may be repeated, or a list with commas. See --list.", metavar="NAME"),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="png, svg and pdf, separated by commas.")] = "png,svg",
    record: Annotated[
        bool,
        typer.Option("--record", help="Train the runs again and record every step, for the figures of training."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing pictures.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the figures and what each needs.")] = False,
    data: MovedData = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw every figure of the paper, and some more, that these runs allow."""
    from dropmax.lab.figures.registry import FIGURES, make_figures
    from dropmax.lab.figures.runs import load_runs

    if show_list:
        _list(as_json)
        return
    use_threads(threads)
    width = max(map(len, FIGURES))
    loaded = load_runs(runs or [], data_dir, data=data, trust_code=trust_code)
    made = make_figures(
        loaded,
        out,
        only=names(",".join(only or [])),
        formats=names(form),
        recorded=record,
        force=force,
        tell=(lambda one: None) if as_json else lambda one: print(printable(_line(one, width)), flush=True),
    )
    if as_json:
        done = [{"figure": m.name, "files": list(map(str, m.files)), "caption": m.caption} for m in made if m.files]
        not_done = [{"figure": m.name, "why": m.why_not} for m in made if not m.files]
        print(json.dumps({"made": done, "not_made": not_done}))
    elif any(one.files for one in made):
        if loaded and len({(run.recipe.data.name, run.label) for run in loaded}) == len(loaded):
            print("One run per method: no bands over seeds. Give runs of other seeds for them.", file=sys.stderr)
        print(f"Captions, and the command that made them: {out / 'captions.md'}", file=sys.stderr)


def _line(one: Made, width: int) -> str:
    if not one.files:
        return f"{one.name:<{width}}  not made: {one.why_not}"
    first, *others = one.files
    return " ".join([f"{one.name:<{width}}  {first}", *(path.suffix for path in others)])


def _list(as_json: bool) -> None:
    from dropmax.lab.figures.registry import FIGURES

    rows = [{"figure": f.name, "paper": f.place, "needs": f.needs.words()} for f in FIGURES.values()]
    if as_json:
        captions = [{"caption": figure.caption} for figure in FIGURES.values()]
        print(json.dumps([row | caption for row, caption in zip(rows, captions, strict=True)]))
        return
    table = grid("figure", "in the paper", "needs")
    for row in rows:
        table.add_row(*row.values())
    console().print(table)
