"""Arrays from one .npz archive."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError
from dropmax.workbench.backbones import Origin
from dropmax.workbench.data.dataset import Part, Parts, spell
from dropmax.workbench.data.labels import as_labels, encode, refuse_bomb

_Arrays = dict[str, NDArray[Any]]
_DEFLATE_LIMIT = 1032  # no deflate stream expands by more, so a header promising more is lying
#: How people spell the parts of the array ``split``.
_SPLITS = {name: name for name in ("train", "validation", "test", "outside")}
_SPLITS |= dict.fromkeys(("val", "valid"), "validation")


def read_npz(path: Path) -> Parts:
    """Read arrays ``x_train, y_train`` with optional ``x_val, y_val`` and ``x_test, y_test``, or just ``x, y``.

    Inputs are uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W), or numbers (N, D). Labels are whole numbers or
    strings; strings in ``classes`` name the labels 0, 1, ... Beside ``x, y`` there may be what ``dropmax embed``
    writes: ``split`` (train, validation, test, or outside for rows of no class), ``names``, ``text``, ``backbone``.
    """
    arrays = _open_npz(path)
    names = ["x_train", "x_val", "x_test"] if "x_train" in arrays else ["x"]
    if names[0] not in arrays:
        raise DataError(
            f"{path} has the arrays {spell(sorted(arrays))}, but x and y, or x_train and y_train, are needed"
        )
    known = {"classes", *names, *map(_label_name, names)}
    if names == ["x"]:
        known |= {"split", "names", "text", "backbone"}
    stray = sorted(arrays.keys() - known)
    if stray:
        raise DataError(f"{path} has the array {stray[0]!r}, which is not one of {', '.join(sorted(known))}")
    inputs, labels = {}, {}
    for name in names:
        if name in arrays or _label_name(name) in arrays:
            inputs[name], labels[name] = _pair(path, name, arrays)
    shapes = {name: values.shape[1:] for name, values in inputs.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{path}: the rows of its parts differ in shape: {shapes}")
    if names == ["x"] and "split" in arrays:
        return _by_split(path, arrays, inputs["x"], labels["x"])
    classes, encoded = encode(path, labels, arrays.get("classes"))
    shown = _shown(arrays, len(inputs[names[0]]))
    parts = {name: Part(inputs[name], encoded[name], shown if name == "x" else None) for name in inputs}
    return Parts(
        parts[names[0]], classes, parts.get("x_val"), parts.get("x_test"),
        origin=_origin(path, arrays), names=_row_names(path, arrays),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class NpzRows:
    """Rows of an archive, for a model that was trained on others."""

    values: NDArray[Any]
    labels: NDArray[Any] | None  #: numbers, or the names of classes
    origin: str  #: the backbone the features came from, or nothing
    outside: NDArray[np.intp]  #: rows that the array ``split`` calls outside: they belong to no class


def read_npz_rows(path: Path, *, labelled: bool = True) -> NpzRows:
    """Read the inputs (``x``, or else ``x_test``) and, if ``labelled``, their labels where there are any."""
    arrays = _open_npz(path)
    name = "x" if "x" in arrays else "x_test"
    if name not in arrays:
        raise DataError(f"{path} has the arrays {spell(sorted(arrays))}, but x (or x_test) is needed")
    labels = None
    if labelled and _label_name(name) in arrays:
        values, labels = _pair(path, name, arrays)
        if "classes" in arrays:
            classes, encoded = encode(path, {name: labels}, arrays["classes"])
            labels = np.array(classes)[encoded[name]]
    else:
        values = check_inputs(path, name, arrays[name])
    split = arrays.get("split", np.empty(0, str))
    outside = np.flatnonzero(split == "outside") if split.dtype.kind == "U" else np.empty(0, int)
    return NpzRows(values, labels, _origin(path, arrays), outside)


def _label_name(name: str) -> str:
    return name.replace("x", "y", 1)


def _pair(path: Path, name: str, arrays: _Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the inputs of this name and their labels, one for each."""
    label_name = _label_name(name)
    for present, absent in ((name, label_name), (label_name, name)):
        if absent not in arrays:
            raise DataError(f"{path} has the array {present!r} but not {absent!r}")
    inputs, labels = check_inputs(path, name, arrays[name]), as_labels(path, label_name, arrays[label_name])
    if len(inputs) != len(labels):
        raise DataError(f"{path}: {name} has {len(inputs):,} rows, but {label_name} has {len(labels):,}")
    return inputs, labels


def _by_split(path: Path, arrays: _Arrays, inputs: NDArray[Any], labels: NDArray[Any]) -> Parts:
    """Divide the rows by the array ``split``; rows of any other part are left out, which a note says."""
    split = arrays["split"]
    if split.shape != (len(inputs),) or split.dtype.kind != "U":
        raise DataError(f"{path}: split must be one of train, validation and test for each of the {len(inputs):,} rows")
    part_of = np.array([_SPLITS.get(name.lower(), "") for name in split.tolist()])
    rows = {part: np.flatnonzero(part_of == part) for part in ("train", "validation", "test")}
    if not len(rows["train"]):
        raise DataError(f"{path}: no row of its array split is 'train'; it holds {spell(sorted(set(split.tolist())))}")
    used = {part: index for part, index in rows.items() if len(index)}
    classes, encoded = encode(path, {part: labels[index] for part, index in used.items()}, arrays.get("classes"))
    shown = _shown(arrays, len(inputs))
    parts = {
        part: Part(inputs[index], encoded[part], None if shown is None else shown[index])
        for part, index in used.items()
    }
    unused = (part_of == "") | (part_of == "outside")
    others = sorted(set(split[unused].tolist()))
    outside, names = inputs[part_of == "outside"], _row_names(path, arrays)
    return Parts(
        parts["train"], classes, parts.get("validation"), parts.get("test"), origin=_origin(path, arrays),
        notes=(f"{int(unused.sum()):,} rows of {spell(others)} are neither trained nor tested on",) * bool(others),
        names=None if names is None else [names[row] for row in rows["train"]],
        outside=outside if len(outside) else None,
    )  # fmt: skip


def _origin(path: Path, arrays: _Arrays) -> str:
    """Return what the file says about the backbone its features came from, or nothing."""
    if "backbone" not in arrays:
        return ""
    try:
        return Origin.from_json(str(arrays["backbone"].item())).to_json()
    except ValueError as error:
        raise DataError(f"{path}: its array backbone is damaged: {error}") from error


def _shown(arrays: _Arrays, rows: int) -> NDArray[Any] | None:
    """Return the sentences, or else the file names, behind features of a backbone."""
    found = arrays.get("text", arrays.get("names"))
    return found if "backbone" in arrays and found is not None and found.shape == (rows,) else None


def _row_names(path: Path, arrays: _Arrays) -> list[str] | None:
    names = arrays.get("names")
    if names is not None and (names.dtype.kind != "U" or names.shape != arrays["x"].shape[:1]):
        raise DataError(f"{path}: names must be one string per row")
    return None if names is None else [str(name) for name in names]


def _open_npz(path: Path) -> _Arrays:
    """Load every array by its lower-case name, once its header is known not to promise more than the file holds."""
    arrays: _Arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bomb(path, sum(info.file_size for info in archive.infolist()))
            for info in archive.infolist():
                _check_member(path, archive, info)
                with archive.open(info) as stream:
                    name = info.filename.removesuffix(".npy").lower()
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds on damaged archives
        raise DataError(f"{path} is not a sound .npz file: {error}") from error
    return arrays


def _check_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others know no bounds
        raise DataError(f"{path}: {info.filename} is packed in a way that np.savez never uses")
    if info.file_size > _DEFLATE_LIMIT * min(info.compress_size, path.stat().st_size) + 1024:
        raise DataError(f"{path}: {info.filename} claims to be larger than the file can hold")
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise DataError(f"{path}: {info.filename} is of an unknown .npy version {version}")
        shape, _, dtype = readers[version](stream)
        if dtype.itemsize == 0:
            raise DataError(f"{path}: {info.filename} holds values of size zero")
        if dtype.hasobject:
            raise DataError(f"{path}: {info.filename} holds Python objects; store numbers or strings")
        if int(np.prod(shape, dtype=object)) * dtype.itemsize + stream.tell() != info.file_size:
            raise DataError(f"{path}: the header of {info.filename} does not fit its size")


def check_inputs(path: Path | str, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return features as float32, and images as uint8 (N, C, H, W); refuse anything else."""
    if values.size == 0:
        raise DataError(f"{path}: {name} is empty")
    if values.ndim == 2:
        if values.dtype.kind not in "biuf":
            raise DataError(f"{path}: {name} must hold numbers, not {values.dtype}")
        with np.errstate(over="ignore"):
            features = values.astype(np.float32)
        if not np.isfinite(features).all():
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise DataError(f"{path}: {name} row {row}, column {column} is {values[row, column]}, which is not finite")
        return features
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        raise DataError(
            f"{path}: {name} is {values.dtype} of shape {values.shape}; store features as numbers (N, D), "
            "images as uint8 (N, H, W), (N, H, W, C) or (N, C, H, W)"
        )
    if values.ndim == 3:
        values = values[:, None]
    elif values.shape[1] not in (1, 3):
        if values.shape[3] not in (1, 3):
            raise DataError(f"{path}: {name} of shape {values.shape} has neither one nor three channels")
        values = values.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(values)
