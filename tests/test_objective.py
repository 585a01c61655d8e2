"""The fused objective equals the plain one: values, gradients for any cotangent, and second derivatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dropmax import objective
from dropmax.objective import fused_terms, plain_terms

F64 = torch.float64


@given(
    n=st.integers(0, 5),
    k=st.sampled_from([2, 3, 10, 50]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    prior_correction=st.booleans(),
    mask_gradient=st.booleans(),
    block=st.sampled_from([1, 20, 2**16]),
    seed=st.integers(0, 999),
)
def test_same_values_and_gradients(
    n: int, k: int, scale: float, prior_correction: bool, mask_gradient: bool, block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    o, a, r = (scale * torch.randn(3, n, k, dtype=F64, generator=generator)).unbind()
    leaves = [x.clone().requires_grad_() for x in (o, a, a, r)]
    u = torch.rand(n, k, dtype=F64, generator=generator)
    t = torch.randint(k, (n,), generator=generator)
    cotangents = list(torch.randn(4, n, dtype=F64, generator=generator))
    options = (0.5, 1e-20, prior_correction, mask_gradient)

    plain = plain_terms(*leaves, u, t, *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "_BLOCK", block)
        fused = fused_terms(*leaves, u, t, *options)
        for ours, expected in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        ours_grad = torch.autograd.grad(fused, leaves, cotangents)
    plain_grad = torch.autograd.grad(plain, leaves, cotangents, materialize_grads=True)
    for x, y in zip(ours_grad, plain_grad, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def test_second_derivatives_are_not_lost() -> None:
    o, a, r = torch.randn(3, 2, 4, dtype=F64).unbind()
    o, a, r = (x.clone().requires_grad_() for x in (o, a, r))
    u, t = torch.rand(2, 4, dtype=F64), torch.tensor([0, 1])
    penalties = []
    for terms in (fused_terms, plain_terms):
        gradients = torch.autograd.grad(sum(terms(o, a, a.detach(), r, u, t)[:2]).sum(), (o, a, r), create_graph=True)
        penalties.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), (o, a, r)))
    for ours, expected in zip(*penalties, strict=True):
        assert (expected != 0).any()
        torch.testing.assert_close(ours, expected)
