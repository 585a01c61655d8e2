"""``dropmax diagnose``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmax.cli.options import AsJson, DataDir, MovedData, Threads, TrustCode, use_threads
from dropmax.workbench.terminal import console as wide_console
from dropmax.workbench.terminal import printable


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    examples: Annotated[int, typer.Option(help="Test examples to look at.", min=2)] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    data_dir: DataDir = None,
    threads: Threads = 0,
    trust_code: TrustCode = False,
    data: MovedData = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's approximations against exact inference: its posterior, sampling, the mean prediction."""
    from dropmax.lab import diagnostics
    from dropmax.workbench.data import Split
    from dropmax.workbench.files import write_atomically
    from dropmax.workbench.provenance import provenance
    from dropmax.workbench.style import pyplot
    from dropmax.workbench.training import RunDirectory, load_data, load_model

    use_threads(threads)
    pyplot()  # say that matplotlib is missing before the work, not after it
    place = RunDirectory.open(run).path
    trained = load_model(place, trust_code=trust_code)
    test = load_data(trained.recipe, data_dir, run=run, data=data).test
    chosen = Split(test.inputs[:examples], test.labels[:examples], test.crop)
    found = diagnostics.diagnose(trained.model, trained.batches(chosen), seed=seed)
    report = found.to_dict() | {"run": str(run), "provenance": provenance(seeds=[trained.recipe.training.seed])}
    write_atomically(place / "diagnosis.json", json.dumps(report, indent=2) + "\n")
    title = f"{trained.recipe.head['name']} on {found.examples:,} test examples of {trained.recipe.data.name}"
    diagnostics.draw_diagnosis(place / "diagnosis.png", found, title)
    if as_json:
        print(json.dumps(report))
    else:
        _print(report, title, place)


def _print(found: dict[str, Any], title: str, place: Path) -> None:
    from rich.table import Column, Table

    console = wide_console()
    console.print(printable(title), markup=False)
    for part, (heading, first, columns) in _TABLES.items():
        rows = {row["samples"]: row for row in found[part]} if part == "monte_carlo" else found[part]
        right = [Column(name, justify="right") for name, _, _ in columns]
        table = Table(first, *right, title=f"\n{heading}", title_justify="left")
        for name, row in rows.items():
            if isinstance(row, dict):
                cells = (format(row[key], form).replace("%", " %") for _, key, form in columns)
                table.add_row(_MASKS.get(name, str(name)), *cells)
        if rows:
            console.print(table)
    console.print(
        f"\nThe mean absolute difference of mean and exact probabilities: {found['modes']['difference']:.4f}\n"
        f"The picture: {printable(place / 'diagnosis.png')}",
        soft_wrap=True,
        markup=False,
    )


#: By the part of a diagnosis: the heading of its table, its first column, and the others: title, key and format.
_TABLES = {
    "posterior": ("Retain probabilities given the label", "class", [
        ("rho", "rho", ".4f"), ("q", "q", ".4f"), ("true posterior", "true", ".4f"),
        ("|q - true|", "difference", ".4f"),
    ]),
    "monte_carlo": ("Monte Carlo against exact", "S", [
        ("rms error", "rms_error", ".2e"), ("largest error", "largest_error", ".2e"),
        ("time / exact's time", "time_ratio", ".3g"),
    ]),
    "modes": ("Prediction", "mode", [
        ("error", "error", ".2%"), ("NLL", "nll", ".4f"), ("ECE", "ece", ".2%"), ("confidence", "confidence", ".4f"),
    ]),
    "gradient": ("Gradient of the likelihood, as multiples of the exact gradient's norm", "of", [
        ("sampled: std", "sampled_std", ".3f"), ("sampled: bias", "sampled_bias", ".3f"),
    ]),
    "stability": (
        "Appendix B: the regulariser, and gradients by class logits as multiples of softmax's", "masks from", [
        ("M", "m", ".4f"), ("bound", "bound", ".4f"), ("target", "target_ratio", ".3f"),
        ("smaller", "target_smaller", ".1%"), ("rivals", "rivals_ratio", ".3f"), ("smaller", "rivals_smaller", ".1%"),
    ]),
}  # fmt: skip
_MASKS = {"q": "q (training)", "p": "p(z | x)"}
