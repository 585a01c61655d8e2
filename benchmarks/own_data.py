"""Our defaults against what people would use instead: ``python -m benchmarks.own_data DATA ... [--seeds N] [--out F]``.

DATA is ``digits``, ``wine``, ``breast_cancer`` or ``iris`` (scikit-learn's; a stratified 30 % is the test part),
``mnist-1k``, or an .npz file as ``dropmax embed`` writes, with its own test part; ``FILE.npz:10`` trains on 10 rows per
class. Nothing is chosen on test rows: logistic regression chooses C by cross-validated log loss, k-nearest neighbours k
by cross-validated error. What ``--out`` holds already is not run again.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.rows import append, markdown, parser, read
from dropmax import metrics
from dropmax.lab.statistics import t_interval
from dropmax.sklearn import DropMaxClassifier
from dropmax.workbench.data import load
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_model, train

Array = NDArray[Any]

_OF_SKLEARN = {"digits": load_digits, "wine": load_wine, "breast_cancer": load_breast_cancer, "iris": load_iris}


def parts(data: str, seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training inputs and labels, test inputs and labels."""
    if data in _OF_SKLEARN:
        X, y = _OF_SKLEARN[data](return_X_y=True)
        X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, stratify=y, random_state=seed)
        return X_train, y_train, X_test, y_test
    name, _, count = data.partition(":")
    found = load(name, seed=seed)
    if count:
        found = load(name, seed=seed, train_size=int(count) * found.num_classes)
    elif name not in ("mnist-1k",):  # whose validation part is five times its training part
        found = found.with_validation_trained_on()
    both = (found.train, found.test)
    return tuple(array for part in both for array in (part.inputs.flatten(1).numpy(), part.labels.numpy()))  # type: ignore[return-value]


def _recipe(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Array:
    """Return the test probabilities of ``dropmax train FILE.npz`` with nothing else said, as `evaluate` has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.npz")
        np.savez(file, x_train=np.float32(X), y_train=y, x_test=np.float32(X_test), y_test=y_test)
        recipe = load_recipe("own-features").override({"data.name": str(file), "training.seed": seed})
        trained = load_model(train(recipe, Path(folder, "run"), quiet=True).path)
        return trained.answer(torch.from_numpy(np.float32(X_test))).probs.double().numpy()


def _logistic(seed: int) -> Any:
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    return GridSearchCV(model, {"logisticregression__C": [0.01, 0.1, 1.0]}, scoring="neg_log_loss", cv=3)


def _neighbours(seed: int) -> Any:
    model = make_pipeline(StandardScaler(), KNeighborsClassifier())
    return GridSearchCV(model, {"kneighborsclassifier__n_neighbors": [1, 3, 5, 10, 20]}, cv=3)


ESTIMATORS: dict[str, Callable[[int], Any]] = {
    "DropMaxClassifier()": lambda seed: DropMaxClassifier(random_state=seed),
    "LogisticRegression, C by cross-validation": _logistic,
    "MLPClassifier(early_stopping=True)": lambda seed: make_pipeline(
        StandardScaler(), MLPClassifier(early_stopping=True, random_state=seed)
    ),
    "RandomForestClassifier(300)": lambda seed: RandomForestClassifier(300, random_state=seed),
    "HistGradientBoostingClassifier()": lambda seed: HistGradientBoostingClassifier(random_state=seed),
    "k-nearest neighbours, k by cross-validation": _neighbours,
}
METHODS = ("dropmax train", *ESTIMATORS)


#: Same data, same result.
_DRAW_NOTHING = ("LogisticRegression, C by cross-validation", "k-nearest neighbours, k by cross-validation")


def wanted(data: str, seed: int) -> list[str]:
    """Return the methods to run: those without random numbers once where the seed does not choose the rows either."""
    methods = list(METHODS)
    if seed and data.endswith(".npz"):
        methods = [method for method in methods if method not in _DRAW_NOTHING]
    if ".npz" in data:  # a hundred trees for each of the classes: an hour
        methods.remove("HistGradientBoostingClassifier()")
    return methods


def run(data: str, seed: int, method: str) -> dict[str, Any]:
    """Fit on the split of this seed, and return what the test part says of it."""
    X, y, X_test, y_test = parts(data, seed)
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # folds with few rows of a class, and MLPClassifier's limit of passes
        if method == "dropmax train":
            probs = _recipe(X, y, X_test, y_test, seed)
        else:
            probs = ESTIMATORS[method](seed).fit(X, y).predict_proba(X_test)
    seconds = time.process_time() - started
    found = metrics.evaluate(torch.from_numpy(np.asarray(probs, float)), torch.from_numpy(y_test.astype(np.int64)))
    return {
        "data": Path(data).name,
        "method": method,
        "seed": seed,
        "rows": len(y),
        "cpu_seconds": round(seconds, 2),
        **{name: found[name] for name in ("error", "nll", "ece", "aurc")},
    }


#: What the tables call the data, in their order.
_TITLES = {
    "cub-efficientnet-lite0.npz": "CUB-200 features",
    "banking77.npz": "BANKING77",
    "clinc150.npz": "CLINC150",
    "banking77.npz:10": "BANKING77, ten rows per class",
    "digits": "digits",
    "mnist-1k": "MNIST-1K pixels",
    "breast_cancer": "breast cancer",
    "wine": "wine",
    "iris": "iris",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Return means over the seeds as Markdown, with 95 % t-intervals where there are three seeds or more."""
    tables = []
    for data in dict.fromkeys([*_TITLES, *(row["data"] for row in rows)]):
        by_method = {m: [row for row in rows if (row["data"], row["method"]) == (data, m)] for m in METHODS}
        known = {method: found for method, found in by_method.items() if found}
        if known:
            lines = []
            for method, found in known.items():
                seconds = np.mean([row["cpu_seconds"] for row in found])
                error, nll = _cell(found, "error", 100, 2), _cell(found, "nll", 1, 3)
                lines.append([method, len(found), error, nll, f"{seconds:.1f}"])
            title = f"{_TITLES.get(data, data)}, {next(iter(known.values()))[0]['rows']:,} rows"
            tables.append(markdown([title, "seeds", "error %", "NLL", "CPU s"], lines) + "\n")
    return "\n".join(tables)


def _cell(rows: list[dict[str, Any]], key: str, scale: int, digits: int) -> str:
    values = [scale * row[key] for row in rows]
    if len(values) < 3:
        return f"{np.mean(values):.{digits}f}"
    mean, half_width = t_interval(values)
    return f"{mean:.{digits}f} ± {half_width:.{digits}f}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("data", nargs="*", help="nothing prints the table of what --out holds")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--methods", nargs="+", metavar="METHOD", help="how their names begin (default: all)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rows = read(options.out)
    done = {(row["data"], row["method"], row["seed"]) for row in rows}
    if not options.data:
        print(table(rows))
    for seed in range(options.seeds):
        for data in options.data:
            for method in wanted(data, seed):
                chosen = options.methods is None or method.startswith(tuple(options.methods))
                if chosen and (Path(data).name, method, seed) not in done:
                    append(options.out, run(data, seed, method), [seed])


if __name__ == "__main__":
    main()
