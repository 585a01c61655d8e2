"""``load``: from a name or a path to a data set."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropmax.errors import DataError, InvalidValue, unknown
from dropmax.workbench.data.catalogue import NAMES, data_directory, find, must_find, source_of
from dropmax.workbench.data.cifar import read_cifar10, read_cifar100, refuse_pickles
from dropmax.workbench.data.dataset import Dataset
from dropmax.workbench.data.functions import is_function, read_function
from dropmax.workbench.data.mnist import read_55k, read_embedded
from dropmax.workbench.data.splits import Parts, assemble

if TYPE_CHECKING:
    from dropmax.workbench.data.folders import Listing

_READABLE = "an image folder or a .npz, .csv or .parquet file"


@dataclasses.dataclass(frozen=True)
class _Own:
    """How to read the user's own folder or file."""

    image_size: int | None = None
    label_column: str | None = None
    id_column: str | None = None
    test: str | os.PathLike[str] | None = None
    backbone: str | None = None
    text_column: str | None = None


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
        validation_size: validate on this many rows; by default the publisher's or, where there is no such part, 10 %
            of the training part, each class giving its share. 0 means none.
        own: for data of your own:

            - ``image_size``: of a folder, the side in pixels of the square the network sees; 64 by default.
            - ``label_column``, ``id_column``: of a table, the column of labels, by default ``label``, and one that
              names the rows and is not a feature.
            - ``test``: the path of a second folder or file with the test part, for data that has none. Its columns
              are matched by name, its labels must be among the training classes.
            - ``backbone``: the pretrained network that turns images or texts into features, which the cache keeps
              (:func:`dropmax.workbench.backbones.load_backbone`).
            - ``text_column``: with ``backbone``, the column of texts of a .csv, .tsv, .parquet or .jsonl table.

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
    else:
        parts = _read_path(name, path, options)
    if options.test is not None:
        parts = _with_test(name, parts, Path(options.test).expanduser(), options)
    return assemble(name, parts, seed=seed, train_size=train_size, validation_size=validation_size)


def _check_options(name: str, path: Path, options: _Own) -> None:
    """Refuse options that this kind of data has no use for."""
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
    if source in ("cifar-10", "cifar-100") and find(source, data_dir)[0] is None:
        refuse_pickles(source, data_dir)
    folder = must_find(name, data_dir)
    if source == "mnist":
        return read_55k(data_dir)
    if source == "cifar-10":
        return read_cifar10(folder)
    if source == "cifar-100":
        return read_cifar100(folder)
    from dropmax.workbench.data.folders import read_listing  # brings Pillow, which the others do not need

    return read_listing(list_images(source, folder), image_size)


def list_images(source: str, folder: Path) -> Listing:
    """List the images of a source that is a folder of them."""
    from dropmax.workbench.data import folders

    return {"cub": folders.list_cub, "awa": folders.list_awa, "awa2": folders.list_awa2}[source](folder)


def _read_path(name: str, path: Path, options: _Own) -> Parts:
    suffix = path.suffix.lower()
    if os.path.isdir(path):
        from dropmax.workbench.data.folders import list_folder, read_listing

        return read_listing(list_folder(path), options.image_size)
    if is_function(name):
        return read_function(name)
    if not os.path.exists(path):
        if suffix in (".npz", ".csv", ".parquet") or len(path.parts) > 1:
            raise DataError(f"{path} does not exist: give the path of {_READABLE}, or one of {', '.join(NAMES)}")
        raise DataError(unknown("data set", name, NAMES, f"anything else must be the path of {_READABLE}"))
    if suffix == ".npz":
        from dropmax.workbench.data.npz import read_npz

        return read_npz(path)
    if suffix in (".csv", ".parquet"):
        from dropmax.workbench.data.tables import read_table

        return read_table(path, options.label_column or "label", options.id_column or "")
    raise DataError(f"{path} is of a kind that cannot be read: give {_READABLE}")


def _read_features(path: Path, options: _Own) -> Parts:
    """Read the features a pretrained network has for a folder or table, computing them where the cache has none."""
    from dropmax.workbench.backbones import load_backbone
    from dropmax.workbench.data.npz import read_npz
    from dropmax.workbench.embedding import cached_features, find_source, name_some

    source = find_source(
        path, text=options.text_column, label=options.label_column or "label", id_column=options.id_column
    )
    file, left_out = cached_features(source, load_backbone(options.backbone or "", source.kind))
    parts = read_npz(file)
    return dataclasses.replace(parts, notes=(*parts.notes, *name_some(left_out)))


def _with_test(name: str, parts: Parts, path: Path, options: _Own) -> Parts:
    """Add the test part that lies in another folder or file, read as a model of these classes would read it."""
    from dropmax.workbench.data.unlabelled import Expected, read_labelled

    if parts.test is not None:
        raise _has_test(name, path)
    shape = parts.train.inputs.shape[1:]
    seen = shape if parts.crop is None else (shape[0], parts.crop, parts.crop)
    notes: list[str] = []
    stored = shape[-1] if len(shape) == 3 else 0
    columns = options.label_column or "label", options.id_column or ""
    part = read_labelled(path, Expected(seen, stored, parts.columns, parts.classes, *columns), notes.append)
    return dataclasses.replace(parts, test=part, notes=(*parts.notes, *notes))
