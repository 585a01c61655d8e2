"""Rows that a trained model, or a second table, must fit: image files, folders of them, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dropmax.errors import DataError
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.images import SUFFIXES, as_input, open_image, square
from dropmax.workbench.data.labels import encode_as
from dropmax.workbench.data.npz import npz_origin, read_npz_rows
from dropmax.workbench.data.parts import Part
from dropmax.workbench.data.tables import read_rows

__all__ = ["Expected", "find_inputs", "read_inputs", "read_labelled"]

TABLES = (".npz", ".csv", ".parquet")
_BATCH = 256


@dataclass(frozen=True)
class Expected:
    """What rows must look like for a model that was trained on others."""

    input_shape: tuple[int, ...]
    stored_size: int = 0  #: side images are scaled to before their centre is cropped; 0 for features
    columns: tuple[str, ...] = ()  #: names of the features, where the model was trained on a table with a header
    classes: tuple[str, ...] = ()
    label_column: str = "label"
    id_column: str = ""
    digits: bool = False  #: prepare image files as MNIST's digits were, see :mod:`dropmax.workbench.data.handwriting`
    origin: str = ""  #: the backbone that images or texts go through first, see ``backbones.Origin``
    text_column: str = ""  #: of tables of texts


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the files behind the paths, a folder standing for all images below it.

    >>> find_inputs([Path("no-such-file.png")])
    Traceback (most recent call last):
    dropmax.errors.DataError: no-such-file.png does not exist
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            images = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not images:
                raise DataError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))})")
            found += images
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path} does not exist")
    return found


def read_inputs(
    files: Sequence[Path],
    expected: Expected,
    tell: Callable[[str], None] = lambda note: None,
    texts: Sequence[str] = (),
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield names and raw inputs (uint8 images or float32 features), tables first.

    For a model behind a pretrained network (``expected.origin``), images, tables of texts and the sentences ``texts``
    go through that network first.

    An image is scaled and cropped at its centre, as in training; for a model of grey images it is turned grey, for one
    of MNIST's digits (``expected.digits``) prepared as those were. The rows of a table are named by their
    identifiers, or ``file:row``, counted from 1. ``tell`` is called with what the user should know, a line each.

    >>> list(read_inputs([], Expected((1, 28, 28), 28)))
    []
    """
    if expected.origin:
        yield from _embedded([file for file in files if file.suffix.lower() != ".npz"], texts, expected, tell)
        files = [file for file in files if file.suffix.lower() == ".npz"]
    images: list[Path] = []
    for file in files:
        if file.suffix.lower() in TABLES:
            values, names, _ = _table(file, expected, tell, labelled=False)
            for start in range(0, len(values), _BATCH):
                part = torch.from_numpy(np.ascontiguousarray(values[start : start + _BATCH]))
                numbers = range(start, start + len(part))
                yield [f"{file}:{i + 1}" if names is None else names[i] for i in numbers], part
        elif len(expected.input_shape) != 3:
            raise DataError(f"{file} is not a table, but the model takes features: give .npz, .csv or .parquet")
        else:
            images.append(file)
    for start in range(0, len(images), _BATCH):
        chunk = images[start : start + _BATCH]
        yield [str(file) for file in chunk], torch.stack([_image(file, expected) for file in chunk])


def _embedded(
    files: Sequence[Path], texts: Sequence[str], expected: Expected, tell: Callable[[str], None]
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield names and features of images, or of texts: those given, and those in tables."""
    from dropmax.workbench.backbones import reload_backbone
    from dropmax.workbench.data.texts import read_texts
    from dropmax.workbench.embedding import image_for

    if not files and not texts:
        return
    backbone = reload_backbone(expected.origin)
    if backbone.origin.kind == "images":
        for start in range(0, len(files), _BATCH):
            chunk = files[start : start + _BATCH]
            yield (
                [str(file) for file in chunk],
                backbone(torch.from_numpy(np.stack([image_for(file, backbone) for file in chunk]))),
            )
        return
    if texts:
        blank = next((text for text in texts if not text.strip()), None)
        if blank is not None:
            raise DataError(f"there is nothing in the text {blank!r}")
        yield list(texts), backbone(list(texts))
    for file in files:
        table = read_texts(file, expected.text_column or "text", id_column=expected.id_column or None)
        if table.left_out:
            tell(f"{file}: {len(table.left_out):,} rows have no text and get no answer: {spell(table.left_out)}")
        for start in range(0, len(table.texts), _BATCH):
            names = [f"{file}:{name.removeprefix('row ')}" for name in table.ids[start : start + _BATCH]]
            yield names, backbone(table.texts[start : start + _BATCH])


def read_labelled(
    path: Path, expected: Expected, tell: Callable[[str], None] = lambda note: None
) -> tuple[Part, tuple[str, ...] | None]:
    """Read rows with labels among ``expected.classes``; return them, and their names where they have any.

    A folder has one sub-folder per class, an .npz the arrays ``x`` and ``y`` (or ``x_test`` and ``y_test``), a table
    its label column.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "new.csv")
    >>> _ = path.write_text("width,label,length\\n3.5,rose,5.1\\n2,iris,4\\n")
    >>> part, names = read_labelled(path, Expected((2,), columns=("length", "width"), classes=("iris", "rose")))
    >>> part.inputs.tolist(), part.labels.tolist()
    ([[5.099999904632568, 3.5], [4.0, 2.0]], [1, 0])
    """
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if expected.origin and path.suffix.lower() != ".npz":
        return _labelled_features(path, expected, tell)
    if path.is_dir():
        return _labelled_folder(path, expected)
    if path.suffix.lower() not in TABLES:
        raise DataError(f"{path} is of a kind that cannot be read: give a folder of images, .npz, .csv or .parquet")
    values, names, labels = _table(path, expected, tell, labelled=True)
    if labels is None:
        raise DataError(f"{path} has no labels: an .npz needs the array y beside x (or y_test beside x_test)")
    encoded, note = encode_as(path, labels, expected.classes)
    if note:
        tell(note)
    return Part(values, encoded), names


def _labelled_features(
    path: Path, expected: Expected, tell: Callable[[str], None]
) -> tuple[Part, tuple[str, ...] | None]:
    """Read a folder or a table of texts through the pretrained network of the model."""
    from dropmax.workbench.backbones import reload_backbone
    from dropmax.workbench.embedding import cached_features, find_source

    text = expected.text_column or None
    source = find_source(path, text=text, label=expected.label_column, id_column=expected.id_column or None)
    file, left_out = cached_features(source, reload_backbone(expected.origin))
    if left_out:
        tell(f"{path}: {len(left_out):,} rows could not be read and were left out: {spell(list(left_out))}")
    values, labels, _ = read_npz_rows(file)
    encoded, note = encode_as(path, np.asarray(labels), expected.classes)
    if note:
        tell(note)
    return Part(values, encoded), None


def _labelled_folder(path: Path, expected: Expected) -> tuple[Part, tuple[str, ...]]:
    from dropmax.workbench.data.folders import list_folder, read_listing

    if len(expected.input_shape) != 3:
        raise DataError(f"{path} is a folder, but the model takes features: give .npz, .csv or .parquet")
    listing = list_folder(path, expected.classes)
    part = "test" if listing.files["test"] else "train"
    encoded, _ = encode_as(path, np.array(listing.classes)[listing.labels[part]], expected.classes)
    names = tuple(file.relative_to(path).as_posix() for file in listing.files[part])
    if expected.input_shape[0] == 3 and not expected.digits:
        only = type(listing)(listing.root, listing.classes)
        only.files["train"], only.labels["train"] = listing.files[part], listing.labels[part]
        size = expected.input_shape[1]
        return Part(read_listing(only, size).train.inputs, encoded), names
    pixels = np.stack([_image(file, expected).numpy() for file in listing.files[part]])
    return Part(pixels, encoded), names


def _table(
    file: Path, expected: Expected, tell: Callable[[str], None], *, labelled: bool
) -> tuple[NDArray[Any], tuple[str, ...] | None, NDArray[Any] | None]:
    """Read a table in the order of the training columns: its inputs, names and labels."""
    names: tuple[str, ...] | None = None
    labels: NDArray[Any] | None
    if file.suffix.lower() == ".npz":
        values, labels, _ = read_npz_rows(file, labelled=labelled)
        _check_origin(file, expected.origin)
        if expected.columns and values.ndim == 2:
            tell(f"{file}: an .npz has no column names; its columns are taken in the order of training")
    else:
        rows = read_rows(file, expected.label_column, expected.id_column, columns=expected.columns, labelled=labelled)
        values, labels, names = rows.values, rows.labels, rows.ids
        if not expected.columns:
            tell(f"{file}: the model knows no column names; its columns are taken in their order")
        if rows.ignored:
            tell(f"{file}: ignored {_count(rows.ignored)} not trained on: {spell(list(rows.ignored))}")
    if values.shape[1:] != expected.input_shape:
        raise DataError(f"{file} has rows of shape {values.shape[1:]}, but the model takes {expected.input_shape}")
    return values, names, labels


def _check_origin(file: Path, origin: str) -> None:
    """Refuse features of one backbone for a model of another."""
    from dropmax.workbench.backbones import Origin

    found = npz_origin(file)
    if origin and found:
        wanted, given = Origin.from_json(origin), Origin.from_json(found)
        if (wanted.digest, wanted.preprocessing) != (given.digest, given.preprocessing):
            raise DataError(f"{file} holds features of {given.short}, but the model was trained on {wanted.short}")


def _count(columns: Sequence[str]) -> str:
    return f"{len(columns)} column{'s' * (len(columns) > 1)}"


def _image(file: Path, expected: Expected) -> torch.Tensor:
    with open_image(file) as image:
        if expected.digits:
            from dropmax.workbench.data.handwriting import as_digit

            try:
                return torch.from_numpy(as_digit(image))[None]
            except DataError as error:
                raise DataError(f"{file}: {error}") from None
        pixels = as_input(square(image, expected.stored_size), expected.input_shape)
        return torch.from_numpy(np.ascontiguousarray(pixels))
