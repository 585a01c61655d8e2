"""Temperatures against a brute-force minimiser, scikit-learn, and what must hold for any logits."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom
from torch import Tensor

from dropmax import metrics
from dropmax.calibration import TEMPERATURE_RANGE, Calibration, apply_temperature, fit_temperature
from dropmax.errors import InvalidType, InvalidValue
from dropmax.sets import PredictionSets


def noisy(seed: int, rows: int = 200, classes: int = 5, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels that follow softmax(logits / scale): the best temperature is near ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    labels = (logits / scale).softmax(-1).multinomial(1, generator=generator)[:, 0]
    return logits, labels


def nll(logits: Tensor, labels: Tensor, temperature: float) -> float:
    return float(torch.nn.functional.cross_entropy(logits.double() / temperature, labels))


def brute_force(logits: Tensor, labels: Tensor) -> float:
    low, high = (math.log(T) for T in TEMPERATURE_RANGE)
    grid = np.linspace(low, high, 200)
    best = grid[int(np.argmin([nll(logits, labels, math.exp(u)) for u in grid]))]
    step = grid[1] - grid[0]
    found = minimize_scalar(
        lambda u: nll(logits, labels, math.exp(u)),
        bounds=(best - step, best + step),
        method="bounded",
        options={"xatol": 1e-12},
    )
    return math.exp(found.x)


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("classes", [2, 5, 100])
def test_brute_force(scale: float, classes: int) -> None:
    logits, labels = noisy(0, 300, classes, scale)
    fitted, expected = fit_temperature(logits, labels), brute_force(logits, labels)
    # A minimum of rounded numbers is flat over sqrt(1e-16) = 1e-8, so the brute force knows no more than about 1e-7.
    assert fitted == pytest.approx(expected, rel=1e-6)
    assert nll(logits, labels, fitted) <= nll(logits, labels, expected) + 1e-14


def test_the_slope_of_the_nll_is_zero_at_the_fitted_temperature() -> None:
    logits, labels = noisy(1)
    beta = torch.tensor(1 / fit_temperature(logits, labels), dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(beta * logits, labels)
    (slope,) = torch.autograd.grad(loss, beta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, beta)
    assert abs(slope.item() / curvature.item()) < 1e-9 * beta.item()  # the next step of Newton's method


@pytest.mark.parametrize("classes", [2, 7])
def test_scikit_learn_finds_the_same_temperature(classes: int) -> None:
    pytest.importorskip("sklearn")
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    from tests.fixed import Fixed

    logits, labels = noisy(2, 500, classes)
    probs = logits.softmax(-1)
    X, y = probs.numpy(), labels.numpy()
    theirs = CalibratedClassifierCV(FrozenEstimator(Fixed().fit(X, y)), method="temperature").fit(X, y)
    fitted = fit_temperature(probs, labels, from_probs=True)
    beta = theirs.calibrated_classifiers_[0].calibrators[0].beta_
    # scikit-learn stops its search at xatol = 64 eps in log beta, where the flat minimum leaves about 1e-7.
    assert fitted == pytest.approx(1 / beta, rel=1e-6)
    ours = apply_temperature(probs, fitted, from_probs=True).numpy()
    np.testing.assert_allclose(theirs.predict_proba(X), ours, atol=1e-6)


def test_logits_and_their_probabilities_have_one_temperature() -> None:
    logits, labels = noisy(3)
    from_probs = fit_temperature(logits.softmax(-1), labels, from_probs=True)
    assert from_probs == pytest.approx(fit_temperature(logits, labels), rel=1e-8)


@given(seed=st.integers(0, 2**32), scale=st.floats(0.1, 10), shift=st.floats(-100, 100))
def test_scaling_logits_scales_the_temperature_and_shifting_does_nothing(seed: int, scale: float, shift: float) -> None:
    logits, labels = noisy(seed, rows=50)
    one = fit_temperature(logits, labels)
    assume(TEMPERATURE_RANGE[0] * 100 < one < TEMPERATURE_RANGE[1] / 100)
    assert fit_temperature(scale * logits + shift, labels) == pytest.approx(scale * one, rel=1e-6)


@given(
    rows=st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3), min_size=1, max_size=8),
    data=st.data(),
)
def test_any_finite_logits_have_a_bounded_temperature_that_is_no_worse_than_none(
    rows: list[list[float]], data: st.DataObject
) -> None:
    logits = torch.tensor(rows)
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    fitted = fit_temperature(logits, labels, from_probs=False)
    assert TEMPERATURE_RANGE[0] <= fitted <= TEMPERATURE_RANGE[1]
    floor = math.log1p(1 / (len(rows) + 1))  # below it, certainty is not believed
    assert nll(logits, labels, fitted) <= max(nll(logits, labels, 1.0), floor) * (1 + 1e-6)
    assert bool(apply_temperature(logits, fitted).isfinite().all())


@given(seed=st.integers(0, 2**32), temperature=st.floats(0.05, 20))
def test_no_temperature_changes_the_order_of_classes(seed: int, temperature: float) -> None:
    logits, _ = noisy(seed, rows=20, scale=1.0)
    assert torch.equal(apply_temperature(logits, temperature).argsort(-1), logits.argsort(-1))


@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_right_every_time_stops_at_the_rule_of_succession(rows: int) -> None:
    logits = torch.zeros(rows, 3)
    logits[:, 1] = torch.linspace(1, 5, rows)
    labels = torch.ones(rows, dtype=torch.long)
    fitted = fit_temperature(logits, labels, from_probs=False)
    assert nll(logits, labels, fitted) == pytest.approx(math.log((rows + 2) / (rows + 1)), rel=1e-6)
    # More right answers allow more certainty, and the overconfident lose some of theirs.
    assert fit_temperature(1e4 * logits, labels, from_probs=False) > 1


def test_wrong_every_time_ends_at_the_largest_temperature() -> None:
    logits = torch.tensor([[3.0, 0.0, 0.0]]).expand(10, 3)
    assert fit_temperature(logits, torch.ones(10, dtype=torch.long)) == pytest.approx(TEMPERATURE_RANGE[1])


def test_labels_of_one_class_and_logits_that_say_nothing() -> None:
    logits, _ = noisy(4, rows=60)
    fitted = fit_temperature(logits, torch.zeros(60, dtype=torch.long))
    assert TEMPERATURE_RANGE[0] <= fitted <= TEMPERATURE_RANGE[1]
    assert fit_temperature(torch.full((5, 3), 7.0), torch.zeros(5, dtype=torch.long)) == 1.0


def test_probabilities_of_zero_count_as_the_smallest_float32() -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.25, 0.75]])
    labels = torch.tensor([0, 0, 1, 1])
    clamped = probs.double().clamp_min(metrics.NLL_FLOOR).log()
    assert fit_temperature(probs, labels, from_probs=True) == pytest.approx(brute_force(clamped, labels), rel=1e-6)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = noisy(5)
    whole = fit_temperature(logits, labels)
    monkeypatch.setattr("dropmax.calibration._BLOCK", 7 * logits.shape[1])
    assert fit_temperature(logits, labels) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    logits, labels = noisy(6)
    scaled = apply_temperature(logits.to(dtype), 2.0)
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert fit_temperature(logits.to(dtype), labels) == fit_temperature(logits.to(dtype).double(), labels)


def test_scaling_has_a_gradient() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_temperature(x, 1.7), logits)
    probs = logits.detach().softmax(-1)
    again = apply_temperature(probs, 1.0, from_probs=True)
    torch.testing.assert_close(again, probs, rtol=1e-12, atol=0)


good, labels2 = torch.tensor([[2.0, -1.0], [0.5, 3.0]]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("logits", "labels", "options", "kind", "message"),
    [
        (torch.empty(0, 2), labels2[:0], {}, InvalidValue, r"n >= 1 rows and K >= 2 classes.*\[0, 2\]"),
        (torch.ones(2, 1), labels2, {"from_probs": False}, InvalidValue, "K >= 2 classes"),
        (good[0], labels2, {}, InvalidValue, r"shape \(n, K\)"),
        (good * math.nan, labels2, {}, InvalidValue, r"logits hold nan at \[0, 0\]"),
        (good.index_fill(0, torch.tensor(1), -math.inf), labels2, {}, InvalidValue, r"logits hold -inf at \[1, 0\]"),
        (good, torch.tensor([0, 2]), {}, InvalidValue, r"target\[1\] = 2 is not a class"),
        (good, torch.tensor([0]), {}, InvalidValue, "one label for each of the 2 rows"),
        (good, labels2.float(), {}, InvalidType, "integer class labels"),
        (good.long(), labels2, {}, InvalidType, "floating point"),
        (good.numpy(), labels2, {}, InvalidType, "torch.as_tensor"),
        (good, labels2, {"from_probs": True}, InvalidValue, "are these logits"),
        (good.softmax(-1), labels2, {}, InvalidValue, "from_probs=True"),
        (torch.empty(0, 2), labels2[:0], {"from_probs": True}, InvalidValue, "n >= 1 rows"),
    ],
)
def test_bad_input(logits: Tensor, labels: Tensor, options: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fit_temperature(logits, labels, **options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_bad_temperature(temperature: float) -> None:
    with pytest.raises(InvalidValue, match="temperature must be a finite number above 0"):
        apply_temperature(good, temperature)


# --- what is stored with a model ---------------------------------------------------------------------------------


def fitted(rows: int = 200) -> Calibration:
    logits, labels = noisy(0, rows, 4)
    return Calibration.fit(
        {"mean": logits.softmax(-1), "exact": (logits / 3).softmax(-1)}, labels, outside={"energy": logits[:, 0]}
    )


def test_a_stored_calibration_is_read_back_to_the_last_bit() -> None:
    found = fitted()
    assert Calibration.from_dict(json.loads(json.dumps(found.to_dict())), 4) == found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "mc"),
        ("mode", "median"),
        ("temperatures", {"mean": 0.0, "exact": 1.0}),
        ("temperatures", {"mean": 1.0}),
        ("temperatures", "1.0"),
        ("nll", {"mean": float("nan"), "exact": 1.0}),
        ("num_classes", 5),
        ("labels", [0] * 199),
        ("labels", [4] * 200),
        ("labels", [True] * 200),
        ("on_label", [1.5] * 200),
        ("on_label", ["a"] * 200),
        ("coverage", 0.5),
        ("coverage", [0.9]),
        ("outside", 1.0),
        ("outside", {"energy": float("inf")}),
        ("outside", {"enery": 1.0}),
        ("by_class", 1),
        ("source", None),
    ],
)
def test_a_damaged_calibration_is_refused(key: str, value: object) -> None:
    stored = fitted().to_dict()
    with pytest.raises(ValueError, match="its calibration"):
        Calibration.from_dict({**stored, key: value}, 4)
    del stored[key]
    if key == "by_class":  # as stored before there was such a thing, with one outside score at most
        for outside, limits in ((None, {}), (2.5, {"energy": 2.5})):
            found = Calibration.from_dict({**stored, "outside": outside}, 4)
            assert (found.by_class, found.outside) == (False, limits)
        return
    with pytest.raises(ValueError, match=f"its calibration lacks or garbles '{key}'"):
        Calibration.from_dict(stored, 4)


def test_coverage_of_sets_whose_temperature_was_fitted_on_the_same_rows() -> None:
    """Formally, one number fitted on the rows that set the threshold breaks the promise; measurably, it does not."""
    logits, labels = noisy(3, 4000, 6)
    probs, n, coverage, splits = logits.softmax(-1), 100, 0.9, 1000
    held = 0
    for split in range(splits):
        order = torch.randperm(4000, generator=torch.Generator().manual_seed(split))[: n + 1]
        found = Calibration.fit({"mean": probs[order[:n]]}, labels[order[:n]])
        one = order[n:]
        held += bool(found.sets(found.apply(probs[one]), coverage)[0, labels[one]])
    k = math.ceil((n + 1) * coverage)
    assert binom.ppf(1e-4, splits, k / (n + 1)) <= held <= binom.ppf(1 - 1e-4, splits, k / (n + 1))


def test_sets_by_class_cover_a_hard_class_that_the_average_hides() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (6000,), generator=generator)
    logits = 6 * torch.nn.functional.one_hot(labels, 4) + torch.randn(6000, 4, generator=generator)
    hard = labels == 3
    logits[hard] = torch.randn(int(hard.sum()), 4, generator=generator)  # of which the model knows nothing
    probs, held = logits.softmax(-1), slice(0, 3000)
    covered = {}
    for by_class in (False, True):
        found = Calibration.fit({"mean": probs[held]}, labels[held], by_class=by_class)
        assert Calibration.from_dict(json.loads(json.dumps(found.to_dict())), 4) == found
        sets = found.sets(found.apply(probs[3000:]), 0.9)
        expected = PredictionSets(0.9, by_class=by_class).fit(found.apply(probs[held]), labels[held])
        assert torch.equal(sets, expected.predict(found.apply(probs[3000:])))
        new = labels[3000:]
        covered[by_class] = [float(sets[new == k, k].double().mean()) for k in range(4)]
        thresholds = found.summary()["thresholds"]["0.9"]
        assert thresholds == (list(found.thresholds(0.9)) if by_class else found.thresholds(0.9)[0])
        assert ("sets by class" in found.reason) == by_class
    assert covered[False][3] < 0.7
    assert min(covered[True]) > 0.87  # about 750 rows of each: five deviations below 0.9 would be 0.85


@pytest.mark.parametrize("rows", [8, 12])
def test_sets_by_class_of_too_few_rows_are_refused(rows: int) -> None:
    logits, _ = noisy(0, rows, 12)
    with pytest.raises(InvalidValue, match=f"need 9 held-out rows of some class.*among {rows} rows of 12 classes"):
        Calibration.fit({"mean": logits.softmax(-1)}, torch.arange(rows), by_class=True)


def test_a_calibration_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no probabilities to calibrate"):
        Calibration.fit({}, torch.zeros(3, dtype=torch.long))
