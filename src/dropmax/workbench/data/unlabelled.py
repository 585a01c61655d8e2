"""Rows that a trained model, or a second table, must fit: image files, folders of them, tables and sentences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropmax.errors import DataError
from dropmax.workbench.backbones import Origin, reload_backbone
from dropmax.workbench.data.dataset import Part, spell
from dropmax.workbench.data.folders import Listing, list_folder, read_listing
from dropmax.workbench.data.images import SUFFIXES, as_input, open_image, square
from dropmax.workbench.data.labels import encode_as
from dropmax.workbench.data.mnist import as_digit
from dropmax.workbench.data.npz import read_npz_rows
from dropmax.workbench.data.tables import TEXT_SUFFIXES, read_rows, read_texts

TABLES = (".npz", ".csv", ".parquet")
_BATCH = 256
#: An image counts as unlike where its mean pixel is this many deviations of the training pixels from their mean:
#: MNIST (0.13, deviation 0.31) turned dark on light is 2.4 off, and no photograph on white paper is.
_BRIGHTNESS = 2.0
#: A row of features, where they are on average this many deviations from the training means.
_FEATURES = 10.0

_Tell = Callable[[str], None]
_Named = tuple[list[str], Tensor]


@dataclass(frozen=True)
class Expected:
    """What rows must look like for a model that was trained on others."""

    input_shape: tuple[int, ...]
    stored_size: int = 0  #: side images are scaled to before their centre is cropped; 0 for features
    columns: tuple[str, ...] = ()  #: names of the features, where the model was trained on a table with a header
    classes: tuple[str, ...] = ()
    label_column: str = "label"
    id_column: str = ""
    digits: bool = False  #: prepare image files as MNIST's digits were, see :mod:`dropmax.workbench.data.mnist`
    origin: str = ""  #: the backbone that images or texts go through first, see ``backbones.Origin``
    text_column: str = ""  #: of tables of texts


def is_sentence(given: Path) -> bool:
    """Say whether what was typed is a sentence: neither a file nor the name of a table, perhaps misspelt."""
    if os.path.exists(given):  # not Path.exists, which raises where a sentence is longer than a name may be
        return False
    return " " in str(given) or given.suffix.lower() not in (*TEXT_SUFFIXES, ".npz")


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the files behind the paths, a folder standing for all images below it."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if not path.is_dir():
            found.append(path)
            continue
        images = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not images:
            raise DataError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))})")
        found += images
    return found


def read_inputs(
    files: Sequence[Path], expected: Expected, tell: _Tell = lambda note: None, texts: Sequence[str] = ()
) -> Iterator[_Named]:
    """Yield names and raw inputs (uint8 images or float32 features), tables first.

    Images are prepared as in training. Behind a pretrained network (``expected.origin``), images, tables of texts and
    the sentences ``texts`` go through it first. The rows of a table are named by their identifiers, or ``file:row``,
    counted from 1. ``tell`` is called with what the user should know, a line each.
    """
    if expected.origin:
        arrays = [file for file in files if file.suffix.lower() == ".npz"]
        yield from _embedded([file for file in files if file not in arrays], texts, expected, tell)
        files = arrays
    images: list[Path] = []
    for file in files:
        if file.suffix.lower() in TABLES:
            values, names, _ = _table(file, expected, tell, labelled=False)
            called = [f"{file}:{row}" for row in range(1, len(values) + 1)] if names is None else names
            for some, rows in zip(_chunks(list(called)), _chunks(values), strict=True):
                yield some, torch.from_numpy(np.ascontiguousarray(rows))
        elif len(expected.input_shape) != 3:
            raise DataError(f"{file} is not a table, but the model takes features: give .npz, .csv or .parquet")
        else:
            images.append(file)
    for chunk in _chunks(images):
        yield [str(file) for file in chunk], torch.stack([_image(file, expected) for file in chunk])


def read_outside(path: Path, expected: Expected, tell: _Tell) -> Tensor:
    """Read inputs that belong to no class; of an .npz those of the split ``outside``, if it has any."""
    inputs = torch.cat([rows for _, rows in read_inputs(find_inputs([path]), expected, tell)])
    rows = read_npz_rows(path, labelled=False).outside if path.suffix.lower() == ".npz" else ()
    return inputs[torch.from_numpy(rows)] if len(rows) else inputs


def _chunks(items: Any) -> Iterator[Any]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _embedded(files: Sequence[Path], texts: Sequence[str], expected: Expected, tell: _Tell) -> Iterator[_Named]:
    """Yield names and features of images, or of texts: those given, and those in tables."""
    from dropmax.workbench.embedding import image_for

    if not files and not texts:
        return
    backbone = reload_backbone(expected.origin)
    if backbone.origin.kind == "images":
        for chunk in _chunks(files):
            pixels = torch.from_numpy(np.stack([image_for(file, backbone) for file in chunk]))
            yield [str(file) for file in chunk], backbone(pixels)
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
        names = [f"{file}:{name.removeprefix('row ')}" for name in table.ids]
        for some, sentences in zip(_chunks(names), _chunks(table.texts), strict=True):
            yield some, backbone(sentences)


def read_labelled(path: Path, expected: Expected, tell: _Tell = lambda note: None) -> Part:
    """Read rows with labels among ``expected.classes``: sub-folders, the array ``y`` or ``y_test``, or a column."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if expected.origin and path.suffix.lower() != ".npz":
        values, labels = _labelled_features(path, expected, tell)
    elif path.is_dir():
        values, labels = _labelled_folder(path, expected)
    elif path.suffix.lower() in TABLES:
        values, _, labels = _table(path, expected, tell, labelled=True)
    else:
        raise DataError(f"{path} is of a kind that cannot be read: give a folder of images, .npz, .csv or .parquet")
    if labels is None:
        raise DataError(f"{path} has no labels: an .npz needs the array y beside x (or y_test beside x_test)")
    encoded, note = encode_as(path, labels, expected.classes)
    if note:
        tell(note)
    return Part(values, encoded)


def _labelled_features(path: Path, expected: Expected, tell: _Tell) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read a folder or a table of texts through the pretrained network of the model."""
    from dropmax.workbench.embedding import cached_features, find_source

    text = expected.text_column or None
    source = find_source(path, text=text, label=expected.label_column, id_column=expected.id_column or None)
    file, left_out = cached_features(source, reload_backbone(expected.origin))
    if left_out:
        tell(f"{path}: {len(left_out):,} rows could not be read and were left out: {spell(list(left_out))}")
    rows = read_npz_rows(file)
    return rows.values, rows.labels


def _labelled_folder(path: Path, expected: Expected) -> tuple[NDArray[Any], NDArray[Any]]:
    if len(expected.input_shape) != 3:
        raise DataError(f"{path} is a folder, but the model takes features: give .npz, .csv or .parquet")
    listing = list_folder(path, expected.classes)
    part = "test" if listing.files["test"] else "train"
    files, labels = listing.files[part], np.array(listing.classes)[listing.labels[part]]
    encode_as(path, labels, expected.classes)  # refuses strange classes before anything is decoded
    if expected.input_shape[0] == 3 and not expected.digits:
        only = Listing(listing.root, listing.classes)
        only.files["train"], only.labels["train"] = files, listing.labels[part]
        return read_listing(only, expected.input_shape[1]).train.inputs, labels
    return np.stack([_image(file, expected).numpy() for file in files]), labels


def _table(
    file: Path, expected: Expected, tell: _Tell, *, labelled: bool
) -> tuple[NDArray[Any], tuple[str, ...] | None, NDArray[Any] | None]:
    """Read a table in the order of the training columns: its inputs, names and labels."""
    names = None
    if file.suffix.lower() == ".npz":
        found = read_npz_rows(file, labelled=labelled)
        values, labels = found.values, found.labels
        if expected.origin and found.origin:
            wanted, given = Origin.from_json(expected.origin), Origin.from_json(found.origin)
            if not given.is_like(wanted):
                raise DataError(f"{file} holds features of {given.short}, but the model was trained on {wanted.short}")
        if expected.columns and values.ndim == 2:
            tell(f"{file}: an .npz has no column names; its columns are taken in the order of training")
    else:
        rows = read_rows(file, expected.label_column, expected.id_column, columns=expected.columns, labelled=labelled)
        values, labels, names = rows.values, rows.labels, rows.ids
        if not expected.columns:
            tell(f"{file}: the model knows no column names; its columns are taken in their order")
        if rows.ignored:
            count = f"{len(rows.ignored)} column{'s' * (len(rows.ignored) > 1)}"
            tell(f"{file}: ignored {count} not trained on: {spell(list(rows.ignored))}")
    if values.shape[1:] != expected.input_shape:
        raise DataError(f"{file} has rows of shape {values.shape[1:]}, but the model takes {expected.input_shape}")
    return values, names, labels


def _image(file: Path, expected: Expected) -> Tensor:
    with open_image(file) as image:
        if expected.digits:
            try:
                return torch.from_numpy(as_digit(image))[None]
            except DataError as error:
                raise DataError(f"{file}: {error}") from None
        pixels = as_input(square(image, expected.stored_size), expected.input_shape)
        return torch.from_numpy(np.ascontiguousarray(pixels))


class Unlike:
    """Counts the inputs that look unlike the training data: inverted pictures, features in other units.

    ``brightness`` is the mean and deviation of the training images' pixels in [0, 1], None if they were not recorded;
    ``mean`` and ``std`` are those of the features in training.
    """

    def __init__(self, brightness: tuple[float, float] | None, mean: Sequence[float], std: Sequence[float]) -> None:
        self.brightness, self.mean, self.std = brightness, torch.tensor(mean), torch.tensor(std)
        self.rows = self.lighter = self.darker = self.far = 0
        self.total = 0.0

    def look(self, inputs: Tensor) -> None:
        """Look at raw inputs: uint8 images or float32 features."""
        self.rows += len(inputs)
        if inputs.ndim == 2:
            self.far += int((((inputs - self.mean) / self.std).abs().mean(-1) > _FEATURES).sum())
        elif self.brightness is not None:
            mean, std = self.brightness
            means = inputs.float().mean((1, 2, 3)) / 255
            self.lighter += int((means > mean + _BRIGHTNESS * std).sum())
            self.darker += int((means < mean - _BRIGHTNESS * std).sum())
            self.total += float(means.sum())

    @property
    def warning(self) -> str:
        """What to tell the user, or nothing."""
        if self.far:
            return (
                f"{self.far:,} of {self.rows:,} rows are far from those the model was trained on "
                f"(on average more than {_FEATURES:.0f} standard deviations per feature): are they in the same units?"
            )
        if not (self.lighter or self.darker) or self.brightness is None:
            return ""
        count, how = max((self.lighter, "lighter"), (self.darker, "darker"))
        other = "dark on light" if how == "lighter" else "light on dark"
        return (
            f"{count:,} of {self.rows:,} images are far {how} than those the model was trained on (mean "
            f"{self.total / self.rows:.2f} against {self.brightness[0]:.2f}): if they are {other}, invert them first"
        )
