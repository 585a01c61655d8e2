"""Tables of features with a header: .csv and .parquet, whose columns are known by their names."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, did_you_mean
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.labels import as_labels, as_whole_numbers, encode
from dropmax.workbench.data.limits import refuse_long
from dropmax.workbench.data.npz import read_npz, read_npz_rows
from dropmax.workbench.data.parquet import open_parquet, parquet_labels, parquet_numbers
from dropmax.workbench.data.parts import Part, Parts

__all__ = ["TableRows", "read_csv", "read_features", "read_npz", "read_parquet", "read_rows", "read_table"]


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of a table: features by the names of their columns, and perhaps labels and identifiers."""

    columns: tuple[str, ...]
    values: NDArray[np.float32]
    labels: NDArray[Any] | None = None
    ids: tuple[str, ...] | None = None
    ignored: tuple[str, ...] = ()  #: columns that are neither features, labels nor identifiers


def read_table(path: Path, label_column: str = "label", id_column: str = "") -> Parts:
    """Read a table to learn from: numbers, one column of labels, and perhaps one of identifiers.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "mine.csv")
    >>> _ = path.write_text("length,width,label\\n5.1,3.5,iris\\n4,2,rose\\n")
    >>> parts = read_table(path)
    >>> parts.classes, parts.columns
    (('iris', 'rose'), ('length', 'width'))
    """
    rows = read_rows(path, label_column, id_column, labelled=True)
    if rows.labels is None:
        raise DataError(f"{path} has no labels")
    classes, encoded = encode(path, {"all": rows.labels})
    names = None if rows.ids is None else {"train": rows.ids}
    return Parts(Part(rows.values, encoded["all"]), classes, columns=rows.columns, names=names)


def read_csv(path: Path, label_column: str = "label") -> Parts:
    """Read a comma-separated table with a header, see :func:`read_table`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "mine.csv")
    >>> _ = path.write_text("length,width,label\\n5.1,3.5,iris\\n4,2,rose\\n")
    >>> read_csv(path).classes
    ('iris', 'rose')
    """
    return read_table(path, label_column)


def read_parquet(path: Path, label_column: str = "label") -> Parts:
    """Read a Parquet table, see :func:`read_table`; needs pyarrow.

    >>> import pyarrow, pyarrow.parquet, tempfile
    >>> path = Path(tempfile.mkdtemp(), "mine.parquet")
    >>> pyarrow.parquet.write_table(pyarrow.table({"length": [5.1, 4.0], "label": ["iris", "rose"]}), path)
    >>> read_parquet(path).classes
    ('iris', 'rose')
    """
    return read_table(path, label_column)


def read_features(path: Path, label_column: str = "label") -> NDArray[Any]:
    """Read the inputs of an .npz (``x``, or else ``x_test``), .csv or .parquet file, leaving out any labels.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "new.csv")
    >>> _ = path.write_text("length,width\\n5.1,3.5\\n4,2\\n")
    >>> read_features(path)
    array([[5.1, 3.5],
           [4. , 2. ]], dtype=float32)
    """
    return read_npz_rows(path)[0] if path.suffix.lower() == ".npz" else read_rows(path, label_column).values


def read_rows(
    path: Path,
    label_column: str = "label",
    id_column: str = "",
    *,
    columns: Sequence[str] = (),
    labelled: bool = False,
) -> TableRows:
    """Read the rows of a .csv or .parquet table.

    Args:
        path: of the table.
        label_column: the column of labels.
        id_column: a column of identifiers, which are read as text and are no features.
        columns: the features to read, by name and in this order; all other columns are ignored. Without any, every
            column but those of labels and identifiers is a feature, in the order of the table.
        labelled: whether the labels are needed; where they are not, they are left out.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "new.csv")
    >>> _ = path.write_text("width,note,length\\n3.5,fresh,5.1\\n2,old,4\\n")
    >>> rows = read_rows(path, columns=("length", "width"))
    >>> rows.values.tolist(), rows.ignored
    ([[5.099999904632568, 3.5], [4.0, 2.0]], ('note',))
    """
    table = _Parquet(path) if path.suffix.lower() == ".parquet" else _Csv(path)
    header = table.header
    _check_header(path, header)
    if labelled:
        _check_label(path, header, label_column)
    if id_column and id_column not in header and not columns:
        raise DataError(
            f"{path} has no column {id_column!r} for the identifiers:{did_you_mean(id_column, header)} "
            f"Its columns are {spell(header)}; name the right one with --id-column (id_column)"
        )
    special = {label_column, id_column}
    missing = [name for name in columns if name not in header]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}, which the model was trained on:{did_you_mean(missing[0], header)} "
            + (f"{len(missing):,} columns are missing: {spell(missing)}" if len(missing) > 1 else "")
        )
    features = tuple(columns) or tuple(name for name in header if name not in special)
    if not features:
        raise DataError(f"{path} has no columns of features")
    labels = table.labels(label_column) if labelled else None
    ids = table.texts(id_column) if id_column in header else None
    ignored = tuple(name for name in header if name not in features and name not in special)
    return TableRows(features, table.numbers(features), labels, ids, ignored)


class _Csv:
    """A comma-separated table, held as text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, self.numbered = _csv_lines(path)

    def numbers(self, names: Sequence[str]) -> NDArray[np.float32]:
        return _csv_numbers(self.path, {name: self.header.index(name) for name in names}, self.numbered)

    def labels(self, name: str) -> NDArray[Any]:
        place = self.header.index(name)
        for line, row in self.numbered:
            if not row[place]:
                raise DataError(f"{self.path}, line {line}: the label is empty")
            refuse_long(f"{self.path}, line {line}", row[place])
        return as_whole_numbers(np.array([row[place] for _, row in self.numbered]))

    def texts(self, name: str) -> tuple[str, ...]:
        place = self.header.index(name)
        return tuple(row[place] for _, row in self.numbered)


class _Parquet:
    """A Parquet table, of which the columns asked for are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = open_parquet(path, ()).column_names

    def numbers(self, names: Sequence[str]) -> NDArray[np.float32]:
        return parquet_numbers(self.path, open_parquet(self.path, names, numeric=True))

    def labels(self, name: str) -> NDArray[Any]:
        table = open_parquet(self.path, (name,), dictionary=True)
        return as_labels(self.path, name, parquet_labels(self.path, table.column(0)))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(str(value) for value in open_parquet(self.path, (name,)).column(0).to_pylist())


def _check_header(path: Path, header: Sequence[str]) -> None:
    if not header:
        raise DataError(f"{path} is empty")
    if len(set(header)) < len(header):
        twice = next(name for name in header if list(header).count(name) > 1)
        raise DataError(f"{path} has the column {twice!r} twice")


def _check_label(path: Path, header: Sequence[str], label_column: str) -> None:
    if label_column not in header:
        raise DataError(
            f"{path} has no column {label_column!r} for the labels:{did_you_mean(label_column, header)} "
            f"Its columns are {spell(list(header))}; name the right one with --label-column (label_column)"
        )
    if len(header) < 2:
        raise DataError(f"{path} has only the label column, and no features")


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


def _csv_numbers(path: Path, places: dict[str, int], numbered: list[tuple[int, list[str]]]) -> NDArray[np.float32]:
    """Return the columns at these places; ``numbered`` are rows with the numbers of their lines."""
    # Number by number: an array of texts would give every cell the memory of the longest.
    cells = (_number(row[place]) for _, row in numbered for place in places.values())
    try:
        values = np.fromiter(cells, np.float64, len(numbered) * len(places)).reshape(len(numbered), len(places))
    except ValueError:
        for line, row in numbered:
            for name, place in places.items():
                if not _is_number(row[place]):
                    raise DataError(
                        f"{path}, line {line}, column {name!r}: {_short(row[place])} is not a number"
                    ) from None
        raise DataError(f"{path} has a cell that is not a number") from None
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        row, position = np.argwhere(~np.isfinite(numbers))[0]
        name, place = list(places.items())[position]
        line, cells_of_row = numbered[row]
        raise DataError(f"{path}, line {line}, column {name!r}: {_short(cells_of_row[place])} is not finite")
    return numbers


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
