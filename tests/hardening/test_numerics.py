"""The campaign on numbers: its short form holds, and it sees numbers that are wrong, NaN, or let through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmax.heads import base
from hardening import not_finite, numerics, numerics_inputs
from hardening import numerics_reference as reference
from hardening.campaign import Outcome

SOFTMAX = numerics_inputs.Subject("softmax", {}, "loss")


def test_short_form(tmp_path: Path) -> None:
    outcome = numerics.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    assert outcome.failed == 0
    assert outcome.counts["close to the reference"] > 2000
    assert outcome.counts["not finite: reported"] > 500
    assert outcome.counts["reference confirmed by mpmath"] > 20
    row = outcome.details["errors"]["dropmax exact, float32"]
    assert row["inputs"] == numerics.SHORT_INPUTS
    assert 0 < row["ordinary max"] < 1e-6


def tried(subject: numerics_inputs.Subject, dtype: torch.dtype = torch.float32) -> Outcome:
    outcome = Outcome()
    numerics.try_batch(subject, numerics_inputs.draw(0, 20, 3, dtype), dtype, numerics.Errors(), outcome, seed=0)
    return outcome


def spoilt(function: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments, **options: change(function(*arguments, **options))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: x, "close to the reference", None),
        (lambda x: 1.001 * x, "further off than promised", "cross_entropy of row"),
        (
            lambda x: x.detach() + (x - x.detach()).abs().sqrt(),
            "NaN or infinity from finite input",
            "gradient of classifier.weight holds",
        ),
    ],
)
def test_a_wrong_loss_and_a_gradient_of_nan_are_seen(
    monkeypatch: pytest.MonkeyPatch, change: Any, kind: str, message: str | None
) -> None:
    monkeypatch.setattr(base, "cross_entropy", spoilt(base.cross_entropy, change))
    outcome = tried(SOFTMAX)
    assert outcome.counts[kind] > 0
    assert (message is None) == (outcome.failed == 0)
    assert message is None or message in outcome.failures[0]


def test_a_wrong_probability_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = numerics_inputs.Subject("dropmax", {}, "exact")
    assert tried(subject, torch.bfloat16).failed == 0
    from dropmax import exact

    monkeypatch.setattr(exact, "predictive", spoilt(exact.predictive, lambda p: 0.999 * p))
    outcome = tried(subject, torch.bfloat16)
    assert any("add up to 1 ± 0.001" in line for line in outcome.failures)
    assert outcome.counts["further off than promised"] > 10


def test_input_that_is_let_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [("softmax", {})]
    outcome = Outcome()
    not_finite.try_heads(outcome, heads, torch.float32)
    assert outcome.failed == 0
    monkeypatch.setattr(base, "check_finite", lambda what, x, advice: x)
    monkeypatch.setattr(base, "check_features", lambda features, size: None)
    not_finite.try_heads(outcome, heads, torch.float32)
    assert outcome.counts["not finite: silently propagated"] > 10
    assert any("loss with nan in features" in line for line in outcome.failures)


def test_a_wrong_reference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "entropy", lambda a: 1.0001 * abs(a).sum(-1) + 1)
    outcome = Outcome()
    numerics.judge_the_reference(0, 10, outcome)
    assert outcome.counts["reference refuted by mpmath"] > 0
    assert "entropy" in outcome.failures[0]


@pytest.mark.parametrize("dtype", numerics.DTYPES.values())
def test_a_batch_holds_what_it_says(dtype: torch.dtype) -> None:
    batch = numerics_inputs.draw(0, 200, 5, dtype)
    everything = torch.stack(list(batch.logits.values())).double()
    assert everything.isfinite().all()
    assert batch.ordinary.sum() >= 50
    limits = torch.finfo(dtype)
    assert everything.abs().max() > min(1e30, limits.max / 10)
    assert ((everything != 0) & (everything.abs() < limits.tiny)).any()  # subnormal
    assert (everything == everything[..., :1]).all(-1).any()  # all equal
    head, features = numerics_inputs.head_with(numerics_inputs.Subject("dropmax", {}, "mean"), batch, dtype)
    expected = batch.logits["correction"]
    torch.testing.assert_close(head.correction(features), expected, rtol=0, atol=limits.tiny)


def test_the_closed_form_for_many_classes_is_the_sum_over_masks() -> None:
    o, a = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0]]).double().numpy(), torch.full((1, 5), 0.7).double().numpy()
    found = reference.two_levels(4, 2.0, float(a[0, 0]))
    assert found["predictive"] == pytest.approx(reference.predictive(o, a)[0, 0], rel=1e-12)
    nll = reference.expected_nll(o, a, torch.tensor([0]).numpy())[0]
    assert found["expected_nll"] == pytest.approx(nll, rel=1e-12)
