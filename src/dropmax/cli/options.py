"""Options several commands share, and what commands say in the same words."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmax.errors import check_choice

#: The keys of ``dropmax.HEADS``, written out: importing them would make ``--help`` wait for torch.
HEAD_NAMES = (
    "softmax",
    "sparsemax",
    "sampled-softmax",
    "random-dropmax",
    "deterministic-attention",
    "deterministic-dropmax",
    "dropmax-qp",
    "dropmax",
)

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Where data sets are; $DROPMAX_DATA by default.", show_default=False, metavar="DIR"
    ),
]
MovedData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Where the data of the run is now, if it is not where it was in training.",
        show_default=False,
        metavar="PATH",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.", show_default=False, metavar="NAME"),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        "--trust-network",
        "--trust-head",
        help="Import the network and head a model names as package.module:Class or file.py:Class. This runs that code.",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 lets torch choose.", min=0, metavar="N")]
Mode = Annotated[
    str | None,
    typer.Option(
        help="How to treat the masks: mean, mc or exact, each without a temperature. By default the calibrated answer.",
        show_default=False,
        metavar="NAME",
    ),
]
Samples = Annotated[int, typer.Option(help="Masks to draw for an example in mode mc.", min=1, metavar="N")]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        "--label-column",
        "--label",
        help="The column of labels in a .csv or .parquet table; label by default.",
        metavar="NAME",
    ),
]
IdColumn = Annotated[
    str | None, typer.Option(help="A column of such a table that names the rows and is not a feature.", metavar="NAME")
]


def check_mode(mode: str | None) -> None:
    """Refuse a mode that there is not."""
    if mode is not None:
        check_choice("mode", mode, ("mean", "mc", "exact"))


def use_threads(threads: int) -> None:
    """Set torch's number of threads, where one is given."""
    import torch

    if threads:
        torch.set_num_threads(threads)


def names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def tell(note: str) -> None:
    """Print a line for the person at the terminal, on standard error: what is piped stays as it is."""
    from dropmax.workbench.terminal import printable

    print(f"dropmax: {printable(note)}", file=sys.stderr, flush=True)


def grid(*titles: str, right: Collection[str] = (), **look: Any) -> Any:
    """Return an empty table without lines; the columns in ``right`` hold numbers."""
    from rich.table import Column, Table

    columns = [Column(title, justify="right" if title in right else "left") for title in titles]
    return Table(*columns, box=None, title_justify="left", **look)


def command(*arguments: object) -> str:
    """Return a command to paste: the program as it was called, and arguments quoted where that is needed."""
    called = sys.argv[0]
    if Path(called).parts[-2:] == ("dropmax", "__main__.py"):
        program = [Path(sys.executable).name, "-m", "dropmax"]
    elif Path(called).name.removesuffix(".exe") != "dropmax" or shutil.which("dropmax") == called:
        program = ["dropmax"]
    else:
        program = [called]
    return shlex.join([*program, *map(str, arguments)])
