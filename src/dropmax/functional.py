"""The equations of DropMax as pure functions, in log space.

Notation, from the paper: class logits ``o``, retain logits ``a`` (retain probability ``rho = sigmoid(a)``), posterior
correction ``r``, posterior logits ``b`` (posterior retain probability ``g = sigmoid(b)``), target class ``t``, mask
``z``. The last dimension runs over the K classes, the others are batch dimensions; nothing here reduces over a batch.

Logarithms are taken by ``logsigmoid`` and ``logsumexp``, never of a rounded ``rho`` or of ``rho + 1e-20``: every
quantity stays finite and precise where the textbook forms overflow, underflow or lose all their digits. float16 and
bfloat16 are computed in float32: sums over many classes do not fit into half precision.

Nothing is checked here. Finite logits give finite results, as long as a sum over the classes fits into the dtype; a row
with NaN gives NaN, and no other row sees it. The heads refuse such rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "auxiliary",
    "cross_entropy",
    "log_hard_mask",
    "log_relaxed_mask",
    "logistic",
    "mask_entropy",
    "mask_kl",
    "masked_logits",
    "masked_nll",
    "mean_logits",
    "sparsemax",
    "sparsemax_loss",
]


def logistic(uniform: Tensor) -> Tensor:
    """Turn uniform noise u into logistic noise ``log u - log(1 - u)``.

    ``torch.rand`` does return 0, so u is first moved into ``[eps/2, 1 - eps/2]``; no other value it returns changes.

    >>> logistic(torch.tensor([0.0, 0.5, 1.0]))
    tensor([-16.6355,   0.0000,  16.6355])
    """
    edge = torch.finfo(uniform.dtype).eps / 2
    return torch.logit(uniform.clamp(edge, 1 - edge))


def log_relaxed_mask(mask_logits: Tensor, uniform: Tensor, temperature: float = 0.1) -> Tensor:
    """Sample ``log z`` of the relaxed Bernoulli (concrete) mask of the paper's equation 6.

    ``z = sigmoid((logit + log u - log(1 - u)) / temperature)``; as the temperature goes to 0, z becomes a
    Bernoulli(sigmoid(logit)) draw.

    >>> log_relaxed_mask(torch.tensor([2.0, -2.0]), torch.tensor([0.5, 0.5])).exp()
    tensor([1.0000e+00, 2.0612e-09])
    """
    return F.logsigmoid((mask_logits + logistic(uniform)) / temperature)


def log_hard_mask(mask_logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample ``log z`` of the Bernoulli mask itself: 0 where ``u < sigmoid(logit)``, else minus infinity.

    It is what the relaxed mask becomes as the temperature goes to 0. There is no gradient.

    >>> log_hard_mask(torch.tensor([2.0, -2.0]), torch.tensor([0.5, 0.5]))
    tensor([0., -inf])
    """
    return (uniform < mask_logits.detach().sigmoid()).to(mask_logits.dtype).log()


def masked_logits(logits: Tensor, log_mask: Tensor, epsilon: float = 1e-20) -> Tensor:
    """Return ``o + log(z + epsilon)``, whose softmax is ``p(y | x, z)`` (equation 5).

    >>> o = torch.tensor([1.0, 2.0, 3.0])
    >>> z = torch.tensor([1.0, 0.0, 1.0])
    >>> masked_logits(o, z.log())
    tensor([  1.0000, -44.0517,   3.0000])
    """
    return logits + torch.logaddexp(log_mask, log_mask.new_tensor(math.log(epsilon)))


def masked_nll(
    logits: Tensor,
    log_mask: Tensor,
    target: Tensor,
    *,
    epsilon: float = 1e-20,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Return ``-log p(y = t | x, z)`` of each row, with the target's mask fixed at 1.

    ``log_mask`` of shape ``(S, ..., K)``, with one dimension more than the logits, holds S masks and gives their mean.
    Label smoothing is spread over the retained classes.

    >>> masked_nll(torch.zeros(4), torch.tensor([0.0, 0.0, -99.0, -99.0]), torch.tensor(0)).exp()
    tensor(2.)
    """
    averaged = log_mask.dim() > logits.dim()
    target = target.expand(log_mask.shape[:-1])
    log_mask = log_mask.scatter(-1, target.unsqueeze(-1), 0.0)
    nll = cross_entropy(
        masked_logits(_from_highest(logits), log_mask, epsilon),  # large logits would swallow the mask
        target,
        label_smoothing=label_smoothing,
        smoothing_mask=log_mask.exp() if label_smoothing else None,
        class_weight=class_weight,
    )
    return nll.mean(0) if averaged else nll


def mean_logits(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return ``o + log rho``, whose softmax is the mean prediction ``p(y | x, z = rho(x))`` (equation 15).

    >>> mean_logits(torch.tensor([1.0, 1.0]), torch.tensor([100.0, 0.0])).softmax(-1)
    tensor([0.6667, 0.3333])
    """
    wide = _wide(logits) + F.logsigmoid(_wide(retain_logits))
    if wide.dtype == logits.dtype:
        return wide
    limits = torch.finfo(logits.dtype)  # a row that became -inf throughout would have NaN for a softmax
    return wide.clamp(limits.min, limits.max).to(logits.dtype)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    smoothing_mask: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Return ``-log softmax(logits)[t]`` for each row, with label smoothing and class weights as in torch.

    With label smoothing s the target distribution is ``(1 - s)`` on the target and s spread over the classes: evenly,
    or, given ``smoothing_mask`` (the mask z of the row), over the retained classes only, in proportion to z. Targets
    carry no gradient, so neither does that spread. With class weights w the row is
    ``(1 - s) w_t nll_t + s sum_k spread_k w_k nll_k``, which for an even spread is what
    ``torch.nn.CrossEntropyLoss(reduction="none")`` gives. Soft labels, ``(N, K)`` probabilities in place of ``(N,)``
    indices, give the expectation over the label.

    >>> cross_entropy(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), torch.tensor([2]))
    tensor([1.3863])
    """
    logits = _from_highest(_wide(logits))
    normaliser = logits.logsumexp(-1)
    if class_weight is not None:
        class_weight = class_weight.to(logits.dtype)
    if target.is_floating_point():
        soft = target.to(logits.dtype) if class_weight is None else target.to(logits.dtype) * class_weight
        nll = normaliser * soft.sum(-1) - (soft * logits).sum(-1)
    else:
        nll = normaliser - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        nll = nll if class_weight is None else nll * class_weight[target]
    if label_smoothing == 0.0:
        return nll
    if smoothing_mask is None:
        spread = torch.full_like(logits, 1 / logits.shape[-1])
    else:
        spread = smoothing_mask.detach() / smoothing_mask.detach().sum(-1, keepdim=True)
    if class_weight is not None:
        spread = spread * class_weight
    smooth = normaliser * spread.sum(-1) - (spread * logits).sum(-1)
    return (1 - label_smoothing) * nll + label_smoothing * smooth


def mask_kl(posterior_logits: Tensor, retain_logits: Tensor, target: Tensor) -> Tensor:
    """Return ``KL[q(z | x, y) || p(z | x)]``, summed over the classes (the first line after equation 13).

    For a rival k: ``g (log g - log rho) + (1 - g) (log(1 - g) - log(1 - rho))``; for the target, whose mask q fixes
    at 1: ``-log rho``.

    >>> a = torch.zeros(1, 3)
    >>> mask_kl(a, a, torch.tensor([0]))  # only the target pays: log 2
    tensor([0.6931])
    """
    b, a = _wide(posterior_logits), _wide(retain_logits)
    g = torch.sigmoid(b)
    kl = g * (F.logsigmoid(b) - F.logsigmoid(a)) + (1 - g) * (F.logsigmoid(-b) - F.logsigmoid(-a))
    index = target.unsqueeze(-1)
    return kl.scatter(-1, index, -F.logsigmoid(a.gather(-1, index))).sum(-1)


def mask_entropy(retain_logits: Tensor) -> Tensor:
    """Return the entropy of ``p(z | x)``, summed over the classes; the objective *maximises* it.

    ``H = -sum_k [rho log rho + (1 - rho) log(1 - rho)]``. Equation 13 of the paper prints it without the minus sign;
    the objective subtracts this H, as the authors' code always did.

    >>> mask_entropy(torch.zeros(2)) / torch.tensor(2.0).log()  # two fair coins: two bits
    tensor(2.)
    """
    a = _wide(retain_logits)
    rho = torch.sigmoid(a)
    return -(rho * F.logsigmoid(a) + (1 - rho) * F.logsigmoid(-a)).sum(-1)


def auxiliary(correction: Tensor, target: Tensor, *, prior_correction: bool = False) -> Tensor:
    """Return the auxiliary loss (equation 11): binary cross entropy of ``sigmoid(r)`` against the one-hot label.

    With K classes a logit that knows nothing settles at the base rate, ``logit(1/K) = -log(K - 1)``, not at 0.
    ``prior_correction`` takes that out: the loss is then of ``r - log(K - 1)``, so that r = 0 means "no evidence".

    >>> auxiliary(torch.zeros(1, 4), torch.tensor([1])) / torch.tensor(2.0).log()
    tensor([4.])
    """
    r = _wide(correction)
    if prior_correction:
        r = r - math.log(r.shape[-1] - 1)
    index = target.unsqueeze(-1)
    # log(1 + exp(-r)) of the target: as log(1 + exp(r)) - r it would lose its digits where r is large.
    return F.softplus(r.scatter(-1, index, -r.gather(-1, index))).sum(-1)


def sparsemax(logits: Tensor) -> Tensor:
    """Return the Euclidean projection of the logits onto the probability simplex, with exact zeros.

    ``sparsemax(o) = argmin_p ||p - o||^2`` over the simplex ``= max(o - tau, 0)``, where tau makes it sum to one
    (Martins & Astudillo, 2016). Its Jacobian on the support S is ``I - 1 1^T / |S|``.

    >>> sparsemax(torch.tensor([1.0, 0.9, -1.0]))
    tensor([0.5500, 0.4500, 0.0000])
    """
    probabilities: Tensor = _Sparsemax.apply(_wide(logits))  # type: ignore[no-untyped-call]
    return probabilities


def sparsemax_loss(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the sparsemax loss of each row: the convex loss whose gradient is ``sparsemax(o) - y``.

    ``L = <p - y, o> + (||y||^2 - ||p||^2) / 2`` with ``p = sparsemax(o)`` and y the label distribution; it is 0 where
    the target leads every rival by 1. The logarithm of a sparse probability would be infinite.

    >>> sparsemax_loss(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 0]))
    tensor([0.0000, 0.3333])
    """
    o = _from_highest(_wide(logits))
    p = sparsemax(o)
    num_classes = o.shape[-1]
    even = label_smoothing / num_classes
    on_target = 1 - label_smoothing
    y_dot_o = on_target * o.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        y_dot_o = y_dot_o + (even * o).sum(-1)
    y_squared = (on_target + even) ** 2 + (num_classes - 1) * even**2
    return (p * o).sum(-1) - y_dot_o + (y_squared - p.square().sum(-1)) / 2


class _Sparsemax(torch.autograd.Function):
    """Sort-based projection; the backward pass needs the output only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        ordered = shifted.sort(-1, descending=True).values
        excess = ordered.cumsum(-1) - 1
        rank = torch.arange(1, logits.shape[-1] + 1, device=logits.device, dtype=logits.dtype)
        support_size = (rank * ordered > excess).sum(-1, keepdim=True).clamp(min=1)
        tau = excess.gather(-1, support_size - 1) / support_size
        return (shifted - tau).clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (probabilities,) = ctx.saved_tensors
        support = (probabilities > 0).to(gradient.dtype)
        mean = (gradient * support).sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        projected: Tensor = support * (gradient - mean)
        return projected


def _from_highest(logits: Tensor) -> Tensor:
    """Subtract each row's highest logit: no probability changes, and their digits survive large logits."""
    return logits - logits.amax(-1, keepdim=True).detach()


def _wide(x: Tensor) -> Tensor:
    """Compute in float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
