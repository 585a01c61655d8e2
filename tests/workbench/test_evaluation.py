"""What a model says about a split: the masks it reports, and which classes it calls confusable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dropmax import Classifier, make_head
from dropmax.workbench.evaluation import answer, confusable, measure, predict


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


def test_predict_keeps_the_order_and_survives_nothing() -> None:
    model = Classifier(nn.Identity(), make_head("dropmax", 4, 3))
    batches = rows()
    outputs = predict(model, batches)
    assert torch.equal(outputs.labels, torch.cat([y for _, y in batches]))
    torch.testing.assert_close(outputs.probs, model.predict_proba(torch.cat([x for x, _ in batches])))
    assert predict(model, []).probs.shape == (0, 3)


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
    assert found.confusable() == confusable(found.retain, found.predicted)
    assert answer(model.head, batches[0][0]).std is None


def test_a_model_that_cannot_answer_is_put_back_into_training() -> None:
    model = Classifier(nn.Identity(), make_head("dropmax", 4, 3)).train()
    with pytest.raises(ValueError, match="4"):
        predict(model, [torch.randn(2, 5)])
    assert model.training


@pytest.mark.parametrize(
    ("rho", "expected"),
    [
        ([0.8, 0.2, 0.2, 0.2], []),
        ([0.8, 0.2, 0.5, 0.2], [2]),
        ([0.8, 0.45, 0.5, 0.2], [2, 1]),
        ([0.8, 0.30, 0.25, 0.2], []),  # no step of a tenth
        ([1.0, 1.0, 1.0, 1.0], []),  # no masks at all
        ([0.8, 0.7], [1]),
        ([0.8, 0.3], []),
    ],
)
def test_confusable_classes_stand_above_the_rest(rho: list[float], expected: list[int]) -> None:
    assert confusable(torch.tensor([rho]), torch.tensor([0])) == [expected]
