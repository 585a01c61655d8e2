"""Arrays from one .npz archive."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.labels import as_labels, encode
from dropmax.workbench.data.limits import refuse_bomb
from dropmax.workbench.data.parts import Part, Parts

__all__ = ["npz_origin", "read_npz", "read_npz_rows"]

_DEFLATE_LIMIT = 1032  # no deflate stream expands by more, so a header promising more is lying


def read_npz(path: Path) -> Parts:
    """Read arrays ``x_train, y_train`` with optional ``x_val, y_val`` and ``x_test, y_test``, or just ``x, y``.

    Capital letters are as good as small ones. Inputs are uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W) with
    one or three channels, or numbers (N, D). Labels are whole numbers or strings. An optional array ``classes`` of
    strings names the whole-number labels 0, 1, ... Beside ``x, y`` there may be what ``dropmax embed`` writes:
    ``split`` (train, validation or test for each row; outside for rows of no class), ``names`` (of the rows), ``text``,
    and ``backbone``.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "mine.npz")
    >>> np.savez(path, x=np.zeros((4, 3)), y=["cat", "dog", "cat", "dog"])
    >>> parts = read_npz(path)
    >>> parts.classes, parts.train.labels, parts.train.inputs.dtype
    (('cat', 'dog'), array([0, 1, 0, 1]), dtype('float32'))
    """
    arrays = _open_npz(path)
    names = ["x_train", "x_val", "x_test"] if "x_train" in arrays else ["x"]
    known = {"classes", *names, *(name.replace("x", "y", 1) for name in names)}
    if names == ["x"]:
        known |= {"split", "names", "text", "backbone"}
    if "x_train" not in arrays and "x" not in arrays:
        raise DataError(
            f"{path} has the arrays {spell(sorted(arrays))}, but x and y, or x_train and y_train, are needed"
        )
    stray = sorted(arrays.keys() - known)
    if stray:
        raise DataError(f"{path} has the array {stray[0]!r}, which is not one of {', '.join(sorted(known))}")
    inputs, labels = {}, {}
    for name in names:
        label_name = name.replace("x", "y", 1)
        if (name in arrays) != (label_name in arrays):
            present, absent = (name, label_name) if name in arrays else (label_name, name)
            raise DataError(f"{path} has the array {present!r} but not {absent!r}")
        if name in arrays:
            inputs[name] = _inputs(path, name, arrays[name])
            labels[name] = as_labels(path, label_name, arrays[label_name])
            if len(inputs[name]) != len(labels[name]):
                raise DataError(
                    f"{path}: {name} has {len(inputs[name]):,} rows, but {label_name} has {len(labels[name]):,}"
                )
    shapes = {name: values.shape[1:] for name, values in inputs.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{path}: the rows of its parts differ in shape: {shapes}")
    if names == ["x"] and "split" in arrays:
        return _by_split(path, arrays, inputs["x"], labels["x"])
    classes, encoded = encode(path, labels, arrays.get("classes"))
    shown = _shown(arrays, len(inputs[names[0]]))
    parts = {name: Part(inputs[name], encoded[name], shown if name == "x" else None) for name in inputs}
    return Parts(
        train=parts[names[0]], validation=parts.get("x_val"), test=parts.get("x_test"), classes=classes,
        origin=_origin(path, arrays), names=_row_names(path, arrays, None),
    )  # fmt: skip


#: How people spell the three parts.
_SPLITS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "outside": "outside",
}


def _by_split(path: Path, arrays: dict[str, NDArray[Any]], inputs: NDArray[Any], labels: NDArray[Any]) -> Parts:
    """Divide the rows by the array ``split``; rows of any other part are left out, which a note says."""
    split = arrays["split"]
    if split.shape != (len(inputs),) or split.dtype.kind != "U":
        raise DataError(f"{path}: split must be one of train, validation and test for each of the {len(inputs):,} rows")
    part_of = np.array([_SPLITS.get(name.lower(), "") for name in split.tolist()])
    rows = {part: np.flatnonzero(part_of == part) for part in ("train", "validation", "test")}
    outside = inputs[part_of == "outside"]
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
    left_out = f"{int(unused.sum()):,} rows of {spell(others)} are neither trained nor tested on"
    return Parts(
        train=parts["train"], validation=parts.get("validation"), test=parts.get("test"), classes=classes,
        notes=(left_out,) if others else (), origin=_origin(path, arrays),
        names=_row_names(path, arrays, rows["train"]), outside=outside if len(outside) else None,
    )  # fmt: skip


def _origin(path: Path, arrays: dict[str, NDArray[Any]]) -> str:
    """Return what the file says about the backbone its features came from, or nothing."""
    if "backbone" not in arrays:
        return ""
    from dropmax.workbench.backbones import Origin

    try:
        return Origin.from_json(str(arrays["backbone"].item())).to_json()
    except ValueError as error:
        raise DataError(f"{path}: its array backbone is damaged: {error}") from error


def _shown(arrays: dict[str, NDArray[Any]], rows: int) -> NDArray[Any] | None:
    """Return the sentences, or else the file names, behind features of a backbone."""
    found = arrays.get("text", arrays.get("names"))
    return found if "backbone" in arrays and found is not None and found.shape == (rows,) else None


def _row_names(
    path: Path, arrays: dict[str, NDArray[Any]], rows: NDArray[np.int64] | None
) -> dict[str, tuple[str, ...]] | None:
    names = arrays.get("names")
    if names is None:
        return None
    if names.dtype.kind != "U" or names.shape != arrays["x"].shape[:1]:
        raise DataError(f"{path}: names must be one string per row")
    return {"train": tuple((names if rows is None else names[rows]).tolist())}


def npz_origin(path: Path) -> str:
    """Return the description of the backbone that an .npz names, or nothing."""
    return _origin(path, _open_npz(path))


def read_npz_rows(path: Path, *, labelled: bool = True) -> tuple[NDArray[Any], NDArray[Any] | None, tuple[str, ...]]:
    """Return the inputs (``x``, or else ``x_test``), their labels where there are any, and the names of the classes.

    Without ``labelled`` the labels are not looked at.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "new.npz")
    >>> np.savez(path, x=np.zeros((2, 3)))
    >>> values, labels, classes = read_npz_rows(path)
    >>> values.shape, labels, classes
    ((2, 3), None, ())
    """
    arrays = _open_npz(path)
    name = "x" if "x" in arrays else "x_test"
    if name not in arrays:
        raise DataError(f"{path} has the arrays {spell(sorted(arrays))}, but x (or x_test) is needed")
    values = _inputs(path, name, arrays[name])
    given = arrays.get(name.replace("x", "y", 1)) if labelled else None
    if given is None:
        return values, None, ()
    labels = as_labels(path, name.replace("x", "y", 1), given)
    if len(labels) != len(values):
        raise DataError(f"{path}: {name} has {len(values):,} rows, but its labels {len(labels):,}")
    if "classes" in arrays:
        classes, encoded = encode(path, {name: labels}, arrays["classes"])
        return values, np.array(classes)[encoded[name]], classes
    return values, labels, ()


def outside_rows(path: Path) -> NDArray[np.intp] | None:
    """Return the rows that the array ``split`` calls ``outside``, which belong to no class; None where there are none.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "new.npz")
    >>> np.savez(path, x=np.zeros((2, 3)), split=np.array(["train", "outside"]))
    >>> outside_rows(path)
    array([1])
    """
    split = _open_npz(path).get("split")
    rows = np.flatnonzero(split == "outside") if split is not None and split.dtype.kind == "U" else np.empty(0, int)
    return rows if len(rows) else None


def _open_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Load every array by its lower-case name, once its header is known not to promise more than the file holds."""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bomb(path, sum(info.file_size for info in archive.infolist()))
            for info in archive.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others know no bounds
                    raise DataError(f"{path}: {info.filename} is packed in a way that np.savez never uses")
                if info.file_size > _DEFLATE_LIMIT * min(info.compress_size, path.stat().st_size) + 1024:
                    raise DataError(f"{path}: {info.filename} claims to be larger than the file can hold")
                with archive.open(info) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                    read = np.lib.format.read_array_header_2_0 if version == (2, 0) else read
                    if read is None:
                        raise DataError(f"{path}: {info.filename} is of an unknown .npy version {version}")
                    shape, _, dtype = read(stream)
                    if dtype.itemsize == 0:
                        raise DataError(f"{path}: {info.filename} holds values of no size")
                    if dtype.hasobject:
                        raise DataError(f"{path}: {info.filename} holds Python objects; store numbers or strings")
                    if int(np.prod(shape, dtype=object)) * dtype.itemsize + stream.tell() != info.file_size:
                        raise DataError(f"{path}: the header of {info.filename} does not fit its size")
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


def _inputs(path: Path, name: str, values: NDArray[Any]) -> NDArray[Any]:
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
        return np.ascontiguousarray(values[:, None])
    if values.shape[1] in (1, 3):
        return np.ascontiguousarray(values)
    if values.shape[3] in (1, 3):
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    raise DataError(f"{path}: {name} of shape {values.shape} has neither one nor three channels")
