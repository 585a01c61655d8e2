"""The fused objective equals the plain functions: values, gradients for any cotangent, and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dropmax import functional as D
from dropmax import objective

F64 = torch.float64


def plain_terms(o: Tensor, a: Tensor, stopped: Tensor, r: Tensor, u: Tensor, t: Tensor, correct: bool) -> list[Tensor]:
    b = stopped + r
    return [
        D.masked_nll(o, D.log_relaxed_mask(b, u, 0.5), t),
        D.mask_kl(b, a, t),
        D.mask_entropy(a),
        D.auxiliary(r, t, prior_correction=correct),
    ]


def fused_terms(o: Tensor, a: Tensor, stopped: Tensor, r: Tensor, u: Tensor, t: Tensor, correct: bool) -> list[Tensor]:
    return [
        objective.sampled_nll(o, stopped + r, u, t, temperature=0.5),
        *objective.regularisers(a, stopped, r, t, prior_correction=correct),
    ]


def compiled_terms(
    o: Tensor, a: Tensor, stopped: Tensor, r: Tensor, u: Tensor, t: Tensor, correct: bool
) -> list[Tensor]:
    """What ``torch.compile`` traces, without waiting for it."""
    return [
        objective._CompiledNLL.apply(o, stopped + r, u, t, 0.5, 1e-20),
        *objective._CompiledRegularisers.apply(a, stopped, r, t, correct),
    ]


@pytest.mark.parametrize("terms", [fused_terms, compiled_terms])
@given(
    n=st.integers(0, 5),
    k=st.sampled_from([2, 3, 10, 50]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    correct=st.booleans(),
    block=st.sampled_from([1, 20, 2**17]),
    seed=st.integers(0, 999),
)
def test_same_values_and_gradients(
    terms: Callable[..., list[Tensor]], n: int, k: int, scale: float, correct: bool, block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    o, a, r = (scale * torch.randn(3, n, k, dtype=F64, generator=generator)).unbind()
    leaves = [x.clone().requires_grad_() for x in (o, a, a, r)]
    u = torch.rand(n, k, dtype=F64, generator=generator)
    t = torch.randint(k, (n,), generator=generator)
    cotangents = list(torch.randn(4, n, dtype=F64, generator=generator))

    plain = plain_terms(*leaves, u, t, correct)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "_BLOCK", block)
        fused = terms(*leaves, u, t, correct)
        for ours, expected in zip(fused, plain, strict=True):
            assert type(ours.grad_fn).__name__.startswith(("_Fused", "_SampledNLL", "_Compiled"))
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        ours_grad = torch.autograd.grad(fused, leaves, cotangents)
    plain_grad = torch.autograd.grad(plain, leaves, cotangents, materialize_grads=True)
    for x, y in zip(ours_grad, plain_grad, strict=True):
        # torch's softplus is linear above 20, so that there the plain form is 2e-9 off
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("terms", [fused_terms, compiled_terms, plain_terms])
@pytest.mark.parametrize("size", [0.0, 3.0, 1e4, 1e30])
def test_corrections_that_cancel_and_huge_logits(terms: Callable[..., list[Tensor]], size: float) -> None:
    # b = a + r is exactly 0 for the first rival, and all but 0 for the second; the other logits are equal and huge.
    a, r = torch.tensor([[0.0, size, -1e4]]), torch.tensor([[0.0, -size, 1.0]])
    o, u, t = torch.full((1, 3), -size), torch.full((1, 3), 0.5), torch.tensor([0])
    nll, kl, entropy, auxiliary = terms(o, a, a, r, u, t, False)
    # masks: the target's 1, then 1/2, then none
    assert nll.item() == pytest.approx(math.log(1.5), rel=1e-6)
    cancelled = (size + 2 * math.log1p(math.exp(-size))) / 2 - math.log(2)  # KL of a fair coin from sigmoid(a)
    assert kl.item() == pytest.approx(math.log(2) + cancelled, rel=1e-6)
    coin = math.log1p(math.exp(-size)) + (size / (1 + math.exp(size)) if size < 100 else 0.0)
    assert entropy.item() == pytest.approx(math.log(2) + coin, rel=1e-6)
    expected = math.log(2) + math.log1p(math.exp(-size)) + math.log1p(math.e)
    assert auxiliary.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("terms", [fused_terms, plain_terms])
def test_second_derivatives_are_not_lost(terms: Callable[..., Sequence[Tensor]]) -> None:
    torch.manual_seed(0)
    o, a, r = (torch.randn(2, 4, dtype=F64, requires_grad=True) for _ in range(3))
    u, t = torch.rand(2, 4, dtype=F64), torch.tensor([0, 1])

    def total(o: Tensor, a: Tensor, r: Tensor) -> Tensor:
        return sum(terms(o, a, a.detach(), r, u, t, False)).sum()

    def gradient_of_o_and_r(o: Tensor, a: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(total(o, a, r), (o, r), create_graph=True)

    assert torch.autograd.gradgradcheck(lambda o, r: total(o, a.detach(), r), (o, r))
    assert all(g.requires_grad for g in gradient_of_o_and_r(o, a, r))
