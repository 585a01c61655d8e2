"""``DropMaxClassifier.fit`` against ``MLPClassifier.fit``: same data, hidden layer, passes and stopping rule.

Both hold out a tenth of the rows and stop after ten passes without gain; the last row has a fixed number of passes, so
that it compares the passes alone. The vectors of BANKING77 are taken from ``banking77.npz`` in ``$DROPMAX_DATA``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from benchmarks import bench_scale, harness
from dropmax.sklearn import DropMaxClassifier

AIM = 2.0


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure each data set, with one thread as MLPClassifier's products are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for name, (X, y) in _data(quick).items():
            rows.append(_row(name, X, y, early_stopping=True, max_iter=3 if quick else 200, quick=quick))
        rows.append(
            _row("digits", *_data(quick)["digits"], early_stopping=False, max_iter=3 if quick else 40, quick=quick)
        )
    finally:
        torch.set_num_threads(threads)
    return rows


def _data(quick: bool) -> dict[str, tuple[Any, Any]]:
    X, y = load_digits(return_X_y=True)
    found = {"digits": (X[:300] if quick else X, y[:300] if quick else y)}
    path = Path(os.environ.get("DROPMAX_DATA", "data")) / "banking77.npz"
    if path.exists() and not quick:
        with np.load(path) as file:
            rows = np.flatnonzero(file["split"] == "train")
            rows = np.random.default_rng(0).permutation(rows)[:3000]
            found["BANKING77 vectors, 3,000 rows"] = (file["x"][rows].astype(np.float32), file["y"][rows])
    return found


def _row(name: str, X: Any, y: Any, *, early_stopping: bool, max_iter: int, quick: bool) -> dict[str, Any]:
    options = {"max_iter": max_iter, "random_state": 0, "early_stopping": early_stopping}
    passes: dict[str, int] = {}

    def fit(kind: Callable[..., Any]) -> Callable[[], None]:
        def call() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                # MLPClassifier needs more than its default of ten passes without gain to be told "never stop".
                limit = {} if early_stopping else {"n_iter_no_change": max_iter}
                passes[kind.__name__] = kind((100,), **options, **limit).fit(X, y).n_iter_

        return call

    kinds = {"MLPClassifier": fit(MLPClassifier), "DropMaxClassifier": fit(DropMaxClassifier)}
    timing = harness.measure(kinds, baseline="MLPClassifier", warm_up=1, least_rounds=7, budget=0.1 if quick else 20.0)[
        "DropMaxClassifier"
    ]
    stopping = "early stopping" if early_stopping else f"{max_iter} passes"
    met = bench_scale.below(AIM, timing.ratio_low, timing.ratio_high)
    return {
        "what": f"fit, {name}, {stopping}",
        "threads": 1,
        "aim": AIM,
        "met": met,
        "passes": passes,
        **asdict(timing),
    }


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return one table."""
    return [bench_scale.aims_table("DropMaxClassifier / MLPClassifier", rows)]
