"""Arrays and tables from one file: .npz archives, .csv and .parquet tables of features with a label column."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, did_you_mean
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.limits import refuse_bomb, refuse_long
from dropmax.workbench.data.parquet import parquet_labels, parquet_numbers, parquet_table
from dropmax.workbench.data.parts import Part, Parts

__all__ = ["read_csv", "read_features", "read_npz", "read_parquet"]

_DEFLATE_LIMIT = 1032  # no deflate stream expands by more, so a header promising more is lying


def read_npz(path: Path) -> Parts:
    """Read arrays ``x_train, y_train`` with optional ``x_val, y_val`` and ``x_test, y_test``, or just ``x, y``.

    Capital letters are as good as small ones. Inputs are uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W) with
    one or three channels, or numbers (N, D). Labels are whole numbers or strings. An optional array ``classes`` of
    strings names the whole-number labels 0, 1, ...

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
            labels[name] = _labels(path, label_name, arrays[label_name])
            if len(inputs[name]) != len(labels[name]):
                raise DataError(
                    f"{path}: {name} has {len(inputs[name]):,} rows, but {label_name} has {len(labels[name]):,}"
                )
    shapes = {name: values.shape[1:] for name, values in inputs.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{path}: the rows of its parts differ in shape: {shapes}")
    classes, encoded = _encode(path, labels, arrays.get("classes"))
    parts = {name: Part(inputs[name], encoded[name]) for name in inputs}
    return Parts(
        train=parts[names[0]], validation=parts.get("x_val"), test=parts.get("x_test"), classes=classes
    )  # fmt: skip


def read_csv(path: Path, label_column: str = "label") -> Parts:
    """Read a comma-separated table with a header: numbers, and one column of labels, numbers or names.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "mine.csv")
    >>> _ = path.write_text("length,width,label\\n5.1,3.5,iris\\n4,2,rose\\n")
    >>> read_csv(path).classes
    ('iris', 'rose')
    """
    header, numbered = _csv_lines(path)
    column = _label_position(path, header, label_column)
    names = [row.pop(column) for _, row in numbered]
    for (line, _), name in zip(numbered, names, strict=True):
        if not name:
            raise DataError(f"{path}, line {line}: the label is empty")
        refuse_long(f"{path}, line {line}", name)
    labels = np.array(names)
    values = _csv_numbers(path, header[:column] + header[column + 1 :], numbered)
    classes, encoded = _encode(path, {"all": _whole_numbers(labels)})
    return Parts(Part(values, encoded["all"]), classes)


def read_parquet(path: Path, label_column: str = "label") -> Parts:
    """Read a Parquet table of numeric columns and one column of labels, numbers or names; needs pyarrow.

    >>> import pyarrow, pyarrow.parquet, tempfile
    >>> path = Path(tempfile.mkdtemp(), "mine.parquet")
    >>> pyarrow.parquet.write_table(pyarrow.table({"length": [5.1, 4.0], "label": ["iris", "rose"]}), path)
    >>> read_parquet(path).classes
    ('iris', 'rose')
    """
    table = parquet_table(path, label_column)
    position = _label_position(path, table.column_names, label_column)
    values = parquet_numbers(path, table, label_column)
    labels = parquet_labels(path, table.column(position))
    classes, encoded = _encode(path, {"all": _labels(path, label_column, labels)})
    return Parts(Part(values, encoded["all"]), classes)


def read_features(path: Path, label_column: str = "label") -> NDArray[Any]:
    """Read the inputs of an .npz (``x``, or else ``x_test``), .csv or .parquet file, leaving out any labels.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "new.csv")
    >>> _ = path.write_text("length,width\\n5.1,3.5\\n4,2\\n")
    >>> read_features(path)
    array([[5.1, 3.5],
           [4. , 2. ]], dtype=float32)
    """
    kind = path.suffix.lower()
    if kind == ".npz":
        arrays = _open_npz(path)
        name = "x" if "x" in arrays else "x_test"
        if name not in arrays:
            raise DataError(f"{path} has the arrays {spell(sorted(arrays))}, but x (or x_test) is needed")
        return _inputs(path, name, arrays[name])
    if kind == ".csv":
        header, numbered = _csv_lines(path)
        if label_column in header:
            position = header.index(label_column)
            numbered = [(line, row[:position] + row[position + 1 :]) for line, row in numbered]
        return _csv_numbers(path, [name for name in header if name != label_column], numbered)
    return parquet_numbers(path, parquet_table(path, label_column), label_column)


def _csv_lines(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and each row of as many cells with the number of its line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            lines = csv.reader(stream)
            header = next(lines, [])
            numbered = [(lines.line_num, row) for row in lines if row]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a comma-separated table: {error}") from error
    if not header:
        raise DataError(f"{path} is empty")
    if not numbered:
        raise DataError(f"{path} has a header and no rows")
    for line, row in numbered:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} cells, but the header has {len(header)} columns")
    return header, numbered


def _csv_numbers(path: Path, features: list[str], numbered: list[tuple[int, list[str]]]) -> NDArray[np.float32]:
    # Number by number: an array of texts would give every cell the memory of the longest.
    cells = (_number(cell) for _, row in numbered for cell in row)
    try:
        values = np.fromiter(cells, np.float64, len(numbered) * len(features)).reshape(len(numbered), len(features))
    except ValueError:
        for line, row in numbered:
            for name, cell in zip(features, row, strict=True):
                if not _is_number(cell):
                    raise DataError(f"{path}, line {line}, column {name!r}: {_short(cell)} is not a number") from None
        raise DataError(f"{path} has a cell that is not a number") from None
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        row, position = np.argwhere(~np.isfinite(numbers))[0]
        cell = numbered[row][1][position]
        raise DataError(f"{path}, line {numbered[row][0]}, column {features[position]!r}: {_short(cell)} is not finite")
    return numbers


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


def _labels(path: Path, name: str, values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim != 1 or values.dtype.kind not in "biufU":
        raise DataError(
            f"{path}: {name} must be one label a row, whole numbers or strings, not {values.dtype} {values.shape}"
        )
    if values.dtype.kind == "f":
        fraction = ~(np.isfinite(values) & (values == np.round(values)))
        if fraction.any():
            raise DataError(f"{path}: {name} holds {values[fraction][0]}; labels are whole numbers or names")
    if values.dtype.kind == "U":
        return values
    if (
        values.dtype.kind in "uf"
        and len(values)
        and not -(2.0**63) <= float(values.min()) <= float(values.max()) < 2.0**63
    ):
        raise DataError(f"{path}: {name} holds {values.max()}, too large for the number of a class")
    return values.astype(np.int64)


def _encode(
    path: Path, labels: dict[str, NDArray[Any]], named: NDArray[Any] | None = None
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Number the classes: as ``named`` lists them, or else the distinct training labels in sorted order."""
    first = next(iter(labels.values()))
    if len({values.dtype.kind for values in labels.values()}) > 1:
        raise DataError(f"{path} mixes whole numbers and strings as labels")
    if named is None:
        values = np.unique(first)
        classes = tuple(str(value) for value in values)
    else:
        if named.ndim != 1 or named.dtype.kind != "U" or not len(named) or len(np.unique(named)) != len(named):
            raise DataError(f"{path}: classes must be distinct strings, one a class")
        classes = tuple(str(name) for name in named)
        values = np.arange(len(named)) if first.dtype.kind == "i" else named
    order = np.argsort(values)
    encoded = {}
    for part, given in labels.items():
        place = np.searchsorted(values, given, sorter=order).clip(max=len(values) - 1)
        index = order[place]
        unknown = values[index] != given
        if unknown.any():
            where = "the training labels" if named is None else f"the {len(classes)} classes"
            raise DataError(
                f"{path}: the label {given[unknown][0]} of {part.replace('x', 'y', 1)} is not among {where}"
            )
        encoded[part] = index.astype(np.int64)
    return classes, encoded


def _label_position(path: Path, header: list[str], label_column: str) -> int:
    if not header:
        raise DataError(f"{path} is empty")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path} has the column {twice!r} twice")
    if label_column not in header:
        raise DataError(
            f"{path} has no column {label_column!r} for the labels:{did_you_mean(label_column, header)} "
            f"Its columns are {spell(header)}; name the right one with --label-column (label_column)"
        )
    if len(header) < 2:
        raise DataError(f"{path} has only the label column, and no features")
    return header.index(label_column)


def _whole_numbers(labels: NDArray[Any]) -> NDArray[Any]:
    """Turn strings that are all whole numbers into numbers, so that 10 sorts after 9."""
    try:
        return labels.astype(np.int64)
    except (ValueError, OverflowError):
        return labels


def _number(cell: str) -> float:
    if "_" in cell:  # Python reads 1_000, nobody else does
        raise ValueError
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 60 else cell[:59] + "…")
