"""Tables with a column of texts: .csv (any usual separator), .parquet and JSON lines."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dropmax.errors import DataError, MissingDependency, did_you_mean, first_line
from dropmax.workbench.data.dataset import spell
from dropmax.workbench.data.limits import refuse_bomb, refuse_long

__all__ = ["TEXT_SUFFIXES", "TextTable", "read_texts"]

#: What :func:`read_texts` reads.
TEXT_SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")

_SEPARATORS = ",;\t|"


@dataclass
class TextTable:
    """Texts row by row, with their labels, ids and splits where the table has such columns.

    ``left_out`` names the rows without a text, which are in none of the lists.
    """

    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_texts(
    path: Path,
    text_column: str,
    *,
    label_column: str | None = None,
    id_column: str | None = None,
    split_column: str | None = None,
) -> TextTable:
    """Read the named columns of a table; a row is called by its id, or else ``row 7``, counted from 1.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "intents.csv")
    >>> _ = path.write_text("utterance;intent\\nWhere is my card?;card_arrival\\n;card_arrival\\n")
    >>> table = read_texts(path, "utterance", label_column="intent")
    >>> table.texts, table.labels, table.left_out
    (['Where is my card?'], ['card_arrival'], ['row 2'])
    """
    header, rows = _open(path)
    wanted = {"text": text_column, "label": label_column, "id": id_column, "split": split_column}
    for purpose, name in wanted.items():
        if name is not None and header.count(name) != 1:
            _refuse_column(path, header, purpose, name)
    table = TextTable()
    for number, row in enumerate(rows, 1):
        called = _cell(row.get(id_column)) if id_column else ""
        called = called or f"row {number}"
        if not _cell(row.get(text_column)):
            table.left_out.append(called)
            continue
        table.texts.append(str(row[text_column]))
        table.ids.append(called)
        if label_column is not None:
            label = _cell(row.get(label_column))
            if not label:
                raise DataError(f"{path}, {called}: the label in column {label_column!r} is empty")
            refuse_long(f"{path}, {called}", label)
            table.labels.append(label)
        if split_column is not None:
            table.splits.append(_cell(row.get(split_column)))
    if not table.texts:
        raise DataError(f"{path} has no texts in its column {text_column!r}")
    return table


def _refuse_column(path: Path, header: list[str], purpose: str, name: str) -> None:
    if name in header:
        raise DataError(f"{path} has the column {name!r} twice: rename one of them")
    option = {"text": "--text", "label": "--label", "id": "--id-column", "split": "--split-column"}[purpose]
    raise DataError(
        f"{path} has no column {name!r} for the {purpose}:{did_you_mean(name, header)} "
        f"Its columns are {spell(header)}; name the right one with {option}"
    )


def _cell(value: Any) -> str:
    """Return a cell as text; nothing, NaN and blanks are all empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value).strip()


def _open(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".jsonl": _json_lines, ".ndjson": _json_lines}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} is of a kind that holds no texts: give one of {', '.join(TEXT_SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    return reader(path)


def _csv(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    first = text.partition("\n")[0]
    # The header decides: texts hold every separator there is.
    separator = max(_SEPARATORS, key=first.count)
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        header = next(reader, [])
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    if not header:
        raise DataError(f"{path} is empty")
    for line, row in lines:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} cells, but the header has {len(header)} columns")
    return header, (dict(zip(header, row, strict=True)) for _, row in lines)


def _json_lines(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    header: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f'{path}, line {number}: expected an object such as {{"text": ...}}')
                header |= dict.fromkeys(row)
                rows.append(row)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}, line {len(rows) + 1}: not JSON: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty")
    return list(header), iter(rows)


def _parquet(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency.extra("pyarrow", "parquet", f"reading {path.name}") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            refuse_bomb(path, 8 * file.metadata.num_rows * max(1, len(file.schema_arrow.names)))
            header = list(file.schema_arrow.names)
            rows = file.read().to_pylist() if len(set(header)) == len(header) else []
    except DataError:
        raise
    except Exception as error:  # pyarrow raises OSError, ValueError, TypeError and others on damaged files
        reason = first_line(error)
        raise DataError(f"{path} cannot be read as a Parquet table: {reason}") from error
    return header, iter(rows)
