"""``dropmax diagnose``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmax.cli.options import AsJson, DataDir, MovedData, Threads, TrustNetwork, use_threads
from dropmax.workbench.terminal import console as wide_console
from dropmax.workbench.terminal import printable


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    examples: Annotated[int, typer.Option(help="Test examples to look at.", min=2)] = 1000,
    seed: Annotated[int, typer.Option(help="Of every random draw.")] = 0,
    data_dir: DataDir = None,
    threads: Threads = 0,
    trust_network: TrustNetwork = False,
    data: MovedData = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's approximations against exact inference: its posterior, sampling, the mean prediction."""
    from dropmax.lab.diagnostics import diagnose as measure
    from dropmax.lab.figures.diagnosis import draw_diagnosis
    from dropmax.workbench.data import Split
    from dropmax.workbench.files import write_atomically
    from dropmax.workbench.provenance import provenance
    from dropmax.workbench.style import pyplot
    from dropmax.workbench.training import RunDirectory, load_data, load_model

    use_threads(threads)
    pyplot()  # say that matplotlib is missing before the work, not after it
    place = RunDirectory.open(run).path
    trained = load_model(place, trust_network=trust_network)
    test = load_data(trained.recipe, data_dir, run=run, data=data).test
    chosen = Split(test.inputs[:examples], test.labels[:examples], test.crop)
    found = measure(trained.model, trained.batches(chosen), seed=seed)
    report = found.to_dict() | {"run": str(run), "provenance": provenance(seeds=[trained.recipe.training.seed])}
    write_atomically(place / "diagnosis.json", json.dumps(report, indent=2) + "\n")
    title = f"{trained.recipe.head['name']} on {found.examples:,} test examples of {trained.recipe.data.name}"
    draw_diagnosis(place / "diagnosis.png", found, title)
    if as_json:
        print(json.dumps(report))
    else:
        _print(report, title, place)


def _print(found: dict[str, Any], title: str, place: Path) -> None:
    from rich.table import Column, Table

    def table(title: str, *columns: str) -> Table:
        return Table(columns[0], *(Column(c, justify="right") for c in columns[1:]), title=title, title_justify="left")

    console = wide_console()
    console.print(printable(title), markup=False)
    posterior = table("\nRetain probabilities given the label", "class", "rho", "q", "true posterior", "|q - true|")
    for kind, row in found["posterior"].items():
        posterior.add_row(kind, *(f"{row[k]:.4f}" for k in ("rho", "q", "true", "difference")))
    console.print(posterior)
    sampling = table("\nMonte Carlo against exact", "S", "rms error", "largest error", "time / exact's time")
    for row in found["monte_carlo"]:
        sampling.add_row(
            f"{row['samples']}", f"{row['rms_error']:.2e}", f"{row['largest_error']:.2e}", f"{row['time_ratio']:.3g}"
        )
    console.print(sampling)
    modes = table("\nPrediction", "mode", "error", "NLL", "ECE", "confidence")
    for mode in ("mean", "exact"):
        row = found["modes"][mode]
        modes.add_row(
            mode,
            f"{100 * row['error']:.2f} %",
            f"{row['nll']:.4f}",
            f"{100 * row['ece']:.2f} %",
            f"{row['confidence']:.4f}",
        )
    console.print(modes)
    console.print(f"mean absolute difference of their probabilities: {found['modes']['difference']:.4f}")
    if found["gradient"]:
        gradient = table(
            "\nGradient of the likelihood, as multiples of the exact gradient's norm",
            "of",
            "sampled: std",
            "sampled: bias",
        )
        for name, row in found["gradient"].items():
            gradient.add_row(name, f"{row['sampled_std']:.3f}", f"{row['sampled_bias']:.3f}")
        console.print(gradient)
    stability = table(
        "\nAppendix B: the regulariser, and gradients by class logits as multiples of softmax's",
        "masks from",
        "M",
        "bound",
        "target",
        "smaller",
        "rivals",
        "smaller",
    )
    for name, row in found["stability"].items():
        ratios = [f"{row[f'{of}_ratio']:.3f}" for of in ("target", "rivals")]
        shares = [f"{100 * row[f'{of}_smaller']:.1f} %" for of in ("target", "rivals")]
        stability.add_row(
            "q (training)" if name == "q" else "p(z | x)",
            f"{row['m']:.4f}",
            f"{row['bound']:.4f}",
            ratios[0],
            shares[0],
            ratios[1],
            shares[1],
        )
    console.print(stability)
    console.print(f"\nThe picture: {printable(place / 'diagnosis.png')}", soft_wrap=True, markup=False)
