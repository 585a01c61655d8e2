"""Naive twins: DropMax by summing over every one of the 2^K masks, in float64, straight from the paper's formulas."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def all_masks(num_classes: int) -> Tensor:
    """(2^K, K) zeros and ones."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=num_classes)), dtype=torch.float64)


def mask_probabilities(masks: Tensor, rho: Tensor) -> Tensor:
    """p(z) of independent Bernoulli(rho), one for each mask."""
    return torch.where(masks > 0, rho, 1 - rho).prod(-1)


def likelihoods(o: Tensor, masks: Tensor, epsilon: float = 1e-20) -> Tensor:
    """(2^K, K): p(y = k | z) for each mask."""
    weights = (masks + epsilon) * (o - o.max()).exp()
    return weights / weights.sum(-1, keepdim=True)


def kl(q: Tensor, p: Tensor) -> float:
    """KL divergence between two distributions over masks."""
    return sum(float(a * (a / b).log()) for a, b in zip(q, p, strict=True) if a > 0)


def entropy(p: Tensor) -> float:
    """Entropy of a distribution over masks."""
    return -sum(float(a * a.log()) for a in p if a > 0)


def auxiliary(r: Tensor, t: int) -> float:
    """Binary cross entropy of sigmoid(r) against the one-hot label, term by term."""
    total = 0.0
    for k, x in enumerate(r.tolist()):
        sigmoid = 1 / (1 + math.exp(-x))
        total -= math.log(sigmoid) if k == t else math.log(1 - sigmoid)
    return total
