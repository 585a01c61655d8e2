"""From the name of a column to a recipe: data sets by name, the user's own data, recipe files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidValue, RunError
from dropmax.workbench.data import NAMES
from dropmax.workbench.data.loading import import_data, is_function, read_function
from dropmax.workbench.recipes import Recipe, is_known, load_recipe, recipe_for

__all__ = ["check_code", "column_name", "place", "resolve"]


def resolve(data: str | None, recipe: str | None, folder: Path = Path()) -> tuple[str, Recipe]:
    """Return the name of the recipe for a column, and the recipe.

    The last fit on all rows is left out: held-out rows choose grid points and temperatures here.

    Args:
        data: a data set, the user's own folder or file, or ``package.module:function``; None takes the recipe file's.
        recipe: the name of one of the data set's recipes, or a ``.toml`` file.
        folder: where paths begin.

    >>> name, recipe = resolve("mnist-1k", None)
    >>> name, recipe.data.name
    ('released', 'mnist-1k')
    """
    changes: dict[str, Any] = {"training.refit": False}
    if recipe is not None and recipe.endswith(".toml"):
        path = folder / Path(recipe).expanduser()
        found = load_recipe(path)
        name = _plain(path.stem)
        changes["data.name"] = place(data or found.data.name, folder)
    elif data is None:
        raise InvalidValue("name the data, such as mnist-1k or a file of yours, or a recipe file that does")
    elif is_function(data):
        is_images = read_function(data).train.inputs.ndim == 4
        found = load_recipe("own-images" if is_images else "own-features", recipe)
        name = recipe or "default"
        changes |= {"data.name": data, "data.image_size": 0} | ({"data.augment": "none"} if is_images else {})
    else:
        full_name, found = recipe_for(place(data, folder), recipe)
        name = full_name.split(".", 1)[1]
    return name, found.override(changes)


def column_name(data: str) -> str:
    """Return what the column of some data is called; the user's own data never takes the name of a known data set.

    >>> column_name("mnist-1k"), column_name("tables/my flowers.csv"), column_name("copies/mnist-1k.npz")
    ('mnist-1k', 'my-flowers', 'own-mnist-1k')
    >>> column_name("mine.data:birds")
    'mine.data.birds'
    """
    if data in NAMES or is_known(data):
        return data
    name = data.replace(":", ".") if is_function(data) else _plain(Path(data).stem)
    return f"own-{name}" if name in NAMES or is_known(name) else name


def check_code(values: dict[str, Any], source: str, trust_code: bool) -> None:
    """Raise where a file names something to import without permission; import functions that give data.

    >>> check_code({"network.name": "stranger:Net"}, "study.toml", trust_code=False)
    Traceback (most recent call last):
    dropmax.errors.RunError: study.toml would import 'stranger:Net' (network.name), which runs that code: ...
    """
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if not name.endswith(".name") or not isinstance(each, str) or ":" not in each:
                continue
            if not trust_code:
                raise RunError(
                    f"{source} would import {each!r} ({name}), which runs that code: if you trust it, add --trust-code"
                )
            if name == "data.name" and is_function(each):
                import_data(each)


def place(data: str, folder: Path = Path()) -> str:
    """Return the absolute path of the user's own data, since workers may run elsewhere; names stay as they are.

    >>> place("mnist-1k")
    'mnist-1k'
    """
    if data in NAMES or is_known(data) or is_function(data):
        return data
    own = Path(data).expanduser()
    return next((str(path.absolute()) for path in (folder / own, own) if path.exists()), data)


def _plain(name: str) -> str:
    return re.sub(r"[^\w+-]+", "-", name) or "own"
