"""The integrals of dropmax.exact against sums over all 2^K masks, and against what must hold for any K."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from dropmax import exact
from dropmax.errors import InvalidType, InvalidValue
from dropmax.exact.quadrature import Walk, rule_for

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}

# --- the naive twin: every mask, in log space and float64 ------------------------------------------------------------


def enumerate_masks(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(M, K) masks z, (..., M) log p(z) and (..., M, K) log p(y | z)."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=logits.shape[-1])))
    logits, mask_logits = logits.double()[..., None, :], mask_logits.double()[..., None, :]
    log_prior = torch.where(masks, logsigmoid(mask_logits), logsigmoid(-mask_logits)).sum(-1)
    seen = masks | ~masks.any(-1, keepdim=True)  # no class kept: softmax over all of them
    return masks, log_prior, torch.log_softmax(logits.masked_fill(~seen, -torch.inf), -1)


def naive_predictive(logits: Tensor, retain_logits: Tensor) -> Tensor:
    _, log_prior, log_p = enumerate_masks(logits, retain_logits)
    return torch.logsumexp(log_prior[..., None] + log_p, -2).exp()


def naive_variance(logits: Tensor, retain_logits: Tensor) -> Tensor:
    _, log_prior, log_p = enumerate_masks(logits, retain_logits)
    mean = naive_predictive(logits, retain_logits)[..., None, :]
    return (log_prior.exp()[..., None] * (log_p.exp() - mean) ** 2).sum(-2)


def of_target(log_p: Tensor, target: Tensor) -> Tensor:
    return log_p.gather(-1, target[..., None, None].expand(*log_p.shape[:-1], 1))[..., 0]


def naive_log_marginal(logits: Tensor, retain_logits: Tensor, target: Tensor) -> Tensor:
    _, log_prior, log_p = enumerate_masks(logits, retain_logits)
    return torch.logsumexp(log_prior + of_target(log_p, target), -1)


def naive_posterior(logits: Tensor, retain_logits: Tensor, target: Tensor) -> Tensor:
    masks, log_prior, log_p = enumerate_masks(logits, retain_logits)
    return torch.softmax(log_prior + of_target(log_p, target), -1) @ masks.double()


def naive_expected_nll(logits: Tensor, posterior_logits: Tensor, target: Tensor) -> Tensor:
    kept = one_hot(target, logits.shape[-1]).bool()
    _, log_q, log_p = enumerate_masks(logits, posterior_logits.double().masked_fill(kept, 1e6))
    nll = -of_target(log_p, target)
    return (log_q.exp() * nll.masked_fill(log_q < -800, 0.0)).sum(-1)  # 0 * inf where the target is dropped


PER_CLASS = [(exact.predictive, naive_predictive), (exact.variance, naive_variance)]
OF_TARGET = [
    (exact.log_marginal, naive_log_marginal),
    (exact.posterior, naive_posterior),
    (exact.expected_nll, naive_expected_nll),
]


def all_functions(target: Tensor) -> list[tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """All five, and their twins, as functions of two tensors of logits."""
    pairs = [(lambda o, a, f=f: f(o, a, target), lambda o, a, n=n: n(o, a, target)) for f, n in OF_TARGET]
    return [*PER_CLASS, *pairs]


def assert_right(logits: Tensor, retain_logits: Tensor, target: Tensor) -> None:
    """Within the tolerance of the dtype, absolute or (for log_marginal and expected_nll) relative."""
    for function, naive in all_functions(target):
        actual, expected = function(logits, retain_logits), naive(logits, retain_logits)
        assert actual.dtype == logits.dtype
        assert actual.shape == expected.shape
        error = (actual.double() - expected).abs() / expected.abs().clamp_min(1)
        assert float(error.max()) <= TOLERANCE[logits.dtype]
    assert bool((exact.variance(logits, retain_logits) >= 0).all())
    assert bool((exact.expected_nll(logits, retain_logits, target) >= 0).all())


def draw(seed: int, shape: tuple[int, ...], spread: float, retain: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    retain_logits = retain * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    return logits.to(dtype), retain_logits.to(dtype), torch.randint(shape[-1], shape[:-1], generator=generator)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@dtypes
@given(
    seed=st.integers(0, 2**32),
    batch=st.sampled_from([(), (1,), (7,), (2, 3)]),
    classes=st.integers(2, 10),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 10.0, 50.0]),
    retain=st.sampled_from([0.0, 1.0, 5.0, 20.0]),
)
def test_every_mask(
    dtype: torch.dtype, seed: int, batch: tuple[int, ...], classes: int, spread: float, retain: float
) -> None:
    assert_right(*draw(seed, (*batch, classes), spread, retain, dtype))


@dtypes
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=4),
    retain_logits=st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4),
    target=st.integers(0, 3),
)
def test_every_mask_of_chosen_numbers(
    dtype: torch.dtype, logits: list[float], retain_logits: list[float], target: int
) -> None:
    assert_right(torch.tensor(logits, dtype=dtype), torch.tensor(retain_logits, dtype=dtype), torch.tensor(target))


@dtypes
def test_every_mask_of_twelve_classes(dtype: torch.dtype) -> None:
    for spread, retain in [(1.0, 1.0), (50.0, 20.0), (50.0, 2.0), (2.0, 20.0)]:
        assert_right(*draw(0, (8, 12), spread, retain, dtype))


CORNERS = {
    "equal logits": ([3.0] * 5, [0.3, -1.0, 2.0, 0.0, 1.0]),
    "all kept": ([1.0, 2.0, 3.0, 4.0, 5.0], [20.0] * 5),
    "all dropped": ([1.0, 2.0, 3.0, 4.0, 5.0], [-20.0] * 5),
    "one kept, the lowest": ([40.0, 30.0, 20.0, 10.0, -50.0], [-20.0, -20.0, -20.0, -20.0, 20.0]),
    "one dropped, the highest": ([50.0, 3.0, 2.0, 1.0, 0.0], [-20.0, 20.0, 20.0, 20.0, 20.0]),
    "top almost surely kept": ([50.0, -50.0, -49.0, -50.0, -48.5], [20.0, 1.0, 2.0, 0.0, -1.0]),
    "gaps just below and above the widest": ([0.0, -47.9, -96.1, -145.0, -200.0], [1.0, -2.0, 0.5, 3.0, 0.0]),
    "huge gaps": ([1e4, 5e3, 1.0, 0.0, -1e4], [2.0, -3.0, 1.0, 0.0, 5.0]),
    "huge gaps, all kept": ([1e4, 5e3, 1.0, 0.0, -1e4], [20.0] * 5),
    "huge gaps, far from zero": ([-9e3, -9e3 + 0.5, -1.9e4, -1.9e4 + 0.25, -1.9e4], [-15.0, -16.0, 1.0, 2.0, 0.0]),
    "gaps of half a million": ([5e5, 0.0, -1.0, -2.0, -5e5], [1.0, 0.0, 2.0, -1.0, 3.0]),
    "saturated retain logits": ([5.0, 3.0, 0.0, -1.0, -400.0], [1e3, -1e3, 0.0, 1e3, 1.0]),
    "saturated, as far as the gap is wide": ([1e3, 0.0, -1.0, -2.0, -3e3], [1e3, 0.0, -2.0, 1.0, 0.0]),
    "saturated, and only then a gap": ([700.0, 300.0, 0.0, -1.0, -2.0], [100.0, 150.0, 0.0, 80.0, -90.0]),
}


@dtypes
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(dtype: torch.dtype, corner: str) -> None:
    logits, retain_logits = torch.tensor(CORNERS[corner], dtype=dtype)
    everyone = torch.arange(5)
    assert_right(logits.expand(5, 5), retain_logits.expand(5, 5), everyone)


@dtypes
@given(seed=st.integers(0, 2**32), retain=st.sampled_from([1.0, 20.0, 200.0, 1000.0]))
def test_spreads_of_ten_thousand(dtype: torch.dtype, seed: int, retain: float) -> None:
    assert_right(*draw(seed, (5, 6), 1e4, retain, dtype))


def test_an_independent_referee() -> None:
    """The same sums in 40 digits with another library, for the twin could share a mistake with the integrals."""
    logits, retain_logits, target = [1.5, -30.25, 0.75, -2.0], [18.0, 0.5, -3.0, 12.0], 1
    with mpmath.workdps(40):
        weights = [mpmath.exp(o) for o in logits]
        rho = [1 / (1 + mpmath.exp(-a)) for a in retain_logits]
        mean, second, joint, nll = [0] * 4, [0] * 4, [0] * 4, mpmath.mpf(0)
        for z in itertools.product([0, 1], repeat=4):
            prior = mpmath.fprod(r if kept else 1 - r for r, kept in zip(rho, z, strict=True))
            kept_weights = [w * (kept or not any(z)) for w, kept in zip(weights, z, strict=True)]
            p = [w / sum(kept_weights) for w in kept_weights]
            mean = [m + prior * pk for m, pk in zip(mean, p, strict=True)]
            second = [m + prior * pk**2 for m, pk in zip(second, p, strict=True)]
            joint = [m + prior * p[target] * kept for m, kept in zip(joint, z, strict=True)]
            if z[target]:
                nll -= prior / rho[target] * mpmath.log(p[target])
        expected = [
            mean,
            [s - m**2 for s, m in zip(second, mean, strict=True)],
            mpmath.log(mean[target]),
            [j / mean[target] for j in joint],
            nll,
        ]
    o, a, t = torch.tensor(logits).double(), torch.tensor(retain_logits).double(), torch.tensor(target)
    for (function, naive), value in zip(all_functions(t), expected, strict=True):
        numbers = [float(v) for v in value] if isinstance(value, list) else float(value)
        truth = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(function(o, a), truth, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(naive(o, a), truth, rtol=1e-11, atol=1e-14)


# --- what must hold for any number of classes ------------------------------------------------------------------------


def test_sampling_agrees_within_its_standard_error() -> None:
    logits, retain_logits, _ = draw(1, (4, 100), 6.0, 3.0, torch.float64)
    samples = 20_000
    masks = torch.rand(samples, 4, 100, dtype=torch.float64) < torch.sigmoid(retain_logits)
    p = torch.softmax(logits.masked_fill(~masks, -torch.inf), -1)  # 100 classes: some class is always kept
    mean, variance = exact.predictive(logits, retain_logits), exact.variance(logits, retain_logits)
    z_scores = (p.mean(0) - mean) / (variance / samples).sqrt()
    assert float(z_scores.abs().max()) < 5
    assert float(z_scores.square().mean()) == pytest.approx(1, abs=0.4)  # fails if the variance were wrong


@dtypes
@pytest.mark.parametrize("classes", [3, 100, 1000, 10_000])
@pytest.mark.parametrize("spread", [0.0, 5.0])  # equal logits are all rounded the same way
def test_probabilities_sum_to_one(dtype: torch.dtype, classes: int, spread: float) -> None:
    logits, _, _ = draw(2, (3, classes), spread, 0, dtype)
    retain_logits = torch.tensor([[-4.0], [0.0], [4.0]], dtype=dtype).expand_as(logits)
    p = exact.predictive(logits, retain_logits)
    assert float((p.double().sum(-1) - 1).abs().max()) < 1e-6
    truth = exact.predictive(logits.double(), retain_logits.double(), step=0.2)
    torch.testing.assert_close(p.double(), truth, rtol=2e-6 if dtype == torch.float32 else 1e-11, atol=0)


@given(seed=st.integers(0, 2**32), classes=st.sampled_from([2, 7, 60]))
def test_permuting_and_shifting_classes(seed: int, classes: int) -> None:
    logits, retain_logits, target = draw(seed, (3, classes), 20.0, 5.0, torch.float64)
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    moved = order.argsort()[target]
    for (function, _), (permuted, _) in zip(all_functions(target), all_functions(moved), strict=True):
        value = function(logits, retain_logits)
        expected = value[..., order] if value.dim() == 2 else value
        torch.testing.assert_close(permuted(logits[:, order], retain_logits[:, order]), expected)
        torch.testing.assert_close(function(logits + 123.456, retain_logits), value)


@given(seed=st.integers(0, 2**32), classes=st.sampled_from([2, 5, 30]), k=st.integers(0, 1))
def test_keeping_a_class_more_often_helps_it_and_hurts_all_others(seed: int, classes: int, k: int) -> None:
    logits, retain_logits, _ = draw(seed, (4, classes), 5.0, 3.0, torch.float64)
    raised = retain_logits.clone()
    raised[:, k] += 0.5
    change = exact.predictive(logits, raised) - exact.predictive(logits, retain_logits)
    assert bool((change[:, k] > 0).all())
    others = torch.arange(classes) != k
    assert bool((change[:, others] < 1e-12).all())


@dtypes
def test_limits(dtype: torch.dtype) -> None:
    logits, _, target = draw(3, (6, 40), 5.0, 0, dtype)
    softmax, everything = torch.softmax(logits, -1), torch.full_like(logits, 1e3)
    close = {"rtol": 0, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(exact.predictive(logits, everything), softmax, **close)
    torch.testing.assert_close(exact.predictive(logits, -everything), softmax, **close)
    torch.testing.assert_close(exact.variance(logits, everything), torch.zeros_like(logits), **close)
    cross_entropy = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(exact.expected_nll(logits, everything, target), cross_entropy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact.log_marginal(logits, everything, target), -cross_entropy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact.expected_nll(logits, -everything, target), torch.zeros(6, dtype=dtype))
    only = torch.full_like(logits, -1e3).scatter(-1, target[:, None], 1e3)
    torch.testing.assert_close(exact.predictive(logits, only), one_hot(target, 40).to(dtype), **close)


@pytest.mark.parametrize("classes", [3, 200])
def test_posterior_obeys_bayes(classes: int) -> None:
    logits, retain_logits, _ = draw(4, (classes,), 4.0, 2.0, torch.float64)
    logits, retain_logits = logits.expand(classes, -1), retain_logits.expand(classes, -1)
    every_label = torch.arange(classes)
    posterior = exact.posterior(logits, retain_logits, every_label)  # (label, class)
    p = exact.predictive(logits, retain_logits)[0]
    # Averaging over labels gives back the prior.
    torch.testing.assert_close(p @ posterior, torch.sigmoid(retain_logits[0]))
    # The target's own mask: it was kept unless all were dropped.
    all_dropped = torch.sigmoid(-retain_logits[0]).prod()
    torch.testing.assert_close(posterior.diagonal(), 1 - all_dropped * torch.softmax(logits[0], -1) / p)
    torch.testing.assert_close(exact.log_marginal(logits, retain_logits, every_label), p.log())


def test_expected_nll_keeps_its_relative_accuracy_when_it_is_tiny() -> None:
    logits, target = torch.tensor([0.0, -20.0, -23.0]), torch.tensor(0)
    for posterior_logits in (torch.zeros(3), torch.full((3,), -15.0)):
        expected = naive_expected_nll(logits, posterior_logits, target)
        assert float(exact.expected_nll(logits, posterior_logits, target)) == pytest.approx(float(expected), rel=1e-5)


# --- gradients and transforms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(5))
def test_gradcheck(index: int) -> None:
    logits, retain_logits, target = draw(5, (2, 3, 5), 3.0, 2.0, torch.float64)
    function, _ = all_functions(target)[index]
    assert torch.autograd.gradcheck(function, (logits.requires_grad_(), retain_logits.requires_grad_()))


@dtypes
@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    ("spread", "retain"), [(0.0, 0.0), (3.0, 2.0), (50.0, 20.0), (3.0, 20.0), (1e4, 5.0), (1e4, 20.0)]
)
def test_gradient_of_the_sum_over_masks(dtype: torch.dtype, index: int, spread: float, retain: float) -> None:
    logits, retain_logits, target = draw(6, (20, 6), spread, retain, dtype)
    function, naive = all_functions(target)[index]
    weights = torch.randn_like(naive(logits, retain_logits))
    gradients = []
    for f, to in ((function, dtype), (naive, torch.float64)):
        inputs = [tensor.to(to, copy=True).requires_grad_() for tensor in (logits, retain_logits)]
        gradients.append(torch.autograd.grad((f(*inputs) * weights).sum(), inputs))
    for actual, expected in zip(*gradients, strict=True):
        error = (actual.double() - expected).abs() / expected.abs().clamp_min(1)
        assert float(error.max()) < {torch.float32: 1e-5, torch.float64: 3e-9}[dtype]


@dtypes
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1.0, 100.0, 1e4, 1e30]))
def test_everything_is_finite(dtype: torch.dtype, seed: int, scale: float) -> None:
    logits, retain_logits, target = draw(seed, (3, 8), scale, min(scale, 1e3), dtype)
    logits[0, :3] = torch.finfo(dtype).min / 4  # how masked-out classes are often written
    for function, _ in all_functions(target):
        inputs = logits.clone().requires_grad_(), retain_logits.clone().requires_grad_()
        value = function(*inputs)
        assert bool(value.isfinite().all())
        for gradient in torch.autograd.grad(value.sum(), inputs):
            assert bool(gradient.isfinite().all())


def test_a_row_of_nan_stays_alone() -> None:
    logits, retain_logits, target = draw(6, (4, 6), 200.0, 50.0, torch.float32)
    for spoilt in (logits, retain_logits):
        for function, _ in all_functions(target):
            expected = function(logits, retain_logits)
            number, spoilt[1, 2] = spoilt[1, 2].clone(), torch.nan
            value = function(logits, retain_logits)
            spoilt[1, 2] = number
            assert bool(value[1].isnan().any())
            torch.testing.assert_close(value[[0, 2, 3]], expected[[0, 2, 3]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("index", range(5))
def test_only_one_of_the_inputs_needs_a_gradient(index: int) -> None:
    logits, retain_logits, target = draw(7, (3, 4), 3.0, 2.0, torch.float64)
    function, _ = all_functions(target)[index]
    both = [logits.clone().requires_grad_(), retain_logits.clone().requires_grad_()]
    expected = torch.autograd.grad(function(*both).sum(), both)
    for i in range(2):
        inputs = [logits, retain_logits]
        inputs[i] = inputs[i].clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(function(*inputs).sum(), inputs[i])[0], expected[i])


@pytest.mark.parametrize("index", range(5))
def test_second_derivatives_are_refused(index: int) -> None:
    logits, retain_logits, target = draw(7, (3, 4), 3.0, 2.0, torch.float64)
    function, _ = all_functions(target)[index]
    (gradient,) = torch.autograd.grad(
        function(logits.requires_grad_(), retain_logits).square().sum(), logits, create_graph=True
    )
    with pytest.raises(InvalidValue, match="first derivatives only"):
        gradient.sum().backward()


@pytest.mark.parametrize("function", [exact.predictive, exact.variance])
def test_function_transforms_per_class(function: Callable[..., Tensor]) -> None:
    logits, retain_logits, _ = draw(8, (4, 5), 3.0, 2.0, torch.float64)
    torch.testing.assert_close(torch.vmap(function)(logits, retain_logits), function(logits, retain_logits))
    one_for_all = torch.vmap(function, in_dims=(0, None))(logits, retain_logits[0])
    torch.testing.assert_close(one_for_all, function(logits, retain_logits[:1].expand(4, -1)))
    jacobian = torch.vmap(torch.func.jacrev(function))(logits, retain_logits)
    expected = [
        torch.autograd.functional.jacobian(lambda o, a=a: function(o, a), o)
        for o, a in zip(logits, retain_logits, strict=True)
    ]
    torch.testing.assert_close(jacobian, torch.stack(expected))


@pytest.mark.parametrize("function", [exact.log_marginal, exact.expected_nll, exact.posterior])
def test_function_transforms_of_a_target(function: Callable[..., Tensor]) -> None:
    logits, retain_logits, target = draw(8, (4, 3, 5), 3.0, 2.0, torch.float64)
    mapped = torch.vmap(function, in_dims=(1, 1, 1), out_dims=1)(logits, retain_logits, target)
    torch.testing.assert_close(mapped, function(logits, retain_logits, target))

    def loss(o: Tensor, a: Tensor, t: Tensor) -> Tensor:
        return function(o, a, t).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss, (0, 1)))(logits, retain_logits, target)
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    torch.testing.assert_close(per_sample, torch.autograd.grad(loss(*inputs, target), inputs))


@pytest.mark.parametrize("index", range(5))
def test_compiles_in_one_graph(index: int) -> None:
    logits, retain_logits, target = draw(9, (4, 5), 3.0, 2.0, torch.float32)
    function, _ = all_functions(target)[index]

    def loss(o: Tensor, a: Tensor) -> Tensor:
        return function(2 * o, a).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    torch.testing.assert_close(compiled(*inputs), loss(*inputs))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs)
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), loss(*inputs))


# --- shapes, dtypes, cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("batch", [(0,), (0, 3), (), (2, 0)])
def test_batch_shapes(index: int, batch: tuple[int, ...]) -> None:
    logits, retain_logits, target = draw(10, (*batch, 4), 3.0, 2.0, torch.float32)
    function, naive = all_functions(target)[index]
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    value = function(*inputs)
    assert value.shape == naive(*inputs).shape
    for gradient, tensor in zip(torch.autograd.grad(value.sum(), inputs), inputs, strict=True):
        assert gradient.shape == tensor.shape


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(index: int, dtype: torch.dtype) -> None:
    logits, retain_logits, target = draw(11, (3, 6), 5.0, 3.0, dtype)
    function, _ = all_functions(target)[index]
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    value = function(*inputs)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, function(logits.float(), retain_logits.float()), rtol=0, atol=0)
    assert [g.dtype for g in torch.autograd.grad(value.sum(), inputs)] == [dtype, dtype]


def test_mixed_dtypes_are_promoted() -> None:
    logits, retain_logits, _ = draw(11, (3, 6), 5.0, 3.0, torch.float32)
    assert exact.predictive(logits.double(), retain_logits).dtype == torch.float64
    assert exact.predictive(logits.half(), retain_logits.bfloat16()).dtype == torch.float32


def test_autocast_and_inference_mode_change_nothing() -> None:
    logits, retain_logits, target = draw(12, (3, 6), 5.0, 3.0, torch.float32)
    for function, _ in all_functions(target):
        expected = function(logits, retain_logits)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(function(logits, retain_logits), expected, rtol=0, atol=0)
        with torch.inference_mode():
            torch.testing.assert_close(function(logits, retain_logits), expected, rtol=0, atol=0)
        torch.testing.assert_close(function(logits, retain_logits), expected, rtol=0, atol=0)


def test_work_memory_survives_inference_mode() -> None:
    """Tensors made in inference mode may not be written to outside; every thread makes its own when it starts."""
    logits, retain_logits, _ = draw(12, (3, 6), 5.0, 3.0, torch.float32)

    def first_inside_then_outside() -> Tensor:
        with torch.inference_mode():
            exact.predictive(logits, retain_logits)
        return exact.predictive(logits, retain_logits)

    with ThreadPoolExecutor(1) as fresh_thread:
        value = fresh_thread.submit(first_inside_then_outside).result()
    torch.testing.assert_close(value, exact.predictive(logits, retain_logits), rtol=0, atol=0)


@pytest.mark.parametrize("index", range(5))
def test_rows_in_any_order_and_any_strides(index: int) -> None:
    """Rows are worked on in chunks that share their last node: that must not show."""
    logits, retain_logits, target = draw(13, (400, 90), 30.0, 4.0, torch.float64)
    target = target.clone()
    function, _ = all_functions(target)[index]
    value = function(logits, retain_logits)
    rows = [0, 131, 399]
    alone, _ = all_functions(target[rows])[index]
    torch.testing.assert_close(alone(logits[rows], retain_logits[rows]), value[rows], rtol=1e-11, atol=1e-12)
    strided = logits.t().contiguous().t()
    torch.testing.assert_close(function(strided, retain_logits), value, rtol=0, atol=0)


@pytest.mark.parametrize("step", [0.1, 0.25, 0.7])
def test_step(step: float) -> None:
    logits, retain_logits, target = draw(14, (20, 6), 10.0, 5.0, torch.float64)
    error = (exact.predictive(logits, retain_logits, step=step) - naive_predictive(logits, retain_logits)).abs().max()
    assert float(error) < max(1e-13, 30 * float(torch.exp(torch.tensor(-(torch.pi**2) / step))))
    assert step < 0.5 or float(error) > 1e-9  # a coarse step is wired, too
    nll = exact.expected_nll(logits, retain_logits, target, step=step)
    torch.testing.assert_close(nll, naive_expected_nll(logits, retain_logits, target), rtol=1e-4, atol=1e-4)


def test_quadrature_weights_are_positive_and_exact() -> None:
    for dtype, tolerance in ((torch.float32, 1e-7), (torch.float64, 1e-12)):
        rule = rule_for(dtype)
        right = [(rule.start + rule.step * j, rule.step) for j in range(100)]
        position, weight = torch.tensor([*rule.left, *right], dtype=torch.float64).T
        assert bool((weight > 0).all())
        x = torch.logspace(-8, 0, 200, dtype=torch.float64)  # 1 = int x exp(-s x) ds for every x up to 1
        integral = (weight * position.exp() * x[:, None] * torch.exp(-position.exp() * x[:, None])).sum(-1)
        torch.testing.assert_close(integral, torch.ones_like(x), rtol=0, atol=tolerance)


def test_wide_spreads_do_not_need_many_nodes() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, -1e30, -torch.inf]])
    walk = Walk(logits, torch.zeros(1, 5), None)
    assert len(walk.nodes(slice(0, 1))[0]) < 5 * 48 / 0.5
    torch.testing.assert_close(exact.predictive(logits, torch.zeros(1, 5)).sum(), torch.tensor(1.0))


def test_ten_thousand_classes_need_little_memory() -> None:
    """(128, 10000) floats are 5 MB: a matrix for each of some forty nodes would be more than 200 MB."""
    script = """
import resource, torch
from dropmax import exact
torch.set_num_threads(1)
logits = torch.randn(128, 10_000, requires_grad=True)
retain_logits = torch.randn(128, 10_000, requires_grad=True)
target = torch.randint(10_000, (128,))
exact.predictive(logits[:1], retain_logits[:1]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
exact.expected_nll(logits, retain_logits, target).sum().backward()
(exact.predictive(logits, retain_logits) ** 2).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 120  # MB


# --- error messages --------------------------------------------------------------------------------------------------

GOOD, LABELS = torch.zeros(2, 3), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: exact.predictive(GOOD, torch.zeros(2, 4)), InvalidValue, r"shape \(2, 3\).*retain_logits.*\(2, 4\)"),
        (lambda: exact.expected_nll(GOOD, GOOD[0], LABELS), InvalidValue, r"\(2, 3\).*posterior_logits.*\(3,\)"),
        (lambda: exact.variance(GOOD.long(), GOOD), InvalidType, r"logits must be floating point, got torch\.int64"),
        (lambda: exact.variance(GOOD, GOOD.bool()), InvalidType, r"retain_logits must be floating point"),
        (lambda: exact.predictive([0.0, 1.0], GOOD), InvalidType, r"logits must be a torch\.Tensor, got list"),
        (lambda: exact.predictive(GOOD[:, :1], GOOD[:, :1]), InvalidValue, r"\(2, 1\).*at least two classes"),
        (lambda: exact.predictive(GOOD[0, 0], GOOD[0, 0]), InvalidValue, r"at least two classes"),
        (lambda: exact.log_marginal(GOOD, GOOD, torch.tensor([0, 3])), InvalidValue, r"label 3.*0\.\.2"),
        (lambda: exact.posterior(GOOD, GOOD, torch.tensor([-1, 0])), InvalidValue, r"label -1.*0\.\.2"),
        (lambda: exact.posterior(GOOD, GOOD, torch.zeros(2)), InvalidType, r"integer class indices.*float32"),
        (lambda: exact.expected_nll(GOOD, GOOD, torch.tensor([0])), InvalidValue, r"target has shape \(1,\).*\(2,\)"),
        (lambda: exact.predictive(GOOD, GOOD, step=0.0), InvalidValue, r"step.*above 0, got 0\.0"),
        (lambda: exact.expected_nll(GOOD, GOOD, LABELS, step=-0.5), InvalidValue, r"step.*above 0, got -0\.5"),
        (lambda: exact.predictive(GOOD, GOOD, step=3.0), InvalidValue, r"step must lie between 0\.01 and 1, got 3\.0"),
        (lambda: exact.predictive(GOOD, GOOD, step="fine"), InvalidType, r"step must be a number, got 'fine'"),
    ],
)
def test_error_messages(call: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
