"""``DropMaxClassifier.fit`` against ``MLPClassifier.fit``: same data, hidden layer of 100, batches and passes.

Both hold out a tenth of the rows, look at them after every pass, and are told not to stop before the last. Ours has its
default dropout, which ``MLPClassifier`` lacks. The rows without an aim add our second fit, on all rows. Times are those
of the processor, as a busy machine delays either. The vectors of BANKING77 are taken from ``banking77.npz`` in
``$DROPMAX_DATA``.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from benchmarks import bench_scale, harness
from dropmax.sklearn import DropMaxClassifier

AIM = 2.0
PASSES = 50


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure each data set, with one thread as MLPClassifier's products are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for name, data in _data(quick).items() for row in _rows(name, *data, quick=quick)]
    finally:
        torch.set_num_threads(threads)


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


def _rows(name: str, X: Any, y: Any, *, quick: bool) -> list[dict[str, Any]]:
    passes = 3 if quick else PASSES

    def fit(kind: Callable[..., Any], **options: Any) -> Callable[[], None]:
        same = {"batch_size": 200, "early_stopping": True, "max_iter": passes, "n_iter_no_change": passes}
        model = kind((100,), random_state=0, **same, **options)

        def call() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(X, y)

        return call

    calls = {"theirs": fit(MLPClassifier), "once": fit(DropMaxClassifier, refit=False), "twice": fit(DropMaxClassifier)}
    budget = 0.1 if quick else 5.0
    timings = harness.measure(
        calls, baseline="theirs", warm_up=1, least_rounds=7, budget=budget, clock=time.process_time
    )
    rows = []
    for kind, what, aim in (("once", "", AIM), ("twice", ", and a second fit on all rows", None)):
        rows.append({"threads": 1, **bench_scale._row(f"fit, {name}, {passes} passes{what}", timings[kind], aim)})
    return rows
