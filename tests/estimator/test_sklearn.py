"""The scikit-learn estimator: scikit-learn's own checks, what it is for, and what a user is told."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn", reason="needs scikit-learn (the extra `sklearn`)")

from scipy.special import softmax
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dropmax import HEADS
from dropmax.errors import InvalidType, InvalidValue, RunError
from dropmax.sklearn import DropMaxClassifier
from tests.close import close
from tests.estimator.estimators import Conv, quick, same_model

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


# --- scikit-learn's own checks, none excused -------------------------------------------------------------------------

# As users get it, but for the number of passes; and with small batches and no held-out rows, where order and luck
# could show.
ESTIMATORS = [
    DropMaxClassifier(max_iter=30),
    DropMaxClassifier((16,), batch_size=16, max_iter=10, learning_rate_init=0.03, early_stopping=False),
]


@parametrize_with_checks(ESTIMATORS)  # type: ignore[untyped-decorator]
def test_scikit_learn_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


# --- what it is for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_iris_from_unscaled_inputs(iris: tuple[Any, Any], head: str) -> None:
    X, y = iris
    shifted = X * [1e-3, 1, 1e3, 1] + [0, 1e4, 0, -5]
    model = DropMaxClassifier((32,), head=head, learning_rate_init=0.01, max_iter=60, random_state=0).fit(shifted, y)
    assert model.score(shifted, y) > 0.93
    for mode in ("mean", "mc", "exact"):
        probs = model.predict_proba(shifted, mode=mode)
        assert probs.shape == (150, 3)
        assert np.allclose(probs.sum(1), 1)
    retain = model.retain_proba(shifted)
    assert retain.shape == (150, 3)
    assert ((retain >= 0) & (retain <= 1)).all()


def test_sampling_converges_to_the_exact_prediction(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = quick(max_iter=50).fit(X, y)
    exact = model.predict_proba(X[:20], mode="exact")
    drawn = model.predict_proba(X[:20], mode="mc", samples=20_000)
    assert np.abs(drawn - exact).max() < 0.02  # five standard errors of a share of 20,000
    assert np.abs(model.predict_proba(X[:20]) - exact).max() > 0.02
    assert np.array_equal(drawn, model.predict_proba(X[:20], mode="mc", samples=20_000))
    assert np.array_equal(clone(model).set_params(mode="exact").fit(X, y).predict_proba(X[:20]), exact)


@pytest.mark.parametrize("head", HEADS)
def test_decisions_and_log_probabilities_agree_with_the_probabilities(iris: tuple[Any, Any], head: str) -> None:
    X, y = iris
    model = quick(head=head, max_iter=20).fit(X, y)
    probs = model.predict_proba(X)
    assert model.decision_function(X).shape == (150, 3)
    assert np.array_equal(model.classes_[model.decision_function(X).argmax(1)], model.predict(X))
    if head != "sparsemax":  # whose probabilities are no softmax
        close(softmax(model.decision_function(X), axis=1), probs.astype(np.float32))
    log_probs = model.predict_log_proba(X, mode="exact")
    assert np.isfinite(log_probs).all()
    close(np.exp(log_probs), model.predict_proba(X, mode="exact"))
    two = quick(head=head).fit(X[:100], y[:100])
    assert two.decision_function(X).shape == (150,)
    assert np.array_equal(two.classes_[(two.decision_function(X) > 0).astype(int)], two.predict(X))


def test_a_prediction_does_not_depend_on_the_other_rows(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = quick().fit(X, y)
    many = np.concatenate([X] * 3)  # several blocks of rows
    whole = model.predict_proba(many)
    assert np.array_equal(whole[:150], whole[300:])
    assert np.array_equal(model.predict_proba(X[7:8]), whole[7:8])
    assert model.predict_proba(X).sum(1) == pytest.approx(np.ones(150), abs=1e-15)


def test_confusable_with_names_the_other_flower(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = DropMaxClassifier((100,), random_state=0, learning_rate_init=0.01, early_stopping=False).fit(X, y)
    named = model.confusable_with(X)
    share = {flower: np.mean([bool(named[row]) for row in np.flatnonzero(y == flower)]) for flower in model.classes_}
    assert share["setosa"] < 0.15 < share["virginica"]  # setosa lies far from the other two
    wrong = np.flatnonzero(model.predict(X) != y)
    doubtful = np.flatnonzero(model.predict_proba(X).max(1) < 0.8)
    assert len(doubtful)
    for row in {*wrong, *doubtful}:
        assert named[row] in (["versicolor"], ["virginica"])
        assert named[row] != [model.predict(X[[row]])[0]]


@pytest.mark.parametrize("make", [load_iris, load_wine])
def test_cross_validated_accuracy(make: Callable[..., Any]) -> None:
    X, y = make(return_X_y=True)
    assert cross_val_score(DropMaxClassifier(learning_rate_init=0.01, random_state=0), X, y, cv=3).mean() > 0.94


def test_standardize_false_leaves_inputs_alone(iris: tuple[Any, Any]) -> None:
    X, y = iris
    scaled = StandardScaler().fit_transform(X)
    inside, outside = (
        quick(standardize=scale, early_stopping=False).fit(rows, y) for scale, rows in ((True, X), (False, scaled))
    )
    assert outside.scaler_ is None
    seen: list[torch.Tensor] = []
    outside.model_.net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    outside.predict(scaled)
    assert np.array_equal(seen[0].numpy(), scaled[: len(seen[0])].astype(np.float32))
    assert inside.scaler_.mean_ == pytest.approx(X.mean(0))


def test_a_constant_feature_does_no_harm(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = quick(max_iter=30, learning_rate_init=0.05).fit(np.column_stack([X, np.full(150, 1e6)]), y)
    assert model.score(np.column_stack([X, np.full(150, 1e6)]), y) > 0.9


# --- training --------------------------------------------------------------------------------------------------------


def test_partial_fit_learns_from_a_stream_and_repeats_itself(iris: tuple[Any, Any]) -> None:
    X, y = iris
    order = np.random.default_rng(0).permutation(150)

    def stream() -> DropMaxClassifier:
        model = DropMaxClassifier((32,), learning_rate_init=0.01, dropout=0.0, random_state=0)
        for _ in range(10):
            for rows in np.array_split(order, 5):
                model.partial_fit(X[rows], y[rows], classes=np.unique(y))
        return model

    first, second = stream(), stream()
    assert first.score(X, y) > 0.93
    assert same_model(first, second)
    assert first.n_iter_ == len(first.loss_curve_) == 50
    assert first.scaler_.mean_ == pytest.approx(X.mean(0))
    pickled = pickle.loads(pickle.dumps(first))
    assert same_model(first.partial_fit(X, y), pickled.partial_fit(X, y))  # Adam's state travels along


def test_partial_fit_goes_on_from_fit(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = quick(dropout=0.0, refit=False).fit(X, y)
    before = model.loss_curve_[-1]
    for _ in range(5):
        model.partial_fit(X, y)
    assert model.loss_curve_[-1] < before
    assert model.n_iter_ == 10


def test_early_stopping_keeps_the_best_weights(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = DropMaxClassifier(
        (64,), early_stopping=True, refit=False, learning_rate_init=0.05, random_state=0, validation_fraction=0.3
    )
    model.fit(X, y)
    curve = model.validation_curve_
    assert len(curve) == model.n_iter_ < 200
    best = int(np.argmin(curve))
    assert best < len(curve) - 1
    stopped_there = clone(model).set_params(max_iter=best + 1).fit(X, y)
    assert np.array_equal(stopped_there.predict_proba(X), model.predict_proba(X))


def test_the_second_fit_is_of_all_rows_for_the_passes_that_were_best(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = DropMaxClassifier((64,), learning_rate_init=0.05, random_state=0, validation_fraction=0.3).fit(X, y)
    best = 1 + int(np.argmin(model.validation_curve_))
    assert best < len(model.validation_curve_)
    assert model.n_iter_ == len(model.loss_curve_) == best
    options = {"early_stopping": False, "max_iter": best, "n_iter_no_change": 1000}
    with pytest.warns(ConvergenceWarning):
        plain = clone(model).set_params(**options).fit(X, y)
    assert np.array_equal(plain.predict_proba(X), model.predict_proba(X)), "as if nothing had ever been held out"


def test_it_says_when_it_has_not_converged_and_only_then(
    iris: tuple[Any, Any], recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.warns(ConvergenceWarning, match=r"max_iter=5 passes.*raise max_iter"):
        quick().fit(*iris)
    recwarn.clear()
    model = quick(max_iter=50, tol=1e3).fit(*iris)
    assert model.n_iter_ == 11  # the first pass, and ten that were not better by 1000
    assert not [warning for warning in recwarn if issubclass(warning.category, ConvergenceWarning)]


def test_verbose_prints_a_line_now_and_then(iris: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    quick(max_iter=25, verbose=True, early_stopping=True).fit(*iris)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["pass 10", "pass 20", "pass 25", lines[-1].split(":")[0]]
    assert all("loss" in line and "validation log loss" in line for line in lines[:-1])
    assert "passes over all rows: loss" in lines[-1]
    quick().fit(*iris)
    assert capsys.readouterr().out == ""


def test_fitting_leaves_the_callers_random_numbers_alone(iris: tuple[Any, Any]) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    quick(head="dropmax-qp").fit(*iris).predict_proba(iris[0], mode="mc")
    assert torch.equal(torch.rand(3), expected)


def test_a_network_of_ones_own(iris: tuple[Any, Any]) -> None:
    X, y = iris
    before = X.copy()
    # Nine features and dropout: it learns slowly, and not from every seed.
    patient = {"early_stopping": False, "tol": 0.0, "n_iter_no_change": 100, "weight_decay": 1e-4, "random_state": 1}
    model = DropMaxClassifier(network=Conv, learning_rate_init=0.02, standardize=False, **patient).fit(X, y)
    assert model.score(X, y) > 0.9
    assert np.array_equal(X, before)
    assert isinstance(model.model_.net, Conv)


def test_examples_that_cannot_be_held_out(iris: tuple[Any, Any]) -> None:
    X, y = iris
    model = quick().fit(X[[0, 50, 100]], y[[0, 50, 100]])  # one of each class: the training loss decides
    assert model.validation_curve_ == []
    assert set(model.classes_) == set(y)
    model = quick().fit(X[[0, 50, 100, 101]], y[[0, 50, 100, 101]])
    assert len(model.validation_curve_) == model.n_iter_


# --- among scikit-learn's tools --------------------------------------------------------------------------------------


def test_data_frames_strings_and_a_pipeline(iris: tuple[Any, Any]) -> None:
    X, y = iris
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    pipeline = make_pipeline(StandardScaler(), quick(max_iter=60, learning_rate_init=0.02))
    pipeline.set_output(transform="pandas").fit(frame, pd.Series(y))
    assert pipeline[-1].feature_names_in_.tolist() == ["a", "b", "c", "d"]
    assert pipeline.score(frame, y) > 0.9
    assert pipeline.predict(frame)[0] == "setosa"
    assert not np.array_equal(pipeline.predict_proba(frame, mode="exact"), pipeline.predict_proba(frame))
    assert pipeline.decision_function(frame).shape == pipeline.predict_log_proba(frame).shape == (150, 3)
    prepared = pipeline[:-1].transform(frame)  # the last step has methods of its own
    assert len(pipeline[-1].confusable_with(prepared)) == len(pipeline[-1].retain_proba(prepared)) == 150


def test_grid_search_clones_and_numpy_parameters(iris: tuple[Any, Any]) -> None:
    X, y = iris
    grid = {
        "dropmaxclassifier__hidden_layer_sizes": [np.int64(8), (8, 4)],
        "dropmaxclassifier__max_iter": np.array([2, 40]),
        "dropmaxclassifier__head": ["softmax", "dropmax"],
    }
    search = GridSearchCV(
        make_pipeline(StandardScaler(), quick(learning_rate_init=0.02)), grid, cv=2, error_score="raise"
    )
    search.fit(X, y, dropmaxclassifier__sample_weight=np.ones(len(y)))
    assert search.best_params_["dropmaxclassifier__max_iter"] == 40
    assert search.best_score_ > 0.9


def test_calibration_and_pickles(iris: tuple[Any, Any]) -> None:
    X, y = iris
    calibrated = CalibratedClassifierCV(quick(max_iter=30, learning_rate_init=0.02), cv=2).fit(X, y)
    assert log_loss(y, calibrated.predict_proba(X)) < 0.5
    again = pickle.loads(pickle.dumps(calibrated))
    close(again.predict_proba(X), calibrated.predict_proba(X), terms=X.shape[1], scale=10.0)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"head": "dropmux"}, InvalidValue, "unknown head 'dropmux': did you mean 'dropmax'"),
        ({"mode": "exakt"}, InvalidValue, "unknown mode 'exakt': did you mean 'exact'"),
        ({"head_options": {"temprature": 1}}, InvalidType, "did you mean 'temperature'"),
        ({"head_options": {"class_weight": [1, 1, 1]}}, InvalidValue, "pass class_weight to the estimator"),
        ({"head_options": {"dtype": torch.float32}}, InvalidValue, "computes in torch.float32"),
        ({"hidden_layer_sizes": (8, 0)}, InvalidValue, "hidden_layer_sizes must hold positive integers"),
        ({"hidden_layer_sizes": 2.5}, InvalidType, "hidden_layer_sizes must be a sequence of integers"),
        ({"class_weight": "balance"}, InvalidValue, "unknown class_weight 'balance': did you mean 'balanced'"),
        ({"class_weight": {"rose": 2}}, InvalidValue, "class_weight holds the label 'rose', which is not among"),
        ({"class_weight": {"setosa": -1.0}}, InvalidValue, r"class_weight\['setosa'\] must be finite and not negative"),
        ({"class_weight": [1, 2, 3]}, InvalidType, "must be a dict from label to weight or 'balanced'"),
        (
            {"class_weight": {"setosa": 0, "versicolor": 0, "virginica": 0}},
            InvalidValue,
            "class_weight gives every row weight zero",
        ),
        ({"network": nn.Linear(4, 4)}, InvalidType, "network is a Linear, which would be shared between clones"),
        ({"network": "mlp"}, InvalidType, "network must be a function"),
        ({"network": lambda n: n}, InvalidType, r"network\(4\) must return a torch.nn.Module, got int"),
        ({"batch_size": 0}, InvalidValue, "batch_size must be at least 1"),
        ({"batch_size": "all"}, InvalidType, "batch_size must be a whole number"),
        ({"learning_rate_init": 0}, InvalidValue, "learning_rate_init must be a finite number above 0"),
        ({"max_iter": 0}, InvalidValue, "max_iter must be at least 1"),
        ({"validation_fraction": 1.0}, InvalidValue, r"validation_fraction must lie in \(0, 1\)"),
        ({"device": "abacus"}, InvalidValue, "torch cannot use device='abacus'"),
        ({"learning_rate_init": 1e200, "head": "softmax"}, RunError, "lower learning_rate_init"),
    ],
)
def test_wrong_parameters_are_named_when_fitting(
    iris: tuple[Any, Any], parameters: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quick(**parameters).fit(*iris)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.r_[np.ones(149), -2.0], "sample_weight must not be negative, got -2.0 in row 149"),
        (np.zeros(150), "every sample_weight is zero"),
        (np.ones(149), r"one number for each of the 150 rows, got \(149,\)"),
        (np.full(150, np.nan), "sample_weight contains NaN"),
    ],
)
def test_wrong_weights(iris: tuple[Any, Any], weight: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick().fit(*iris, sample_weight=weight)


def test_wrong_calls(iris: tuple[Any, Any]) -> None:
    X, y = iris
    with pytest.raises(InvalidValue, match=r"at least 2 classes, got only \['setosa'\]"):
        quick().fit(X[:50], y[:50])
    for method in (
        "predict", "predict_proba", "predict_log_proba", "decision_function", "retain_proba", "confusable_with",
    ):  # fmt: skip
        with pytest.raises(NotFittedError):
            getattr(quick(), method)(X)
    model = quick(head="softmax").fit(X, y)
    with pytest.raises(InvalidValue, match="unknown mode 'mode': did you mean"):
        model.predict_proba(X, mode="mode")
    with pytest.raises(InvalidValue, match="has not been calibrated"):
        model.confusable_with(X, coverage=0.9)


def test_wrong_calls_of_partial_fit(iris: tuple[Any, Any]) -> None:
    X, y = iris
    with pytest.raises(InvalidValue, match="first call of partial_fit needs classes="):
        quick().partial_fit(X, y)
    with pytest.raises(InvalidValue, match="y holds the label 'virginica', which is not among the classes"):
        quick().partial_fit(X, y, classes=["setosa", "versicolor"])
    model = quick().partial_fit(X, y, classes=np.unique(y))
    with pytest.raises(InvalidValue, match="y holds the label 'rose', which is not among the classes"):
        model.partial_fit(X[:1], ["rose"])
    with pytest.raises(InvalidValue, match=r"classes=\['a', 'b'\] are not those of the first call"):
        model.partial_fit(X, y, classes=["a", "b"])
    with pytest.raises(InvalidValue, match="class_weight='balanced' needs all of y at once"):
        quick(class_weight="balanced").partial_fit(X, y, classes=np.unique(y))


def test_without_scikit_learn_the_import_names_the_extra() -> None:
    code = "import sys; sys.modules['sklearn'] = None; import dropmax.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "MissingDependency: dropmax.sklearn needs scikit-learn 1.6 or newer, which is not installed" in done.stderr
    assert 'pip install "dropmax[sklearn]"' in done.stderr
