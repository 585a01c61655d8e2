"""``dropmax embed``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dropmax.cli.options import AsJson, Threads, use_threads
from dropmax.errors import InvalidValue
from dropmax.workbench.terminal import printable


def embed(
    source: Annotated[
        Path, typer.Argument(help="A folder of images, one sub-folder per class, or a table with a column of texts.")
    ],
    backbone: Annotated[
        str,
        typer.Option(
            "--with",
            help="efficientnet-lite0, -lite1, -lite2, wordllama, universal-sentence-encoder, timm:NAME, hf:NAME, "
            "or package.module:function.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The .npz file to write; it must not exist.")],
    text: Annotated[str | None, typer.Option(help="Column of texts.", show_default=False)] = None,
    label: Annotated[str, typer.Option("--label", "--label-column", help="Column of labels.")] = "label",
    id_column: Annotated[str | None, typer.Option(help="Column that names the rows.", show_default=False)] = None,
    split_column: Annotated[
        str | None, typer.Option(help="Column of train, validation or test.", show_default=False)
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-network", help="Import package.module of --with. Importing runs that code.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Turn images or sentences into features with a pretrained network; a killed call resumes."""
    if out.suffix != ".npz":
        raise InvalidValue(f"--out must end in .npz, got {out}")
    if out.exists():
        raise InvalidValue(f"{out} exists: choose another file with --out, or delete it first")
    from dropmax.workbench.backbones import load_backbone
    from dropmax.workbench.embedding import embed as run
    from dropmax.workbench.embedding import find_source, name_some

    use_threads(threads)
    found = find_source(source, text=text, label=label, id_column=id_column, split_column=split_column)
    done = run(found, load_backbone(backbone, found.kind, trust=trust_code), out)
    if as_json:
        print(json.dumps({"out": str(done.path), "rows": done.rows, "unreadable": done.unreadable}))
        return
    for line in name_some(done.unreadable):
        print(printable(line), file=sys.stderr)
    left_out = f", {len(done.unreadable):,} left out" if done.unreadable else ""
    print(printable(f"{done.rows:,} rows of features are in {done.path}{left_out}. Next: dropmax train {done.path}"))
