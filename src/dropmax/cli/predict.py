"""``dropmax predict``."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli.options import Device, Mode, Samples, Threads, TrustNetwork, use_threads
from dropmax.errors import RunError
from dropmax.workbench.terminal import printable

if TYPE_CHECKING:
    from dropmax.workbench.evaluation import Outputs


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    files: Annotated[list[Path], typer.Argument(help="Images, folders of images, or tables (.npz, .csv, .parquet).")],
    form: Annotated[str, typer.Option("--format", help="table, csv or json.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write to this new file instead of the screen.")] = None,
    mode: Mode = "mean",
    samples: Samples = 100,
    seed: Annotated[int, typer.Option(help="Of the masks in mode mc.")] = 0,
    device: Device = None,
    threads: Threads = 0,
    trust_network: TrustNetwork = False,
) -> None:
    """Say what things are, how sure that is, and what they may be confused with."""
    from dropmax.checks import check_choice
    from dropmax.heads import MODES

    check_choice("format", form, ("table", "csv", "json"))
    check_choice("mode", mode, MODES)
    if out is not None and out.exists():
        raise RunError(f"{out} exists: choose another file with --out, or delete it first")
    import torch

    from dropmax.workbench.data.unlabelled import find_inputs, read_inputs
    from dropmax.workbench.progress import progress
    from dropmax.workbench.training import load_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_network=trust_network)
    chosen = find_inputs(files)
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    with progress("predicting", len(chosen), "files") as advance:
        label_column = trained.recipe.data.label_column or "label"
        for names, inputs in read_inputs(chosen, trained.input_shape, trained.stored_size, label_column=label_column):
            options = {"mode": mode, "samples": samples, "generator": generator, "std": mode == "exact"}
            rows += _rows(names, trained.answer(inputs, **options), trained.classes)
            advance(len(names))
    if out is None and sys.stdout.isatty():
        rows = _shown(rows)  # a script gets names as they are; a person's terminal must not obey what is in them
    text = _WRITERS[form](rows)
    if out is None:
        sys.stdout.write(text)
    else:
        from dropmax.workbench.files import write_atomically

        write_atomically(out, text)
        print(f"{len(rows):,} predictions are in {out}", file=sys.stderr)


def _rows(names: Sequence[str], outputs: Outputs, classes: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    predicted, rivals = outputs.predicted.tolist(), outputs.confusable()
    for i, (name, k) in enumerate(zip(names, predicted, strict=True)):
        name = os.fsencode(name).decode(errors="backslashreplace")  # names of files need not be text
        row = {"input": name, "class": classes[k], "probability": round(float(outputs.probs[i, k]), 6)}
        if outputs.std is not None:
            row["std"] = round(float(outputs.std[i, k]), 6)
        row["confusable"] = [{"class": classes[r], "retain": round(float(outputs.retain[i, r]), 4)} for r in rivals[i]]
        rows.append(row)
    return rows


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _table(rows: list[dict[str, Any]]) -> str:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("input", "class", Column("probability", justify="right"), "may be confused with", box=None)
    for row in rows:
        sure = f"{row['probability']:.4f}" + (f" ± {row['std']:.4f}" if "std" in row else "")
        table.add_row(*(Text(printable(cell)) for cell in (row["input"], row["class"], sure, _spell(row))))
    buffer = io.StringIO()
    is_terminal = sys.stdout.isatty()
    Console(file=buffer, soft_wrap=not is_terminal, force_terminal=is_terminal).print(table)
    return buffer.getvalue()


def _csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = [name for name in ("input", "class", "probability", "std", "confusable") if rows and name in rows[0]]
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_spell(row) if name == "confusable" else row[name] for name in columns])
    return buffer.getvalue()


def _json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


def _spell(row: dict[str, Any]) -> str:
    return ", ".join(f"{rival['class']} ({rival['retain']:.2f})" for rival in row["confusable"])


_WRITERS = {"table": _table, "csv": _csv, "json": _json}
