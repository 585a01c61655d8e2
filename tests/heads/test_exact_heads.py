"""Heads with exact inference: prediction, its spread, and the two exact objectives, against enumeration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dropmax import DropMax, DropMaxError, make_head
from tests import enumeration as naive

F64 = torch.float64
K = 7


def head_and_batch(name: str = "dropmax", **options: object) -> tuple[DropMax, Tensor, Tensor]:
    head = make_head(name, 6, K, dtype=F64, **options)
    return head, 4 * torch.randn(5, 6, dtype=F64), torch.randint(K, (5,))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["dropmax", "dropmax-qp"])
def test_exact_prediction_and_its_spread_are_those_of_all_masks(name: str) -> None:
    head, features, _ = head_and_batch(name)
    masks = naive.all_masks(K)
    p, std = head.predict_proba(features, "exact"), head.predictive_std(features)
    for row, h in enumerate(features):
        weight = naive.mask_probabilities(masks, head.retain_probs(h))
        values = naive.likelihoods(head.classifier(h), masks)
        mean = weight @ values
        torch.testing.assert_close(p[row], mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(std[row], (weight @ (values - mean).square()).sqrt(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "random-dropmax", "deterministic-dropmax"])
def test_heads_without_masks_at_test_time_answer_alike_in_every_mode(name: str) -> None:
    head, features, _ = head_and_batch(name)
    torch.testing.assert_close(head.predict_proba(features, "exact"), head.predict_proba(features))
    assert (head.predictive_std(features) == 0).all()


def test_the_exact_likelihood_is_the_expectation_over_the_masks_of_q() -> None:
    head, features, target = head_and_batch(likelihood="exact")
    assert head.noise_shape(5) is None
    loss = head.loss(features, target, reduction="none")
    masks = naive.all_masks(K)
    q = head.posterior_probs(features, target)
    for row, h in enumerate(features):
        weight = naive.mask_probabilities(masks, q[row])
        nll = -naive.likelihoods(head.classifier(h), masks)[:, target[row]].log()
        assert loss.terms["cross_entropy"][row].item() == pytest.approx((weight * nll).sum().item(), abs=1e-9)
    sampled, *_ = head_and_batch()
    sampled.load_state_dict(head.state_dict())
    others = sampled.loss(features, target, reduction="none").terms
    for term in ("kl", "entropy", "auxiliary"):
        torch.testing.assert_close(loss.terms[term], others[term])


def test_the_marginal_objective_is_log_p_of_the_label_and_the_entropy() -> None:
    head, features, target = head_and_batch(likelihood="marginal")
    total, terms = head.loss(features, target)
    assert set(terms) == {"cross_entropy", "entropy"}
    p = head.predict_proba(features, "exact").gather(-1, target[:, None])
    torch.testing.assert_close(terms["cross_entropy"], -p.log().mean())
    torch.testing.assert_close(total, terms["cross_entropy"] - terms["entropy"])


@pytest.mark.parametrize("mask_gradient", [True, False])
def test_who_learns_from_the_exact_likelihood(mask_gradient: bool) -> None:
    head, features, target = head_and_batch(likelihood="exact", mask_gradient=mask_gradient)
    nll = head.terms(head.logits(features), target, None)["cross_entropy"].sum()
    parameters = dict(head.named_parameters())
    found = torch.autograd.grad(nll, list(parameters.values()), allow_unused=True)
    learns = {name for name, g in zip(parameters, found, strict=True) if g is not None and (g != 0).any()}
    expected = {"classifier.weight", "classifier.bias"}
    assert learns == (expected | {"correction.weight", "correction.bias"} if mask_gradient else expected)


@pytest.mark.parametrize("likelihood", ["exact", "marginal"])
def test_exact_objectives_pass_gradcheck_and_weigh_classes(likelihood: str) -> None:
    head, features, target = head_and_batch(likelihood=likelihood, class_weight=[1.0, 2, 3, 4, 5, 6, 7])

    def nll(weight: Tensor) -> Tensor:
        logits = {**head.logits(features), "classifier": features @ weight.T + head.classifier.bias}
        return head.terms(logits, target, None)["cross_entropy"]

    assert torch.autograd.gradcheck(nll, head.classifier.weight.detach().clone().requires_grad_())
    plain, *_ = head_and_batch(likelihood=likelihood)
    plain.load_state_dict(head.state_dict())
    rows = plain.loss(features, target, reduction="none").total * (target + 1)
    torch.testing.assert_close(head.loss(features, target, reduction="none").total, rows)


def test_label_smoothing_has_no_exact_form() -> None:
    with pytest.raises(DropMaxError, match=r"label_smoothing=0\.1 needs likelihood='sampled', not 'exact'"):
        DropMax(6, K, likelihood="exact", label_smoothing=0.1)
    with pytest.raises(DropMaxError, match="unknown likelihood 'exat': did you mean 'exact'"):
        DropMax(6, K, likelihood="exat")


def test_an_exact_loss_row_by_row_with_vmap() -> None:
    head, features, target = head_and_batch(likelihood="exact")
    rows = torch.vmap(lambda h, t: head.loss(h[None], t[None]).total)(features, target)
    torch.testing.assert_close(rows, head.loss(features, target, reduction="none").total)
