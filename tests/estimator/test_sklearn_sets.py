"""The estimator's calibrated probabilities and prediction sets, against scikit-learn and MAPIE."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator

from dropmax.errors import InvalidType, InvalidValue
from dropmax.sklearn import DropMaxClassifier

Data = tuple[Any, Any]


@pytest.fixture(scope="module")
def data() -> tuple[Data, Data, Data]:
    X, y = make_classification(
        900, 12, n_informative=8, n_classes=4, n_clusters_per_class=1, flip_y=0.2, random_state=0
    )
    labels = np.array(["ash", "elm", "fir", "oak"])[y]
    return (X[:400], labels[:400]), (X[400:700], labels[400:700]), (X[700:], labels[700:])


@pytest.fixture(scope="module")
def model(data: tuple[Data, Data, Data]) -> DropMaxClassifier:
    fitted = DropMaxClassifier((32,), max_iter=25, tol=0.0, n_iter_no_change=30, random_state=0, early_stopping=False)
    with pytest.warns(match="max_iter"):
        fitted.fit(*data[0])
    return fitted.conformalize(*data[1])


def test_scikit_learns_temperature_is_ours(data: tuple[Data, Data, Data], model: DropMaxClassifier) -> None:
    theirs = CalibratedClassifierCV(FrozenEstimator(model), method="temperature").fit(*data[1])
    T = 1 / theirs.calibrated_classifiers_[0].calibrators[0].beta_
    assert model.calibration_.temperatures["mean"] == pytest.approx(T, rel=1e-3)  # their search stops there
    X = data[2][0]
    assert np.abs(model.predict_proba(X) - theirs.predict_proba(X)).max() > 0.02  # it has something to do
    np.testing.assert_allclose(model.predict_proba(X, "mean", calibrated=True), theirs.predict_proba(X), atol=1e-3)


@pytest.mark.parametrize("head", ["dropmax", "softmax"])
def test_the_calibrated_answer_has_the_lowest_log_loss(data: tuple[Data, Data, Data], head: str) -> None:
    fitted = DropMaxClassifier((16,), head=head, max_iter=5, tol=1e9, random_state=0).fit(*data[0])
    fitted.conformalize(*data[1])
    X, y = data[1]
    truth = np.searchsorted(fitted.classes_, y)

    def log_loss(**options: Any) -> float:
        return float(-np.log(fitted.predict_proba(X, **options)[np.arange(len(y)), truth]).mean())

    modes = ("mean", "exact") if head == "dropmax" else ("mean",)
    assert tuple(fitted.calibration_.nll) == modes
    losses = {mode: log_loss(mode=mode, calibrated=True) for mode in modes}
    assert losses == pytest.approx(dict(fitted.calibration_.nll), rel=1e-5)
    assert log_loss(calibrated=True) == pytest.approx(min(losses.values()), rel=1e-6)
    assert all(losses[mode] <= log_loss(mode=mode) for mode in modes)


def test_sets_are_those_of_mapie_and_cover(data: tuple[Data, Data, Data], model: DropMaxClassifier) -> None:
    mapie = pytest.importorskip("mapie.classification")

    class Calibrated(DropMaxClassifier):
        def predict_proba(self, X: Any, *rest: Any, **options: Any) -> Any:
            return super().predict_proba(X, calibrated=True)

    wrapped = pickle.loads(pickle.dumps(model))
    wrapped.__class__ = Calibrated
    theirs = mapie.SplitConformalClassifier(
        wrapped, confidence_level=[0.8, 0.95], conformity_score="lac", prefit=True
    ).conformalize(*data[1])
    X, y = data[2]
    labels, sets = model.predict_set(X, coverage=[0.8, 0.95])
    their_labels, their_sets = theirs.predict_set(X)
    assert labels.tolist() == their_labels.tolist()
    assert np.array_equal(sets, their_sets)
    held = sets[np.arange(len(y)), np.searchsorted(model.classes_, y)].mean(0)
    assert 0.7 < held[0] < 0.9  # within four standard deviations of 0.8 for 300 and 200 rows
    assert held[1] > 0.88
    assert model.predict_set(X[:3], coverage=0.8)[1].shape == (3, 4, 1)


def test_confusable_labels_are_the_rest_of_the_set(data: tuple[Data, Data, Data], model: DropMaxClassifier) -> None:
    X = data[2][0]
    probs = model.predict_proba(X, calibrated=True)
    _, sets = model.predict_set(X, coverage=0.9)
    named = model.confusable_with(X, coverage=0.9)
    for row, inside, others in zip(probs, sets[..., 0], named, strict=True):
        order = [k for k in np.argsort(-row, kind="stable") if inside[k] or (not inside.any() and row[k] >= 0.2)]
        assert others == model.classes_[order[1:]].tolist()
    assert any(named)
    assert model.confusable_with(X, coverage=0.9, limit=1) == [others[:1] for others in named]


def test_fitting_again_forgets_and_pickling_keeps(data: tuple[Data, Data, Data], model: DropMaxClassifier) -> None:
    X, y = data[1]
    again = pickle.loads(pickle.dumps(model))
    assert again.calibration_ == model.calibration_
    assert again.partial_fit(X, y).calibration_ is None
    with pytest.raises(InvalidValue, match=r"not been calibrated: call conformalize\(X, y\)"):
        again.predict_proba(X, calibrated=True)


def test_wrong_calls(data: tuple[Data, Data, Data], model: DropMaxClassifier) -> None:
    X, y = data[1]
    for call in (lambda m: m.conformalize(X, y), lambda m: m.predict_set(X), lambda m: m.calibration_):
        with pytest.raises(NotFittedError):
            call(DropMaxClassifier())
    fresh = pickle.loads(pickle.dumps(model))
    fresh.model_.head.calibration = None
    with pytest.raises(InvalidValue, match="conformalize"):
        fresh.predict_set(X)
    with pytest.raises(InvalidValue, match="y holds the label 'yew', which is not among the classes"):
        fresh.conformalize(X, np.where(y == "oak", "yew", y))
    with pytest.raises(InvalidValue, match="X has 300 rows, but y has 299 labels"):
        fresh.conformalize(X, y[1:])
    assert fresh.calibration_ is None
    for wrong in ("0.9", [], None):
        with pytest.raises(InvalidType, match=r"coverage must be a number such as 0.95, or a list of them, got"):
            model.predict_set(X, coverage=wrong)
    with pytest.raises(InvalidValue, match=r"coverage must lie in \(0, 1\), got 95"):
        model.predict_set(X, coverage=95)
    with pytest.raises(InvalidValue, match=r"a coverage of 0.999 needs at least 999 calibration rows, got 300"):
        model.predict_set(X, coverage=0.999)
    with pytest.raises(InvalidValue, match="limit"):
        model.confusable_with(X, limit=0)
