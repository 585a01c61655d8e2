"""Options several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where data sets are; $DROPMAX_DATA by default.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU where there is one by default.", show_default=False)
]
TrustNetwork = Annotated[
    bool,
    typer.Option(
        "--trust-network", help="Import the network a model names as package.module:Class. Importing runs that code."
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 lets torch choose.", min=0)]
Mode = Annotated[str, typer.Option(help="How to treat the masks: mean, mc or exact.")]
Samples = Annotated[int, typer.Option(help="Masks to draw for an example in mode mc.", min=1)]


def use_threads(threads: int) -> None:
    """Set torch's number of threads, where one is given."""
    import torch

    if threads:
        torch.set_num_threads(threads)
