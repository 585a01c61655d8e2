"""Parquet tables, read by pyarrow once their footer is known to be sensible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropmax.errors import DataError, first_line, optional
from dropmax.workbench.data.labels import as_labels, refuse_bomb, refuse_long


class Parquet:
    """A Parquet table, of which the columns asked for are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = list(self._read(()).column_names)

    def _read(self, names: Sequence[str], *, numeric: bool = False, dictionary: bool = False) -> Any:
        """Read some columns, once the footer is known to ask for a sensible amount of memory; without any, the schema.

        With ``dictionary`` texts come as a dictionary: a long one stays one entry, however many rows have it.
        """
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
        """Return a column as it is."""
        found: list[Any] = self._read((name,)).column(0).to_pylist()
        return found

    def numbers(self, names: Sequence[str]) -> NDArray[np.float32]:
        """Return columns side by side; an empty or infinite cell is refused."""
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
        """Return a column as whole numbers or strings."""
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
    import pyarrow

    types = pyarrow.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
