"""``dropmax train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmax.cli.options import AsJson, DataDir, Device, Threads, TrustNetwork, use_threads
from dropmax.errors import InvalidValue
from dropmax.workbench.recipes import Recipe, load_recipe, parse_override
from dropmax.workbench.terminal import printable


def train(
    data: Annotated[
        str | None,
        typer.Argument(help="A data set such as mnist-1k, or your own: a folder of images, .npz, .csv, .parquet."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="paper, released, or a recipe file of yours (.toml).", show_default=False),
    ] = None,
    head: Annotated[str | None, typer.Option(help="One of dropmax.HEADS; dropmax by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides splits, weights and noise.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Short for --set training.epochs=N.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override any value of the recipe: --set training.learning_rate=1e-4.", metavar="NAME=VALUE"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/DATA-HEAD-SEED by default.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run.", show_default=False)] = None,
    data_dir: DataDir = None,
    device: Device = None,
    threads: Threads = 0,
    trust_network: TrustNetwork = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an old run in the run directory.")] = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Log to tensorboard, mlflow or wandb too; may be repeated.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Short for --log tensorboard.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a head on a data set, into a run directory."""
    if resume is not None:
        clashing = [
            k
            for k, v in {
                "DATA": data,
                "--recipe": recipe,
                "--head": head,
                "--seed": seed,
                "--epochs": epochs,
                "--set": settings,
                "--out": out,
                "--force": force or None,
            }.items()
            if v is not None
        ]
        if clashing:
            raise InvalidValue(f"--resume goes on with a run as it was begun; leave out {', '.join(clashing)}")
        chosen = None
    else:
        if trust_network:
            raise InvalidValue("--trust-network goes with --resume: a network you name yourself is imported anyway")
        chosen = _choose(data, recipe, head, seed, epochs, settings or [])
    from dropmax.workbench import training
    from dropmax.workbench.training.callbacks import make_callbacks

    use_threads(threads)
    callbacks = make_callbacks([*(log or []), *["tensorboard"] * tensorboard])
    if chosen is None:
        assert resume is not None
        run = training.resume(
            resume, data_dir=data_dir, device=device, callbacks=callbacks, trust_network=trust_network
        )
    else:
        place = out or Path("runs") / f"{Path(chosen.data.name).stem}-{chosen.head['name']}-{chosen.training.seed}"
        run = training.train(chosen, place, data_dir=data_dir, device=device, force=force, callbacks=callbacks)
    _report(run.path, run.metrics(), as_json)


def _choose(
    data: str | None, recipe: str | None, head: str | None, seed: int | None, epochs: int | None, settings: list[str]
) -> Recipe:
    """Find the recipe and override it by what was given on the command line."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in settings)
    overrides |= {
        k: v for k, v in {"head.name": head, "training.seed": seed, "training.epochs": epochs}.items() if v is not None
    }
    if recipe is not None and recipe.endswith(".toml"):
        if data is not None:
            overrides["data.name"] = data
        return load_recipe(recipe).override(overrides)
    if data is None:
        raise InvalidValue("name a data set such as mnist-1k, a folder or file of your own, or --recipe FILE.toml")
    path = Path(data).expanduser()
    if path.is_dir() or path.suffix.lower() in (".npz", ".csv", ".parquet"):
        own = "own-images" if path.is_dir() else "own-features"
        return load_recipe(own, recipe).override({"data.name": str(path), **overrides})
    return load_recipe(data, recipe).override(overrides)


def _report(path: Path, rows: list[dict[str, Any]], as_json: bool) -> None:
    last = rows[-1]
    if as_json:
        print(json.dumps({"run": str(path), **last}))
        return
    if "validation" in last:
        found = last["validation"]
        print(
            f"Validation after {last['epoch']} epochs: error {100 * found['error']:.2f} %, NLL {found['nll']:.4f}, "
            f"ECE {100 * found['ece']:.2f} %"
        )
    print(printable(f"The run is in {path}. Next: dropmax evaluate {path}"))
