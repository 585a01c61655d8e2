"""A study: variants of one recipe side by side, from a small TOML file.

.. code-block:: toml

    [base]
    data = "mnist-1k"               # a data set or a path, or a list: a column each
    recipe = "released"             # or a recipe file, such as "mine.toml"
    runs = 5
    overrides."training.epochs" = 50

    [variants.no-kl]                # a row: overrides by dotted name, as with --set
    "head.kl_weight" = 0

    [variants.smoothed]
    "head.name" = "softmax"
    grid."head.label_smoothing" = [0.05, 0.1, 0.2]    # tuned on the hold-out set with the tuning seed
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidType, InvalidValue, unknown
from dropmax.imports import locate
from dropmax.lab.experiments.columns import check_code, column_name, place, recipe_is_file, resolve
from dropmax.lab.experiments.plan import Group, Plan, check_sizes, grid_points, shortened
from dropmax.workbench.recipes import parse_toml

__all__ = ["plan_study", "study_names"]

_BASE_KEYS = ("data", "recipe", "runs", "overrides")


def study_names() -> list[str]:
    """Return the studies that come with the package.

    >>> "mnist-1k-ablation" in study_names()
    True
    """
    files = resources.files(__package__).joinpath("studies").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def plan_study(
    study: str | Path,
    *,
    data: Sequence[str] | None = None,
    recipe: str | None = None,
    runs: int | None = None,
    schedule_scale: float = 1.0,
    train_size: int = 0,
    overrides: Mapping[str, Any] | None = None,
    trust_code: bool = False,
) -> Plan:
    """Plan a study from its file, or by the name of one that comes with the package.

    ``data`` and ``recipe`` take the place of those in the file. Paths in the file begin at its own folder.

    >>> plan = plan_study("mnist-1k-ablation")
    >>> [group.variant for group in plan.groups][:3]
    ['dropmax', 'no-kl', 'no-entropy']
    """
    source, folder, tables = _read(study)
    for table in tables:
        if table not in ("base", "variants"):
            raise InvalidValue(f"{source}: {unknown('table', table, ('base', 'variants'))}")
    base = _table(tables.get("base"), f"{source}: [base]")
    for key in base:
        if key not in _BASE_KEYS:
            raise InvalidValue(f"{source}: {unknown('key of [base]', key, _BASE_KEYS)}")
    variants = _table(tables.get("variants"), f"{source}: [variants]")
    count = runs if runs is not None else base.get("runs", 5)
    if not isinstance(count, int):
        raise InvalidType(f"{source}: base.runs must be a whole number, got {count!r}")
    check_sizes(count, schedule_scale, train_size)
    common = flattened(_table(base.get("overrides", {}), f"{source}: base.overrides"))
    if recipe is not None and recipe_is_file(recipe):
        recipe = str(Path(recipe).expanduser().absolute())
    check_code(dict(overrides or {}), "the command", trust_code=True)  # typing it counts as trust
    shared = _Shared(source, folder, common, dict(overrides or {}), schedule_scale, train_size, trust_code)
    groups = []
    for name, is_typed in _columns(source, base, data):
        if name is not None:
            check_code({"data.name": name}, source, trust_code or is_typed)
        for variant, values in variants.items():
            groups.append(_group(shared, name, variant, values, recipe or base.get("recipe")))
    return Plan(tuple(groups), count, schedule_scale, train_size, shared.overrides, is_study=True)


def _columns(source: str, base: Mapping[str, Any], data: Sequence[str] | None) -> list[tuple[str | None, bool]]:
    """Return the data of the columns, each with whether it was typed; None where a recipe file names the data."""
    if data:
        return [(place(name, None), True) for name in data]
    names = [base["data"]] if isinstance(base.get("data"), str) else base.get("data")
    if names is None and str(base.get("recipe", "")).endswith(".toml"):
        return [(None, False)]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidValue(
            f'{source}: [base] needs data, such as data = "mnist-1k", a file of yours or a list, or a recipe file'
        )
    return [(name, False) for name in names]


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables by dotted names, so that ``head.name = ...`` may be written with or without quotes.

    >>> flattened({"head": {"name": "softmax"}, "training.epochs": 5})
    {'head.name': 'softmax', 'training.epochs': 5}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


@dataclass(frozen=True)
class _Shared:
    """What all variants of a study have in common."""

    source: str
    folder: Path
    common: dict[str, Any]
    overrides: dict[str, Any]
    schedule_scale: float
    train_size: int
    trust_code: bool


def _group(shared: _Shared, data: str | None, variant: str, values: Any, recipe: str | None) -> Group:
    where = f"{shared.source}: [variants.{variant}]"
    if not re.fullmatch(r"[\w.+-]+", variant):
        raise InvalidValue(
            f"{shared.source}: a variant is called {variant!r}: directories bear its name, so use letters, digits and "
            ". + - _ only"
        )
    own = dict(_table(values, where))
    grid = _grid(own.pop("grid", {}), where)
    recipe = own.pop("recipe", recipe)
    changes = {**shared.common, **flattened(own)}
    check_code({**changes, **grid}, where, shared.trust_code)
    try:
        recipe_name, found = resolve(data, recipe, shared.folder)
        if recipe_is_file(recipe):
            names = {
                "data.name": found.data.name,
                "network.name": found.network["name"],
                "head.name": found.head["name"],
            }
            check_code(dict(names), f"{where}: {recipe}", shared.trust_code)
        planned = found.data.name
        if isinstance(changes.get("data.name"), str):
            changes["data.name"] = place(changes["data.name"], shared.folder)
        for key in ("network.name", "head.name"):
            if isinstance(changes.get(key), str):
                changes[key] = locate(changes[key], shared.folder)
        changed = shortened(found.override({**changes, **shared.overrides}), shared.schedule_scale, shared.train_size)
        points = grid_points({key: choices for key, choices in grid.items() if key not in shared.overrides})
        for point in points:
            changed.override(point)
    except (InvalidValue, InvalidType) as error:
        raise type(error)(f"{where}: {error}") from error
    if changed.data.name != planned:  # a recipe that was written for other data
        recipe_name = f"{column_name(planned)}.{recipe_name}"
    return Group(column_name(changed.data.name), recipe_name, variant, changed.findable(), points)


def _grid(values: Any, where: str) -> dict[str, list[Any]]:
    grid = flattened(_table(values, f"{where}: grid"))
    for key, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise InvalidType(f"{where}: grid: {key} must be a list of values, got {choices!r}")
        if key == "data.name":
            raise InvalidValue(f"{where}: grid: data.name cannot be tuned; list the data under [base]")
    return grid


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or (not value and where.endswith(("[base]", "[variants]"))):
        raise InvalidValue(f"{where} must be a table with something in it, got {value!r}")
    return value


def _read(study: str | Path) -> tuple[str, Path, dict[str, Any]]:
    """Return how to call a study in errors, the folder its paths begin at, and its tables."""
    path = Path(study)
    try:
        if path.suffix == ".toml":
            source, folder, text = str(path), path.parent, path.read_text(encoding="utf-8")
        elif str(study) in study_names():
            source, folder = f"{study}.toml", Path()
            text = resources.files(__package__).joinpath("studies").joinpath(source).read_text(encoding="utf-8")
        else:
            raise InvalidValue(unknown("study", str(study), study_names(), "or give a .toml file"))
        return source, folder, parse_toml(text, source)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read the study {study}: {getattr(error, 'strerror', None) or error}") from error
