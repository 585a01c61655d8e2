"""A study: variants of one recipe side by side, from a small TOML file; docs/reproducing.md shows one.

``[base]`` has the data, recipe, runs, overrides and grid that all share; every ``[variants.NAME]`` is a row: overrides
by dotted name, as with ``--set``, and, in place of the shared one, a ``grid`` of lists to tune over.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidType, InvalidValue, unknown
from dropmax.imports import locate
from dropmax.lab.experiments.plan import (
    Group,
    Plan,
    check_code,
    check_sizes,
    column_name,
    grid_points,
    place,
    resolve,
    shortened,
)
from dropmax.workbench.recipes import Recipe, parse_toml

__all__ = ["plan_study", "study_names"]


@functools.cache
def _shipped() -> dict[str, Mapping[str, Any]]:
    """Return the tables of the studies that come with the package: several to a file, each below its name."""
    folder = resources.files(__package__).joinpath("studies")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    return {name: study for file in files for name, study in parse_toml(file.read_text("utf-8"), file.name).items()}


def study_names() -> list[str]:
    """Return the studies that come with the package.

    >>> "mnist-1k-ablation" in study_names()
    True
    """
    return sorted(_shipped())


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
    source, folder, base, variants = _read(study)
    count = runs if runs is not None else base.get("runs", 5)
    if not isinstance(count, int):
        raise InvalidType(f"{source}: base.runs must be a whole number, got {count!r}")
    check_sizes(count, schedule_scale, train_size)
    common, typed = flattened(_table(base.get("overrides", {}), f"{source}: base.overrides")), dict(overrides or {})
    if recipe is not None and recipe.endswith(".toml"):
        recipe = str(Path(recipe).expanduser().absolute())
    check_code(typed, "the command", trust_code=True)  # typing it counts as trust
    columns = _columns(source, base, data)
    for name in columns:
        if name is not None:
            check_code({"data.name": name}, source, trust_code or bool(data))

    def change(found: Recipe, values: Mapping[str, Any]) -> Recipe:
        return shortened(found.override({**values, **typed}), schedule_scale, train_size)

    shared = _grid(base.get("grid", {}), f"{source}: [base]")
    rows = [_Row(source, folder, variant, values, common, shared, trust_code) for variant, values in variants.items()]
    groups = [row.group(name, recipe or base.get("recipe"), typed, change) for name in columns for row in rows]
    return Plan(tuple(groups), count, schedule_scale, train_size, typed, is_study=True)


def _read(study: str | Path) -> tuple[str, Path, Mapping[str, Any], Mapping[str, Any]]:
    """Return how to call a study in errors, the folder its paths begin at, and its two tables."""
    path = Path(study)
    if path.suffix == ".toml":
        source, folder = str(path), path.parent
        try:
            tables: Mapping[str, Any] = parse_toml(path.read_text(encoding="utf-8"), source)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"cannot read the study {study}: {getattr(error, 'strerror', None) or error}") from error
    elif str(study) in study_names():
        source, folder, tables = f"the study {study}", Path(), _shipped()[str(study)]
    else:
        raise InvalidValue(unknown("study", str(study), study_names(), "or give a .toml file"))
    _check_keys(source, "table", tables, ("base", "variants"))
    base, variants = (_table(tables.get(name) or None, f"{source}: [{name}]") for name in ("base", "variants"))
    _check_keys(source, "key of [base]", base, ("data", "recipe", "runs", "overrides", "grid"))
    return source, folder, base, variants


def _check_keys(source: str, what: str, table: Mapping[str, Any], valid: tuple[str, ...]) -> None:
    for key in table:
        if key not in valid:
            raise InvalidValue(f"{source}: {unknown(what, key, valid)}")


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidValue(f"{where} must be a table with something in it, got {value!r}")
    return value


def _columns(source: str, base: Mapping[str, Any], data: Sequence[str] | None) -> Sequence[str | None]:
    """Return the data of the columns; None where a recipe file names it."""
    if data:
        return [place(name) for name in data]
    names = [base["data"]] if isinstance(base.get("data"), str) else base.get("data")
    if names is None and str(base.get("recipe", "")).endswith(".toml"):
        return [None]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidValue(
            f'{source}: [base] needs data, such as data = "mnist-1k", a file of yours or a list, or a recipe file'
        )
    return names


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables by dotted names, so that ``head.name = ...`` may be written with or without quotes."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


@dataclass(frozen=True)
class _Row:
    """A variant of a study."""

    source: str
    folder: Path
    variant: str
    values: Any
    common: dict[str, Any]
    shared_grid: dict[str, list[Any]]  #: of rows without one of their own
    trust_code: bool

    def group(
        self, data: str | None, recipe: str | None, fixed: Mapping[str, Any], change: Callable[..., Recipe]
    ) -> Group:
        """Return its cell on some data; ``change`` applies overrides to a recipe, and ``fixed`` ones are not tuned."""
        where = f"{self.source}: [variants.{self.variant}]"
        if not re.fullmatch(r"[\w.+-]+", self.variant):
            advice = "directories bear its name, so use letters, digits and . + - _ only"
            raise InvalidValue(f"{self.source}: a variant is called {self.variant!r}: {advice}")
        own = dict(_table(self.values, where))
        grid = _grid(own.pop("grid"), where) if "grid" in own else self.shared_grid
        recipe = own.pop("recipe", recipe)
        values = {**self.common, **flattened(own)}
        check_code({**values, **grid}, where, self.trust_code)
        try:
            name, found = resolve(data, recipe, self.folder)
            if recipe is not None and recipe.endswith(".toml"):
                named = {f"{key}.name": getattr(found, key)["name"] for key in ("network", "head")}
                check_code({"data.name": found.data.name, **named}, f"{where}: {recipe}", self.trust_code)
            if isinstance(values.get("data.name"), str):
                values["data.name"] = place(values["data.name"], self.folder)
            for key in ("network.name", "head.name"):
                if isinstance(values.get(key), str):
                    values[key] = locate(values[key], self.folder)
            changed = change(found, values)
            points = grid_points({key: choices for key, choices in grid.items() if key not in fixed})
            for point in points or ({},):
                _check_head(changed.override(point))
        except (InvalidValue, InvalidType) as error:
            raise type(error)(f"{where}: {error}") from error
        if changed.data.name != found.data.name:  # a recipe that was written for other data
            name = f"{column_name(found.data.name)}.{name}"
        return Group(column_name(changed.data.name), name, self.variant, changed.findable(), points)


def _check_head(recipe: Recipe) -> None:
    """Refuse an option that the head does not have before the first run, not in the middle of a grid."""
    from dropmax.heads.registry import check_options, find_head

    check_options(find_head(recipe.head["name"]), (name for name in recipe.head if name != "name"))


def _grid(values: Any, where: str) -> dict[str, list[Any]]:
    grid = flattened(_table(values, f"{where}: grid"))
    for key, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise InvalidType(f"{where}: grid: {key} must be a list of values, got {choices!r}")
        if key == "data.name":
            raise InvalidValue(f"{where}: grid: data.name cannot be tuned; list the data under [base]")
    return grid
