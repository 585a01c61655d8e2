"""The terms of the DropMax objective, fused: the numbers of :mod:`dropmax.functional` with fewer trips to memory.

Autograd through the plain functions stores some thirty arrays of size batch x classes. Here the derivatives are written
out by hand, nothing but the masks is stored, and the rows are walked in blocks small enough that temporary arrays stay
in the processor's cache. A compiler gets the same derivatives as plain expressions, which it fuses without blocks. The
plain functions are used where ``torch.func`` transforms them, and where somebody will differentiate twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmax.checks import is_transformed
from dropmax.functional import auxiliary, log_relaxed_mask, logistic, mask_entropy, mask_kl, masked_nll

__all__ = ["Regularisers", "regularisers", "sampled_nll"]

#: Numbers in a block: 2**17 float32 are half a megabyte, of which about ten live at a time.
_BLOCK = 2**17

#: With a smaller epsilon, exp(o - max o) times it could underflow in float32.
LEAST_EPSILON = 1e-30


class Regularisers(NamedTuple):
    """The terms of the objective beside the likelihood, one number a row each.

    >>> Regularisers._fields
    ('kl', 'entropy', 'auxiliary')
    """

    kl: Tensor
    entropy: Tensor
    auxiliary: Tensor


def sampled_nll(
    o: Tensor,
    mask_logits: Tensor,
    uniform: Tensor,
    target: Tensor,
    *,
    temperature: float = 0.1,
    epsilon: float = 1e-20,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Return ``-log p(y = t | x, z)`` of each of N rows for relaxed masks z drawn with the noise ``uniform``.

    Equals::

        masked_nll(o, log_relaxed_mask(mask_logits, uniform, temperature), target, epsilon=epsilon, ...)

    >>> o, b, u = torch.rand(3, 5, 10)
    >>> target = torch.arange(5)
    >>> torch.allclose(sampled_nll(o, b, u, target), masked_nll(o, log_relaxed_mask(b, u), target))
    True
    """
    one_mask = uniform.dim() == o.dim()
    if one_mask and not label_smoothing and epsilon >= LEAST_EPSILON and not is_transformed(o):
        function = _CompiledNLL if torch.compiler.is_compiling() else _SampledNLL
        nll: Tensor = function.apply(o, mask_logits, uniform, target, temperature, epsilon)  # type: ignore[no-untyped-call]
        return nll if class_weight is None else nll * class_weight.to(nll.dtype)[target]
    log_mask = log_relaxed_mask(mask_logits, uniform, temperature)
    return masked_nll(o, log_mask, target, epsilon=epsilon, label_smoothing=label_smoothing, class_weight=class_weight)


def regularisers(
    a: Tensor, stopped: Tensor, r: Tensor, target: Tensor, *, prior_correction: bool = False
) -> Regularisers:
    """Return KL, entropy and auxiliary loss of each of N rows.

    The posterior logits are ``b = stopped + r``, where ``stopped`` holds the values of ``a`` and decides where a
    gradient may go. Equals::

        mask_kl(stopped + r, a, target), mask_entropy(a), auxiliary(r, target, prior_correction=prior_correction)

    >>> a, r = torch.zeros(2, 1, 4)
    >>> {name: round(float(x), 4) for name, x in regularisers(a, a, r, torch.tensor([1]))._asdict().items()}
    {'kl': 0.6931, 'entropy': 2.7726, 'auxiliary': 2.7726}
    """
    if is_transformed(a):
        return _plain_regularisers(a, stopped, r, target, prior_correction)
    function = _CompiledRegularisers if torch.compiler.is_compiling() else _FusedRegularisers
    return Regularisers(*function.apply(a, stopped, r, target, prior_correction))  # type: ignore[no-untyped-call]


def _plain_nll(
    o: Tensor, mask_logits: Tensor, uniform: Tensor, target: Tensor, temperature: float, epsilon: float
) -> Tensor:
    return masked_nll(o, log_relaxed_mask(mask_logits, uniform, temperature), target, epsilon=epsilon)


def _plain_regularisers(a: Tensor, stopped: Tensor, r: Tensor, target: Tensor, prior_correction: bool) -> Regularisers:
    return Regularisers(
        mask_kl(stopped + r, a, target), mask_entropy(a), auxiliary(r, target, prior_correction=prior_correction)
    )


class _SampledNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, b: Tensor, uniform: Tensor, target: Tensor, temperature: float, epsilon: float
    ) -> Tensor:
        mask, t = torch.empty_like(o), target.unsqueeze(-1)
        highest, weighed = o.new_empty(2, len(o), 1).unbind()
        edge = torch.finfo(uniform.dtype).eps / 2
        for o_, b_, u, t_, z, h, w in _row_blocks(o, b, uniform, t, mask, highest, weighed):
            torch.clamp(u, edge, 1 - edge, out=z)
            z.logit_().add_(b_).mul_(1 / temperature).sigmoid_().scatter_(-1, t_, 1.0)
            # sum_k (z_k + epsilon) exp(o_k - max o) is at least epsilon: no logarithm of z is needed.
            torch.amax(o_, -1, keepdim=True, out=h)
            torch.sum((o_ - h).exp_().mul_(z + epsilon), -1, keepdim=True, out=w)
        log_weighed = weighed.log_()
        ctx.save_for_backward(o, b, uniform, target, mask, highest, log_weighed)
        ctx.options = temperature, epsilon
        # The large numbers first: what is left of them is as large as the result, and its digits survive.
        return (highest - o.gather(-1, t) + log_weighed).squeeze(-1) - math.log1p(epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        o, b, uniform, target, mask, highest, log_weighed = ctx.saved_tensors
        temperature, epsilon = ctx.options
        if torch.is_grad_enabled():
            found = _by_autograd(
                lambda o, b: (_plain_nll(o, b, uniform, target, temperature, epsilon),), (o, b), (gradient,), ctx
            )
            return (*found, None, None, None, None)

        grad_o = torch.empty_like(o)
        grad_b = torch.empty_like(o) if ctx.needs_input_grad[1] else None
        t, weight = target.unsqueeze(-1), gradient.unsqueeze(-1)
        for o_, z, h, lw, w, on_o, on_b in _row_blocks(o, mask, highest, log_weighed, weight, grad_o, grad_b):
            unmasked = (o_ - h).sub_(lw).exp_().mul_(w)
            torch.mul(unmasked, z + epsilon, out=on_o)
            if on_b is not None:
                # p_k dlog(z_k + epsilon)/db_k = unmasked_k z_k (1 - z_k) / temperature; 0 for z_t = 1
                torch.mul(unmasked.mul_(z), (1 - z).mul_(1 / temperature), out=on_b)
        grad_o.scatter_add_(-1, t, -weight)
        return grad_o, grad_b, None, None, None, None


class _FusedRegularisers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, stopped: Tensor, r: Tensor, target: Tensor, prior_correction: bool
    ) -> tuple[Tensor, ...]:
        t, shift = target.unsqueeze(-1), _base_rate(a, prior_correction)
        kl, entropy, auxiliary = a.new_empty(3, len(a)).unbind()
        for a_, stopped_, r_, t_, *sums in _row_blocks(a, stopped, r, t, kl, entropy, auxiliary):
            b = stopped_ + r_
            size = a_.abs()
            c, s = c_and_s(size)
            torch.sum(size.mul_(s).add_(c), -1, out=sums[1])
            # KL = c(a) - c(b) - sign(b) r s(b), and |a| more where a and b differ in sign: nothing cancels
            sign = torch.copysign(b.new_ones(()), b)  # of 0, either: 0 would be wrong
            c_b, s_b = c_and_s(b.abs_())
            c.sub_(c_b).addcmul_(s_b.mul_(sign), r_, value=-1).sub_(sign.mul_(a_).clamp_max_(0))
            torch.sum(c.scatter_(-1, t_, F.logsigmoid(a_.gather(-1, t_)).neg_()), -1, out=sums[0])
            evidence = r_ - shift
            evidence.scatter_(-1, t_, -evidence.gather(-1, t_))
            torch.sum(c_and_s(evidence.abs())[0].add_(evidence.clamp_min_(0)), -1, out=sums[2])
        ctx.save_for_backward(a, stopped, r, target)
        ctx.prior_correction = prior_correction
        return kl, entropy, auxiliary

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        a, stopped, r, target = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _by_autograd(
                lambda a, stopped, r: _plain_regularisers(a, stopped, r, target, ctx.prior_correction),
                (a, stopped, r),
                gradients,
                ctx,
            )
            return (*found, None, None)

        shift = _base_rate(a, ctx.prior_correction)
        grad_a, grad_r = torch.empty_like(a), torch.empty_like(a)
        grad_stopped = torch.empty_like(a) if ctx.needs_input_grad[1] else None
        t, weights = target.unsqueeze(-1), [gradient.unsqueeze(-1) for gradient in gradients]
        out = (grad_a, grad_stopped, grad_r)
        for a_, stopped_, r_, t_, w_kl, w_entropy, w_auxiliary, on_a, on_b, on_r in _row_blocks(
            a, stopped, r, t, *weights, *out
        ):
            g = (stopped_ + r_).sigmoid_()
            on_b = slope(r_, g, on_b).mul_(w_kl).scatter_(-1, t_, 0.0)
            torch.addcmul(on_b, (r_ - shift).sigmoid_(), w_auxiliary, out=on_r)
            # KL: rho - g, where the target has g = 1; entropy: -a rho (1 - rho)
            rho = torch.sigmoid(a_, out=on_a)
            spread = slope(a_, rho)
            rho.sub_(g.scatter_(-1, t_, 1.0)).mul_(w_kl).addcmul_(spread, w_entropy, value=-1)
        grad_r.scatter_add_(-1, t, -weights[2])
        return grad_a, grad_stopped, grad_r, None, None


class _CompiledNLL(torch.autograd.Function):
    """:class:`_SampledNLL` for a compiler: no blocks, nothing in place, a comparison where the other scatters."""

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, b: Tensor, uniform: Tensor, target: Tensor, temperature: float, epsilon: float
    ) -> Tensor:
        is_target = _is_target(o, target)
        mask = torch.where(is_target, 1.0, ((b + logistic(uniform)) / temperature).sigmoid())
        highest = o.amax(-1, keepdim=True)
        log_weighed = ((o - highest).exp() * (mask + epsilon)).sum(-1, keepdim=True).log()
        ctx.save_for_backward(o, target, mask, highest, log_weighed)
        ctx.options = temperature, epsilon
        lead = torch.where(is_target, highest - o, 0.0).sum(-1, keepdim=True)
        return (lead + log_weighed).squeeze(-1) - math.log1p(epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        o, target, mask, highest, log_weighed = ctx.saved_tensors
        temperature, epsilon = ctx.options
        weight = gradient.unsqueeze(-1)
        unmasked = (o - highest - log_weighed).exp() * weight
        grad_o = unmasked * (mask + epsilon) - torch.where(_is_target(o, target), weight, 0.0)
        grad_b = unmasked * mask * (1 - mask) / temperature if ctx.needs_input_grad[1] else None
        return grad_o, grad_b, None, None, None, None


class _CompiledRegularisers(torch.autograd.Function):
    """:class:`_FusedRegularisers` for a compiler."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, stopped: Tensor, r: Tensor, target: Tensor, prior_correction: bool
    ) -> tuple[Tensor, ...]:
        shift = _base_rate(a, prior_correction)
        is_target = _is_target(a, target)
        b = stopped + r
        c, s = c_and_s(a.abs())
        entropy = a.abs() * s + c
        sign = torch.copysign(b.new_ones(()), b)
        c_b, s_b = c_and_s(b.abs())
        rivals = c - c_b - sign * r * s_b - (sign * a).clamp(max=0)
        kl = torch.where(is_target, c - a.clamp(max=0), rivals)
        evidence = torch.where(is_target, shift - r, r - shift)
        auxiliary = c_and_s(evidence.abs())[0] + evidence.clamp(min=0)
        ctx.save_for_backward(a, stopped, r, target)
        ctx.shift = shift
        return kl.sum(-1), entropy.sum(-1), auxiliary.sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        a, stopped, r, target = ctx.saved_tensors
        w_kl, w_entropy, w_auxiliary = (gradient.unsqueeze(-1) for gradient in gradients)
        is_target = _is_target(a, target)
        g, rho = (stopped + r).sigmoid(), a.sigmoid()
        grad_a = (rho - torch.where(is_target, 1.0, g)) * w_kl - rho * (1 - rho) * a * w_entropy
        grad_b = torch.where(is_target, 0.0, g * (1 - g) * r * w_kl)
        grad_r = grad_b + ((r - ctx.shift).sigmoid() - is_target.to(r.dtype)) * w_auxiliary
        return grad_a, grad_b if ctx.needs_input_grad[1] else None, grad_r, None, None


def c_and_s(
    size: Tensor, x1: Tensor | None = None, x2: Tensor | None = None, x3: Tensor | None = None, x4: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``c(x) = log(1 + exp(-|x|))`` and ``s(x) = sigmoid(-|x|)`` of ``size = |x|``, in x3 and x1 if given.

    ``log sigmoid(x) = min(x, 0) - c(x)``, and entropy and KL made of these two have no large numbers that cancel.

    >>> c_and_s(torch.tensor([0.0, 30.0]))
    (tensor([6.9315e-01, 9.3576e-14]), tensor([5.0000e-01, 9.3576e-14]))
    """
    small = torch.neg(size, out=x1).exp_()
    one_more = torch.add(small, 1, out=x2)
    # log1p takes five times as long as log. What rounding took from 1 + small is added again: all of it where small is
    # small, and where it is not, nobody sees it.
    lost = torch.sub(small, torch.sub(one_more, 1, out=x4), out=x4)
    return torch.log(one_more, out=x3).add_(lost), small.div_(one_more)


def slope(gradient: Tensor, sigmoid: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``gradient * sigmoid * (1 - sigmoid)`` in one pass.

    >>> slope(torch.tensor(2.0), torch.tensor(0.5))
    tensor(0.5000)
    """
    if out is None:
        result: Tensor = torch.ops.aten.sigmoid_backward(gradient, sigmoid)
        return result
    torch.ops.aten.sigmoid_backward.grad_input(gradient, sigmoid, grad_input=out)
    return out


def _is_target(x: Tensor, target: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)


def _by_autograd(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], gradients: Sequence[Tensor], ctx: Any
) -> list[Tensor | None]:
    """Differentiate the plain form instead, so that the result can be differentiated again (``create_graph=True``)."""
    needed = ctx.needs_input_grad[: len(inputs)]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    pairs = [(y, g) for y, g in zip(function(*inputs), gradients, strict=True) if y.requires_grad]
    outputs, cotangents = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]


def _base_rate(x: Tensor, prior_correction: bool) -> float:
    return math.log(x.shape[-1] - 1) if prior_correction else 0.0


def _row_blocks(*tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Return parts of the tensors, block after block of their rows; the tensors themselves where all is one block."""
    first = tensors[0]
    if first is None or first.numel() <= _BLOCK:
        return [tensors]
    step = max(1, _BLOCK // first.shape[-1])
    parts = [[None] * -(-len(first) // step) if x is None else torch.split(x, step) for x in tensors]
    return zip(*parts, strict=True)
