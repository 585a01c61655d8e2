"""A study: variants of one recipe side by side, from a small TOML file.

.. code-block:: toml

    [base]
    data = "mnist-1k"               # one data set, or a list: a column each
    recipe = "released"
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
from importlib import resources
from pathlib import Path
from typing import Any

from dropmax.errors import InvalidType, InvalidValue, unknown
from dropmax.lab.experiments.plan import Group, Plan, check_sizes, column_name, grid_points, shortened
from dropmax.workbench.recipes import parse_toml, recipe_for

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
) -> Plan:
    """Plan a study from its file, or by the name of one that comes with the package.

    ``data`` and ``recipe`` take the place of those in the file.

    >>> plan = plan_study("mnist-1k-ablation")
    >>> [group.variant for group in plan.groups][:3]
    ['dropmax', 'no-kl', 'no-entropy']
    """
    source, tables = _read(study)
    for table in tables:
        if table not in ("base", "variants"):
            raise InvalidValue(f"{source}: {unknown('table', table, ('base', 'variants'))}")
    base = _table(tables.get("base"), f"{source}: [base]")
    for key in base:
        if key not in _BASE_KEYS:
            raise InvalidValue(f"{source}: {unknown('key of [base]', key, _BASE_KEYS)}")
    variants = _table(tables.get("variants"), f"{source}: [variants]")
    columns = list(data or ()) or ([base["data"]] if isinstance(base.get("data"), str) else base.get("data"))
    if not isinstance(columns, list) or not columns or not all(isinstance(name, str) for name in columns):
        raise InvalidValue(f'{source}: [base] needs data, such as data = "mnist-1k" or a list of names')
    count = runs if runs is not None else base.get("runs", 5)
    if not isinstance(count, int):
        raise InvalidType(f"{source}: base.runs must be a whole number, got {count!r}")
    check_sizes(count, schedule_scale, train_size)
    common = flattened(_table(base.get("overrides", {}), f"{source}: base.overrides"))
    return Plan(
        tuple(
            _group(source, name, variant, values, recipe or base.get("recipe"), common, overrides or {},
                   schedule_scale, train_size)
            for name in columns
            for variant, values in variants.items()
        ),
        count,
        schedule_scale,
        train_size,
        dict(overrides or {}),
        is_study=True,
    )  # fmt: skip


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables by dotted names, so that ``head.name = ...`` may be written with or without quotes.

    >>> flattened({"head": {"name": "softmax"}, "training.epochs": 5})
    {'head.name': 'softmax', 'training.epochs': 5}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _group(
    source: str,
    data: str,
    variant: str,
    values: Any,
    recipe: str | None,
    common: dict[str, Any],
    overrides: Mapping[str, Any],
    schedule_scale: float,
    train_size: int,
) -> Group:
    if not re.fullmatch(r"[\w.+-]+", variant):
        raise InvalidValue(
            f"{source}: a variant is called {variant!r}: files bear its name, so use letters, digits and . + - _ only"
        )
    own = dict(_table(values, f"{source}: [variants.{variant}]"))
    grid = flattened(_table(own.pop("grid", {}), f"{source}: [variants.{variant}.grid]"))
    for key, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise InvalidType(f"{source}: variants.{variant}.grid: {key} must be a list of values, got {choices!r}")
    full_name, found = recipe_for(data, recipe)
    try:
        changed = found.override({**common, **flattened(own), **overrides})
        changed = shortened(changed, schedule_scale, train_size)
        points = grid_points({key: choices for key, choices in grid.items() if key not in overrides})
        for point in points:
            changed.override(point)
    except (InvalidValue, InvalidType) as error:
        raise type(error)(f"{source}: [variants.{variant}]: {error}") from error
    return Group(column_name(data), full_name.split(".", 1)[1], variant, changed, points)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or (not value and where.endswith(("[base]", "[variants]"))):
        raise InvalidValue(f"{where} must be a table with something in it, got {value!r}")
    return value


def _read(study: str | Path) -> tuple[str, dict[str, Any]]:
    path = Path(study)
    try:
        if path.suffix == ".toml":
            source, text = str(path), path.read_text(encoding="utf-8")
        elif str(study) in study_names():
            source = f"{study}.toml"
            text = resources.files(__package__).joinpath("studies").joinpath(source).read_text(encoding="utf-8")
        else:
            raise InvalidValue(unknown("study", str(study), study_names(), "or give a .toml file"))
        return source, parse_toml(text, source)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read the study {study}: {getattr(error, 'strerror', None) or error}") from error
