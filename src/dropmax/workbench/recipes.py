"""Recipes: everything that decides a run, in a small TOML file. Those of the package are in ``recipes.toml``.

A recipe has four tables. ``[data]`` and ``[training]`` hold the fields below; ``[network]`` and ``[head]`` hold a
``name`` and the options of that network or head. ``[heads.NAME]`` may hold options that apply when that head is
chosen, so that one recipe serves all eight.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from dropmax.errors import InvalidType, InvalidValue, unknown
from dropmax.imports import locate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What a value may be, beside its type in ``Annotated``."""

    least: int | None = None
    positive: bool | None = None  #: finite, and above 0 or not below it
    choices: tuple[str, ...] = ()

    def check(self, source: str, name: str, value: Any) -> None:
        """Refuse a value that could only fail later, or worse, succeed."""
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices and item not in self.choices:
                raise InvalidValue(f"{source}: {unknown(name, item, self.choices)}")
        if self.least is not None and value < self.least:
            raise InvalidValue(f"{source}: {name} must be at least {self.least}, got {value}")
        if self.positive is not None and not (0 < value < math.inf or (value == 0 and not self.positive)):
            bound = "above" if self.positive else "not below"
            raise InvalidValue(f"{source}: {name} must be finite and {bound} 0, got {value}")


_Count = Annotated[int, _Limits(least=1)]
_Size = Annotated[int, _Limits(least=0)]
_Positive = Annotated[float, _Limits(positive=True)]
_NotNegative = Annotated[float, _Limits(positive=False)]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """``[data]``: what to learn from."""

    name: str  #: a known data set, or the path of a folder or file
    augment: Annotated[str, _Limits(choices=("none", "crop-flip", "resize-crop-flip"))] = "none"
    standardise: bool = True  #: whether to give each channel mean 0 and deviation 1; otherwise pixels are in [0, 1]
    image_size: _Size = 0  #: side of the images for data sets of differing sizes; 0 takes the data set's default
    train_size: _Size = 0  #: use this many training examples; 0 means all
    #: hold this many out; 0 means none, -1 takes the data set's default
    validation_size: Annotated[int, _Limits(least=-1)] = -1
    label_column: str = ""  #: of .csv and .parquet tables; "label" by default
    id_column: str = ""  #: of these tables: names the rows, and is no feature
    test: str = ""  #: path of a second folder or file with the test part; for data of your own
    backbone: str = ""  #: pretrained network that turns images or texts of your own into features
    text_column: str = ""  #: with backbone: the column of texts


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """``[training]``: how to learn.

    >>> TrainingOptions(epochs=100, milestones=(0.5, 0.75)).learning_rate_at(80)
    1e-05
    """

    epochs: _Count = 100
    batch_size: _Count = 128
    #: steps per epoch, at least: where rows are few, batches are smaller, down to 16 rows
    least_steps: _Count = 1
    #: "adam" has weight decay as an L2 penalty
    optimizer: Annotated[str, _Limits(choices=("adam", "adamw", "sgd"))] = "adam"
    learning_rate: _Positive = 1e-3
    momentum: _NotNegative = 0.9  #: of sgd
    schedule: Annotated[str, _Limits(choices=("step", "cosine"))] = "step"
    milestones: tuple[float, ...] = ()  #: shares of the epochs after which the rate is multiplied by decay_factor
    decay_factor: _Positive = 0.1
    weight_decay: _NotNegative = 0.0
    #: parameter groups of the head without weight decay
    decay_exempt: Annotated[tuple[str, ...], _Limits(choices=("psi", "theta", "phi"))] = ("theta",)
    decay_biases: bool = True  #: whether weight decay is also of biases and batch norms
    mixup: _NotNegative = 0.0  #: both parameters of the Beta distribution that mixes pairs of inputs; 0 mixes none
    #: weights the head starts from (:func:`dropmax.workbench.networks.common.initialise_head`)
    head_init: Annotated[str, _Limits(choices=("default", "glorot", "truncated-normal"))] = "default"
    clip_norm: _NotNegative = 0.0  #: largest norm of the gradient; 0 means no clipping
    #: the last two are autocast
    precision: Annotated[str, _Limits(choices=("float32", "bfloat16", "float16"))] = "float32"
    channels_last: bool = False
    compile: bool = False
    validate_every: _Count = 1  #: epochs between measurements on the validation set
    calibrate: bool = True  #: whether to fit temperatures on the validation set at the end
    #: end after so many epochs without a lower validation NLL, and keep the best epoch; 0 trains them all
    patience: _Size = 0
    pretrained_rate: _Positive = 0.1  #: share of the learning rate for unfrozen blocks of a pretrained network
    refit: bool = False  #: whether to train once more at the end, on training and validation rows together
    checkpoint_seconds: _NotNegative = 20.0  #: least time between checkpoints; the last epoch always makes one
    seed: _Size = 0

    def rows_per_step(self, num_rows: int, processes: int = 1) -> int:
        """Return the batch size for this many training rows, which each of the processes has its share of.

        >>> TrainingOptions(batch_size=128, least_steps=10).rows_per_step(500)
        50
        """
        return min(self.batch_size, max(16, num_rows // self.least_steps) // processes * processes)

    def learning_rate_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        passed = sum(epoch >= round(share * self.epochs) for share in self.milestones)
        return float(f"{self.learning_rate * self.decay_factor**passed:.12g}")  # 1e-5, not 1.0000000000000003e-05


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole run: data, network, head, training.

    >>> recipe = load_recipe("mnist-1k", "released")
    >>> recipe.head["name"], recipe.network["name"], recipe.training.epochs
    ('dropmax', 'lenet', 200)
    >>> recipe.override({"head.name": "softmax", "training.epochs": 5}).head
    {'name': 'softmax'}
    """

    data: DataOptions
    network: dict[str, Any]
    head: dict[str, Any]
    training: TrainingOptions
    heads: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def imports_code(self) -> bool:
        """Whether its network or head is a class to import, ``package.module:Class``."""
        return any(":" in table["name"] for table in (self.network, self.head))

    def findable(self) -> Recipe:
        """Return the recipe with the user's own network and head named so that any process finds them."""
        from dropmax.heads import findable_name

        network = {**self.network, "name": locate(self.network["name"])}
        return dataclasses.replace(self, network=network, head={**self.head, "name": findable_name(self.head["name"])})

    def override(self, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with some values replaced, by dotted names such as ``training.epochs``.

        Choosing another head drops the options of the one before and takes those under ``[heads.NAME]``.
        """
        tables = {**self.to_dict(), "heads": self.heads}
        for dotted, value in sorted(values.items(), key=lambda item: not item[0].endswith(".name")):
            table, _, key = dotted.partition(".")
            if table not in ("data", "network", "head", "training") or not key:
                tables_of = "data.KEY, network.KEY, head.KEY or training.KEY"
                raise InvalidValue(f"cannot set {dotted!r}: name a value as {tables_of}")
            if table in ("head", "network") and key == "name" and tables[table]["name"] != value:
                tables[table] = {"name": value}  # the options of that head come from [heads]
            else:
                tables[table][key] = value
        return recipe_from_dict(tables, "the command line")

    def to_dict(self) -> dict[str, Any]:
        """Return the tables of the resolved recipe."""
        found = dataclasses.asdict(self)
        del found["heads"]
        return found

    def to_toml(self) -> str:
        """Return the resolved recipe as TOML; :func:`load_recipe` reads it back.

        >>> print(load_recipe("mnist-1k").to_toml()[:24])
        [data]
        name = "mnist-1k"
        """
        lines = []
        for table, values in self.to_dict().items():
            lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
        return "\n".join(lines)


def recipe_names() -> list[str]:
    """Return the recipes that come with the package, as ``data.variant``.

    >>> "mnist-1k.released" in recipe_names()
    True
    """
    return sorted(_built_in())


@functools.cache
def _built_in() -> dict[str, dict[str, Any]]:
    """Return the tables of every recipe of the package; one ``like`` another has what it does not change."""
    found: dict[str, dict[str, Any]] = {}
    text = resources.files("dropmax.workbench").joinpath("recipes.toml").read_text(encoding="utf-8")
    for name, changed in parse_toml(text, "recipes.toml").items():
        tables = copy.deepcopy(found[changed.pop("like")]) if "like" in changed else {}
        for table, values in changed.items():
            is_another = table == "network" and "name" in values
            tables[table] = values if is_another else {**tables.get(table, {}), **values}
        found[name] = tables
    return found


def find_recipe(data: str, variant: str | None = None) -> str:
    """Return the full name of the recipe for a data set; ``released`` where there is one, else ``paper``, ``small``.

    >>> find_recipe("mnist-1k"), find_recipe("cub"), find_recipe("cub-64")
    ('mnist-1k.released', 'cub.paper', 'cub-64.small')
    """
    names = recipe_names()
    if data in names and variant is None:
        return data
    variants = [name.partition(".")[2] for name in names if name.partition(".")[0] == data]
    if not variants:
        known = sorted({name.partition(".")[0] for name in names if not name.startswith("own-")})
        raise InvalidValue(unknown("data set", data, known, "for your own data, give the path of a folder or file"))
    if variant is None:
        variant = next((name for name in ("released", "paper", "small") if name in variants), variants[0])
    elif variant not in variants:
        raise InvalidValue(unknown(f"recipe for {data}", variant, variants))
    return f"{data}.{variant}"


def is_known(data: str) -> bool:
    """Say whether a recipe that comes with the package is for this data set, rather than for the user's own data.

    >>> is_known("mnist-1k"), is_known("mnist-1k.npz")
    (True, False)
    """
    return any(data in (name, name.partition(".")[0]) for name in recipe_names() if not name.startswith("own-"))


def recipe_for(data: str, variant: str | None = None) -> tuple[str, Recipe]:
    """Return the full name of the recipe for a data set, or for the user's own folder or file, and the recipe.

    >>> name, recipe = recipe_for("mnist-1k")
    >>> name, recipe.data.name
    ('mnist-1k.released', 'mnist-1k')
    >>> recipe_for("no-such-file.csv")
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: no-such-file.csv does not exist: give the path of a folder of images, .npz, ...
    """
    path = Path(data).expanduser()
    is_table = path.suffix.lower() in (".npz", ".csv", ".parquet")
    is_own = not is_known(data) and (path.exists() or is_table or len(path.parts) > 1)
    if not is_own:
        full_name = find_recipe(data, variant)
        return full_name, load_recipe(full_name)
    if not path.exists():
        raise InvalidValue(f"{data} does not exist: give the path of a folder of images, .npz, .csv or .parquet")
    if not path.is_dir() and not is_table:
        raise InvalidValue(f"{data} is of a kind that cannot be read: give a folder of images, .npz, .csv or .parquet")
    full_name = find_recipe("own-images" if path.is_dir() else "own-features", variant)
    return full_name, load_recipe(full_name).override({"data.name": data})


def load_recipe(name: str | Path, variant: str | None = None) -> Recipe:
    """Load a recipe that comes with the package by the name of its data set, or a TOML file by its path.

    >>> load_recipe("cifar-100").network["name"]
    'cifar-resnet'
    """
    if str(name).endswith(".toml"):
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
        return recipe_from_dict(parse_toml(text, str(path)), str(path))
    full_name = find_recipe(str(name), variant)
    return recipe_from_dict(copy.deepcopy(_built_in()[full_name]), full_name)


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML that may come from anybody; ``source`` is named in the error.

    >>> parse_toml("a = ", "mine.toml")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: mine.toml is not valid TOML: ...
    """
    try:
        found: dict[str, Any] = tomllib.loads(text)
        _refuse_deep(found)
        return found
    except ValueError as error:  # also for numbers of thousands of digits
        raise InvalidValue(f"{source} is not valid TOML: {error}") from error
    except RecursionError:
        raise InvalidValue(f"{source} is nested too deep") from None


def _refuse_deep(value: Any, deep: int = 0) -> None:
    if deep > 20:
        raise RecursionError
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_deep(item, deep + 1)


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``training.epochs=5`` into a name and a TOML value; a value that is not TOML is taken as a string.

    >>> parse_override("training.epochs=5"), parse_override("head.name=softmax")
    (('training.epochs', 5), ('head.name', 'softmax'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InvalidValue(f"--set takes NAME=VALUE, such as training.epochs=5, not {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return name.strip(), value.strip()


def recipe_from_dict(tables: Mapping[str, Any], source: str) -> Recipe:
    """Check the tables of a recipe and fill in what they leave out; ``source`` is named in errors.

    >>> recipe_from_dict(load_recipe("mnist-1k").to_dict(), "a copy").training.batch_size
    100
    """
    known = ("data", "network", "head", "training", "heads")
    for table, values in tables.items():
        if table not in known:
            raise InvalidValue(f"{source}: {unknown('table', table, known)}")
        if not isinstance(values, Mapping):
            raise InvalidType(f"{source}: [{table}] must be a table, got {values!r}")
    for table in ("data", "network", "head"):
        if not isinstance(tables.get(table, {}).get("name"), str):
            raise InvalidValue(f"{source}: [{table}] needs a name")
    for name, options in tables.get("heads", {}).items():
        if not isinstance(options, Mapping):
            raise InvalidType(f"{source}: [heads.{name}] must be a table, got {options!r}")
    data = dict(tables["data"])
    former = {"name", "augment", "image_size", "train_size", "validation_size", "label_column"}
    if data.keys() >= former and "id_column" not in data and data["validation_size"] == 0:
        data["validation_size"] = -1  # a stored recipe of a version in which 0 stood for the data set's default
    heads = {name: dict(options) for name, options in tables.get("heads", {}).items()}
    name = tables["head"]["name"]
    recipe = Recipe(
        data=_fill(DataOptions, data, "data", source),
        network=dict(tables["network"]),
        head={"name": name, **heads.get(name, {}), **tables["head"]},
        training=_fill(TrainingOptions, tables.get("training", {}), "training", source),
        heads=heads,
    )
    for table, options in {"network": recipe.network, "head": recipe.head, **heads}.items():
        for key, value in options.items():
            if not (key.isidentifier() and key.isascii()):
                raise InvalidValue(f"{source}: {table}.{key!r} is not the name of an option")
            _refuse_strange(value, f"{source}: {table}.{key}")
    shares = recipe.training.milestones
    if any(not 0 < share < 1 for share in shares):
        raise InvalidValue(f"{source}: training.milestones are shares of the epochs between 0 and 1, got {[*shares]}")
    return recipe


def _refuse_strange(value: Any, where: str) -> None:
    """Options are what a recipe can be written out with again: no dates, no tables."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _refuse_strange(item, where)
    elif not isinstance(value, (str, int, float, bool)):
        raise InvalidType(f"{where} must be a string, a number, true or false, or a list of these, got {value!r}")


def _fill(cls: type[Any], values: Mapping[str, Any], table: str, source: str) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    filled = {}
    for key, value in values.items():
        if key not in hints:
            raise InvalidValue(f"{source}: {unknown(f'key of [{table}]', key, hints)}")
        limits: _Limits | None = next(iter(getattr(hints[key], "__metadata__", ())), None)
        kind = hints[key] if limits is None else get_args(hints[key])[0]
        filled[key] = _coerce(kind, value, f"{source}: {table}.{key}")
        if limits is not None:
            limits.check(source, f"{table}.{key}", filled[key])
    return cls(**filled)


def _coerce(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else float("inf")
    if kind in (int, float, str, bool):
        if type(value) is not kind:
            name = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
            raise InvalidType(f"{where} must be {name}, got {value!r}")
        return value
    item = kind.__args__[0]  # tuple[item, ...]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidType(f"{where} must be a list, got {value!r}")
    return tuple(_coerce(item, element, where) for element in value)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # A JSON string, number or boolean is a TOML one; except that TOML wants the character 127 escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
