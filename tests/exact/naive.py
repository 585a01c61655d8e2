"""The naive twins of dropmax.exact: sums over every one of the 2^K masks, in log space and float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from dropmax import exact

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


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


def naive_expected_entropy(logits: Tensor, retain_logits: Tensor) -> Tensor:
    _, log_prior, log_p = enumerate_masks(logits, retain_logits)
    return (log_prior.exp() * torch.special.entr(log_p.exp()).sum(-1)).sum(-1)


def naive_mutual_information(logits: Tensor, retain_logits: Tensor) -> Tensor:
    total = torch.special.entr(naive_predictive(logits, retain_logits)).sum(-1)
    return total - naive_expected_entropy(logits, retain_logits)


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
ENTROPIES = [
    (exact.expected_entropy, naive_expected_entropy),
    (exact.mutual_information, naive_mutual_information),
]
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
    for function, naive in [*all_functions(target), *ENTROPIES]:
        actual, expected = function(logits, retain_logits), naive(logits, retain_logits)
        assert actual.dtype == logits.dtype
        assert actual.shape == expected.shape
        error = (actual.double() - expected).abs()
        if (function, naive) in ENTROPIES:
            assert bool((actual >= 0).all())
        else:
            error = error / expected.abs().clamp_min(1)
        assert float(error.max()) <= TOLERANCE[logits.dtype]
    assert bool((exact.variance(logits, retain_logits) >= 0).all())
    assert bool((exact.expected_nll(logits, retain_logits, target) >= 0).all())


def draw(seed: int, shape: tuple[int, ...], spread: float, retain: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    retain_logits = retain * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    return logits.to(dtype), retain_logits.to(dtype), torch.randint(shape[-1], shape[:-1], generator=generator)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
