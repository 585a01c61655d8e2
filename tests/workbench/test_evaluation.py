"""What a model says about a split: the masks it reports, and which classes it calls confusable."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dropmax import Classifier, make_head
from dropmax.calibration import fit_temperature
from dropmax.errors import InvalidType, InvalidValue
from dropmax.workbench.evaluation import Outputs, Verdict, answer, calibrate, measure, predict
from tests.close import close


def rows(n: int = 11) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = torch.randn(n, 4), torch.randint(3, (n,))
    return [(x[:4], y[:4]), (x[4:], y[4:])]


@pytest.mark.parametrize("name", ["dropmax", "softmax", "random-dropmax"])
def test_measure_does_not_depend_on_the_batches_and_leaves_training_alone(name: str) -> None:
    model = Classifier(nn.Sequential(nn.Dropout(0.5)), make_head(name, 4, 3))
    model.train()
    batches = rows()
    whole = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    state = torch.get_rng_state()
    split, joined = measure(model, batches), measure(model, whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert split.metrics == pytest.approx(joined.metrics)
    assert split.masks == pytest.approx(joined.masks)
    assert split.loss == pytest.approx(joined.loss, rel=1e-4)


def test_the_masks_it_reports_are_the_heads() -> None:
    head = make_head("dropmax", 4, 3)
    model = Classifier(nn.Identity(), head)
    (x, y), _ = batches = rows()
    found = measure(model, batches[:1]).masks
    rho, q = head.retain_probs(x), head.posterior_probs(x, y)
    target = torch.nn.functional.one_hot(y, 3).bool()
    assert found["retain_target"] == pytest.approx(rho[target].mean().item(), rel=1e-5)
    assert found["retain_rivals"] == pytest.approx(rho[~target].mean().item(), rel=1e-5)
    assert found["posterior_rivals"] == pytest.approx(q[~target].mean().item(), rel=1e-5)


def test_predict_keeps_the_order_survives_nothing_and_puts_a_model_back_into_training() -> None:
    model = Classifier(nn.Identity(), make_head("dropmax", 4, 3)).train()
    batches = rows()
    outputs = predict(model, batches)
    assert torch.equal(outputs.labels, torch.cat([y for _, y in batches]))
    torch.testing.assert_close(outputs.probs, model.predict_proba(torch.cat([x for x, _ in batches])))
    assert predict(model, []).probs.shape == (0, 3)
    with pytest.raises(ValueError, match="4"):
        predict(model, [torch.randn(2, 5)])
    assert model.training


@pytest.mark.parametrize("name", ["dropmax", "softmax"])
@pytest.mark.parametrize("mode", ["mean", "mc", "exact"])
def test_predict_is_what_the_head_says_with_or_without_labels(name: str, mode: str) -> None:
    model = Classifier(nn.Sequential(nn.Dropout(0.5)), make_head(name, 4, 3)).train()
    batches = rows()
    options = {"mode": mode, "samples": 7, "std": True}
    with_labels = predict(model, batches, **options, generator=torch.Generator().manual_seed(1))
    found = predict(model, [x for x, _ in batches], **options, generator=torch.Generator().manual_seed(1))
    assert model.training
    assert found.labels.shape == (0,)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # without a gradient there is a faster form, which rounds differently
        expected = [model.head.predict_proba(x, mode, samples=7, generator=generator) for x, _ in batches]
    for outputs in (found, with_labels):
        assert torch.equal(outputs.probs, torch.cat(expected))
        assert outputs.std is not None
        for ours, theirs in ((outputs.retain, model.head.retain_probs), (outputs.std, model.head.predictive_std)):
            assert torch.equal(ours, torch.cat([theirs(x) for x, _ in batches]))
    best = found.top(2)
    assert torch.equal(best.indices[:, 0], found.predicted)
    assert torch.equal(best.values, found.probs.gather(1, best.indices))
    assert found.top(99).indices.shape == (11, 3)
    assert answer(model.head, batches[0][0]).std is None


# --- the answer of a calibrated model ----------------------------------------------------------------------------


def trained(name: str = "dropmax", n: int = 400, classes: int = 5) -> tuple[Classifier, Tensor, Tensor]:
    """Return a head that has learned a little, and held-out rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * n, 8, generator=generator)
    y = (x[:, :classes] * 2 + torch.randn(2 * n, classes, generator=generator)).argmax(-1)
    torch.manual_seed(0)
    model = Classifier(nn.Identity(), make_head(name, 8, classes))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        model.head.loss(x[:n], y[:n]).total.backward()
        optimizer.step()
    return model, x[n:], y[n:]


@pytest.mark.parametrize("name", ["dropmax", "softmax"])
def test_calibrating_chooses_the_mode_with_the_lowest_scaled_nll(name: str) -> None:
    model, x, y = trained(name)
    found = calibrate(model.train(), [(x[:150], y[:150]), (x[150:], y[150:])], source="made-up rows")
    assert found is model.head.calibration is not None
    assert model.training
    modes = ("mean", "exact") if name == "dropmax" else ("mean",)
    assert tuple(found.temperatures) == modes
    for mode in modes:
        probs = model.head.predict_proba(x, mode).detach()
        T = fit_temperature(probs, y, from_probs=True)
        assert found.temperatures[mode] == pytest.approx(T, rel=1e-6)
        scaled = probs.double() ** (1 / T)
        scaled /= scaled.sum(-1, keepdim=True)
        assert found.nll[mode] == pytest.approx(float(-scaled[torch.arange(len(y)), y].log().mean()), rel=1e-5)
        close(model.head.predict_proba(x, mode, calibrated=True), scaled, terms=8, scale=10)
    assert found.mode == min(modes, key=lambda mode: found.nll[mode])
    assert found.reason.startswith(f"mode {found.mode}")
    assert f"{len(y)} made-up rows" in found.reason
    answered, raw = predict(model, [x]), predict(model, [x], mode=found.mode)
    with torch.no_grad():
        assert torch.equal(answered.probs, model.head.predict_proba(x, calibrated=True))
    assert answered.calibration is found
    assert raw.calibration is raw.outside is None
    assert not torch.allclose(answered.probs, raw.probs, atol=1e-3)
    assert torch.equal(answered.predicted, raw.predicted)


def test_without_rows_a_model_is_not_calibrated() -> None:
    model, x, y = trained()
    calibrate(model, [(x, y)])
    assert calibrate(model, []) is model.head.calibration is None
    with pytest.raises(InvalidValue, match="has not been calibrated"):
        model.head.predict_proba(x, calibrated=True)
    with pytest.raises(InvalidType, match="calibrated must be True or False, got 'yes'"):
        model.head.predict_proba(x, calibrated="yes")


def test_sets_are_lac_and_never_empty_while_a_class_has_a_fifth() -> None:
    model, x, y = trained()
    found = calibrate(model, [(x, y)])
    assert found is not None
    outputs = predict(model, [x])
    on_label = outputs.probs[torch.arange(len(y)), y].double()
    for coverage in (0.6, 0.9, 0.99):
        rank = math.floor((len(y) + 1) * (1 - coverage) + 1e-9)  # from below: as many may be missed
        threshold = float(on_label.sort().values[rank - 1])
        assert found.thresholds(coverage) == pytest.approx([threshold] * 5, abs=1e-12)
        sets = outputs.sets(coverage)
        for row, kept in zip(outputs.probs.tolist(), sets.tolist(), strict=True):
            expected = [p >= threshold - 1e-12 for p in row]
            assert kept == (expected if any(expected) else [p >= 0.2 for p in row])
        assert float(sets[torch.arange(len(y)), y].double().mean()) >= coverage
    assert found.sets(outputs.probs, 0.3).sum(-1).min() == 0
    assert outputs.sets(0.3).sum(-1).min() > 0


def test_verdicts_order_the_set_by_probability_and_name_a_state() -> None:
    probs = torch.tensor([[0.97, 0.01, 0.02], [0.30, 0.48, 0.22], [0.19, 0.62, 0.19]])
    outputs = Outputs(probs, torch.ones(3, 3))
    assert outputs.verdicts() == [Verdict("sure", (0,)), Verdict("torn", (1, 0, 2)), Verdict("torn", (1, 0, 2))]
    assert outputs.confusable() == [[], [0, 2], [0, 2]]
    assert outputs.confusable(limit=1) == [[], [0], [0]]
    assert outputs.verdicts(0.7)[1:] == [Verdict("torn", (1, 0)), Verdict("torn", (1, 0))]
    flat = Outputs(torch.full((1, 20), 0.05), torch.ones(1, 20))
    assert flat.verdicts() == [Verdict("unlike", ())]
    assert Outputs(torch.empty(0, 3), torch.empty(0, 3)).verdicts() == []


def test_an_outside_score_beyond_the_held_out_rows_is_unlike_all_of_them() -> None:
    model, x, y = trained()
    found = calibrate(model, [(x, y)])
    assert found is not None
    assert sorted(found.outside) == ["energy", "entropy"]
    scores = torch.stack([model.head.outside_score(x, kind).detach() for kind in found.outside])
    limits = torch.tensor(list(found.outside.values()))[:, None]
    strange = (scores > limits).any(0)
    most = len(y) - math.ceil((len(y) + 1) * 0.99)  # 1 % of them
    assert 0 < int(strange.sum()) <= most
    for score, limit in zip(scores, limits, strict=True):  # no score is trusted more than the other
        assert (score > limit).sum() == (scores[0] > limits[0]).sum()
    lower = torch.where(scores < limits, scores, -math.inf).amax(1, keepdim=True)
    assert int((scores > lower).any(0).sum()) > most  # the next limits would be too low
    states = [verdict.state for verdict in predict(model, [x]).verdicts()]
    assert [state == "unlike" for state in states] == strange.tolist()
    few = calibrate(model, [(x[:98], y[:98])])  # too few for a limit that at most 1 % exceed
    assert few is not None
    assert few.outside == {}
    assert list(calibrate(trained("softmax")[0], [(x, y)]).outside) == ["energy"]  # type: ignore[union-attr]


def test_the_default_coverage_is_the_highest_with_small_sets() -> None:
    model, x, y = trained()
    found = calibrate(model, [(x, y)])
    assert found is not None
    probs = predict(model, [x]).probs
    sizes = {c / 100: float(found.sets(probs, c / 100).sum(-1).double().mean()) for c in range(90, 100)}
    assert found.coverage == max(c for c, size in sizes.items() if size <= 2)
    few = calibrate(model, [(x[:10], y[:10])])
    assert few is not None
    assert few.coverage == 0.9  # 0.91 needs eleven rows
    fewest = calibrate(model, [(x[:5], y[:5])])
    assert fewest is not None
    assert fewest.coverage is None
    with pytest.raises(InvalidValue, match="5 calibration rows are too few for prediction sets"):
        fewest.thresholds()
    with pytest.raises(InvalidValue, match=r"a coverage of 0.95 needs at least 19 calibration rows, got 5"):
        fewest.thresholds(0.95)
    assert predict(model, [x]).sets().any()  # the plain ones
