"""Where the data of a run is, which rows it held out, and how to find it again from anywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dropmax.errors import DataError, RunError
from dropmax.workbench.data import NAMES, Dataset, data_directory, load
from dropmax.workbench.data.catalogue import source_of
from dropmax.workbench.files import read_json, write_atomically
from dropmax.workbench.recipes import Recipe

#: In a run directory: what finds the data again, and the rows that were held out.
FILE = "data.json"


def load_data(
    recipe: Recipe, data_dir: Path | str | None = None, *, run: Path | str | None = None, data: Path | str | None = None
) -> Dataset:
    """Load the data a recipe names, split by its seed.

    Args:
        recipe: of the run.
        data_dir: where data sets known by name are.
        run: the run directory, or its model file: it remembers where its data was, whatever the working directory.
        data: a folder or file to take in place of the one the recipe names.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> len(load_data(load_recipe("mnist-1k")).train)
    1000
    """
    options, known = recipe.data, _remembered(run)
    was = known.get("data_dir")
    if data_dir is None and options.name in NAMES and was and Path(was).is_dir():
        data_dir = was
    found = load(
        data_place(recipe, run, data),
        data_dir=data_dir,
        seed=recipe.training.seed,
        train_size=options.train_size or None,
        validation_size=None if options.validation_size < 0 else options.validation_size,
        image_size=options.image_size or None,
        label_column=options.label_column or None,
        id_column=options.id_column or None,
        test=_find(options.test, known.get("test"), run) if options.test else None,
        backbone=options.backbone or None,
        text_column=options.text_column or None,
    )
    found = dataclasses.replace(found, name=options.name)
    if options.standardise:
        return found
    channels = len(found.mean)
    return dataclasses.replace(found, mean=(0.0,) * channels, std=(1.0,) * channels)


def data_place(recipe: Recipe, run: Path | str | None = None, data: Path | str | None = None) -> str:
    """Return the name or path that :func:`load_data` loads; a path that is gone is an error that names it."""
    return str(data) if data is not None else _find(recipe.data.name, _remembered(run).get("path"), run)


def balanced(recipe: Recipe, data: Dataset) -> Recipe:
    """Return the recipe with ``head.class_weight = "balanced"`` replaced by N / (K N_k) for each class k."""
    if recipe.head.get("class_weight") != "balanced":
        return recipe
    counts = data.train.labels.bincount(minlength=data.num_classes).tolist()
    weights = [round(sum(counts) / (len(counts) * count), 9) for count in counts]
    return recipe.override({"head.class_weight": weights})


def tell_about(data: Dataset, tell: Callable[[str], None]) -> None:
    """Say what a user should know before training: which rows are held out, what was done to images."""
    for line in (*data.notes, *map(str, data.held_out)):
        tell(line)
    if not len(data.validation):
        tell("there is no validation part: nothing is measured on the way, and the model after the last epoch is kept")


def remember_data(run: Path, recipe: Recipe, data_dir: Path | str | None, data: Dataset) -> None:
    """Write ``data.json``: how the data was given, what finds it again, and which rows were held out."""
    options = recipe.data
    found: dict[str, Any] = {"given": options.name}
    if options.name not in NAMES:
        found["path"] = _absolute(options.name)
    elif source_of(options.name) is not None:
        found["data_dir"] = str(data_directory(data_dir).absolute())
    if options.test:
        found["test"] = _absolute(options.test)
    found["held_out"] = {part.part: {"rule": part.rule, "rows": list(part.rows)} for part in data.held_out}
    write_atomically(run / FILE, json.dumps(found) + "\n")


def move_data(run: Path, path: Path) -> None:
    """Let a run know that its data is at another path now."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    write_atomically(run / FILE, json.dumps(_remembered(run) | {"path": _absolute(str(path))}) + "\n")


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _remembered(run: Path | str | None) -> dict[str, Any]:
    """Return what a run directory, or the one a model file lies in, remembers of its data."""
    if run is None:
        return {}
    place = Path(run)
    file = (place if place.is_dir() else place.parent) / FILE
    found = read_json(file)
    if not all(isinstance(found.get(key, ""), str) for key in ("path", "test", "data_dir")):
        raise RunError(f"{file} is damaged: it does not say where the data is")
    return found


def _find(name: str, path: str | None, run: Path | str | None) -> str:
    """Return where the user's own data is: where it was, or where its name leads from here."""
    if run is None or (name in NAMES and path is None):
        return name
    places = [place for place in (path, name) if place]
    for place in places:
        if Path(place).expanduser().exists():
            return place
    raise DataError(
        f"the data of {run} is not at {places[0]} any more (it was given as {name}): "
        "say where it is with --data PATH (data=...)"
    )
