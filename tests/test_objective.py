"""The fast form of the objective equals the plain functions: values, gradients for any weights, second derivatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dropmax import functional as D
from dropmax import objective
from dropmax.losses import losses_of_logits
from dropmax.noise import draw_words
from dropmax.objective import Block, Options, block, plain_terms
from dropmax.walk import Rows

F64 = torch.float64


def plain_totals(
    o: Tensor | None, a: Tensor, stopped: Tensor, r: Tensor | None, u: Tensor, t: Tensor, options: Options
) -> Tensor:
    """The objective of each row, written out with the functions of dropmax.functional."""
    b = stopped if r is None else stopped + r
    total = options.kl_weight * D.mask_kl(b, a, t) - options.entropy_weight * D.mask_entropy(a)
    if r is not None:
        total = total + options.auxiliary_weight * D.auxiliary(r - options.base_rate, t)
    if o is None:
        return total
    log_mask = D.log_hard_mask(b, u)
    if options.mask_gradient:
        log_mask = D.log_relaxed_mask(b, u, options.temperature)
    nll = D.masked_nll(o, log_mask, t, epsilon=options.epsilon, label_smoothing=options.label_smoothing)
    return total + options.cross_entropy_weight * nll


@given(
    n=st.integers(0, 5),
    k=st.sampled_from([2, 3, 10, 50, 64, 130]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    part=st.sampled_from(["all", "no likelihood", "no correction", "stopped"]),
    weights=st.sampled_from([(1.0, 1.0, 1.0, 1.0), (0.5, 0.2, 0.2, 1.0), (2.0, 0.0, 0.7, 3.0), (1.0, 0.3, 0.0, 0.0)]),
    options=st.fixed_dictionaries(
        {
            "mask_gradient": st.booleans(),
            "samples": st.sampled_from([1, 3]),
            "label_smoothing": st.sampled_from([0.0, 0.2]),
            "base_rate": st.sampled_from([0.0, 2.0]),
            "temperature": st.sampled_from([0.1, 0.5]),
            "epsilon": st.sampled_from([1e-20, 1e-3]),
        }
    ),
    group=st.sampled_from([1, 20, 2**16]),
    seed=st.integers(0, 999),
)
def test_same_values_and_gradients(
    n: int, k: int, scale: float, part: str, weights: tuple[float, ...], options: dict[str, Any], group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    o, a, r = (scale * torch.randn(3, n, k, dtype=F64, generator=generator)).unbind()
    u = torch.rand(options["samples"], n, k, dtype=F64, generator=generator).squeeze(0)
    t = torch.randint(k, (n,), generator=generator)
    weight = torch.randn(n, dtype=F64, generator=generator)
    names = ("cross_entropy_weight", "kl_weight", "entropy_weight", "auxiliary_weight")
    chosen = Options(**options, **dict(zip(names, weights, strict=True)))
    leaves = {name: x.clone().requires_grad_() for name, x in (("o", o), ("a", a), ("r", r), ("stopped", a))}
    one, two = (None if part == "no likelihood" else leaves["o"]), (None if part == "no correction" else leaves["r"])
    stopped = leaves["stopped"] if part == "stopped" else None
    held = stopped if stopped is not None else leaves["a"] if two is None else leaves["a"].detach()
    expected = plain_totals(one, leaves["a"], held, two, u, t, chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "GROUP_NUMBERS", group)
        found = losses_of_logits(one, leaves["a"], stopped, two, Rows(t, u), chosen)
    assert "OfLogits" in type(found.total.grad_fn).__name__
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-8)
    gradients = [
        torch.autograd.grad(x, list(leaves.values()), weight, allow_unused=True) for x in (found.total, expected)
    ]
    for name, x, y in zip(leaves, *gradients, strict=True):
        if x is None or y is None:
            assert x is None or not x.any(), name
            assert y is None or not y.any(), name
        else:
            # torch's softplus is linear above 20, so that there the plain form is 2e-9 off
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("relaxed", [True, False])
def test_class_weights_with_label_smoothing(relaxed: bool, smoothing: float) -> None:
    o, a, r = (torch.randn(6, 7, dtype=F64, requires_grad=True) for _ in range(3))
    u, t, weight = torch.rand(6, 7, dtype=F64), torch.randint(7, (6,)), torch.rand(7, dtype=F64)
    weight[t[0]] = 0.0
    options = Options(label_smoothing=smoothing, mask_gradient=relaxed, kl_weight=0.7, entropy_weight=0.7)
    found = losses_of_logits(o, a, None, r, Rows(t, u, weight, weight[t]), options)
    terms = plain_terms(o, a, a.detach(), r, u, t, options, weight)
    rest = 0.7 * (terms["kl"] - terms["entropy"]) + terms["auxiliary"]
    expected = terms["cross_entropy"] + weight[t] * rest
    torch.testing.assert_close(found.total, expected)
    x, y = (torch.autograd.grad(z.sum(), (o, a, r)) for z in (found.total, expected))
    torch.testing.assert_close(x, y)


def test_what_is_reported_beside_the_total() -> None:
    o, a, r = torch.randn(3, 6, 70, dtype=F64)
    u, t = torch.rand(6, 70, dtype=F64), torch.randint(70, (6,))
    expected = plain_terms(o, a, a, r, u, t, Options())
    for options in (Options(), Options(sum_entropy=True)):
        found = losses_of_logits(o, a, None, r, Rows(t, u), options)
        torch.testing.assert_close(found.cross_entropy, expected["cross_entropy"])
        torch.testing.assert_close(found.kl_less_entropy, expected["kl"] - expected["entropy"])
        torch.testing.assert_close(found.auxiliary, expected["auxiliary"])
        torch.testing.assert_close(
            found.entropy, expected["entropy"] if options.sum_entropy else torch.zeros(6, dtype=F64)
        )
        assert torch.equal(found.retain_logits, a)


@pytest.mark.parametrize("size", [0.0, 3.0, 1e4, 1e30])
def test_corrections_that_cancel_and_huge_logits(size: float) -> None:
    # b = a + r is exactly 0 for the first rival, and all but 0 for the second; the other logits are equal and huge.
    a, r = torch.tensor([[0.0, size, -1e4]]), torch.tensor([[0.0, -size, 1.0]])
    o, u, t = torch.full((1, 3), -size), torch.full((1, 3), 0.5), torch.tensor([0])
    options = Options(mask_gradient=True, sum_entropy=True)
    found = losses_of_logits(o, a, None, r, Rows(t, u), options)
    plain = plain_terms(o, a, a, r, u, t, options)
    # masks: the target's 1, then 1/2, then none
    cancelled = (size + 2 * math.log1p(math.exp(-size))) / 2 - math.log(2)  # KL of a fair coin from sigmoid(a)
    coin = math.log1p(math.exp(-size)) + (size / (1 + math.exp(size)) if size < 100 else 0.0)
    expected = {
        "cross_entropy": math.log(1.5),
        "kl": math.log(2) + cancelled,
        "entropy": math.log(2) + coin,
        "auxiliary": math.log(2) + math.log1p(math.exp(-size)) + math.log1p(math.e),
    }
    kl = found.kl_less_entropy + found.entropy
    fast = {"cross_entropy": found.cross_entropy, "kl": kl, "entropy": found.entropy, "auxiliary": found.auxiliary}
    for name, value in expected.items():
        assert plain[name].item() == pytest.approx(value, rel=1e-6), name
        assert fast[name].item() == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("options", [Options(), Options(mask_gradient=True)])
def test_second_derivatives_are_not_lost(options: Options) -> None:
    o, a, r = (torch.randn(2, 4, dtype=F64, requires_grad=True) for _ in range(3))
    u, t = torch.rand(2, 4, dtype=F64), torch.tensor([0, 1])

    def total(o: Tensor, a: Tensor, r: Tensor) -> Tensor:
        return losses_of_logits(o, a, None, r, Rows(t, u), options).total.sum()

    assert torch.autograd.gradgradcheck(lambda o, r: total(o, a.detach(), r), (o, r))
    assert all(g.requires_grad for g in torch.autograd.grad(total(o, a, r), (o, a, r), create_graph=True))


def test_hard_masks_are_bernoulli_draws_of_the_posterior() -> None:
    a, r = torch.randn(2, 1, 6).expand(2, 20_000, 6).unbind()
    o, t = torch.zeros(20_000, 6), torch.full((20_000,), 2)
    # With equal class logits, the normaliser counts the classes that were kept.
    kept = losses_of_logits(o, a, None, r, Rows(t, draw_words(20_000 + 6)), Options()).cross_entropy.exp()
    g = (a + r)[0].sigmoid()
    g[2] = 1.0
    spread = float((g * (1 - g)).sum().sqrt()) / math.sqrt(20_000)
    assert float(kept.mean()) == pytest.approx(float(g.sum()), abs=4 * spread)
    torch.testing.assert_close(kept, kept.round())  # whole classes, not parts of them


def test_float32_keeps_its_digits() -> None:
    generator = torch.Generator().manual_seed(2)
    for scale in (1e-3, 1.0, 5.0, 30.0):
        o, a, r = (scale * torch.randn(3, 16, 1000, generator=generator)).unbind()
        u, t = torch.rand(16, 1000, generator=generator), torch.randint(1000, (16,), generator=generator)
        options = Options(base_rate=math.log(999), kl_weight=0.01, entropy_weight=0.01)
        x = Block(o, a, r, t.unsqueeze(-1), noise=(u,))
        narrow, on = block(x, options)
        wide, wide_on = block(Block(o.double(), a.double(), r.double(), t.unsqueeze(-1), noise=(u.double(),)), options)
        for part, other in ((narrow, wide), (on, wide_on)):
            for name, p, q in zip(part._fields, part, other, strict=True):
                if p is not None and q is not None:
                    size = float(q.abs().max())
                    assert float((p - q).abs().max()) <= 2e-5 * max(size, 1e-3), (name, scale)
