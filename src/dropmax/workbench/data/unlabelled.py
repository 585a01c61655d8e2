"""Inputs without labels, for a trained model to answer: image files, folders of them, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from dropmax.errors import DataError
from dropmax.workbench.data.images import SUFFIXES, as_input, decode
from dropmax.workbench.data.tables import read_features

__all__ = ["find_inputs", "read_inputs"]

_TABLES = (".npz", ".csv", ".parquet")


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
    input_shape: tuple[int, ...],
    stored_size: int,
    *,
    label_column: str = "label",
    batch_size: int = 256,
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield names and raw inputs (uint8 images or float32 features) for a model that takes ``input_shape``.

    An image is scaled to ``stored_size`` and cropped at its centre, as in training; for a model of grey images it is
    turned grey. The rows of a table are named ``file:row``, counted from 1.

    >>> list(read_inputs([], (1, 28, 28), 28))
    []
    """
    images: list[Path] = []
    for file in files:
        if file.suffix.lower() in _TABLES:
            values = read_features(file, label_column)
            if values.shape[1:] != input_shape:
                raise DataError(f"{file} has rows of shape {values.shape[1:]}, but the model takes {input_shape}")
            for start in range(0, len(values), batch_size):
                part = values[start : start + batch_size]
                yield (
                    [f"{file}:{start + i + 1}" for i in range(len(part))],
                    torch.from_numpy(np.ascontiguousarray(part)),
                )
        elif len(input_shape) != 3:
            raise DataError(f"{file} is not a table, but the model takes features: give .npz, .csv or .parquet")
        else:
            images.append(file)
    for start in range(0, len(images), batch_size):
        chunk = images[start : start + batch_size]
        pixels = np.stack([as_input(decode(file, stored_size), input_shape) for file in chunk])
        yield [str(file) for file in chunk], torch.from_numpy(pixels)
