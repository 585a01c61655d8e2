"""``dropmax demo``: softmax and DropMax side by side on a thousand digits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmax.cli.options import AsJson, command
from dropmax.errors import RunError
from dropmax.workbench.files import check_place
from dropmax.workbench.terminal import console as wide_console

HEADS = ("softmax", "dropmax")


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the two runs and the picture.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Decides which digits are trained on, weights and noise.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="10 epochs instead of 200: a smoke test.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train softmax and DropMax on 1,000 real digits, compare them on 10,000, and draw what DropMax sees."""
    epochs = 10 if quick else 200
    runs = {head: out / f"{head}-{seed}{'-quick' if quick else ''}" for head in HEADS}
    for path in runs.values():
        check_place(path)  # before the work, not after it
    print(
        f"Training softmax and DropMax on 1,000 MNIST digits, {epochs} epochs each, side by side.",
        "It takes about a minute and a half on two cores." if not quick else "",
        file=sys.stderr,
    )
    started = time.monotonic()
    _train_side_by_side(runs, seed, epochs)
    seconds = time.monotonic() - started

    from dropmax import metrics
    from dropmax.lab.figures.demo import contrast, draw_demo
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model

    trained = {head: load_model(path) for head, path in runs.items()}
    test = load_data(trained["dropmax"].recipe).test
    outputs = {head: predict(model.model, model.batches(test)) for head, model in trained.items()}
    found = {head: metrics.evaluate(rows.probs, rows.labels) for head, rows in outputs.items()}
    picture = out / f"demo{'-quick' if quick else ''}.png"
    draw_demo(picture, test.inputs, outputs["softmax"], outputs["dropmax"])
    counts = contrast(outputs["softmax"], outputs["dropmax"])
    if as_json:
        about = {"seed": seed, "epochs": epochs, "seconds": round(seconds, 1)}
        print(json.dumps({**about, "test": found, "contrast": asdict(counts)}))
        return
    _print(found, epochs, runs, picture, ". ".join(counts.sentences()))


def _train_side_by_side(runs: dict[str, Path], seed: int, epochs: int) -> None:
    """Two processes with half the cores each are faster than one after the other with all of them."""
    threads = max(1, (os.cpu_count() or 2) // 2)
    workers: dict[str, subprocess.Popen[str]] = {}
    try:
        for head, path in runs.items():
            arguments = [sys.executable, "-m", "dropmax", "train"]
            if (path / "recipe.toml").exists():
                arguments += ["--resume", str(path)]  # a stopped demo resumes; a finished one is done at once
            else:
                arguments += ["mnist-1k", "--recipe", "released", "--head", head, "--seed", str(seed)]
                arguments += ["--epochs", str(epochs), "--out", str(path)]
            workers[head] = subprocess.Popen(
                [*arguments, "--threads", str(threads)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        _watch(workers, runs, epochs)
    except KeyboardInterrupt:
        raise RunError("stopped; the same command resumes") from None
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                worker.terminate()
        for worker in workers.values():
            worker.wait()
    for head, worker in workers.items():
        if worker.returncode:
            last = (worker.stderr.read() if worker.stderr else "").strip().splitlines()[-1:]
            raise RunError(f"training {head} failed: {' '.join(last).removeprefix('dropmax: ')}")


def _watch(workers: dict[str, subprocess.Popen[str]], runs: dict[str, Path], epochs: int) -> None:
    from dropmax.workbench.terminal import progress

    with progress("training", epochs * len(runs), "epochs") as advance:
        seen = 0
        while True:
            running = any(worker.poll() is None for worker in workers.values())
            done = sum(_lines(path / "metrics.jsonl") for path in runs.values())
            advance(max(0, done - seen))
            seen = max(seen, done)
            if not running or any(worker.poll() for worker in workers.values()):
                return
            time.sleep(0.2)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _print(
    found: dict[str, dict[str, float]], epochs: int, runs: dict[str, Path], picture: Path, sentences: str
) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    right: Any = [Column(title, justify="right") for title in ("test error", "NLL", "ECE")]
    title = f"10,000 test digits after {epochs} epochs on 1,000, both heads calibrated on held-out digits"
    table = Table("head", *right, title=title, title_justify="left")
    for head, values in found.items():
        best = {name: min(found, key=lambda h: found[h][name]) for name in ("error", "nll", "ece")}
        error, ece = (f"{100 * values[name]:.2f} %" for name in ("error", "ece"))
        cells = {"error": error, "nll": f"{values['nll']:.4f}", "ece": ece}
        table.add_row(head, *(f"[bold]{cell}[/bold]" if best[name] == head else cell for name, cell in cells.items()))
    console = wide_console()
    console.print()
    console.print(table)
    console.print(f"\n{sentences}\n")
    console.print(f"The picture: {picture}\n\nNext:", soft_wrap=True)
    both = command("explore", runs["dropmax"], runs["softmax"])
    for line, meaning in (
        (both, "both side by side in the browser; draw your own digit"),
        (command("evaluate", runs["dropmax"]), "more metrics of this model"),
        (command("predict", runs["dropmax"]) + " IMAGE...", "what your own digits are, and may be confused with"),
        (command("train") + " FOLDER", "the same for your own images, one sub-folder per class"),
    ):
        console.print(f"  {escape(line)}  [dim]# {meaning}[/dim]", soft_wrap=True)
