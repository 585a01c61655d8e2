"""Element-wise work on a block: what it adds to the terms of each row, and the gradients of its logits.

:func:`forward_block` and :func:`backward_block` run as they are, in memory they are given, or compiled into one pass
over the block each. The target's entry is fixed by gather and scatter; in compiled code, by a comparison that costs
nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dropmax.blocked.terms import RowTerms
from dropmax.functional import logistic
from dropmax.noise import combine
from dropmax.objective import c_and_s, slope


class Sums(NamedTuple):
    """What is known of each row after some of the blocks. With S > 1 masks a row, some are (S, N) and not (N,)."""

    highest: Tensor  # max_k o_k
    weighed: Tensor  # sum_k (z_k + epsilon) exp(o_k - highest)
    target_logit: Tensor  # o_t
    kl: Tensor
    entropy: Tensor
    auxiliary: Tensor
    # For label smoothing, with c_k the weight of class k:
    kept: Tensor  # sum_k z_k
    kept_weight: Tensor  # sum_k z_k c_k
    kept_logit: Tensor  # sum_k z_k c_k (o_k - highest + log(z_k + epsilon))


class Scratch:
    """Memory that the arithmetic of one block leaves to the next: finding fresh memory costs as much as using it.

    A compiler needs none, and gets a scratch without tensors: ``out=None`` means "make one".
    """

    def __init__(self, numbers: Tensor | None = None, bits: Tensor | None = None) -> None:
        self.numbers: Sequence[Tensor | None] = [None] * 8 if numbers is None else numbers.unbind()
        self.bits: Sequence[Tensor] = [] if bits is None else bits.unbind()

    @classmethod
    def like(cls, x: Tensor, samples: int) -> Scratch:
        """Return memory for blocks of as many numbers as ``x`` has; no bits where a row has several masks."""
        bits = torch.empty(2, x.numel(), dtype=torch.int32, device=x.device) if samples == 1 else None
        return cls(torch.empty(8, x.numel(), dtype=x.dtype, device=x.device), bits)

    def shaped(self, rows: int, width: int) -> Scratch:
        """Return the same memory for a block of this shape."""
        part = Scratch()
        part.numbers = [None if x is None else x[: rows * width].view(rows, width) for x in self.numbers]
        part.bits = [x[: rows * width].view(rows, width) for x in self.bits]
        return part


def _mask(
    b: Tensor,
    noise: tuple[Tensor, ...],
    column: Tensor,
    temperature: float,
    scratch: Scratch,
    out: Tensor | None = None,
) -> Tensor:
    """Draw the relaxed masks of a block; the target's is 1."""
    if len(noise) == 1:
        drawn = logistic(noise[0])
    else:
        place = scratch.numbers[1]
        drawn = combine(
            noise[0], noise[1], b.dtype, [*scratch.bits, place] if scratch.bits and place is not None else []
        )
        drawn.logit_()
    return _put(torch.sigmoid(drawn.add_(b).mul_(1 / temperature), out=out), column, 1.0)


def forward_block(
    o: Tensor,
    a: Tensor,
    r: Tensor,
    noise: tuple[Tensor, ...],
    column: Tensor,
    sums: Sums,
    class_weight: Tensor | None,
    temperature: float,
    epsilon: float,
    base_rate: float,
    smooth: bool,
    scratch: Scratch,
    out: Tensor | None,
) -> tuple[Tensor, Sums]:
    """Return the masks of a block, in ``out``, and the sums with this block.

    ``column`` (N, 1) says where in the block the target is; outside of it for targets in other blocks.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = scratch.numbers
    b = torch.add(a, r, out=x0)
    z = _mask(b, noise, column, temperature, scratch, x1 if out is None and _fits(noise, x1) else out)

    # sum_k (z_k + epsilon) exp(o_k - max o) is at least epsilon: no logarithm of z is needed.
    highest = torch.maximum(sums.highest, o.amax(-1))
    unmasked = torch.sub(o, highest.unsqueeze(-1), out=x2).exp_()
    weighed = sums.weighed * (sums.highest - highest).exp() + (z + epsilon).mul_(unmasked).sum(-1)

    # With c(x) = log(1 + exp(-|x|)) and s(x) = sigmoid(-|x|), entropy and KL have no large numbers that cancel:
    #   H  = c(a) + |a| s(a)
    #   KL = c(a) - c(b) - sign(b) r s(b), and |a| more where a and b differ in sign; for the target c(a) + max(-a, 0)
    # The sign of b = 0 may be either, but must not be 0.
    size = torch.abs(a, out=x2)
    c, s = c_and_s(size, x3, x4, x5, x6)
    entropy = torch.addcmul(c, size, s, out=x4).sum(-1)
    at_target = _pick(c, column) + _pick(a, column).neg().clamp_min(0)
    c_b, s = c_and_s(torch.abs(b, out=x2), x3, x4, x6, x7)
    sign = torch.copysign(b.new_ones(()), b, out=x4)
    c.sub_(c_b).sub_(s.mul_(sign).mul_(r)).sub_(sign.mul_(a).clamp_max_(0))
    kl = _put(c, column, 0.0).sum(-1) + at_target

    shifted = torch.sub(r, base_rate, out=x0)
    at_target = _pick(shifted, column)
    c, _ = c_and_s(torch.abs(shifted, out=x2), x3, x4, x5, x6)
    rivals = _put(shifted.clamp_min_(0), column, 0.0)
    auxiliary = c.add_(rivals).sum(-1) + at_target.neg().clamp_min(0)

    kept, kept_weight, kept_logit = sums.kept, sums.kept_weight, sums.kept_logit
    if smooth:
        share = z if class_weight is None else z * class_weight
        kept = kept + z.sum(-1)
        moved = torch.where(kept_weight > 0, kept_weight * (sums.highest - highest), 0.0)  # at first highest is -inf
        left = (o - highest.unsqueeze(-1)) + (z + epsilon).log_()
        kept_weight = kept_weight + share.sum(-1)
        kept_logit = kept_logit + moved + (share * left).sum(-1)
    return z, Sums(
        highest,
        weighed,
        sums.target_logit + _pick(o, column),
        sums.kl + kl,
        sums.entropy + entropy,
        sums.auxiliary + auxiliary,
        kept,
        kept_weight,
        kept_logit,
    )


def backward_block(
    o: Tensor,
    a: Tensor,
    r: Tensor,
    z: Tensor | None,
    noise: tuple[Tensor, ...] | None,
    column: Tensor,
    highest: Tensor,
    log_weighed: Tensor,
    on_softmax: Tensor,
    on_spread: Tensor | None,
    on: RowTerms,
    class_weight: Tensor | None,
    temperature: float,
    epsilon: float,
    base_rate: float,
    mask_gradient: bool,
    scratch: Scratch,
    out: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of o, a and r, and of the a inside ``b = a + r``, which only the features may see.

    They are computed in ``out`` where it holds tensors.
    """
    x0, x1, x2, x3, x4, x5, *_ = scratch.numbers
    out_o, out_a, out_r, out_b = out
    on_nll, _, on_kl, on_entropy, on_auxiliary = (x.unsqueeze(-1) for x in on)
    b = torch.add(a, r, out=x0)
    if z is None:
        if noise is None:
            raise ValueError("a block needs its masks or its noise")
        z = _mask(b, noise, column, temperature, scratch, x1 if _fits(noise, x1) else None)
    one_mask = z.dim() == 2
    left = torch.add(z, epsilon, out=x2 if one_mask else None)
    unmasked = torch.sub(o, highest.unsqueeze(-1), out=x3)
    unmasked = unmasked.sub_(log_weighed.unsqueeze(-1)) if one_mask else unmasked - log_weighed.unsqueeze(-1)
    unmasked.exp_().mul_(on_softmax.unsqueeze(-1))
    if on_spread is not None:
        spread = z / left * on_spread.unsqueeze(-1)
        unmasked.sub_(spread if class_weight is None else spread.mul_(class_weight))
    weighed = torch.mul(left, unmasked, out=out_o if one_mask else None)
    on_o = _add_at(weighed if one_mask else torch.sum(weighed, 0, out=out_o), column, -on_nll)

    g = b.sigmoid_()
    on_b = _put(slope(r, g, x4 if out_b is None else out_b).mul_(on_kl), column, 0.0)
    if mask_gradient:
        # d(z_k + epsilon)/db_k = z_k (1 - z_k) / temperature, which is 0 for z_t = 1
        on_b.add_(_sum_samples(slope(unmasked, z, x5 if one_mask else None)), alpha=1 / temperature)
    rising = torch.sub(r, base_rate, out=x5).sigmoid_()
    on_r = _add_at(torch.addcmul(on_b, rising, on_auxiliary, out=out_r), column, -on_auxiliary)

    # KL: rho - g, where the target has g = 1; entropy: -a rho (1 - rho)
    rho = torch.sigmoid(a, out=out_a)
    spread = slope(a, rho, x5)
    on_a = rho.sub_(_put(g, column, 1.0)).mul_(on_kl).addcmul_(spread, on_entropy, value=-1)
    return on_o, on_a, on_r, on_b


def _fits(noise: tuple[Tensor, ...], place: Tensor | None) -> bool:
    """Say whether one mask, and not several, is to be drawn, so that ``place`` can hold it."""
    return place is not None and noise[0].dim() == 2


def _put(x: Tensor, column: Tensor, value: float) -> Tensor:
    """Set the target's entry of each row whose target is in this block; ``column`` is outside of it elsewhere."""
    if torch.compiler.is_compiling():
        return torch.where(_is_target(x, column), value, x)
    index, inside = _index(x, column)
    return x.scatter_(-1, index, torch.where(inside, value, x.gather(-1, index)))


def _add_at(x: Tensor, column: Tensor, values: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x + torch.where(_is_target(x, column), values, 0.0)
    index, inside = _index(x, column)
    return x.scatter_add_(-1, index, torch.where(inside, values, 0.0))


def _pick(x: Tensor, column: Tensor) -> Tensor:
    """Return the target's entry of each row, 0 where the target is in another block."""
    if torch.compiler.is_compiling():
        return torch.where(_is_target(x, column), x, 0.0).sum(-1)
    index, inside = _index(x, column)
    return torch.where(inside, x.gather(-1, index), 0.0).squeeze(-1)


def _is_target(x: Tensor, column: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device) == column


def _index(x: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    index = column.clamp(0, x.shape[-1] - 1)
    return index.expand(*x.shape[:-1], 1), index == column


def _sum_samples(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.sum(0)
