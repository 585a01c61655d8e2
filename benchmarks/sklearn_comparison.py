"""DropMaxClassifier against MLPClassifier: ``python -m benchmarks.sklearn_comparison [DATA ...] [--max-iter N]``.

Both have one hidden layer of 100 units, Adam at 0.001, batches of at most 200, the same limit of passes and the same
stopping rule (their common defaults), behind the same StandardScaler, on the same stratified split of 70 % / 30 %. The
seed of a run makes the split, the synthetic data, and both estimators. They differ in how weights start and in the L2
penalty, see docs/sklearn.md; our defaults were chosen on other data sets.

Results are kept after every seed, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, load_wine, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropmax.errors import DropMaxError, InvalidValue, RunError, did_you_mean
from dropmax.lab.statistics import paired_difference
from dropmax.sklearn import DropMaxClassifier
from dropmax.workbench.files import write_atomically
from dropmax.workbench.provenance import provenance

#: Shares of the seven forest types in covtype.
_COVTYPE_SHARES = (0.365, 0.488, 0.061, 0.005, 0.016, 0.030, 0.035)


def _covtype_like(seed: int) -> tuple[Any, Any]:
    inputs, labels = make_classification(
        n_samples=6000,
        n_features=54,
        n_informative=12,
        n_redundant=6,
        n_classes=7,
        n_clusters_per_class=2,
        weights=list(_COVTYPE_SHARES),
        flip_y=0.02,
        random_state=seed,
    )
    return inputs, labels


DATA: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "digits": lambda seed: load_digits(return_X_y=True),
    "wine": lambda seed: load_wine(return_X_y=True),
    "covtype-like": _covtype_like,
}

#: The softmax head in our estimator separates what the head does from what the rest of the estimator does.
ARMS: dict[str, Callable[[int, int], Any]] = {
    "MLPClassifier": lambda seed, max_iter: MLPClassifier((100,), max_iter=max_iter, random_state=seed),
    "softmax head": lambda seed, max_iter: DropMaxClassifier(
        (100,), head="softmax", max_iter=max_iter, random_state=seed
    ),
    "DropMaxClassifier": lambda seed, max_iter: DropMaxClassifier((100,), max_iter=max_iter, random_state=seed),
}


def run_seed(data: str, seed: int, max_iter: int) -> list[dict[str, Any]]:
    """Fit every arm on the split of this seed and return a row for each."""
    X, y = DATA[data](seed)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, stratify=y, random_state=seed)
    rows = []
    for arm, make in ARMS.items():
        model = make_pipeline(StandardScaler(), make(seed, max_iter))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            start = time.process_time()
            model.fit(X_train, y_train)
            seconds = time.process_time() - start
        probs = model.predict_proba(X_test)
        row = {
            "seed": seed,
            "arm": arm,
            "accuracy": float(np.mean(model.classes_[probs.argmax(1)] == y_test)),
            "log_loss": float(log_loss(y_test, probs)),
            "passes": model[-1].n_iter_,
            "cpu_seconds": round(seconds, 3),
        }
        if arm == "DropMaxClassifier":
            row["log_loss_exact_mode"] = float(log_loss(y_test, model.predict_proba(X_test, mode="exact")))
        rows.append(row)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of each arm, and the paired differences to MLPClassifier with their 95 % t intervals."""
    seeds = sorted({row["seed"] for row in rows})
    found: dict[str, Any] = {"seeds": seeds}
    for arm in ARMS:
        own = {row["seed"]: row for row in rows if row["arm"] == arm}
        base = {row["seed"]: row for row in rows if row["arm"] == "MLPClassifier"}
        found[arm] = {}
        for metric in ("accuracy", "log_loss"):
            values = [own[seed][metric] for seed in seeds]
            found[arm][metric] = {"mean": float(np.mean(values))}
            if arm != "MLPClassifier" and len(seeds) > 1:
                difference = paired_difference(values, [base[seed][metric] for seed in seeds])
                found[arm][metric]["minus_MLPClassifier"] = difference._asdict()
        found[arm]["cpu_seconds"] = {"median": float(np.median([own[seed]["cpu_seconds"] for seed in seeds]))}
    return found


def compare(data: str, seeds: Sequence[int], max_iter: int, out: Path, command: str) -> dict[str, Any]:
    """Run the seeds that the file does not have yet, and return all it holds of this comparison, which is one line."""
    try:
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        others = [line for line in lines if (line["comparison"], line["max_iter"]) != (data, max_iter)]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{out} does not hold results of this benchmark: move it away ({error!r})") from error
    new: dict[str, Any] = {"comparison": data, "max_iter": max_iter, "sessions": [], "rows": []}
    result = next((line for line in lines if line not in others), new)
    done = {row["seed"] for row in result["rows"]}
    missing = [seed for seed in seeds if seed not in done]
    if missing:
        result["sessions"].append(provenance(command, []))
        result["sessions"][-1]["versions"]["scikit-learn"] = _sklearn_version()
    for seed in missing:
        result["rows"] += run_seed(data, seed, max_iter)
        result["sessions"][-1]["seeds"].append(seed)
        result["summary"] = summary(result["rows"])
        write_atomically(out, "".join(json.dumps(line) + "\n" for line in [*others, result]))
        print(f"{data}, seed {seed}: " + ", ".join(_short(row) for row in result["rows"][-len(ARMS) :]), flush=True)
    return result


def _sklearn_version() -> str:
    import sklearn

    return str(sklearn.__version__)


def _short(row: dict[str, Any]) -> str:
    return f"{row['arm']} {row['accuracy']:.4f} / {row['log_loss']:.4f}"


def _print_summary(data: str, found: dict[str, Any]) -> None:
    for arm in ARMS:
        cells = []
        for metric in ("accuracy", "log_loss"):
            value = found[arm][metric]
            text = f"{metric} {value['mean']:.4f}"
            if "minus_MLPClassifier" in value:
                difference = value["minus_MLPClassifier"]
                text += f" ({difference['mean']:+.4f} +- {difference['half_width']:.4f}, p {difference['p_value']:.3f})"
            cells.append(text)
        print(f"{data:13} {arm:18} {'  '.join(cells)}  cpu {found[arm]['cpu_seconds']['median']:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sklearn_comparison", description=__doc__)
    parser.add_argument("data", nargs="*", metavar="DATA", help=f"which of {', '.join(DATA)} (default: all)")
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 0 (default: %(default)s)")
    parser.add_argument("--max-iter", type=int, default=200, help="passes at most, for all (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/sklearn.jsonl"), metavar="FILE", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    command = " ".join(["python -m benchmarks.sklearn_comparison", *arguments])
    try:
        for data in options.data:
            if data not in DATA:
                raise InvalidValue(f"unknown data {data!r}:{did_you_mean(data, DATA)} There are {', '.join(DATA)}")
        for data in options.data or DATA:
            result = compare(data, range(options.seeds), options.max_iter, options.out, command)
            _print_summary(data, result["summary"])
    except DropMaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
