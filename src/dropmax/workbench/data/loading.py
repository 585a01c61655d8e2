"""``load``: from a name, a path or a function of yours to a data set.

A function is named ``package.module:function``. It takes no arguments and returns ``(inputs, labels)``, or a dictionary
with ``train`` and, as far as there are any, ``validation`` and ``test``, each ``(inputs, labels)``, and ``classes``,
their names. Inputs are arrays (n, features) or uint8 images (n, channels, height, width); labels are integers from 0.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dropmax.errors import DataError, InvalidValue, unknown
from dropmax.imports import load_module
from dropmax.workbench.backbones import load_backbone
from dropmax.workbench.data.catalogue import NAMES, data_directory, find, must_find, source_of
from dropmax.workbench.data.cifar import read_cifar10, read_cifar100, refuse_pickles
from dropmax.workbench.data.dataset import Dataset, Part, Parts, assemble
from dropmax.workbench.data.folders import Listing, list_awa, list_awa2, list_cub, list_folder, read_listing
from dropmax.workbench.data.mnist import read_55k, read_embedded
from dropmax.workbench.data.npz import check_inputs, read_npz
from dropmax.workbench.data.tables import read_table
from dropmax.workbench.data.unlabelled import Expected, read_labelled

_READABLE = "an image folder or a .npz, .csv or .parquet file"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_EXPECTED = "the function must return (inputs, labels), or a dictionary of such pairs with train, validation, test"


@dataclasses.dataclass(frozen=True)
class _Own:
    """How to read the user's own folder or file."""

    image_size: int | None = None  #: of a folder
    label_column: str | None = None  #: of a table
    id_column: str | None = None  #: of a table: it names the rows, and is no feature
    test: str | os.PathLike[str] | None = None  #: columns are matched by name, labels must be among those of training
    backbone: str | None = None  #: turns images or texts into features, which the cache keeps
    text_column: str | None = None  #: of a .csv, .tsv, .parquet or .jsonl table, with backbone


def load(
    name_or_path: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    train_size: int | None = None,
    validation_size: int | None = None,
    **own: Any,
) -> Dataset:
    """Load a data set by one of the :data:`NAMES`, or from the path of an image folder or .npz, .csv, .parquet file.

    Args:
        name_or_path: the name or path; a name wins over a file of that name, ``./name`` is the file.
        data_dir: where named sets are; by default ``$DROPMAX_DATA``, or else ``data`` in the cache directory.
        seed: chooses the rows that are trained and validated on, where there is a choice; never those tested on.
        train_size: train on this many rows only, the classes as even as they can be.
        validation_size: validate on this many rows, 0 for none; by default the publisher's, or else 10 % of the
            training part, each class giving its share.
        own: for data of your own, ``image_size`` (the side in pixels of the square the network sees, 64), the
            ``label_column`` ("label") and ``id_column`` of a table, ``test`` (the path of the test part, for data that
            has none), and ``backbone`` with ``text_column``, see :func:`dropmax.workbench.backbones.load_backbone`.

    >>> digits = load("mnist-1k", seed=1)
    >>> digits.train.inputs.shape, digits.train.labels.bincount().tolist()
    (torch.Size([1000, 1, 28, 28]), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    >>> load("cifar10")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dropmax.errors.DataError: unknown data set 'cifar10': did you mean 'cifar-10'? Valid are mnist-1k, ...
    """
    name, options = os.fspath(name_or_path), _Own(**own)
    path = Path(name).expanduser()
    _check_options(name, path, options)
    if options.backbone is not None:
        parts = _read_features(path, options)
    elif name in NAMES:
        if name in ("mnist-1k", "cifar-100-5k") and train_size is None:
            train_size = NAMES[name].sizes[0]
        parts = _read_named(name, data_directory(data_dir), options.image_size)
        if name.startswith("deic-"):
            parts = _data_efficient(name, parts, whole=validation_size == 0)
    else:
        parts = _read_path(name, path, options)
    if options.test is not None:
        parts = _with_test(name, parts, Path(options.test).expanduser(), options)
    return assemble(name, parts, seed=seed, train_size=train_size, validation_size=validation_size)


def _check_options(name: str, path: Path, options: _Own) -> None:
    is_table = name not in NAMES and path.suffix.lower() in (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
    is_folder = name in ("cub", "awa", "awa2") or (name not in NAMES and os.path.isdir(path))
    for option in ("label_column", "id_column"):
        if getattr(options, option) is not None and not is_table:
            raise InvalidValue(f"{option} is for .csv and .parquet tables, not for {name}")
    if options.test is not None and name in NAMES:
        raise _has_test(name, options.test)
    if options.image_size is not None and not is_folder:
        raise InvalidValue(f"image_size is for image folders; the size of {name} is fixed")
    if options.backbone is None:
        if options.text_column is not None:
            raise InvalidValue("text_column needs a backbone that turns texts into features, such as wordllama")
    elif options.test is not None or options.image_size is not None or name in NAMES:
        raise InvalidValue("backbone is for a folder or table of your own, without test or image_size")


def _has_test(name: str, test: str | os.PathLike[str]) -> InvalidValue:
    return InvalidValue(f"{name} has a test part of its own: leave out the separate test data {os.fspath(test)}")


def _read_named(name: str, data_dir: Path, image_size: int | None) -> Parts:
    source = source_of(name)
    if source is None:
        # Always from the package, even where the official files are present: a result must not depend on that.
        return read_embedded()
    if source.startswith("cifar") and find(source, data_dir)[0] is None:
        refuse_pickles(source, data_dir)
    folder = must_find(name, data_dir)
    if source == "mnist":
        return read_55k(data_dir)
    if source.startswith("cifar"):
        return read_cifar10(folder) if source == "cifar-10" else read_cifar100(folder)
    return read_listing(list_images(source, folder), image_size)


def _data_efficient(name: str, parts: Parts, *, whole: bool) -> Parts:
    """Return the split of the data-efficient benchmark (Brigato et al., 2021, "deic") of a set with a test part.

    The first 30 images of each class to train on, and the next 20 to validate on; ``whole`` trains on all 50, as is
    done once everything has been chosen.
    """
    labels = parts.train.labels
    by_class = [np.flatnonzero(labels == k)[:50] for k in range(len(parts.classes))]
    if min(map(len, by_class)) < 50:
        few = min(range(len(by_class)), key=lambda k: len(by_class[k]))
        raise DataError(f"{name} needs 50 training images of each class; {parts.classes[few]} has {len(by_class[few])}")
    first, last = (np.sort(np.concatenate([rows[part] for rows in by_class])) for part in (slice(30), slice(30, 50)))
    if whole:
        return dataclasses.replace(parts, train=parts.train.rows(np.sort(np.concatenate([first, last]))))
    return dataclasses.replace(parts, train=parts.train.rows(first), validation=parts.train.rows(last))


def list_images(source: str, folder: Path) -> Listing:
    """List the images of a source that is a folder of them."""
    return {"cub": list_cub, "awa": list_awa, "awa2": list_awa2}[source](folder)


def _read_path(name: str, path: Path, options: _Own) -> Parts:
    suffix = path.suffix.lower()
    if os.path.isdir(path):
        return read_listing(list_folder(path), options.image_size)
    if is_function(name):
        return read_function(name)
    if not os.path.exists(path):
        if suffix in (".npz", ".csv", ".parquet") or len(path.parts) > 1:
            raise DataError(f"{path} does not exist: give the path of {_READABLE}, or one of {', '.join(NAMES)}")
        raise DataError(unknown("data set", name, NAMES, f"anything else must be the path of {_READABLE}"))
    if suffix == ".npz":
        return read_npz(path)
    if suffix in (".csv", ".parquet"):
        return read_table(path, options.label_column or "label", options.id_column or "")
    raise DataError(f"{path} is of a kind that cannot be read: give {_READABLE}")


def _read_features(path: Path, options: _Own) -> Parts:
    """Read the features a pretrained network has for a folder or table, computing them where the cache has none."""
    from dropmax.workbench.embedding import cached_features, find_source, name_some  # which imports this package

    label = options.label_column or "label"
    source = find_source(path, text=options.text_column, label=label, id_column=options.id_column)
    file, left_out = cached_features(source, load_backbone(options.backbone or "", source.kind))
    parts = read_npz(file)
    return dataclasses.replace(parts, notes=(*parts.notes, *name_some(left_out)))


def _with_test(name: str, parts: Parts, path: Path, options: _Own) -> Parts:
    """Add the test part of another folder or file, read as a model of these classes would read it."""
    if parts.test is not None:
        raise _has_test(name, path)
    shape = parts.train.inputs.shape[1:]
    seen = shape if parts.crop is None else (shape[0], parts.crop, parts.crop)
    stored = shape[-1] if len(shape) == 3 else 0
    columns = parts.columns, parts.classes, options.label_column or "label", options.id_column or ""
    notes: list[str] = []
    part = read_labelled(path, Expected(seen, stored, *columns), notes.append)
    return dataclasses.replace(parts, test=part, notes=(*parts.notes, *notes))


# --- data that a function of yours returns ---------------------------------------------------------------------------


def is_function(name: str) -> bool:
    """Say whether a name of data is that of a function, such as ``mine.data:birds``."""
    return _FUNCTION.fullmatch(name) is not None


def import_data(name: str) -> None:
    """Import the module of such a function, which runs it: only names from people you trust should come here."""
    load_module("data", name)


def read_function(name: str) -> Parts:
    """Call a function whose module is imported already, and check what it returns."""
    module_name, _, function_name = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        raise DataError(
            f"the data {name!r} is what a function returns, and its module is not imported: import {module_name} first "
            "if you trust it (dropmax reproduce does, for data you name yourself or with --trust-code)"
        )
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidValue(f"data {name!r}: {module_name} has no function {function_name!r}")
    try:
        found = function()
    except Exception as error:
        last = (str(error).splitlines() or [""])[-1]
        raise DataError(f"data {name!r}: the function failed ({type(error).__name__}: {last})") from error
    try:
        return _parts(found)
    except DataError as error:
        raise DataError(f"data {name!r}: {error}") from None


def _parts(found: Any) -> Parts:
    pairs = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in pairs or set(pairs) - {"train", "validation", "test", "classes"}:
        raise DataError(f"{_EXPECTED}, got a dictionary with {', '.join(map(repr, pairs)) or 'nothing'}")
    given = pairs.pop("classes", None)
    parts = {key: _part(key, pair) for key, pair in pairs.items() if pair is not None or key == "train"}
    shape = parts["train"].inputs.shape[1:]
    for key, part in parts.items():
        if part.inputs.shape[1:] != shape:
            raise DataError(f"inputs of {key} have shape {part.inputs.shape[1:]}, of train {shape}")
    count = 1 + max(int(part.labels.max()) for part in parts.values())
    classes = tuple(map(str, given or range(count)))
    if len(classes) < count:
        raise DataError(f"it names {len(classes)} classes, and has labels up to {count - 1}")
    return Parts(parts["train"], classes, parts.get("validation"), parts.get("test"))


def _part(key: str, pair: Any) -> Part:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{_EXPECTED}; {key} is a {type(pair).__name__}")
    inputs, labels = (np.asarray(value) for value in pair)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or int(labels.min()) < 0:
        raise DataError(f"the labels of {key} must be integers from 0, one per row")
    if inputs.ndim not in (2, 4) or len(inputs) != len(labels):
        raise DataError(
            f"the inputs of {key} must be numbers of shape (n, features), or images of shape (n, channels, height, "
            f"width), one row per label; got {inputs.dtype} of shape {inputs.shape} for {len(labels)} labels"
        )
    return Part(check_inputs("its result", f"inputs of {key}", inputs), labels.astype(np.int64))
