"""Parquet tables, read by pyarrow once their footer is known to be sensible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, MissingDependency, first_line
from dropmax.workbench.data.limits import refuse_bomb, refuse_long

__all__ = ["open_parquet", "parquet_labels", "parquet_numbers"]


def open_parquet(path: Path, columns: Sequence[str], *, numeric: bool = False, dictionary: bool = False) -> Any:
    """Read some columns, once the footer is known to ask for a sensible amount of memory; without any, the schema.

    Args:
        path: of the table.
        columns: those to read.
        numeric: refuse columns that hold anything but numbers, before they are read.
        dictionary: read texts as a dictionary: a long one stays one entry, however many rows have it.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency.extra("pyarrow", "parquet", f"reading {path.name}") from None
    try:
        with pyarrow.parquet.ParquetFile(path, read_dictionary=list(columns) if dictionary else []) as file:
            schema = file.schema_arrow
            for name in columns if numeric else ():
                if not _is_numeric(schema.field(name).type):
                    raise DataError(f"{path}, column {name!r}: features must be numbers, not {schema.field(name).type}")
            # A column of one number repeated takes a few bytes in the file, whatever the number of its rows.
            refuse_bomb(path, 8 * file.metadata.num_rows * max(1, len(schema.names)))
            if file.metadata.num_rows == 0:
                raise DataError(f"{path} has no rows")
            return file.read(columns=list(columns)) if columns else schema.empty_table()
    except DataError:
        raise
    except Exception as error:  # pyarrow raises OSError, ValueError, TypeError and others on damaged files
        reason = first_line(error)
        raise DataError(f"{path} cannot be read as a Parquet table: {reason}") from error


def parquet_numbers(path: Path, table: Any) -> NDArray[np.float32]:
    """Return the columns of a table side by side; an empty or infinite cell is refused."""
    values = np.empty((table.num_rows, table.num_columns), np.float32)
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        _refuse_empty(path, name, column)
        with np.errstate(over="ignore"):
            values[:, place] = column.to_numpy()
    if not np.isfinite(values).all():
        row, wrong = np.argwhere(~np.isfinite(values))[0]
        raise DataError(f"{path}, row {row}, column {table.column_names[wrong]!r}: {values[row, wrong]} is not finite")
    return values


def parquet_labels(path: Path, column: Any) -> NDArray[Any]:
    """Return labels as numbers or strings. Strings come as a dictionary: a long one counts once, not once per row."""
    import pyarrow

    _refuse_empty(path, "label", column)
    of_dictionary = pyarrow.types.is_dictionary(column.type)
    kind = column.type.value_type if of_dictionary else column.type
    is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    if not (_is_numeric(kind) or (of_dictionary and is_text)):
        raise DataError(f"{path}: labels must be whole numbers or strings, not {kind}")
    if not of_dictionary:
        return np.asarray(column.to_numpy())
    chunks = []
    try:
        for chunk in column.chunks:
            names = chunk.dictionary.to_pylist()
            for name in names if is_text else ():
                refuse_long(str(path), name)
            chunks.append(np.array(names, dtype=str if is_text else None)[chunk.indices.to_numpy()])
    except (UnicodeDecodeError, TypeError, IndexError) as error:  # no text, an empty entry, one that is not there
        raise DataError(f"{path}: its labels are damaged: {error}") from error
    return np.concatenate(chunks)


def _refuse_empty(path: Path, name: str, column: Any) -> None:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise DataError(f"{path}, row {row}, column {name!r}: the cell is empty")


def _is_numeric(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
