"""Parquet tables, read by pyarrow once their footer is known to be sensible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, MissingDependency
from dropmax.workbench.data.limits import refuse_bomb, refuse_long

__all__ = ["parquet_labels", "parquet_numbers", "parquet_table"]


def parquet_table(path: Path, label_column: str) -> Any:
    """Read the table, once its footer is known to ask for a sensible amount of memory, and for numbers."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency.extra("pyarrow", "parquet", f"reading {path.name}") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            for name, kind in zip(schema.names, schema.types, strict=True):
                if name != label_column and not _is_numeric(kind):
                    raise DataError(f"{path}, column {name!r}: features must be numbers, not {kind}")
            # A column of one number repeated takes a few bytes in the file, whatever the number of its rows.
            refuse_bomb(path, 8 * file.metadata.num_rows * max(1, len(schema.names)))
        # Long texts stay one entry of a dictionary each, however many rows have them.
        wanted = [label_column] if label_column in schema.names else []
        with pyarrow.parquet.ParquetFile(path, read_dictionary=wanted) as file:
            table = file.read()
    except DataError:
        raise
    except Exception as error:  # pyarrow raises OSError, ValueError, TypeError and others on damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path} cannot be read as a Parquet table: {reason}") from error
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows")
    return table


def parquet_numbers(path: Path, table: Any, label_column: str) -> NDArray[np.float32]:
    """Return every column but that of the labels, side by side; an empty or infinite cell is refused."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise DataError(f"{path}, row {row}, column {name!r}: the cell is empty")
        if name != label_column:
            with np.errstate(over="ignore"):
                columns.append(column.to_numpy().astype(np.float32))
    if not columns:
        raise DataError(f"{path} has no columns of features")
    values = np.stack(columns, axis=1)
    if not np.isfinite(values).all():
        row, wrong = np.argwhere(~np.isfinite(values))[0]
        name = [name for name in table.column_names if name != label_column][wrong]
        raise DataError(f"{path}, row {row}, column {name!r}: {values[row, wrong]} is not finite")
    return values


def parquet_labels(path: Path, column: Any) -> NDArray[Any]:
    """Return labels as numbers or strings. Strings come as a dictionary: a long one counts once, not once a row."""
    import pyarrow

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


def _is_numeric(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
