"""``load``: from a name or a path to a data set."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, InvalidValue, unknown
from dropmax.workbench.data.catalogue import NAMES, data_directory, find, must_find, source_of
from dropmax.workbench.data.cifar import read_cifar10, read_cifar100, refuse_pickles
from dropmax.workbench.data.dataset import Dataset
from dropmax.workbench.data.functions import is_function, read_function
from dropmax.workbench.data.mnist import DIGITS, FILES, embedded_digits, find_mnist, read_55k
from dropmax.workbench.data.parts import Part, Parts, assemble

__all__ = ["load"]

_READABLE = "an image folder or a .npz, .csv or .parquet file"


def load(
    name_or_path: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    train_size: int | None = None,
    validation_size: int | None = None,
    image_size: int | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    test: str | os.PathLike[str] | None = None,
    backbone: str | None = None,
    text_column: str | None = None,
) -> Dataset:
    """Load a data set by one of the :data:`NAMES`, or from the path of an image folder or .npz, .csv, .parquet file.

    Args:
        name_or_path: the name or path; a name wins over a file of that name, ``./name`` is the file.
        data_dir: where named sets are; by default ``$DROPMAX_DATA``, or else ``data`` in the cache directory.
        seed: chooses the rows that are trained and validated on, where there is a choice; never those tested on.
        train_size: train on this many rows only, the classes as even as they can be.
        validation_size: validate on this many rows; by default the publisher's or, where there is no such part, 10 %
            of the training part, each class giving its share. 0 means none.
        image_size: for image folders, the side in pixels of the square the network sees; 64 by default.
        label_column: for .csv and .parquet tables, the column of labels; ``label`` by default.
        id_column: for these tables, a column that names the rows and is not a feature.
        test: the path of a second folder or file with the test part, for data of your own that has none. Its columns
            are matched by name, its labels must be among the training classes.
        backbone: for a folder of images or a table of texts of your own, the pretrained network to turn them into
            features with (:func:`dropmax.workbench.backbones.load_backbone`). The features are kept in the cache.
        text_column: with ``backbone``, the column of texts of a .csv, .tsv, .parquet or .jsonl table.

    >>> digits = load("mnist-1k", seed=1)
    >>> digits.train.inputs.shape, digits.train.labels.bincount().tolist()
    (torch.Size([1000, 1, 28, 28]), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    >>> load("cifar10")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dropmax.errors.DataError: unknown data set 'cifar10': did you mean 'cifar-10'? Valid are mnist-1k, ...
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    is_table = name not in NAMES and path.suffix.lower() in (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
    is_folder = name in ("cub", "awa", "awa2") or (name not in NAMES and os.path.isdir(path))
    for option, value in (("label_column", label_column), ("id_column", id_column)):
        if value is not None and not is_table:
            raise InvalidValue(f"{option} is for .csv and .parquet tables, not for {name}")
    if test is not None and name in NAMES:
        raise InvalidValue(f"{name} has a test part of its own: leave out the separate test data {os.fspath(test)}")
    if image_size is not None and not is_folder:
        raise InvalidValue(f"image_size is for image folders; the size of {name} is what it is")
    if text_column is not None and backbone is None:
        raise InvalidValue("text_column needs a backbone that turns texts into features, such as wordllama")
    if backbone is not None:
        if test is not None or image_size is not None or name in NAMES:
            raise InvalidValue("backbone is for a folder or table of your own, without test or image_size")
        parts = _embedded(path, backbone, text_column, label_column or "label", id_column)
    elif name in NAMES:
        if name in ("mnist-1k", "cifar-100-5k") and train_size is None:
            train_size = NAMES[name].sizes[0]
        parts = _read_named(name, data_directory(data_dir), image_size)
    else:
        parts = _read_path(name, path, image_size, label_column or "label", id_column or "")
    if test is not None:
        parts = _with_test(parts, name, Path(test).expanduser(), label_column or "label", id_column or "")
    return assemble(name, parts, seed=seed, train_size=train_size, validation_size=validation_size)


def _read_named(name: str, data_dir: Path, image_size: int | None) -> Parts:
    if name in ("mnist-1k", "mnist-5k"):
        # Always from the package, even where the official files are present: a result must not depend on that.
        digits = embedded_digits()
        return Parts(
            train=_digits(digits.train_images, digits.train_labels),
            validation=_digits(digits.validation_images, digits.validation_labels),
            test=_digits(digits.test_images, digits.test_labels),
            classes=DIGITS,
        )
    source = source_of(name)
    if source in ("cifar-10", "cifar-100") and find(source, data_dir)[0] is None:
        refuse_pickles(source, data_dir)
    folder = must_find(name, data_dir)
    if name in ("mnist", "mnist-55k"):
        files = find_mnist(data_dir)
        missing = [f"{part}-idx{dimensions}-ubyte.gz" for part, dimensions in FILES.items() if part not in files]
        if missing:
            raise DataError(f"{folder} lacks {', '.join(missing)}: run `dropmax data fetch mnist`")
        train, validation, test = (_digits(*arrays) for arrays in read_55k(files))
        return Parts(train, DIGITS, validation, test)
    if source == "cifar-10":
        return read_cifar10(folder)
    if source == "cifar-100":
        return read_cifar100(folder)
    from dropmax.workbench.data.folders import (
        list_awa,
        list_awa2,
        list_cub,
        read_listing,
    )  # brings Pillow, which the others do not need

    listing = {"cub": list_cub, "awa": list_awa, "awa2": list_awa2}[name](folder)
    return read_listing(listing, image_size)


def _embedded(path: Path, backbone: str, text: str | None, label_column: str, id_column: str | None) -> Parts:
    """Read the features a pretrained network has for a folder or table, computing them where the cache has none."""
    from dropmax.workbench.backbones import load_backbone
    from dropmax.workbench.data.npz import read_npz
    from dropmax.workbench.embedding import cached_features, find_source

    source = find_source(path, text=text, label=label_column, id_column=id_column)
    file, left_out = cached_features(source, load_backbone(backbone, source.kind))
    parts = read_npz(file)
    notes = [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    shown = [*notes[:20], *([f"and {len(notes) - 20:,} more were left out"] if len(notes) > 20 else [])]
    return dataclasses.replace(parts, notes=(*parts.notes, *shown))


def _with_test(parts: Parts, name: str, path: Path, label_column: str, id_column: str) -> Parts:
    """Add the test part that lies in another folder or file, read as a model of these classes would read it."""
    from dropmax.workbench.data.unlabelled import Expected, read_labelled

    if parts.test is not None:
        raise InvalidValue(f"{name} has a test part of its own: leave out the separate test data {path}")
    shape = parts.train.inputs.shape[1:]
    seen = shape if parts.crop is None else (shape[0], parts.crop, parts.crop)
    notes: list[str] = []
    stored = shape[-1] if len(shape) == 3 else 0
    expected = Expected(seen, stored, parts.columns, parts.classes, label_column, id_column)
    part, _ = read_labelled(path, expected, notes.append)
    return dataclasses.replace(parts, test=part, notes=(*parts.notes, *notes))


def _read_path(name: str, path: Path, image_size: int | None, label_column: str, id_column: str) -> Parts:
    if os.path.isdir(path):
        from dropmax.workbench.data.folders import list_folder, read_listing

        return read_listing(list_folder(path), image_size)
    if is_function(name):
        return read_function(name)
    readers = {".npz", ".csv", ".parquet"}
    if not os.path.exists(path):
        if path.suffix.lower() in readers or len(path.parts) > 1:
            raise DataError(f"{path} does not exist: give the path of {_READABLE}, or one of {', '.join(NAMES)}")
        raise DataError(unknown("data set", name, NAMES, f"anything else must be the path of {_READABLE}"))
    from dropmax.workbench.data.tables import read_npz, read_table

    if path.suffix.lower() == ".npz":
        return read_npz(path)
    if path.suffix.lower() in (".csv", ".parquet"):
        return read_table(path, label_column, id_column)
    raise DataError(f"{path} is of a kind that cannot be read: give {_READABLE}")


def _digits(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Part:
    return Part(images[:, None], labels.astype(np.int64))
