"""The terms of the DropMax objective, twice: plainly, and fused, with fewer trips to memory.

Autograd through the plain form stores some thirty arrays of size batch x classes. In the fused one the derivatives are
written out by hand, nothing but the masks is stored, and the rows are walked in blocks small enough that temporary
arrays stay in the processor's cache. A compiler fuses the plain form by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmax import functional

#: Numbers in a block: 2**16 float32 are 256 kB, of which about ten live at a time.
_BLOCK = 2**16


class Terms(NamedTuple):
    """The four terms of the objective, one number a row each.

    >>> Terms._fields
    ('cross_entropy', 'kl', 'entropy', 'auxiliary')
    """

    cross_entropy: Tensor
    kl: Tensor
    entropy: Tensor
    auxiliary: Tensor


def plain_terms(
    o: Tensor,
    a: Tensor,
    stopped: Tensor,
    r: Tensor,
    uniform: Tensor,
    target: Tensor,
    temperature: float = 0.1,
    epsilon: float = 1e-20,
    prior_correction: bool = False,
    mask_gradient: bool = True,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
) -> Terms:
    """Return the terms of each of N rows, straight from :mod:`dropmax.functional`.

    The posterior logits are ``b = stopped + r``, where ``stopped`` holds the values of ``a`` and decides where a
    gradient may go. ``uniform`` of shape ``(S, N, K)`` averages the cross entropy over S masks.

    >>> o, a, r = torch.zeros(3, 1, 4)
    >>> terms = plain_terms(o, a, a, r, torch.full_like(o, 0.99), torch.tensor([1]))
    >>> {name: round(float(value), 4) for name, value in terms._asdict().items()}
    {'cross_entropy': 1.3863, 'kl': 0.6931, 'entropy': 2.7726, 'auxiliary': 2.7726}
    """
    b = stopped + r
    log_mask = functional.log_relaxed_mask(b, uniform, temperature)
    return Terms(
        functional.masked_nll(
            o,
            log_mask if mask_gradient else log_mask.detach(),
            target,
            epsilon=epsilon,
            label_smoothing=label_smoothing,
            class_weight=class_weight,
        ),
        functional.mask_kl(b, a, target),
        functional.mask_entropy(a),
        functional.auxiliary(r, target, prior_correction=prior_correction),
    )


def fused_terms(
    o: Tensor,
    a: Tensor,
    stopped: Tensor,
    r: Tensor,
    uniform: Tensor,
    target: Tensor,
    temperature: float = 0.1,
    epsilon: float = 1e-20,
    prior_correction: bool = False,
    mask_gradient: bool = True,
) -> Terms:
    """Return what :func:`plain_terms` returns, gradients included, for one mask a row and an epsilon above 1e-30.

    >>> o, a, r, u = torch.rand(4, 5, 10)
    >>> target = torch.arange(5)
    >>> plain, fused = plain_terms(o, a, a, r, u, target), fused_terms(o, a, a, r, u, target)
    >>> all(torch.allclose(x, y) for x, y in zip(plain, fused))
    True
    """
    return Terms(
        *_FusedTerms.apply(  # type: ignore[no-untyped-call]
            o, a, stopped, r, uniform, target, temperature, epsilon, prior_correction, mask_gradient
        )
    )


class _FusedTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        a: Tensor,
        stopped: Tensor,
        r: Tensor,
        uniform: Tensor,
        target: Tensor,
        temperature: float,
        epsilon: float,
        prior_correction: bool,
        mask_gradient: bool,
    ) -> tuple[Tensor, ...]:
        shift = math.log(o.shape[-1] - 1) if prior_correction else 0.0
        mask = torch.empty_like(o)
        log_normaliser, kl, entropy, auxiliary = o.new_empty(4, len(o)).unbind()
        edge = torch.finfo(uniform.dtype).eps / 2
        for rows in _row_blocks(o):
            a_, r_, t_ = a[rows], r[rows], target[rows].unsqueeze(-1)
            b_ = stopped[rows] + r_

            # The relaxed masks, and the likelihood: sum_k (z_k + epsilon) exp(o_k - max o) is at least epsilon, so
            # it needs no logarithm of z to stay in range.
            z = uniform[rows].clamp(edge, 1 - edge).logit_().add_(b_).div_(temperature).sigmoid_()
            z.scatter_(-1, t_, 1.0)
            mask[rows] = z
            highest = o[rows].amax(-1, keepdim=True)
            weighed = (o[rows] - highest).exp_().mul_(z.add_(epsilon))
            log_normaliser[rows] = weighed.sum(-1).log_().add_(highest.squeeze(-1))

            # log sigmoid(x) = min(x, 0) - c(x) and log sigmoid(-x) = min(x, 0) - x - c(x), c(x) = log(1 + exp(-|x|))
            size = a_.abs()
            small = (-size).exp_()
            c_a = small.log1p()
            entropy[rows] = small.div_(small + 1).mul_(size).add_(c_a).sum(-1)
            low_a, low_b = a_.clamp(max=0), b_.clamp(max=0)
            c_a -= b_.abs().neg_().exp_().log1p_()  # now c(a) - c(b)
            difference = low_b.sub_(low_a)
            g = b_.sigmoid()
            # g (low_b - low_a) + (1 - g) (low_b - low_a - b + a), where b - a = r
            divergence = (1 - g).mul_(r_).neg_().add_(difference).add_(c_a)
            at_target = F.logsigmoid(a_.gather(-1, t_)).neg_()
            kl[rows] = divergence.scatter_(-1, t_, at_target).sum(-1)

            auxiliary[rows] = F.softplus(r_ - shift).sum(-1) - (r_.gather(-1, t_).squeeze(-1) - shift)
        nll = log_normaliser - o.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(o, a, stopped, r, uniform, target, mask, log_normaliser)
        ctx.options = temperature, epsilon, prior_correction, mask_gradient
        return nll, kl, entropy, auxiliary

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        o, a, stopped, r, uniform, target, mask, log_normaliser = ctx.saved_tensors
        temperature, epsilon, prior_correction, mask_gradient = ctx.options
        if torch.is_grad_enabled():  # create_graph=True: somebody will differentiate again, so leave it to autograd
            terms = plain_terms(o, a, stopped, r, uniform, target, *ctx.options)
            inputs = [x for x, needed in zip((o, a, stopped, r), ctx.needs_input_grad[:4], strict=True) if needed]
            found = iter(torch.autograd.grad(terms, inputs, gradients, create_graph=True, materialize_grads=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:4]), *[None] * 6)

        shift = math.log(o.shape[-1] - 1) if prior_correction else 0.0
        columns = [gradient.unsqueeze(-1) for gradient in gradients]
        grad_o, grad_a, grad_r = torch.empty_like(o), torch.empty_like(o), torch.empty_like(o)
        grad_stopped = torch.empty_like(o) if ctx.needs_input_grad[2] else None
        for rows in _row_blocks(o):
            a_, r_, z, t_ = a[rows], r[rows], mask[rows], target[rows].unsqueeze(-1)
            w_nll, w_kl, w_entropy, w_auxiliary = (column[rows] for column in columns)

            unmasked = (o[rows] - log_normaliser[rows].unsqueeze(-1)).exp_().mul_(w_nll)
            torch.mul(unmasked, z + epsilon, out=grad_o[rows])
            grad_o[rows].scatter_add_(-1, t_, -w_nll)

            g = (stopped[rows] + r_).sigmoid_()
            rho = a_.sigmoid()
            spread = (1 - rho).mul_(rho)
            g_of_target = g.scatter(-1, t_, 1.0)
            torch.sub(rho, g_of_target, out=rho).mul_(w_kl)
            torch.addcmul(rho, spread.mul_(a_), w_entropy, value=-1, out=grad_a[rows])

            grad_b = (1 - g).mul_(g).mul_(r_).mul_(w_kl)
            if mask_gradient:
                grad_b.add_(unmasked.mul_(z).mul_(1 - z), alpha=1 / temperature)
            grad_b.scatter_(-1, t_, 0.0)
            if grad_stopped is not None:
                grad_stopped[rows] = grad_b
            torch.addcmul(grad_b, (r_ - shift).sigmoid_(), w_auxiliary, out=grad_r[rows])
            grad_r[rows].scatter_add_(-1, t_, -w_auxiliary)
        return grad_o, grad_a, grad_stopped, grad_r, None, None, None, None, None, None


def _row_blocks(x: Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, x.shape[-1]))
    return (slice(start, start + step) for start in range(0, len(x), step))
