"""The equations against enumeration over all masks, their known optima, and their behaviour at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy as torch_cross_entropy

from dropmax import functional as D
from tests import enumeration as naive

F64 = torch.float64


def logits(num_classes: int, scale: float, seed: int) -> torch.Tensor:
    return scale * torch.randn(num_classes, dtype=F64, generator=torch.Generator().manual_seed(seed))


@given(k=st.integers(2, 10), t=st.integers(0, 9), scale=st.sampled_from([0.1, 1.0, 4.0]), seed=st.integers(0, 10**6))
def test_every_term_against_enumeration_of_all_masks(k: int, t: int, scale: float, seed: int) -> None:
    t %= k
    o, a, r = (logits(k, scale, seed + i) for i in range(3))
    target = torch.tensor(t)
    masks = naive.all_masks(k)

    likelihood = naive.likelihoods(o, masks)
    ours = D.masked_logits(o, masks.log()).log_softmax(-1).exp()
    torch.testing.assert_close(ours, likelihood, atol=1e-12, rtol=1e-9)

    p = naive.mask_probabilities(masks, a.sigmoid())
    q = naive.mask_probabilities(masks, (a + r).sigmoid().scatter(-1, target[None], 1.0))
    assert D.mask_kl(a + r, a, target).item() == pytest.approx(naive.kl(q, p), rel=1e-9, abs=1e-9)
    assert D.mask_entropy(a).item() == pytest.approx(naive.entropy(p), rel=1e-9, abs=1e-9)
    assert D.auxiliary(r, target).item() == pytest.approx(naive.auxiliary(r, t), rel=1e-9)
    shifted = naive.auxiliary(r - math.log(k - 1), t)
    assert D.auxiliary(r, target, prior_correction=True).item() == pytest.approx(shifted, rel=1e-9)


@pytest.mark.parametrize(
    ("is_target", "g", "optimum"), [(True, 0.5, 0.7822), (False, 0.0, 0.2178), (False, 0.25, 0.3722), (False, 0.5, 0.5)]
)
def test_gradient_descent_on_kl_minus_entropy_reaches_its_optimum(is_target: bool, g: float, optimum: float) -> None:
    # With the entropy's printed sign rho would run to 0 or 1 instead.
    a = torch.zeros(1, 2, dtype=F64, requires_grad=True)
    b = torch.logit(torch.full((1, 2), g, dtype=F64), eps=1e-12)
    target = torch.tensor([0])
    optimiser = torch.optim.SGD([a], lr=1.0)
    for _ in range(2000):
        optimiser.zero_grad()
        (D.mask_kl(b, a, target) - D.mask_entropy(a)).sum().backward()
        optimiser.step()
    assert a.sigmoid()[0, 0 if is_target else 1].item() == pytest.approx(optimum, abs=5e-5)


def test_the_relaxed_mask_tends_to_a_bernoulli_draw() -> None:
    from scipy.stats import binomtest

    n = 20_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(1))
    for logit in (-2.0, 0.0, 1.5):
        z = D.log_relaxed_mask(torch.full((n,), logit), u, temperature=1e-4).exp()
        assert ((z < 0.01) | (z > 0.99)).float().mean() > 0.999
        ones = int((z > 0.5).sum())
        assert binomtest(ones, n, torch.tensor(logit).sigmoid().item()).pvalue > 1e-3
        warm = D.log_relaxed_mask(torch.full((n,), logit), u, temperature=1.0).exp()
        assert ((warm > 0.01) & (warm < 0.99)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_zero_and_one_is_survived(dtype: torch.dtype) -> None:
    logit = torch.zeros(2, dtype=dtype, requires_grad=True)
    log_mask = D.log_relaxed_mask(logit, torch.tensor([0.0, 1.0], dtype=dtype))
    assert log_mask.isfinite().all()
    log_mask.sum().backward()
    assert logit.grad is not None
    assert logit.grad.isfinite().all()
    assert log_mask.exp()[0] < 1e-30 < 0.999 < log_mask.exp()[1]


def test_only_noise_of_zero_and_one_is_moved() -> None:
    least = 2.0**-24  # what torch.rand returns least, beside 0
    noise = torch.tensor([0.0, least, 0.25, 1 - least, 1.0])
    expected = [-24 * math.log(2), -24 * math.log(2), -math.log(3), 24 * math.log(2), 24 * math.log(2)]
    assert D.logistic(noise).tolist() == pytest.approx(expected, rel=1e-6)


def test_defaults_are_those_of_the_paper() -> None:
    logit, noise = torch.tensor([0.3]), torch.tensor([0.4])
    torch.testing.assert_close(D.log_relaxed_mask(logit, noise), D.log_relaxed_mask(logit, noise, temperature=0.1))
    dropped = torch.tensor([0.0, -torch.inf])
    assert D.masked_logits(torch.zeros(2), dropped)[1].item() == pytest.approx(-20 * math.log(10), rel=1e-6)
    # A rival 50 ahead shows, dropped as it is: 1 + 1e-20 exp(50).
    nll = D.masked_nll(torch.tensor([0.0, 50.0]), dropped, torch.tensor(0)).item()
    assert nll == pytest.approx(math.log1p(1e-20 * math.exp(50)), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_several_masks_give_the_mean_and_smoothing_goes_to_the_retained(smoothing: float) -> None:
    o, z, t = torch.randn(4, 5, dtype=F64), torch.rand(3, 4, 5, dtype=F64), torch.randint(5, (4,))
    weight = torch.rand(5, dtype=F64)
    found = D.masked_nll(o, z.log(), t, label_smoothing=smoothing, class_weight=weight)
    expected = torch.zeros(4, dtype=F64)
    for sample in range(3):
        for row in range(4):
            kept = z[sample, row].clone()
            kept[t[row]] = 1.0
            p = (kept + 1e-20) * o[row].exp()
            nll = -(p / p.sum()).log() * weight
            expected[row] += ((1 - smoothing) * nll[t[row]] + smoothing * (kept / kept.sum() * nll).sum()) / 3
    torch.testing.assert_close(found, expected)


def test_a_row_with_nan_is_nan_and_alone() -> None:
    o = torch.tensor([[1.0, torch.nan, 0.0], [3.0, 1.0, 0.0]])
    assert D.sparsemax(o)[0].isnan().all()
    assert D.sparsemax(o)[1].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_torchs(smoothing: float, weighted: bool) -> None:
    x, y = torch.randn(7, 5, dtype=F64), torch.randint(5, (7,))
    weight = torch.rand(5, dtype=F64) if weighted else None
    ours = D.cross_entropy(x, y, label_smoothing=smoothing, class_weight=weight)
    theirs = torch_cross_entropy(x, y, weight=weight, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(ours, theirs)


def test_the_spread_of_label_smoothing_carries_no_gradient() -> None:
    mask = torch.rand(4, dtype=F64, requires_grad=True)
    D.cross_entropy(
        torch.randn(4, dtype=F64, requires_grad=True), torch.tensor(0), label_smoothing=0.3, smoothing_mask=mask
    ).backward()
    assert mask.grad is None


def sparsemax_by_sorting(o: list[float]) -> list[float]:
    """The algorithm of Martins & Astudillo, one number at a time."""
    ordered = sorted(o, reverse=True)
    tau = 0.0
    for size in range(1, len(o) + 1):
        if 1 + size * ordered[size - 1] > sum(ordered[:size]):
            tau = (sum(ordered[:size]) - 1) / size
    return [max(x - tau, 0.0) for x in o]


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=12))
def test_sparsemax_against_a_naive_reference(values: list[float]) -> None:
    p = D.sparsemax(torch.tensor(values, dtype=F64))
    assert p.tolist() == pytest.approx(sparsemax_by_sorting(values), abs=1e-9)
    assert p.sum().item() == pytest.approx(1.0)


def test_sparsemax_against_entmax() -> None:
    entmax = pytest.importorskip("entmax")
    x = (3 * torch.randn(50, 20, dtype=F64)).requires_grad_()
    target = torch.randint(20, (50,))
    g = torch.randn(50, 20, dtype=F64)
    for ours, theirs in [
        (D.sparsemax(x), entmax.sparsemax(x)),
        (D.sparsemax_loss(x, target)[:, None], entmax.sparsemax_loss(x, target)[:, None]),
    ]:
        torch.testing.assert_close(ours, theirs)
        cotangent = g[:, : ours.shape[1]]
        (grad,) = torch.autograd.grad(ours, x, cotangent)
        (reference,) = torch.autograd.grad(theirs, x, cotangent)
        torch.testing.assert_close(grad, reference)
    assert (D.sparsemax(x) == 0).any()


@pytest.mark.parametrize("s", [0.0, 0.3])
@given(values=st.lists(st.floats(-5, 5), min_size=2, max_size=6), t=st.integers(0, 5))
def test_sparsemax_loss_is_the_fenchel_young_loss_of_its_definition(s: float, values: list[float], t: int) -> None:
    # L = max_p [<p, o> - |p|^2/2] - (<y, o> - |y|^2/2) over the simplex; the maximum is at sparsemax(o).
    o = torch.tensor(values, dtype=F64)
    t %= len(values)
    y = torch.full_like(o, s / len(values))
    y[t] += 1 - s
    p = torch.tensor(sparsemax_by_sorting(values), dtype=F64)

    def score(x: torch.Tensor) -> torch.Tensor:
        return (x * o).sum() - x.square().sum() / 2

    expected = score(p) - score(y)
    assert D.sparsemax_loss(o, torch.tensor(t), label_smoothing=s).item() == pytest.approx(expected.item(), abs=1e-9)


def test_sparsemax_passes_gradcheck_twice() -> None:
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(D.sparsemax, x)
    assert torch.autograd.gradgradcheck(D.sparsemax, x)
    assert torch.autograd.gradcheck(lambda x: D.sparsemax_loss(x, torch.tensor([0, 1, 2])), x)
    batched = torch.vmap(D.sparsemax)(x)
    torch.testing.assert_close(batched, D.sparsemax(x))


@pytest.mark.parametrize("size", [1e4, 1e30, -1e30])
def test_only_differences_of_huge_logits_matter(size: float) -> None:
    huge, target = torch.full((1, 5), size), torch.tensor([3])
    log_mask = torch.tensor([[0.0, -50.0, -50.0, 0.0, 0.0]])  # three of the five are kept
    assert D.cross_entropy(huge, target).item() == pytest.approx(math.log(5), rel=1e-6)
    assert D.cross_entropy(huge, target, label_smoothing=0.5).item() == pytest.approx(math.log(5), rel=1e-6)
    assert D.masked_nll(huge, log_mask, target).item() == pytest.approx(math.log(3), rel=1e-6)
    assert D.sparsemax_loss(huge, target).item() == pytest.approx(0.4, rel=1e-6)


def test_differences_are_taken_from_the_highest_logit() -> None:
    o = torch.tensor([1e8 + 8, 1e8, -1e8])  # from the lowest, 16 is the next number after 0
    assert D.sparsemax(o).tolist() == [1.0, 0.0, 0.0]
    assert D.cross_entropy(o, torch.tensor(1)).item() == pytest.approx(8, rel=1e-3)


def test_class_weights_do_not_widen_the_loss() -> None:
    weight = torch.ones(3, dtype=F64)
    assert D.cross_entropy(torch.zeros(3), torch.tensor(1), class_weight=weight).dtype == torch.float32


def test_what_the_target_pays_survives_a_huge_correction() -> None:
    r = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [0.0, 1e30]])
    assert D.auxiliary(r, torch.tensor([0, 0, 1])).tolist() == pytest.approx([0.0, 2e4, math.log(2)], rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 5), (5,)])
def test_sparsemax_takes_rows_of_any_batch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    o = torch.randn(shape, dtype=F64, requires_grad=True)
    target, weight = torch.randint(5, shape[:-1]), torch.randn(shape, dtype=F64)

    def loss(o: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return D.sparsemax_loss(o, target, label_smoothing=0.3).sum() + (D.sparsemax(o) * weight).sum()

    (found,) = torch.autograd.grad(loss(o, target, weight), o)
    rows = o.detach().reshape(-1, 5).requires_grad_()
    (expected,) = torch.autograd.grad(loss(rows, target.reshape(-1), weight.reshape(-1, 5)), rows)
    torch.testing.assert_close(found.reshape(-1, 5), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_mean_logits_keep_the_dtype(dtype: torch.dtype) -> None:
    assert D.mean_logits(torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)).dtype == dtype


def test_label_smoothing_of_sparsemax_does_not_overflow() -> None:
    o = torch.full((1, 4), torch.finfo(torch.float32).min / 2).scatter(-1, torch.tensor([[1]]), 0.0)
    assert D.sparsemax_loss(o, torch.tensor([1]), label_smoothing=0.2).isfinite()


def test_mean_logits_that_do_not_fit_into_float16_are_the_lowest_number_not_minus_infinity() -> None:
    lowest = torch.finfo(torch.float16).min
    o, a = torch.tensor([-6e4, 0.0]).half(), torch.tensor([-6e4, -6e4]).half()
    assert D.mean_logits(o, a).tolist() == [lowest, -6e4]
    assert D.mean_logits(torch.full((2,), torch.finfo(torch.float16).max).half(), a + 6e4).isfinite().all()


def test_the_naive_forms_fail_where_ours_hold() -> None:
    """Why this module works in log space: a logit of 20 already ruins log(1 - rho) in float32."""
    a = torch.tensor([20.0])
    naive_log = (1 - a.sigmoid() + 1e-20).log()
    assert not torch.isclose(naive_log, torch.tensor([-20.0]), rtol=0.2)
    kl = D.mask_kl(torch.tensor([[0.0, -20.0]]), torch.tensor([[0.0, 20.0]]), torch.tensor([0]))
    assert kl.item() == pytest.approx(math.log(2) + 20, rel=1e-6)
