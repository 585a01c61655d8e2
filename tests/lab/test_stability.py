"""Appendix B against sums over all masks and their gradients by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dropmax.lab.stability import gradient_stability, regulariser
from tests import enumeration as naive

K = 4


def problem(seed: int, rows: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    o, a = 3 * torch.randn(2, rows, K, generator=generator, dtype=torch.float64)
    q = torch.rand(rows, K, generator=generator, dtype=torch.float64)
    return o, a, q, torch.randint(K, (rows,), generator=generator)


def enumerated(o: Tensor, rho: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """(M without the target's own mask, gradient by o of the expected loss, gradient by o of all of M)."""
    o = o.clone().requires_grad_()
    masks = naive.all_masks(K)
    probability = naive.mask_probabilities(masks, rho)
    x = ((masks + 1e-20) * o.exp()).sum(-1)
    loss = (probability * (x.log() - (masks[:, t] + 1e-20).log() - o[t])).sum()
    plain = o.logsumexp(-1) - o[t]
    (gradient,) = torch.autograd.grad(loss, o, retain_graph=True)
    (of_m,) = torch.autograd.grad(loss - plain, o, retain_graph=True)
    return (probability * x.log()).sum() - o.logsumexp(-1), gradient, of_m


def share_is(found: float, excess: Tensor) -> bool:
    """Whether this share is at most 0, where what is within the error of the quadrature may count either way."""
    least, most = ((excess <= limit).double().mean().item() for limit in (5e-8, 2e-7))
    return least - 1e-9 <= found <= most + 1e-9


@given(st.integers(0, 10_000))
def test_m_is_the_sum_over_all_masks_and_below_its_bound(seed: int) -> None:
    o, a, _, _ = problem(seed)
    m, bound = regulariser(o, a)
    for i in range(len(o)):
        expected, _, _ = enumerated(o[i], a[i].sigmoid(), 0)
        assert m[i].item() == pytest.approx(expected.item(), abs=1e-6)  # the quadrature's own error
        printed = ((a[i].sigmoid() + 1e-20) * o[i].exp()).sum().log() - o[i].exp().sum().log()
        assert bound[i].item() == pytest.approx(printed.item(), abs=1e-12)
        assert m[i] <= bound[i] + 1e-6


@given(st.integers(0, 10_000))
def test_gradients_are_those_of_the_enumerated_loss(seed: int) -> None:
    o, a, q, y = problem(seed)
    found = gradient_stability(o, a, q, y)
    rows = range(len(y))
    for name, rho in (("p", a.sigmoid()), ("q", q.scatter(-1, y[:, None], 1.0))):
        gradients = torch.stack([enumerated(o[i], rho[i], int(y[i]))[1] for i in rows])
        of_m = torch.stack([enumerated(o[i], rho[i], int(y[i]))[2] for i in rows])
        plain = o.softmax(-1) - torch.nn.functional.one_hot(y, K)
        is_target = torch.nn.functional.one_hot(y, K).bool()
        softmax, dropmax = plain[is_target].abs(), gradients[is_target].abs()
        assert found[name]["target_ratio"] == pytest.approx((dropmax.mean() / softmax.mean()).item(), rel=1e-5)
        assert share_is(found[name]["target_smaller"], dropmax - softmax)
        softmax, dropmax = plain[~is_target], gradients[~is_target]
        ratio = (dropmax.square().sum() / softmax.square().sum()).sqrt().item()
        assert found[name]["rivals_ratio"] == pytest.approx(ratio, rel=1e-5)
        assert share_is(found[name]["rivals_smaller"], dropmax - softmax)
        weighted = (rho + 1e-20) * o.exp()
        of_bound = weighted / weighted.sum(-1, keepdim=True) - o.softmax(-1)
        assert share_is(found[name]["bounded_target"], (of_m - of_bound)[is_target])
        assert share_is(found[name]["bounded_rivals"], (of_m - of_bound)[~is_target])


def test_with_every_class_kept_there_is_no_regulariser() -> None:
    o, _, _, y = problem(0)
    kept = torch.full_like(o, 50.0)
    m, bound = regulariser(o, kept)
    assert m.abs().max() < 1e-8
    assert bound.abs().max() < 1e-8
    found = gradient_stability(o, kept, torch.ones_like(o), y)["p"]
    assert found["target_ratio"] == pytest.approx(1, abs=1e-7)


def test_where_all_masks_drop_everything_m_is_the_logarithm_of_epsilon() -> None:
    o, _, _, _ = problem(1)
    m, bound = regulariser(o, torch.full_like(o, -200.0))
    torch.testing.assert_close(m, torch.full_like(m, math.log(1e-20)), atol=1e-6, rtol=0)
    torch.testing.assert_close(bound, torch.full_like(m, math.log(1e-20)), atol=1e-6, rtol=0)
