"""``dropmax evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli.options import (
    AsJson,
    DataDir,
    Device,
    IdColumn,
    LabelColumn,
    Mode,
    MovedData,
    Samples,
    Threads,
    TrustCode,
    tell,
    use_threads,
)
from dropmax.errors import DataError, InvalidValue, check_choice

if TYPE_CHECKING:
    from dropmax.workbench.data import Split
    from dropmax.workbench.training import TrainedModel


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    new: Annotated[
        str | None,
        typer.Argument(
            metavar="[NEWDATA]",
            help="New labelled data to score in place of the run's test part: a folder with one sub-folder per class, "
            ".npz, .csv or .parquet. All of it is scored.",
            show_default=False,
        ),
    ] = None,
    mode: Mode = "mean",
    samples: Samples = 100,
    split: Annotated[str, typer.Option(help="test, validation or train.", metavar="NAME")] = "test",
    seed: Annotated[int, typer.Option(help="Of the masks in mode mc.", metavar="N")] = 0,
    label_column: LabelColumn = None,
    id_column: IdColumn = None,
    data: MovedData = None,
    data_dir: DataDir = None,
    device: Device = None,
    threads: Threads = 0,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure error, NLL, Brier, calibration and rejection of a trained model."""
    check_choice("split", split, ("test", "validation", "train"))
    if new is not None and (data is not None or split != "test"):
        raise InvalidValue("--data and --split are about the data of the run; NEWDATA is scored as a whole")
    if new is None and (label_column or id_column):
        raise InvalidValue("--label-column and --id-column are for NEWDATA; the run knows the columns of its own data")
    from dropmax.heads import MODES

    check_choice("mode", mode, MODES)
    import torch

    from dropmax import metrics
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_code=trust_code)
    if new is not None:
        rows, what = _read_new(trained, new, data_dir, label_column, id_column), f"examples of {new}"
    else:
        rows = getattr(load_data(trained.recipe, data_dir, run=run, data=data), split)
        what = f"{split} examples of {trained.recipe.data.name}"
    if not len(rows):
        raise DataError(f"there are no {split} examples of {trained.recipe.data.name}: it was trained without any")
    outputs = predict(
        trained.model,
        trained.batches(rows),
        mode=mode,
        samples=samples,
        generator=torch.Generator().manual_seed(seed),
    )
    found = metrics.evaluate(outputs.probs, outputs.labels)
    if as_json:
        about = {"run": str(run), "split": split} if new is None else {"run": str(run), "data": new}
        print(json.dumps({**about, "mode": mode, "examples": len(outputs.labels), **found}))
        return
    _print(found, f"{trained.recipe.head['name']} on {len(outputs.labels):,} {what}, mode {mode}")


def _read_new(
    trained: TrainedModel, new: str, data_dir: Path | None, label_column: str | None, id_column: str | None
) -> Split:
    """Read labelled data that the run has not seen, as its model wants it."""
    import dataclasses

    import torch

    from dropmax.workbench.data import NAMES, Split, load
    from dropmax.workbench.data.unlabelled import read_labelled

    expected = trained.expected
    if new in NAMES:
        known = load(new, data_dir=data_dir)
        if known.classes != trained.classes or known.input_shape != trained.input_shape:
            raise DataError(
                f"{new} has {known.num_classes} classes of shape {known.input_shape}, and the model was trained on "
                f"{len(trained.classes)} of shape {trained.input_shape}, or on classes of other names"
            )
        return known.test
    columns: dict[str, Any] = {"label_column": label_column, "id_column": id_column}
    expected = dataclasses.replace(expected, **{key: value for key, value in columns.items() if value})
    part, _ = read_labelled(Path(new).expanduser(), expected, tell)
    inputs, crop = torch.from_numpy(part.inputs), None
    if trained.is_images and inputs.shape[-1] != trained.input_shape[-1]:
        crop = trained.input_shape[-1]
    return Split(inputs, torch.from_numpy(part.labels), crop)


def _print(found: dict[str, float], title: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from dropmax.workbench.terminal import console, printable

    table = Table(title=escape(printable(title)), title_justify="left", box=None, show_header=False)
    for name, value in found.items():
        label, factor, form, meaning = _WORDS[name]
        table.add_row(label, form.format(factor * value), f"[dim]{meaning}[/dim]")
    console().print(table)


#: For each metric: its label, a factor and a format to show it with, and what it means.
_WORDS = {
    "error": ("error", 100, "{:.2f} %", "wrong answers"),
    "top5_error": ("top-5 error", 100, "{:.2f} %", "truth not among the five likeliest"),
    "nll": ("NLL", 1, "{:.4f}", "mean surprise at the truth, in nats"),
    "brier": ("Brier", 1, "{:.4f}", "squared distance of the probabilities from the truth"),
    "ece": ("ECE", 100, "{:.2f} %", "confidence against accuracy, 15 bins"),
    "aurc": ("AURC", 1, "{:.5f}", "mean error when the least sure are rejected first"),
}
