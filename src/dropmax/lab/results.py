"""Results of ``dropmax reproduce`` as a table with one row per run: ``dropmax.results.load``.

>>> import tempfile
>>> from dropmax.lab.experiments import Local, plan_table, reproduce
>>> tiny = {"training.epochs": 1, "data.train_size": 50, "data.validation_size": 50}
>>> plan = plan_table(["mnist-1k"], heads=["softmax", "sparsemax"], runs=1, tune=False, overrides=tiny)
>>> out = tempfile.mkdtemp()
>>> _ = reproduce(plan, out, engine=Local(workers=1), quiet=True)
>>> frame = load(out)
>>> frame[["data", "variant", "seed", "status"]].values.tolist()
[['mnist-1k', 'softmax', 0, 'done'], ['mnist-1k', 'sparsemax', 0, 'done']]
>>> bool(frame["test.mean.error"].between(0, 1).all())
True
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropmax.errors import RunError, optional
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.store import FILE, Store
from dropmax.lab.experiments.study import flattened

if TYPE_CHECKING:
    import pandas

__all__ = ["load", "rows", "to_csv"]


def load(path: Path | str) -> pandas.DataFrame:
    """Return the runs under a directory as a :class:`pandas.DataFrame`, one row per run, tuning runs included.

    Args:
        path: the ``--out`` of ``dropmax reproduce``, its ``results.jsonl``, or a directory with several of these below
            it; the column ``study`` tells them apart.

    Columns are named as in the records: ``test.mean.error`` is the error (a share, not percent) of the mean prediction
    on the test set, ``point.head.gamma`` a value that was tuned, ``provenance.commit`` where the code stood. A column
    that a run has no value for is missing there.
    """
    found: pandas.DataFrame = optional("pandas", "lab", "dropmax.results.load").DataFrame(rows(path))
    return found


def rows(path: Path | str) -> list[dict[str, Any]]:
    """Return what :func:`load` returns as a list of dictionaries, without pandas."""
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.rglob(FILE))
    if not files:
        raise RunError(f"there is no {FILE} in {place}: `dropmax reproduce mnist-1k --out {place}` makes one")
    found = []
    for file in files:
        study = "." if file == place else file.parent.relative_to(place).as_posix()
        store = Store(file.parent)
        found += [{"study": study, **_row(record)} for record in [*store.runs("tune"), *store.runs()]]
    return found


def to_csv(records: Iterable[RunRecord]) -> str:
    """Return records as CSV with one line per run, which ``pandas.read_csv`` reads without options."""
    table = [_row(record) for record in records]
    names = list(dict.fromkeys(name for row in table for name in row)) or ["kind"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _row(record: RunRecord) -> dict[str, Any]:
    """Return a record without entries that are not single values: the log and the machine's details."""
    whole = record.model_dump(exclude={"last_row", "curve", "recipe"})
    whole["head"] = record.recipe.get("head", {}).get("name")
    whole["epochs"] = record.recipe.get("training", {}).get("epochs")
    whole["provenance"].pop("seeds")
    return flattened(whole)
