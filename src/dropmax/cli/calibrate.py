"""``dropmax calibrate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dropmax.cli import options
from dropmax.cli.evaluate import read_new
from dropmax.cli.options import use_threads
from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.terminal import printable


def calibrate(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    new: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA]",
            help="Labelled data that did not train the model: a folder with one sub-folder per class, .npz, .csv or "
            ".parquet. Without it, the rows that the run held out.",
            show_default=False,
        ),
    ] = None,
    by_class: Annotated[
        bool,
        typer.Option(
            "--by-class",
            help="Let prediction sets promise their coverage for each class, not only on average over classes.",
        ),
    ] = False,
    label_column: options.LabelColumn = None,
    id_column: options.IdColumn = None,
    data: options.MovedData = None,
    data_dir: options.DataDir = None,
    device: options.Device = None,
    threads: options.Threads = 0,
    trust_code: options.TrustCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Fit temperatures and prediction sets on held-out rows, and store them with the model.

    From then on `evaluate`, `predict`, `report`, `explore` and `export` give the calibrated answer.
    """
    if new is not None and data is not None:
        raise InvalidValue("--data is where the data of the run is, and DATA replaces that data: give one of them")
    if new is None and (label_column or id_column):
        raise InvalidValue("--label-column and --id-column are for DATA; the run knows the columns of its own data")
    from dropmax.workbench import evaluation
    from dropmax.workbench.training import load_data, load_model
    from dropmax.workbench.training.trained import write_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_code=trust_code)
    if new is None:
        rows = load_data(trained.recipe, data_dir, run=run, data=data).validation
        source = f"held-out rows of {Path(trained.recipe.data.name).name}"
        if not len(rows) or trained.recipe.training.refit:
            raise DataError(
                f"{run} was trained on all of its rows, and calibrating on those would flatter it: give labelled rows "
                f"that did not train it as DATA"
            )
    else:
        rows, source = read_new(trained, new, data_dir, label_column, id_column), f"rows of {Path(new).name}"
    found = evaluation.calibrate(trained.model, trained.batches(rows), by_class=by_class, source=source)
    assert found is not None
    write_model(run / "model.safetensors" if run.is_dir() else run, trained)
    if as_json:
        print(json.dumps({"run": str(run), **found.summary()}))
        return
    print(printable(f"Calibrated: {found.reason}."))
    for coverage in (float(key) for key in found.summary()["thresholds"]):
        limits = found.thresholds(coverage)
        least = f"{min(limits):.4f}" + (f" to {max(limits):.4f}" if min(limits) < max(limits) else "")
        print(f"A set of {coverage:.0%} coverage holds the classes of probability {least} or more.".replace("%", " %"))
        for note in found.notes(coverage):
            print(f"  {note}")
