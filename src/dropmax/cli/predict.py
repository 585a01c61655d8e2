"""``dropmax predict``."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli.options import (
    Device,
    IdColumn,
    LabelColumn,
    Mode,
    Samples,
    Threads,
    TrustCode,
    tell,
    use_threads,
)
from dropmax.errors import RunError, check_choice
from dropmax.workbench.terminal import printable

if TYPE_CHECKING:
    from dropmax.workbench.evaluation import Outputs

#: How many rivals an answer names at most.
RIVALS = 5


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Images, folders of images, tables (.npz, .csv, .parquet), or, for a model of texts, sentences."
        ),
    ],
    form: Annotated[str, typer.Option("--format", help="table, csv or json.", metavar="NAME")] = "table",
    out: Annotated[
        Path | None, typer.Option(help="Write to this new file instead of the screen.", metavar="FILE")
    ] = None,
    top: Annotated[int, typer.Option(help="How many classes to name, likeliest first.", min=1, metavar="N")] = 1,
    all_probabilities: Annotated[
        bool, typer.Option("--all-probabilities", help="Add the probability of every class (csv and json).")
    ] = False,
    mode: Mode = "mean",
    samples: Samples = 100,
    seed: Annotated[int, typer.Option(help="Of the masks in mode mc.", metavar="N")] = 0,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="For a model of MNIST's digits: do not prepare photographs as MNIST was.")
    ] = False,
    label_column: LabelColumn = None,
    id_column: IdColumn = None,
    device: Device = None,
    threads: Threads = 0,
    trust_code: TrustCode = False,
) -> None:
    """Say what things are, how sure that is, and what they may be confused with.

    Columns of tables are matched by name; a label column and columns the model was not trained on are ignored.
    """
    check_choice("format", form, ("table", "csv", "json"))
    from dropmax.heads import MODES

    check_choice("mode", mode, MODES)
    if out is not None and out.exists():
        raise RunError(f"{out} exists: choose another file with --out, or delete it first")
    import torch

    from dropmax.workbench.data.unlabelled import find_inputs, read_inputs
    from dropmax.workbench.data.unlike import Unlike
    from dropmax.workbench.progress import progress
    from dropmax.workbench.training import load_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_code=trust_code)
    expected = trained.expected
    texts = [str(given) for given in files if expected.text_column and not given.exists()]
    chosen = find_inputs([given for given in files if str(given) not in texts])
    columns: dict[str, Any] = {"label_column": label_column, "id_column": id_column}
    expected = dataclasses.replace(expected, **{key: value for key, value in columns.items() if value})
    if as_is:
        expected = dataclasses.replace(expected, digits=False)
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    unlike = Unlike(trained.brightness, trained.mean, trained.std)
    with progress("predicting", len(chosen), "files") as advance:
        for names, inputs in read_inputs(chosen, expected, tell, texts):
            unlike.look(inputs)
            outputs = trained.answer(inputs, mode=mode, samples=samples, generator=generator, std=mode == "exact")
            rows += _rows(names, outputs, trained.classes, top, all_probabilities)
            advance(len(names))
    if unlike.warning:
        tell(f"warning: {unlike.warning}")
    if out is None and sys.stdout.isatty():
        rows = _shown(rows)  # a script gets names as they are; a person's terminal must not obey what is in them
    text = _WRITERS[form](rows, trained.classes)
    if out is None:
        sys.stdout.write(text)
    else:
        from dropmax.workbench.files import write_atomically

        write_atomically(out, text)
        tell(f"{len(rows):,} predictions are in {out}")


def _rows(
    names: Sequence[str], outputs: Outputs, classes: Sequence[str], top: int, all_probabilities: bool
) -> Iterator[dict[str, Any]]:
    rivals, best = outputs.confusable(limit=RIVALS), outputs.top(top)
    for i, name in enumerate(names):
        # names of files need not be text
        row: dict[str, Any] = {"input": os.fsencode(name).decode(errors="backslashreplace")}
        for rank, k in enumerate(best.indices[i].tolist(), 1):
            row[f"class_{rank}"] = classes[k]
            row[f"probability_{rank}"] = round(float(outputs.probs[i, k]), 6)
            if outputs.std is not None:
                row[f"std_{rank}"] = round(float(outputs.std[i, k]), 6)
        row["confusable"] = [{"class": classes[r], "retain": round(float(outputs.retain[i, r]), 4)} for r in rivals[i]]
        if all_probabilities:
            row["probabilities"] = dict(zip(classes, (round(p, 6) for p in outputs.probs[i].tolist()), strict=True))
        yield row


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _table(rows: list[dict[str, Any]], classes: Sequence[str]) -> str:
    from rich.table import Column, Table
    from rich.text import Text

    from dropmax.workbench.terminal import console

    ranks = range(1, 1 + sum(key.startswith("class_") for key in rows[0]))
    titles: list[Any] = ["input"]
    for rank in ranks:
        numbered = "" if len(ranks) == 1 else f" {rank}"
        titles += [f"class{numbered}", Column(f"probability{numbered}", justify="right")]
    table = Table(*titles, "may be confused with", box=None)
    for row in rows:
        cells = [row["input"]]
        for rank in ranks:
            deviation = f" ± {row[f'std_{rank}']:.4f}" if f"std_{rank}" in row else ""
            cells += [row[f"class_{rank}"], f"{row[f'probability_{rank}']:.4f}{deviation}"]
        cells.append(", ".join(f"{rival['class']} ({rival['retain']:.2f})" for rival in row["confusable"]))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    buffer = io.StringIO()
    console(buffer, is_terminal=sys.stdout.isatty()).print(table)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def _csv(rows: list[dict[str, Any]], classes: Sequence[str]) -> str:
    """Write one column per thing: rank by rank, then the rivals (empty where there are fewer), then all classes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    plain = [key for key in rows[0] if key not in ("confusable", "probabilities")]
    rivals = min(RIVALS, len(classes) - 1)
    header = plain + [f"{what}_{rank}" for rank in range(1, rivals + 1) for what in ("confusable", "retain")]
    writer.writerow(header + [f"p_{name}" for name in rows[0].get("probabilities", ())])
    for row in rows:
        cells = [row[key] for key in plain]
        for rival in row["confusable"]:
            cells += [rival["class"], rival["retain"]]
        cells += [""] * (len(header) - len(cells))
        writer.writerow(cells + list(row.get("probabilities", {}).values()))
    return buffer.getvalue()


def _json(rows: list[dict[str, Any]], classes: Sequence[str]) -> str:
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


_WRITERS = {"table": _table, "csv": _csv, "json": _json}
