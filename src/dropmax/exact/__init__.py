"""Exact inference: sums over all 2^K class masks as one-dimensional integrals.

A mask z keeps each class k with probability rho_k = sigmoid(retain_logits_k), independently, and
p(y=k | x, z) is the softmax over the classes that were kept (over all of them if none was). The paper samples z; but
with X = sum_k z_k exp(o_k) and 1/X = int_0^inf exp(-s X) ds, the expectation over z moves inside the integral and
becomes a product over classes. What is left is one smooth integral, which a few dozen nodes evaluate to rounding
error, in O(batch x classes x nodes) time and O(batch x classes) memory. See docs/exact.md.

All functions take logits of shape (..., K) and targets of shape (...). They are differentiable (once) in both tensors
of logits, and work under ``torch.compile``, ``torch.vmap`` and ``torch.func.grad``; ``torch.export`` takes predictive
and variance. The exceptions are ``expected_entropy`` and ``mutual_information``: they have no gradient and do not work
inside a transform. Half precision is computed and returned in float32. Quadrature nodes are 1/2 apart in log s in
float32 (errors about 1e-7), and 5/16 in float64 (about 1e-12).

Logits of -inf rule a class out as far as the arithmetic goes (it counts as 2^20 below the best one, like any class
still further below), and retain logits of inf and -inf keep and drop a class for certain. NaN, and a class logit of
inf, are refused where looking is free; inside a transform or on an accelerator they make their row NaN, and no other. A
``log_marginal`` below -1e5 says no more than that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropmax.checks import check_finite, check_target, is_exporting
from dropmax.errors import InvalidType, InvalidValue
from dropmax.exact import kernels, portable
from dropmax.exact.autograd import Moments, Posterior, ScalarOfTarget

__all__ = [
    "expected_entropy",
    "expected_nll",
    "log_marginal",
    "mutual_information",
    "posterior",
    "predictive",
    "variance",
]


def predictive(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return p(y=k | x) = E_z[p(y=k | x, z)] for every class, shape (..., K).

    Equals, for all 2^K masks z as rows of a boolean tensor and ``kept`` the same with the empty mask replaced by the
    full one::

        p_z = torch.where(z, sigmoid(retain_logits), sigmoid(-retain_logits)).prod(-1)
        p_z @ softmax(logits.masked_fill(~kept, -inf), -1)

    >>> logits = torch.tensor([2.0, 1.0, 0.0])
    >>> predictive(logits, torch.zeros(3))  # every class is kept with probability 1/2
    tensor([0.4928, 0.3112, 0.1960])
    >>> predictive(logits, torch.full((3,), 30.0))  # every class is kept: softmax
    tensor([0.6652, 0.2447, 0.0900])
    """
    logits, retain_logits = _same_shape_and_dtype(logits, retain_logits, "retain_logits")
    if is_exporting():
        return portable.moments(logits, retain_logits, 1)[0].to(logits.dtype)
    (mean,) = Moments.apply(logits, retain_logits, 1)
    return mean


def variance(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return the variance over masks of p(y=k | x, z) for every class, shape (..., K).

    Equals, with ``p_z`` and ``p = softmax(...)`` as in :func:`predictive`::

        p_z @ (p - p_z @ p) ** 2

    It is a small difference of two moments, so it is computed in float64 where the device has it.

    >>> logits = torch.tensor([2.0, 1.0, 0.0])
    >>> variance(logits, torch.zeros(3)).sqrt()
    tensor([0.3957, 0.3449, 0.3153])
    >>> variance(logits, torch.full((3,), 30.0)).sqrt()  # every class is kept: nothing varies
    tensor([0., 0., 0.])
    """
    logits, retain_logits = _same_shape_and_dtype(logits, retain_logits, "retain_logits")
    if is_exporting():
        mean, second = portable.moments(logits, retain_logits, 2)
    else:
        mean, second = Moments.apply(_widen(logits), _widen(retain_logits), 2)
    return (second - mean.square()).clamp_min(0).to(logits.dtype)


def log_marginal(logits: Tensor, retain_logits: Tensor, target: Tensor) -> Tensor:
    """Return log p(y=target | x), shape (...): the log of :func:`predictive`, exact where that underflows.

    >>> logits, retain_logits = torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3)
    >>> log_marginal(logits, retain_logits, torch.tensor(2)).exp()
    tensor(0.1960)
    >>> log_marginal(1000 * logits, retain_logits + 100, torch.tensor(2))  # both better classes must be dropped
    tensor(-200.)
    """
    return _scalar_of_target(logits, retain_logits, "retain_logits", target, True)


def expected_nll(logits: Tensor, posterior_logits: Tensor, target: Tensor) -> Tensor:
    """Return E_{z ~ q}[-log p(y=target | x, z)], shape (...), for q that always keeps the target.

    The other classes are kept with probability sigmoid(posterior_logits), independently: the expected likelihood term
    of the variational bound, without sampling and without relaxing the masks. The target's posterior logit is ignored.

    >>> logits = torch.tensor([2.0, 1.0, 0.0])
    >>> expected_nll(logits, torch.zeros(3), torch.tensor(0))
    tensor(0.2119)
    >>> expected_nll(logits, torch.full((3,), 30.0), torch.tensor(0))  # every rival is kept: cross entropy
    tensor(0.4076)
    """
    return _scalar_of_target(logits, posterior_logits, "posterior_logits", target, False)


def posterior(logits: Tensor, retain_logits: Tensor, target: Tensor) -> Tensor:
    """Return the true posterior marginals p(z_k=1 | x, y=target), shape (..., K).

    This is what q(z | x, y) approximates. The target's own marginal is 1 minus the posterior probability that every
    class was dropped. Computed in float64 where the device has it, since it compares small probabilities.

    >>> posterior(torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3), torch.tensor(2))
    tensor([0.1334, 0.2289, 0.9426])
    """
    logits, retain_logits = _same_shape_and_dtype(logits, retain_logits, "retain_logits")
    target = check_target(target, logits.shape[:-1], logits.shape[-1])
    _, marginals = Posterior.apply(_widen(logits), _widen(retain_logits), target)
    return marginals.to(logits.dtype)


def expected_entropy(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return E_z H[p(y | x, z)], shape (...), in nats: how unsure the answer is once the classes to keep are known.

    Equals, with ``p_z`` and ``p = softmax(...)`` as in :func:`predictive`::

        p_z @ -(p * p.log()).sum(-1)

    Computed in float64 where the device has it. There is no gradient.

    >>> logits = torch.tensor([2.0, 1.0, 0.0])
    >>> expected_entropy(logits, torch.zeros(3))
    tensor(0.3993)
    >>> expected_entropy(logits, torch.full((3,), 30.0))  # every class is kept: the entropy of softmax
    tensor(0.8324)
    """
    entropy, _ = _expected_entropy(logits, retain_logits)
    return entropy


def mutual_information(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return I(y; z | x) = H[p(y | x)] - E_z H[p(y | x, z)], shape (...): how much the answer depends on the masks.

    Computed in float64 where the device has it. There is no gradient.

    >>> logits = torch.tensor([2.0, 1.0, 0.0])
    >>> mutual_information(logits, torch.zeros(3))
    tensor(0.6321)
    >>> mutual_information(logits, torch.full((3,), 30.0))  # every class is kept: there is one mask
    tensor(0.)
    """
    expected, total = _expected_entropy(logits, retain_logits)
    return (total - expected).clamp_min(0)


@torch.no_grad()
def _expected_entropy(logits: Tensor, retain_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return E_z H[p(y | x, z)] and H[p(y | x)], each (...)."""
    logits, retain_logits = _same_shape_and_dtype(logits, retain_logits, "retain_logits")
    shape = logits.shape
    rows, retain_rows = (_widen(x).reshape(-1, shape[-1]) for x in (logits, retain_logits))
    expected, mean = kernels.expected_entropy(rows, retain_rows)
    total = torch.special.entr(mean).sum(-1)
    return expected.reshape(shape[:-1]).to(logits.dtype), total.reshape(shape[:-1]).to(logits.dtype)


def _scalar_of_target(logits: Tensor, mask_logits: Tensor, name: str, target: Tensor, marginal: bool) -> Tensor:
    logits, mask_logits = _same_shape_and_dtype(logits, mask_logits, name)
    target = check_target(target, logits.shape[:-1], logits.shape[-1])
    # The gradients come almost for free while walking forward, so they are computed there, if anyone will ask.
    with_gradients = torch.is_grad_enabled() and (logits.requires_grad or mask_logits.requires_grad)
    value, *_ = ScalarOfTarget.apply(logits, mask_logits, target, marginal, with_gradients)
    return value


def _same_shape_and_dtype(logits: Tensor, mask_logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Check the arguments that all functions share, and return both logits in the dtype to compute in."""
    for argument, value in (("logits", logits), (name, mask_logits)):
        if not isinstance(value, Tensor):
            raise InvalidType(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise InvalidType(f"{argument} must be floating point, got {value.dtype}: call .float() on them first")
    if logits.shape != mask_logits.shape:
        raise InvalidValue(
            f"logits have shape {tuple(logits.shape)}, but {name} have shape {tuple(mask_logits.shape)}: "
            f"expected one of each for every class"
        )
    if logits.dim() == 0 or logits.shape[-1] < 2:
        raise InvalidValue(
            f"logits have shape {tuple(logits.shape)}, but the last dimension must hold at least two classes"
        )
    advice = "look at what computed them"
    check_finite("logits", logits, advice, also=(-math.inf,))
    check_finite(name, mask_logits, advice, also=(-math.inf, math.inf))
    dtype = torch.promote_types(logits.dtype, mask_logits.dtype)
    if dtype != torch.float64:
        dtype = torch.float32
    return logits.to(dtype), mask_logits.to(dtype)


def _widen(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, if its device can."""
    return tensor if tensor.device.type == "mps" else tensor.double()
