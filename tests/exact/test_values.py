"""The integrals of dropmax.exact against sums over all 2^K masks, and against what must hold for any K."""

from __future__ import annotations

import itertools
from functools import partial

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from dropmax import exact
from dropmax.exact import quadrature
from tests.exact.naive import (
    TOLERANCE,
    all_functions,
    assert_right,
    draw,
    dtypes,
    naive_expected_nll,
)


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
def test_probabilities_sum_to_one(
    dtype: torch.dtype, classes: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, _, _ = draw(2, (3, classes), spread, 0, dtype)
    retain_logits = torch.tensor([[-4.0], [0.0], [4.0]], dtype=dtype).expand_as(logits)
    p = exact.predictive(logits, retain_logits)
    assert float((p.double().sum(-1) - 1).abs().max()) < 1e-6
    monkeypatch.setattr(quadrature, "rule_for", partial(quadrature.rule_for, step=0.2))  # more nodes than it needs
    truth = exact.predictive(logits.double(), retain_logits.double())
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
