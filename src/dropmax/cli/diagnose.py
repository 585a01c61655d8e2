"""``dropmax diagnose``."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    for heading, (first, *others), rows in _tables(found):
        right = [Column(name, justify="right") for name in others]
        table = Table(first, *right, title=f"\n{heading}", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(
        f"\nThe mean absolute difference of mean and exact probabilities: {found['modes']['difference']:.4f}\n"
        f"The picture: {printable(place / 'diagnosis.png')}",
        soft_wrap=True,
        markup=False,
    )


def _tables(found: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield heading, columns and rows of each table."""
    yield (
        "Retain probabilities given the label",
        ["class", "rho", "q", "true posterior", "|q - true|"],
        [
            [kind, *(f"{row[k]:.4f}" for k in ("rho", "q", "true", "difference"))]
            for kind, row in found["posterior"].items()
        ],
    )
    yield (
        "Monte Carlo against exact",
        ["S", "rms error", "largest error", "time / exact's time"],
        [
            [str(row["samples"]), f"{row['rms_error']:.2e}", f"{row['largest_error']:.2e}", f"{row['time_ratio']:.3g}"]
            for row in found["monte_carlo"]
        ],
    )
    modes = {mode: found["modes"][mode] for mode in ("mean", "exact")}
    shown = ("error", "nll", "ece", "confidence")
    yield (
        "Prediction",
        ["mode", "error", "NLL", "ECE", "confidence"],
        [
            [mode, *(f"{100 * row[k]:.2f} %" if k in ("error", "ece") else f"{row[k]:.4f}" for k in shown)]
            for mode, row in modes.items()
        ],
    )
    if found["gradient"]:
        yield (
            "Gradient of the likelihood, as multiples of the exact gradient's norm",
            ["of", "sampled: std", "sampled: bias"],
            [
                [name, f"{row['sampled_std']:.3f}", f"{row['sampled_bias']:.3f}"]
                for name, row in found["gradient"].items()
            ],
        )
    names = {"q": "q (training)", "p": "p(z | x)"}
    yield (
        "Appendix B: the regulariser, and gradients by class logits as multiples of softmax's",
        ["masks from", "M", "bound", "target", "smaller", "rivals", "smaller"],
        [
            [names[name], f"{row['m']:.4f}", f"{row['bound']:.4f}"]
            + [
                text
                for k in ("target", "rivals")
                for text in (f"{row[f'{k}_ratio']:.3f}", f"{100 * row[f'{k}_smaller']:.1f} %")
            ]
            for name, row in found["stability"].items()
        ],
    )
