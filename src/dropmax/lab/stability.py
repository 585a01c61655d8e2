"""Appendix B, measured: the regulariser M that masks add to the cross entropy, its Jensen bound, and the gradients.

The appendix writes the expected loss as the cross entropy of softmax plus M (equation 21), bounds the part of M that
depends on the class logits (equation 22), and argues from the bound's gradient by the target's weights (equations 23
to 25). Here every expectation over the masks is exact, under p(z | x), of which the appendix speaks, and under q, which
training draws from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropmax import exact

__all__ = ["gradient_stability", "is_target_of", "on_rivals", "posterior_logits", "regulariser"]


def regulariser(logits: Tensor, retain_logits: Tensor, epsilon: float = 1e-20) -> tuple[Tensor, Tensor]:
    """Return the part of M that depends on the class logits, and its Jensen bound (equation 22), each of shape (N,).

    M is ``E log[sum_k (z_k + eps) e^o_k / ((z_t + eps) sum_k e^o_k)]``. The target's own mask enters it as
    ``-E log(z_t + eps)``, which no class logit changes; the appendix leaves it out, and so does this function. Equals,
    with all masks ``z`` of K classes and their probabilities ``p_z``::

        X = (z + epsilon) @ logits.exp()
        p_z @ X.log() - logits.logsumexp(-1), ((rho + epsilon) @ logits.exp()).log() - logits.logsumexp(-1)

    >>> m, bound = regulariser(torch.zeros(1, 3), torch.zeros(1, 3))
    >>> bool(m < bound), round(float(bound), 4)  # half of the classes remain on average
    (True, -0.6931)
    """
    whole = logits.logsumexp(-1, keepdim=True)
    # eps sum_k e^o_k is one more class, which is always kept: the target of an expected NLL.
    floor = whole + math.log(epsilon)
    extended = torch.cat([logits, floor], -1)
    masks = torch.cat([retain_logits, torch.zeros_like(floor)], -1)
    last = torch.full(logits.shape[:-1], logits.shape[-1], device=logits.device)
    expected = exact.expected_nll(extended, masks, last) + floor.squeeze(-1)
    mean = torch.logaddexp(logits + torch.nn.functional.logsigmoid(retain_logits), logits + math.log(epsilon))
    return expected - whole.squeeze(-1), mean.logsumexp(-1) - whole.squeeze(-1)


def gradient_stability(
    logits: Tensor, retain_logits: Tensor, posterior: Tensor, target: Tensor
) -> dict[str, dict[str, float]]:
    """Measure Appendix B on N examples, under the masks of training (``"q"``) and of the appendix (``"p"``).

    The gradient of the expected loss by a class logit is ``E p(k | z) - [k = t]``, where softmax has ``p_k - [k = t]``;
    by the weights of a class it is that times h.

    Args:
        logits: class logits o, (N, K).
        retain_logits: a, (N, K).
        posterior: q(z_k = 1 | x, y), (N, K).
        target: labels, (N,).

    Returns:
        For each of "q" and "p": the means of ``m``, M without the target's own mask, and of its ``bound``;
        ``target_ratio`` and ``rivals_ratio``, the mean size of the gradients by the target's logit and the root mean
        square of those by the rivals' logits, as multiples of softmax's; ``target_smaller`` and ``rivals_smaller``,
        the shares of gradients that are no larger than softmax's; and ``bounded_target`` and ``bounded_rivals``, the
        shares for which the gradient of M is at most that of its bound, as equation 23 says.

    >>> o, a = torch.tensor([[5.0, 0.0, 0.0]]), torch.tensor([[1.0, -1.0, -1.0]])
    >>> found = gradient_stability(o, a, a.sigmoid(), torch.tensor([0]))
    >>> found["q"]["target_smaller"], found["p"]["target_smaller"]
    (1.0, 0.0)
    """
    o, a = logits.double(), retain_logits.double()
    is_target = is_target_of(o, target)
    return {
        name: _under(o, masks, is_target) for name, masks in (("q", posterior_logits(posterior, is_target)), ("p", a))
    }


def is_target_of(logits: Tensor, target: Tensor) -> Tensor:
    """Return a mask of the shape of the logits that is true at each row's label."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, target[:, None], True)


def posterior_logits(posterior: Tensor, is_target: Tensor) -> Tensor:
    """Return q as logits in float64, finite, with the target always kept."""
    return torch.logit(posterior.double()).clamp(-60, 60).masked_fill(is_target, 60.0)


def on_rivals(probs: Tensor, is_target: Tensor) -> Tensor:
    """Return 1 - p_t, the size of the gradient by the target's logit, without the rounding where p_t is close to 1."""
    return probs.masked_fill(is_target, 0.0).sum(-1)


def _under(o: Tensor, masks: Tensor, is_target: Tensor) -> dict[str, float]:
    m, bound = regulariser(o, masks)
    p, expected = o.softmax(-1), exact.predictive(o, masks)
    of_bound = (o + torch.nn.functional.logsigmoid(masks)).softmax(-1)
    rivals = ~is_target
    softmax, dropmax = on_rivals(p, is_target), on_rivals(expected, is_target)
    tolerance = 1e-7  # ten times the error of exact inference in float64
    return {
        "m": m.mean().item(),
        "bound": bound.mean().item(),
        "target_ratio": (dropmax.mean() / softmax.mean()).item(),
        "target_smaller": _share(dropmax <= softmax + tolerance),
        "bounded_target": _share((expected <= of_bound + tolerance)[is_target]),
        "rivals_ratio": (expected[rivals].square().mean() / p[rivals].square().mean()).sqrt().item(),
        "rivals_smaller": _share((expected <= p + tolerance)[rivals]),
        "bounded_rivals": _share((expected <= of_bound + tolerance)[rivals]),
    }


def _share(holds: Tensor) -> float:
    return holds.double().mean().item()
