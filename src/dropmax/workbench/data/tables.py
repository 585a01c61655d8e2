"""Tables with a header: .csv with any usual separator, .parquet and JSON lines; their features, or their texts."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, did_you_mean, first_line, optional
from dropmax.workbench.data.dataset import Part, Parts, spell
from dropmax.workbench.data.labels import as_labels, encode, read_lines, reading, refuse_bomb, refuse_long

#: What :func:`read_texts` reads.
TEXT_SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")

_OPTIONS = {"texts": "--text", "labels": "--label-column", "identifiers": "--id-column", "splits": "--split-column"}


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of a table: features by the names of their columns, and perhaps labels and identifiers."""

    columns: tuple[str, ...]
    values: NDArray[np.float32]
    labels: NDArray[Any] | None = None
    ids: tuple[str, ...] | None = None
    ignored: tuple[str, ...] = ()  #: columns that are neither features, labels nor identifiers


@dataclass
class TextTable:
    """Texts row by row, with their labels, ids and splits where the table has such columns."""

    texts: list[str]
    labels: list[str]
    ids: list[str]
    splits: list[str]
    left_out: list[str] = field(default_factory=list)  #: rows without a text, which are in none of the lists


def read_table(path: Path, label_column: str = "label", id_column: str = "") -> Parts:
    """Read a table to learn from: numbers, one column of labels, and perhaps one of identifiers."""
    rows = read_rows(path, label_column, id_column, labelled=True)
    assert rows.labels is not None
    classes, encoded = encode(path, {"all": rows.labels})
    return Parts(Part(rows.values, encoded["all"]), classes, columns=rows.columns, names=rows.ids)


def read_rows(
    path: Path, label_column: str = "label", id_column: str = "", *, columns: Sequence[str] = (), labelled: bool = False
) -> TableRows:
    """Read the rows of a .csv or .parquet table; labels only where they are asked for.

    With ``columns`` the features are those columns in that order, and all others are ignored. Without, every column but
    those of labels and identifiers is a feature, in the order of the table.
    """
    table = _open(path)
    header, special = table.header, {label_column, id_column}
    if labelled:
        _check_column(table, "labels", label_column)
    if id_column and (id_column in header or not columns):
        _check_column(table, "identifiers", id_column)
    missing = [name for name in columns if name not in header]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}, which the model was trained on:{did_you_mean(missing[0], header)} "
            + (f"{len(missing):,} columns are missing: {spell(missing)}" if len(missing) > 1 else "")
        )
    features = tuple(columns) or tuple(name for name in header if name not in special)
    if not features:
        raise DataError(f"{path} has no columns of features")
    twice = Counter(header) - Counter(set(header))
    if any(name in twice for name in features):
        raise DataError(f"{path} has the column {next(iter(twice))!r} twice: rename one of them")
    values, labels = table.numbers(features), table.labels(label_column) if labelled else None
    ids = tuple(map(str, table.cells(id_column))) if id_column in header else None
    ignored = tuple(name for name in header if name not in special.union(features))
    return TableRows(features, values, labels, ids, ignored)


def read_texts(
    path: Path,
    text_column: str,
    *,
    label_column: str | None = None,
    id_column: str | None = None,
    split_column: str | None = None,
) -> TextTable:
    """Read the named columns of a table; a row is called by its id, or else ``row 7``, counted from 1."""
    table = _open(path)
    wanted = {"texts": text_column, "labels": label_column, "identifiers": id_column, "splits": split_column}
    columns: dict[str, list[Any]] = {}
    for purpose, name in wanted.items():
        if name is not None:
            _check_column(table, purpose, name)
            if purpose != "texts" and name == text_column:
                raise DataError(f"{path}: the column {name!r} cannot hold both the texts and the {purpose}")
            columns[purpose] = table.cells(name)
    ids = columns.get("identifiers", [""] * len(columns["texts"]))
    called = [_plain(cell) or f"row {number}" for number, cell in enumerate(ids, 1)]
    there = [k for k, text in enumerate(columns["texts"]) if _plain(text)]
    if not there:
        raise DataError(f"{path} has no texts in its column {text_column!r}")
    labels = [_plain(columns["labels"][k]) for k in there] if label_column else []
    for k, label in zip(there, labels, strict=False):
        if not label:
            raise DataError(f"{path}, {called[k]}: the label in column {label_column!r} is empty")
        refuse_long(f"{path}, {called[k]}", label)
    return TextTable(
        texts=[str(columns["texts"][k]) for k in there],
        labels=labels,
        ids=[called[k] for k in there],
        splits=[_plain(columns["splits"][k]) for k in there] if split_column else [],
        left_out=[called[k] for k in sorted(set(range(len(called))) - set(there))],
    )


def _check_column(table: _Lines | _Parquet, purpose: str, name: str) -> None:
    """Raise unless the header has this column, once."""
    path, header = table.path, table.header
    if header.count(name) > 1:
        raise DataError(f"{path} has the column {name!r} twice: rename one of them")
    if name not in header:
        raise DataError(
            f"{path} has no column {name!r} for the {purpose}:{did_you_mean(name, header)} "
            f"Its columns are {spell(header)}; name the right one with {_OPTIONS[purpose]}"
        )


def _plain(value: Any) -> str:
    """Return a cell as text; nothing, NaN and blanks are all empty."""
    is_nan = isinstance(value, float) and value != value
    return "" if value is None or is_nan else str(value).strip()


def _open(path: Path) -> _Lines | _Parquet:
    suffix = path.suffix.lower()
    if suffix not in TEXT_SUFFIXES:
        raise DataError(f"{path} is of a kind that holds no texts: give one of {', '.join(TEXT_SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    table = _Parquet(path) if suffix == ".parquet" else (_csv if suffix in (".csv", ".tsv") else _json_lines)(path)
    if not table.header:
        raise DataError(f"{path} is empty")
    return table


@dataclass
class _Lines:
    """A table held as its rows, each with the number of its line."""

    path: Path
    header: list[str]
    rows: list[tuple[int, list[Any]]]

    def cells(self, name: str) -> list[Any]:
        place = self.header.index(name)
        return [row[place] for _, row in self.rows]

    def labels(self, name: str) -> NDArray[Any]:
        cells = self.cells(name)
        for (line, _), cell in zip(self.rows, cells, strict=True):
            if not cell:
                raise DataError(f"{self.path}, line {line}: the label is empty")
            refuse_long(f"{self.path}, line {line}", cell)
        labels = np.array(cells)
        try:
            return labels.astype(np.int64)  # so that 10 sorts after 9
        except (ValueError, OverflowError):
            return labels

    def numbers(self, names: Sequence[str]) -> NDArray[np.float32]:
        places = [self.header.index(name) for name in names]
        shape = len(self.rows), len(places)
        # Number by number: an array of texts would give every cell the memory of the longest.
        values = np.fromiter(self._numbers(places), np.float64, shape[0] * shape[1]).reshape(shape)
        with np.errstate(over="ignore"):
            numbers = values.astype(np.float32)
        if not np.isfinite(numbers).all():
            row, column = np.argwhere(~np.isfinite(numbers))[0]
            raise self._wrong(row, places[column], "finite")
        return numbers

    def _numbers(self, places: Sequence[int]) -> Iterator[float]:
        for number, (_, row) in enumerate(self.rows):
            for place in places:
                value = _number(row[place])
                if value is None:
                    raise self._wrong(number, place, "a number")
                yield value

    def _wrong(self, row: int, place: int, what: str) -> DataError:
        line, cells = self.rows[row]
        cell = cells[place] if len(cells[place]) <= 60 else cells[place][:59] + "…"
        return DataError(f"{self.path}, line {line}, column {self.header[place]!r}: {cell!r} is not {what}")


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)  # Python reads 1_000, nobody else does
    except ValueError:
        return None


def _csv(path: Path) -> _Lines:
    csv.field_size_limit(2**31 - 1)
    with reading(path), open(path, newline="", encoding="utf-8-sig") as stream:
        # The header decides on the separator: texts hold every one there is.
        names = re.sub(r'"[^"]*"', "", stream.readline())
        stream.seek(0)
        reader = csv.reader(stream, delimiter=max(",;\t|", key=names.count))
        try:
            header = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    if header and not rows:
        raise DataError(f"{path} has a header and no rows")
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} cells, but the header has {len(header)} columns")
    return _Lines(path, header, rows)


def _json_lines(path: Path) -> _Lines:
    found: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f'{path}, line {number}: expected an object such as {{"text": ...}}')
        found.append((number, row))
    header = list(dict.fromkeys(name for _, row in found for name in row))
    return _Lines(path, header, [(number, [row.get(name) for name in header]) for number, row in found])


class _Parquet:
    """A Parquet table, of which pyarrow reads the columns asked for once its footer is known to be sensible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = list(self._read(()).column_names)

    def _read(self, names: Sequence[str], *, numeric: bool = False, dictionary: bool = False) -> Any:
        """Read some columns, or without any the schema; in a ``dictionary`` a long text that is repeated stays one."""
        path = self.path
        parquet = optional("pyarrow.parquet", "parquet", f"reading {path.name}")
        try:
            with parquet.ParquetFile(path, read_dictionary=list(names) if dictionary else []) as file:
                schema = file.schema_arrow
                for name in names if numeric else ():
                    kind = schema.field(name).type
                    if not _is_numeric(kind):
                        raise DataError(f"{path}, column {name!r}: features must be numbers, not {kind}")
                # A column of one number repeated takes a few bytes in the file, whatever the number of its rows.
                refuse_bomb(path, 8 * file.metadata.num_rows * max(1, len(schema.names)))
                if file.metadata.num_rows == 0:
                    raise DataError(f"{path} has no rows")
                return file.read(columns=list(names)) if names else schema.empty_table()
        except DataError:
            raise
        except Exception as error:  # pyarrow raises OSError, ValueError, TypeError and others on damaged files
            raise DataError(f"{path} cannot be read as a Parquet table: {first_line(error)}") from error

    def cells(self, name: str) -> list[Any]:
        found: list[Any] = self._read((name,)).column(0).to_pylist()
        return found

    def numbers(self, names: Sequence[str]) -> NDArray[np.float32]:
        table = self._read(names, numeric=True)
        values = np.empty((table.num_rows, len(names)), np.float32)
        for place, name in enumerate(names):
            column = table.column(name)
            self._refuse_empty(name, column)
            with np.errstate(over="ignore"):
                values[:, place] = column.to_numpy()
        if not np.isfinite(values).all():
            row, wrong = np.argwhere(~np.isfinite(values))[0]
            raise DataError(f"{self.path}, row {row}, column {names[wrong]!r}: {values[row, wrong]} is not finite")
        return values

    def labels(self, name: str) -> NDArray[Any]:
        import pyarrow

        column = self._read((name,), dictionary=True).column(0)
        self._refuse_empty(name, column)
        of_dictionary = pyarrow.types.is_dictionary(column.type)
        kind = column.type.value_type if of_dictionary else column.type
        is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        if not (_is_numeric(kind) or (of_dictionary and is_text)):
            raise DataError(f"{self.path}: labels must be whole numbers or strings, not {kind}")
        if not of_dictionary:
            return as_labels(self.path, name, np.asarray(column.to_numpy()))
        chunks = []
        try:
            for chunk in column.chunks:
                names = chunk.dictionary.to_pylist()
                for text in names if is_text else ():
                    refuse_long(str(self.path), text)
                chunks.append(np.array(names, dtype=str if is_text else None)[chunk.indices.to_numpy()])
        except (UnicodeDecodeError, TypeError, IndexError) as error:  # no text, an empty entry, one that is not there
            raise DataError(f"{self.path}: its labels are damaged: {error}") from error
        return as_labels(self.path, name, np.concatenate(chunks))

    def _refuse_empty(self, name: str, column: Any) -> None:
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise DataError(f"{self.path}, row {row}, column {name!r}: the cell is empty")


def _is_numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
