"""``dropmax evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dropmax.cli.options import AsJson, DataDir, Device, Mode, Samples, Threads, TrustNetwork, use_threads


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    mode: Mode = "mean",
    samples: Samples = 100,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    seed: Annotated[int, typer.Option(help="Of the masks in mode mc.")] = 0,
    data_dir: DataDir = None,
    device: Device = None,
    threads: Threads = 0,
    trust_network: TrustNetwork = False,
    as_json: AsJson = False,
) -> None:
    """Measure error, NLL, Brier, calibration and rejection of a trained model."""
    from dropmax.checks import check_choice

    check_choice("split", split, ("test", "validation", "train"))
    from dropmax.heads import MODES

    check_choice("mode", mode, MODES)
    import torch

    from dropmax import metrics
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_network=trust_network)
    data = load_data(trained.recipe, data_dir)
    outputs = predict(
        trained.model,
        trained.batches(getattr(data, split)),
        mode=mode,
        samples=samples,
        generator=torch.Generator().manual_seed(seed),
    )
    found = metrics.evaluate(outputs.probs, outputs.labels)
    if as_json:
        print(json.dumps({"run": str(run), "split": split, "mode": mode, "examples": len(outputs.labels), **found}))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from dropmax.workbench.terminal import printable

    table = Table(
        title=f"{trained.recipe.head['name']} on {len(outputs.labels):,} {split} examples of "
        f"{escape(printable(trained.recipe.data.name))}, mode {mode}",
        title_justify="left",
        box=None,
        show_header=False,
    )
    for name, value in found.items():
        label, factor, form, meaning = _WORDS[name]
        table.add_row(label, form.format(factor * value), f"[dim]{meaning}[/dim]")
    Console().print(table)


#: For each metric: its label, a factor and a format to show it with, and what it means.
_WORDS = {
    "error": ("error", 100, "{:.2f} %", "wrong answers"),
    "top5_error": ("top-5 error", 100, "{:.2f} %", "truth not among the five likeliest"),
    "nll": ("NLL", 1, "{:.4f}", "mean surprise at the truth, in nats"),
    "brier": ("Brier", 1, "{:.4f}", "squared distance of the probabilities from the truth"),
    "ece": ("ECE", 100, "{:.2f} %", "confidence against accuracy, 15 bins"),
    "aurc": ("AURC", 1, "{:.5f}", "mean error when the least sure are rejected first"),
}
