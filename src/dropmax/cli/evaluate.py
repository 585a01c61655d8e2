"""``dropmax evaluate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli import options
from dropmax.cli.options import check_mode, grid, tell, use_threads
from dropmax.errors import DataError, InvalidValue, check_choice, did_you_mean
from dropmax.workbench.terminal import console, printable

if TYPE_CHECKING:
    from torch import Tensor

    from dropmax.workbench.data import Split
    from dropmax.workbench.evaluation import Outputs
    from dropmax.workbench.training import TrainedModel

#: Classes of which the table of prediction sets shows each one; of more, those with the lowest coverage.
SHOWN_CLASSES = 20


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
    mode: options.Mode = None,
    samples: options.Samples = 100,
    split: Annotated[str, typer.Option(help="test, validation or train.", metavar="NAME")] = "test",
    outside: Annotated[
        Path | None,
        typer.Option(
            help="Inputs that belong to none of the classes: how well can they be told from the others? A folder of "
            "images, .npz (its rows of the split outside, if it has any), .csv or .parquet.",
            show_default=False,
            metavar="DATA",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the masks in mode mc.", metavar="N")] = 0,
    label_column: options.LabelColumn = None,
    id_column: options.IdColumn = None,
    data: options.MovedData = None,
    data_dir: options.DataDir = None,
    device: options.Device = None,
    threads: options.Threads = 0,
    trust_code: options.TrustCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure error, NLL, Brier, calibration, rejection and prediction sets of a trained model."""
    check_choice("split", split, ("test", "validation", "train"))
    if new is not None and (data is not None or split != "test"):
        raise InvalidValue("--data and --split apply to the data of the run; NEWDATA is scored as a whole")
    if new is None and (label_column or id_column):
        raise InvalidValue("--label-column and --id-column are for NEWDATA; the run knows the columns of its own data")
    check_mode(mode)
    import torch

    from dropmax import metrics
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_code=trust_code)
    unlike = None if outside is None else _read_outside(trained, outside)
    if new is not None:
        rows, what = read_new(trained, new, data_dir, label_column, id_column), f"examples of {new}"
    else:
        rows = getattr(load_data(trained.recipe, data_dir, run=run, data=data), split)
        what = f"{split} examples of {trained.recipe.data.name}"
    if not len(rows):
        raise DataError(f"there are no {split} examples of {trained.recipe.data.name}: it was trained without any")
    generator = torch.Generator().manual_seed(seed)
    outputs = predict(trained.model, trained.batches(rows), mode=mode, samples=samples, generator=generator)
    found = metrics.evaluate(outputs.probs, outputs.labels)
    sets = _sets(outputs, trained.classes)
    scores = [] if unlike is None else _outside(trained, rows, unlike)
    calibration = outputs.calibration
    shown = mode or (calibration.mode if calibration is not None else "mean")
    if as_json:
        about = {"run": str(run), "split": split} if new is None else {"run": str(run), "data": new}
        report = {**about, "mode": shown, "examples": len(outputs.labels), **found}
        report |= {"calibration": calibration and calibration.summary(), "sets": sets}
        report |= {} if outside is None else {"outside": {"data": str(outside), "scores": scores}}
        print(json.dumps(report))
        return
    title = f"{trained.recipe.head['name']} on {len(outputs.labels):,} {what}"
    _print(found, f"{title}, mode {shown}{'' if calibration is None else ', calibrated'}")
    if calibration is not None:
        print(printable(f"Calibrated: {calibration.reason}."))
    elif mode is None:
        print("Not calibrated: see `dropmax calibrate`. Without held-out rows there are no prediction sets.")
    _print_sets(sets)
    _print_outside(scores, outside)


def read_new(
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
    if not (path := Path(new).expanduser()).exists() and not path.suffix:
        raise DataError(f"{new} does not exist:{did_you_mean(new, NAMES)} Give a data set by name, a folder or a table")
    part = read_labelled(path, expected, tell)
    inputs, crop = torch.from_numpy(part.inputs), None
    if trained.is_images and inputs.shape[-1] != trained.input_shape[-1]:
        crop = trained.input_shape[-1]
    return Split(inputs, torch.from_numpy(part.labels), crop)


def _sets(outputs: Outputs, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the prediction sets of each coverage that the calibration rows allow, on average and per class."""
    from dropmax.calibration import COVERAGES, rows_needed

    calibration, labels = outputs.calibration, outputs.labels
    if calibration is None:
        return []
    found = []
    for coverage in sorted(c for c in COVERAGES if len(calibration.labels) >= rows_needed(c)):
        sets = outputs.sets(coverage)
        size, holds = sets.sum(-1).double(), sets.gather(-1, labels[:, None])[:, 0].double()
        mine = [labels == k for k in range(len(classes))]
        by_class = [
            {
                "class": name,
                "examples": int(chosen.sum()),
                "measured": float(holds[chosen].mean()) if chosen.any() else None,
                "mean_size": float(size[chosen].mean()) if chosen.any() else None,
            }
            for name, chosen in zip(classes, mine, strict=True)
        ]
        overall = {"coverage": coverage, "measured": float(holds.mean()), "mean_size": float(size.mean())}
        found.append({**overall, "notes": list(calibration.notes(coverage)), "classes": by_class})
    return found


def _read_outside(trained: TrainedModel, path: Path) -> Tensor:
    """Read inputs that belong to no class."""
    from dropmax.workbench.data.unlabelled import read_outside

    if not (path := path.expanduser()).exists():
        raise DataError(f"--outside {path} does not exist: name a folder of images, .npz, .csv or .parquet")
    return read_outside(path, trained.expected, tell)


def _outside(trained: TrainedModel, inside: Split, unlike: Tensor) -> list[dict[str, Any]]:
    """Measure how well each score tells inputs of no class from the others."""
    import torch

    from dropmax.outside import tell_apart

    net, device = trained.model.net, next(trained.model.parameters()).device
    with torch.no_grad():
        ours = torch.cat([net(x) for x, _ in trained.batches(inside)])
        theirs = torch.cat([net(trained.prepare(x.to(device))) for x in torch.split(unlike, 500)])
    return [{"score": kind, **row} for kind, row in tell_apart(trained.model.head, ours, theirs).items()]


def _print(found: dict[str, float], title: str) -> None:
    from rich.markup import escape

    table = grid(title=escape(printable(title)), show_header=False)
    for name, value in found.items():
        label, factor, form, meaning = _WORDS[name]
        table.add_row(label, form.format(factor * value), f"[dim]{meaning}[/dim]")
    console().print(table)


def _print_sets(sets: list[dict[str, Any]]) -> None:
    if not sets:
        return
    promised = [f"{row['coverage']:.0%}" for row in sets]
    table = grid("prediction sets", *promised, right=promised)

    def add(name: str, rows: Sequence[dict[str, Any]]) -> None:
        cells = (f"{row['measured']:.1%}, size {row['mean_size']:.2f}" if row["examples"] else "-" for row in rows)
        table.add_row(printable(name), *cells)

    add("all classes", [{**row, "examples": True} for row in sets])
    middle = sets[len(sets) // 2]["classes"]
    order = sorted(range(len(middle)), key=lambda k: (not middle[k]["examples"], middle[k]["measured"] or 0.0))
    shown = sorted(order) if len(order) <= SHOWN_CLASSES else order[: SHOWN_CLASSES // 2]
    for k in shown:
        add(middle[k]["class"], [row["classes"][k] for row in sets])
    console().print(table)
    if len(shown) < len(order):
        print(f"These are the {len(shown)} of {len(order)} classes with the lowest coverage; --json has all.")
    for note in dict.fromkeys(note for row in sets for note in row["notes"]):
        print(printable(note))


def _print_outside(scores: list[dict[str, Any]], outside: Path | None) -> None:
    from dropmax.outside import SCORES

    if outside is None:
        return
    numbers = ("AUROC", "FPR at 95 %")
    table = grid(f"against {printable(str(outside))}", *numbers, "", right=numbers)
    for row in scores:
        table.add_row(row["score"], f"{row['auroc']:.4f}", f"{row['fpr95']:.1%}", f"[dim]{SCORES[row['score']]}[/dim]")
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
