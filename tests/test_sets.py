"""Prediction sets against MAPIE, naive twins, and the exact distribution of their coverage."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import betabinom, binom
from torch import Tensor

from dropmax.calibration import PredictionSets, rows_needed
from dropmax.errors import InvalidType, InvalidValue


def draw(seed: int, rows: int, classes: int, skew: float = 0.0) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels that do not follow them: no method may rely on that."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    truth = logits / 2 - skew * torch.arange(classes)
    return logits.softmax(-1), truth.softmax(-1).multinomial(1, generator=generator)[:, 0]


def naive_scores(probs: Tensor, u: Tensor, method: str, penalty: float, k_reg: int) -> list[list[float]]:
    """The scores of the papers, one class at a time."""
    rows = []
    for p, u_row in zip(probs.tolist(), u.tolist(), strict=True):
        row = []
        for k, p_k in enumerate(p):
            before = [j for j, p_j in enumerate(p) if p_j > p_k or (p_j == p_k and j < k)]
            score = 1 - p_k
            if method != "lac":
                score = sum(p[j] for j in before) + (1 - u_row) * p_k
            if method == "raps":
                score += penalty * max(0, len(before) + 1 - k_reg)
            row.append(score)
        rows.append(row)
    return rows


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_naive_scores_and_sets(method: str) -> None:
    probs, labels = draw(0, 60, 7)
    sets = PredictionSets(0.8, method, penalty=0.07, k_reg=2)
    u = torch.rand(60, dtype=torch.float64)
    naive = torch.tensor(naive_scores(probs, u, method, 0.07, 2), dtype=torch.float64)
    torch.testing.assert_close(sets.scores(probs, u), naive, rtol=0, atol=1e-14)
    sets.fit(probs[:40], labels[:40])
    of_labels = sorted(sets.scores(probs[:40], sets._uniform(40)).gather(1, labels[:40, None])[:, 0].tolist())
    assert float(sets.thresholds_[0]) == of_labels[math.ceil(41 * 0.8) - 1]
    assert torch.equal(sets.predict(probs[40:]), sets.scores(probs[40:], sets._uniform(20)) <= sets.thresholds_)


def mapie(method: str, coverage: float, calibration: tuple[Tensor, Tensor], last: bool | str) -> Any:
    """MAPIE's SplitConformalClassifier around a model whose inputs are its probabilities."""
    classification = pytest.importorskip("mapie.classification")
    from tests.fixed import Fixed

    X, y = (tensor.numpy() for tensor in calibration)
    model = classification.SplitConformalClassifier(
        Fixed().fit(X, y), confidence_level=coverage, conformity_score=method, prefit=True, random_state=3
    )
    model.conformalize(X, y)
    options = None if method == "lac" else {"include_last_label": last}
    return model, lambda probs: torch.from_numpy(model.predict_set(probs.numpy(), options)[1][:, :, 0])


def as_mapie_draws(sets: PredictionSets, rows: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(3).uniform(size=rows))


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("method", ["lac", "aps"])
@pytest.mark.parametrize("classes", [3, 20])
def test_mapie_gives_the_same_sets(method: str, coverage: float, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = draw(1, 800, classes)
    _, predict_set = mapie(method, coverage, (probs[:300], labels[:300]), last="randomized")
    monkeypatch.setattr(PredictionSets, "_uniform", as_mapie_draws)
    ours = PredictionSets(coverage, method).fit(probs[:300], labels[:300]).predict(probs[300:])
    assert torch.equal(ours, predict_set(probs[300:]))


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_mapie_gives_the_same_raps_sets(coverage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the penalty and rank that MAPIE chose, and the rows it calibrated on.

    MAPIE draws u for the calibration rows and, asked to include the last label, takes u = 0 for the others and adds
    the first class above the threshold. (Its randomised RAPS follows another formula than its scores do.)
    """
    pytest.importorskip("sklearn")
    from sklearn.model_selection import StratifiedShuffleSplit

    probs, labels = draw(2, 1500, 20)
    model, predict_set = mapie("raps", coverage, (probs[:1000], labels[:1000]), last=True)
    theirs = predict_set(probs[1000:])
    score = model._mapie_classifier.conformity_score_function_
    splitter = StratifiedShuffleSplit(1, test_size=score.size_raps, random_state=3)
    rows, tuning = next(splitter.split(probs[:1000].numpy(), labels[:1000].numpy()))
    assert np.array_equal(probs[tuning].numpy(), score.X_raps)
    draws = as_mapie_draws(PredictionSets(), len(rows))
    sets = PredictionSets(coverage, "raps", penalty=float(score.lambda_star), k_reg=int(score.k_star[0]))
    monkeypatch.setattr(PredictionSets, "_uniform", lambda self, n: draws if n == len(draws) else torch.zeros(n))
    sets.fit(probs[rows], labels[rows])
    assert float(sets.thresholds_[0]) == pytest.approx(float(score.quantiles_[0]), abs=1e-12)
    ours = sets.predict(probs[1000:])
    first_above = probs[1000:].masked_fill(ours, -1.0).argmax(1, keepdim=True)
    assert not bool(ours.all(1).any())
    assert torch.equal(ours.scatter(1, first_above, True), theirs)


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_coverage_has_its_exact_distribution(method: str) -> None:
    """Over 1,000 splits the number of covered rows is beta-binomial, as the scores have no ties."""
    n, m, splits, coverage = 99, 100, 1000, 0.9
    k = math.ceil((n + 1) * coverage)
    probs, labels = draw(3, splits * (n + m), 6)
    covered = []
    for p, y in zip(probs.split(n + m), labels.split(n + m), strict=True):
        sets = PredictionSets(coverage, method).fit(p[:n], y[:n]).predict(p[n:])
        covered.append(int(sets.gather(1, y[n:, None]).sum()))
    law = betabinom(m, k, n + 1 - k)
    standard_error = law.std() / math.sqrt(splits)
    assert np.mean(covered) == pytest.approx(law.mean(), abs=4 * standard_error)  # 6e-5 to fail by chance
    for inside in (0.5, 0.9, 0.99):
        low, high = law.interval(inside)
        share = sum(law.pmf(c) for c in range(int(low), int(high) + 1))
        hits = sum(low <= c <= high for c in covered)
        assert binom.ppf(5e-5, splits, share) <= hits <= binom.ppf(1 - 5e-5, splits, share)


def hard_and_easy(seed: int, classes: int, per_class: int, hard: Tensor) -> tuple[Tensor, Tensor]:
    """Equally many rows of each class; the model sees the true class well, or hardly where it is ``hard``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    signal = torch.where(hard[labels], 1.0, 6.0)[:, None] * torch.nn.functional.one_hot(labels, classes)
    return (signal + torch.randn(signal.shape, generator=generator, dtype=torch.float64)).softmax(-1), labels


def test_by_class_gives_each_frequent_class_the_threshold_of_its_own_rows() -> None:
    probs, labels = draw(5, 400, 3)
    sets = PredictionSets(0.9, by_class=True).fit(probs, labels)
    assert sets.notes_ == ()
    assert sets.groups_.tolist() == [0, 1, 2]
    for k in range(3):
        own = labels == k
        alone = PredictionSets(0.9).fit(probs, labels)._quantile((1 - probs[own])[:, k])
        assert float(sets.thresholds_[k]) == float(alone)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rare_classes_share_thresholds_of_large_enough_groups() -> None:
    # Class 0 has 200 rows, classes 1 to 20 have 10 each, class 21 has none; 0.95 needs 19 rows.
    counts = [200] + [10] * 20 + [0]
    labels = torch.cat([torch.full((count,), k) for k, count in enumerate(counts)])
    probs = draw(6, len(labels), 22)[0]
    sets = PredictionSets(0.95, by_class=True).fit(probs, labels)
    groups = sets.groups_.tolist()
    assert groups[0] == 0
    assert groups.count(0) == 1
    assert groups[21] == -1
    assert min(groups[1:21]) == 1
    assert all(groups.count(group) > 1 for group in set(groups[1:21]))
    for group in set(groups):
        assert len({float(t) for t, g in zip(sets.thresholds_, groups, strict=True) if g == group}) == 1
    assert any("1 of 22 classes have no calibration row (class 21)" in note for note in sets.notes_)
    assert any("20 rare classes share" in note for note in sets.notes_)
    again = PredictionSets(0.95, by_class=True).fit(probs, labels)
    assert torch.equal(again.thresholds_, sets.thresholds_)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_groups_of_rare_classes_are_covered() -> None:
    """Every fifth class is hard. Groups by score cover them; the threshold of all rows does not."""
    hard = torch.arange(40) % 5 == 4
    calibration, (test, labels) = hard_and_easy(7, 40, 15, hard), hard_and_easy(8, 40, 200, hard)

    def coverage_of_hard(by_class: bool) -> float:
        sets = PredictionSets(0.95, by_class=by_class).fit(*calibration).predict(test)
        return float(sets.gather(1, labels[:, None])[hard[labels]].double().mean())

    assert coverage_of_hard(False) < 0.85
    assert coverage_of_hard(True) > 0.9


def test_too_few_rare_rows_for_a_group_use_the_threshold_of_all() -> None:
    labels = torch.tensor([0] * 100 + [1] * 3)
    probs = draw(8, 103, 2)[0]
    with pytest.warns(UserWarning, match="1 rare classes do not make up a group of 19 calibration rows"):
        sets = PredictionSets(0.95, by_class=True).fit(probs, labels)
    assert float(sets.thresholds_[1]) == float(sets._quantile(sets.scores_))


@given(coverage=st.floats(0.01, 0.999), spare=st.integers(0, 50))
def test_the_fewest_rows_are_enough_and_one_less_is_refused(coverage: float, spare: int) -> None:
    coverage = round(coverage, 3)
    needed = rows_needed(coverage)
    assert math.ceil((needed + 1) * coverage - 1e-9) <= needed
    probs, labels = draw(spare, max(1, needed), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PredictionSets(coverage).fit(probs, labels)
        if needed > 1:
            with pytest.raises(InvalidValue, match=f"needs at least {needed} calibration rows, got {needed - 1}"):
                PredictionSets(coverage).fit(probs[:-1], labels[:-1])


@given(seed=st.integers(0, 2**32), method=st.sampled_from(["lac", "aps", "raps"]))
def test_more_coverage_never_shrinks_a_set(seed: int, method: str) -> None:
    probs, labels = draw(seed, 80, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sets = PredictionSets(0.9, method).fit(probs[:60], labels[:60])
        smaller, larger = sets.predict(probs[60:], 0.7), sets.predict(probs[60:])
        assert torch.equal(smaller, PredictionSets(0.7, method).fit(probs[:60], labels[:60]).predict(probs[60:]))
    assert bool((smaller <= larger).all())


def test_a_class_missing_from_calibration_is_said() -> None:
    probs, _ = draw(9, 50, 3)
    with pytest.warns(UserWarning, match=r"1 of 3 classes have no calibration row \(class 2\)"):
        PredictionSets(0.9).fit(probs, torch.tensor([0, 1]).repeat(25))


def test_sets_of_no_rows_and_of_half_precision() -> None:
    probs, labels = draw(10, 100, 3)
    sets = PredictionSets(0.9).fit(probs.half(), labels)
    assert sets.predict(probs[:0]).shape == (0, 3)
    assert sets.predict(probs.half()).dtype == torch.bool


good, label = draw(11, 50, 3)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"coverage": 1.0}, InvalidValue, r"coverage must lie in \(0, 1\)"),
        ({"coverage": 95}, InvalidValue, r"coverage must lie in \(0, 1\), got 95"),
        ({"coverage": "0.9"}, InvalidType, "coverage must be a number"),
        ({"method": "apps"}, InvalidValue, "did you mean 'aps'"),
        ({"by_class": 1}, InvalidType, "by_class must be True or False"),
        ({"penalty": -1.0}, InvalidValue, "penalty"),
        ({"k_reg": 1.5}, InvalidType, "k_reg"),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PredictionSets(**options)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: PredictionSets().predict(good), InvalidValue, "call fit"),
        (lambda: PredictionSets().fit(good.log(), label), InvalidValue, "are these logits"),
        (lambda: PredictionSets().fit(good, label[:-1]), InvalidValue, "one label for each of the 50 rows"),
        (lambda: fitted().predict(good[:, :2]), InvalidValue, "probs have 2 classes, but fit saw 3"),
        (lambda: fitted().predict(good.numpy()), InvalidType, "use torch"),
    ],
)
def test_bad_input(call: Callable[[], Tensor], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def fitted() -> PredictionSets:
    return PredictionSets().fit(good, label)
