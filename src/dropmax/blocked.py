"""The DropMax objective without the logits: block after block of classes, in memory of size batch x block.

A batch of 256 and 100,000 classes make 25 million logits, three times; autograd keeps them and as many gradients. Here
the classes are walked in blocks. The forward pass computes the logits of a block, adds what they contribute to each
term of each row (a running log-sum-exp for the likelihood, plain sums for the others) and forgets them. The backward
pass walks the same blocks again, with the same noise (:mod:`dropmax.noise`), and writes the gradients of the block's
weights where they belong. Computing the logits twice costs a third more matrix products; where they are small enough
(:data:`KEPT_BYTES`) they are kept instead.

Element-wise work on a block is in two functions, :func:`_forward_block` and :func:`_backward_block`. They run as they
are, and inside ``torch.compile`` they are compiled into one pass over the block each.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmax.functional import auxiliary, log_relaxed_mask, logistic, mask_entropy, mask_kl, masked_nll
from dropmax.noise import combine, hashes, uniform
from dropmax.objective import _by_autograd

__all__ = ["KEPT_BYTES", "RowTerms", "Settings", "blocked_terms", "plain_terms"]

#: Logits and masks of all blocks are kept for the backward pass where they need no more than this; else computed again.
KEPT_BYTES = 2**26

#: Numbers in a block, if nobody says otherwise: 2**17 float32 are half a megabyte, and a handful are in use at a time.
_BLOCK_NUMBERS = 2**17

#: Narrower blocks make matrix products slow.
_LEAST_BLOCK = 256


class Settings(NamedTuple):
    """What the walk needs beside tensors; the options of :class:`dropmax.DropMax` under the same names.

    >>> Settings(block=1024).temperature
    0.1
    """

    block: int  # classes in a block
    keep: bool = False  # keep the blocks for the backward pass instead of computing them again
    temperature: float = 0.1
    epsilon: float = 1e-20
    samples: int = 1
    smooth: bool = False  # also compute what label smoothing needs
    base_rate: float = 0.0  # what the auxiliary loss subtracts from r
    mask_gradient: bool = True
    stop_parameters: bool = False
    first_class: int = 0  # index of the first class here: not 0 on all ranks but one, where ranks share the classes


class RowTerms(NamedTuple):
    """The terms of the objective, one number a row each.

    ``smooth`` is the part of the cross entropy that label smoothing spreads over the retained classes (zeros without).

    >>> RowTerms._fields
    ('nll', 'smooth', 'kl', 'entropy', 'auxiliary')
    """

    nll: Tensor
    smooth: Tensor
    kl: Tensor
    entropy: Tensor
    auxiliary: Tensor


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
    kept_logit: Tensor  # sum_k z_k c_k (o_k + log(z_k + epsilon))


def choose_block(num_rows: int, num_classes: int) -> int:
    """Return a number of classes for a block: as even a split as possible, a multiple of 64 where there are several.

    >>> choose_block(128, 10_000), choose_block(128, 10)
    (1024, 10)
    """
    wanted = max(_LEAST_BLOCK, _BLOCK_NUMBERS // max(1, num_rows))
    blocks = math.ceil(num_classes / wanted)
    return num_classes if blocks == 1 else math.ceil(num_classes / blocks / 64) * 64


def blocked_terms(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    settings: Settings,
    class_weight: Tensor | None = None,
) -> RowTerms:
    """Return the terms of the objective for features ``(N, d)``, as :func:`plain_terms` does from whole logits.

    Args:
        features: h.
        maps: weights and biases of class logits, retain logits and correction: W_o, b_o, W_a, b_a, W_r, b_r.
        target: ``(N,)`` class indices.
        noise: a seed (:func:`dropmax.noise.draw_seed`), or the uniform numbers themselves, ``(N, K)`` or ``(S, N, K)``.
        settings: see :class:`Settings`.
        class_weight: ``(K,)`` weights of the classes in ``smooth``.

    >>> h, target, noise = torch.randn(4, 8), torch.tensor([0, 9, 5, 4]), torch.rand(4, 10)
    >>> maps = [x for _ in range(3) for x in (torch.randn(10, 8), torch.randn(10))]
    >>> found = blocked_terms(h, maps, target, noise, Settings(block=3))
    >>> all(torch.allclose(x, y, rtol=1e-4) for x, y in zip(found, plain_terms(h, maps, target, noise, Settings(3))))
    True
    """
    dtype = product_dtype(features, maps)
    with torch.autocast(features.device.type, enabled=False):
        terms = _Blocked.apply(features, *maps, target, noise, class_weight, settings, dtype)  # type: ignore[no-untyped-call]
    return RowTerms(*terms)


def plain_terms(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    settings: Settings,
    class_weight: Tensor | None = None,
) -> RowTerms:
    """Return what :func:`blocked_terms` returns, by the equations of :mod:`dropmax.functional`.

    >>> h, target = torch.zeros(1, 2), torch.tensor([0])
    >>> zeros = [torch.zeros(4, 2), torch.zeros(4)] * 3
    >>> plain_terms(h, zeros, target, torch.full((1, 4), 0.5), Settings(4)).nll  # masks of 1, 1/2, 1/2 and 1/2
    tensor([0.9163])
    """
    w_o, b_o, w_a, b_a, w_r, b_r = maps
    o, a, r = F.linear(features, w_o, b_o), F.linear(features, w_a, b_a), F.linear(features, w_r, b_r)
    stopped = F.linear(features, w_a.detach(), b_a.detach()) if settings.stop_parameters else a.detach()
    b = stopped + r
    log_mask = log_relaxed_mask(
        b if settings.mask_gradient else b.detach(), _all_noise(noise, o, settings), settings.temperature
    )
    nll = masked_nll(o, log_mask, target, epsilon=settings.epsilon)
    smooth = torch.zeros_like(nll)
    if settings.smooth:
        smooth = masked_nll(
            o, log_mask, target, epsilon=settings.epsilon, label_smoothing=1.0, class_weight=class_weight
        )
    aux = auxiliary(r - settings.base_rate, target)
    return RowTerms(nll, smooth, mask_kl(b, a, target), mask_entropy(a), aux)


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *maps, target, noise, class_weight, settings, dtype = arguments
        if torch.compiler.is_compiling():  # it would unroll the walk, which may be a thousand blocks long
            *parts, kept = _forward_op(features, maps, target, noise, class_weight, dtype, *settings)
            sums = Sums(*parts)
        else:
            sums, kept = forward_walk(features, maps, target, noise, class_weight, settings, dtype)
        log_normaliser = sums.highest + sums.weighed.log()
        ctx.save_for_backward(
            features, *maps, target, noise, class_weight, log_normaliser, sums.kept, sums.kept_weight, kept
        )
        ctx.settings, ctx.dtype = settings, dtype
        return finish(sums, log_normaliser, settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, *maps, target, noise, class_weight, log_normaliser, z_sum, z_weight, kept = ctx.saved_tensors
        nothing = (None,) * 5
        if torch.compiler.is_compiling():
            rows = [log_normaliser, z_sum, z_weight, kept, *gradients]
            needed = list(ctx.needs_input_grad[:7])
            found = _backward_op(features, maps, target, noise, class_weight, rows, needed, ctx.dtype, *ctx.settings)
            return (*(x if need else None for x, need in zip(found, needed, strict=True)), *nothing)
        if torch.is_grad_enabled():

            def plain(features: Tensor, *maps: Tensor) -> RowTerms:
                return plain_terms(features, maps, target, noise, ctx.settings, class_weight)

            return (*_by_autograd(plain, (features, *maps), gradients, ctx), *nothing)
        known = Known(target, noise, class_weight, log_normaliser, z_sum, z_weight, kept)
        found = backward_walk(
            features, maps, known, RowTerms(*gradients), ctx.settings, ctx.dtype, ctx.needs_input_grad[:7]
        )
        return (*found, *nothing)


def finish(sums: Sums, log_normaliser: Tensor, settings: Settings) -> RowTerms:
    """Return the terms from the sums over all classes."""
    nll = _over_samples(log_normaliser) - sums.target_logit - math.log1p(settings.epsilon)
    smooth = torch.zeros_like(nll)
    if settings.smooth:
        smooth = _over_samples((log_normaliser * sums.kept_weight - sums.kept_logit) / sums.kept)
    return RowTerms(nll, smooth, sums.kl, sums.entropy, sums.auxiliary)


class Known(NamedTuple):
    """What the backward pass knows from the forward pass."""

    target: Tensor
    noise: Tensor
    class_weight: Tensor | None
    log_normaliser: Tensor
    kept: Tensor
    kept_weight: Tensor
    blocks: Tensor  # logits and masks of all blocks, or empty


# --- the two walks ----------------------------------------------------------------------------------------------------


def forward_walk(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    class_weight: Tensor | None,
    settings: Settings,
    dtype: torch.dtype,
    compiled: bool = False,
) -> tuple[Sums, Tensor]:
    """Walk over the classes once; return the sums and, if they are to be kept, the blocks."""
    one_block = _fused(_forward_block) if compiled else _forward_block
    num_rows, num_classes, samples = len(features), len(maps[0]), settings.samples
    wide = _wide_dtype(dtype)
    shape = (num_rows,) if samples == 1 else (samples, num_rows)
    none, nones = features.new_zeros(num_rows, dtype=wide), features.new_zeros(shape, dtype=wide)
    sums = Sums(torch.full_like(none, -torch.inf), nones, none, none, none, none, nones, nones, nones)
    h = features.to(dtype)
    blocks = _buffer(num_rows, num_classes, settings, wide, features.device)
    by_row, by_class = _hashes(noise, num_rows, num_classes, settings)
    for here, block in _walk(blocks, num_rows, num_classes, settings):
        o, a, r = block[:3].unbind()
        for out, weight, bias in zip((o, a, r), maps[0::2], maps[1::2], strict=True):
            _product(h, weight[here], bias[here], out)
        mask, sums = one_block(
            o,
            a,
            r,
            _noise_of(noise, here, by_row, by_class),
            (target - here.start).unsqueeze(-1),
            sums,
            class_weight[here] if class_weight is not None and settings.smooth else None,
            settings.temperature,
            settings.epsilon,
            settings.base_rate,
            settings.smooth,
        )
        if settings.keep:
            _masks_in(block, settings).copy_(mask)
    return sums, blocks if settings.keep else blocks[:0].clone()


def backward_walk(
    features: Tensor,
    maps: Sequence[Tensor],
    known: Known,
    gradients: RowTerms,
    settings: Settings,
    dtype: torch.dtype,
    needed: Sequence[bool],
    compiled: bool = False,
) -> list[Tensor | None]:
    """Walk over the classes once more; return the gradients of the features and of each of the maps."""
    one_block = _fused(_backward_block) if compiled else _backward_block
    num_rows, num_classes = len(features), len(maps[0])
    wide = _wide_dtype(dtype)
    h = features.to(dtype)
    blocks = known.blocks if settings.keep else _buffer(num_rows, num_classes, settings, wide, features.device)
    by_row, by_class = _hashes(known.noise, num_rows, num_classes, settings)
    grad_h = torch.zeros_like(features, dtype=wide) if needed[0] else None
    found = [torch.empty_like(x) if need else None for x, need in zip(maps, needed[1:], strict=True)]
    on_softmax = gradients.nll
    on_spread = None
    if settings.smooth:
        on_spread = gradients.smooth / known.kept / settings.samples
        on_softmax = on_softmax + gradients.smooth * known.kept_weight / known.kept
    on_softmax = on_softmax.expand(known.log_normaliser.shape) / settings.samples

    for here, block in _walk(blocks, num_rows, num_classes, settings):
        o, a, r = block[:3].unbind()
        if not settings.keep:
            for out, weight, bias in zip((o, a, r), maps[0::2], maps[1::2], strict=True):
                _product(h, weight[here], bias[here], out)
        on_o, on_a, on_r, on_b = one_block(
            o,
            a,
            r,
            _masks_in(block, settings) if settings.keep else None,
            None if settings.keep else _noise_of(known.noise, here, by_row, by_class),
            (known.target - here.start).unsqueeze(-1),
            known.log_normaliser,
            on_softmax,
            on_spread,
            gradients,
            known.class_weight[here] if known.class_weight is not None and settings.smooth else None,
            settings.temperature,
            settings.epsilon,
            settings.base_rate,
            settings.mask_gradient,
        )
        for i, gradient in enumerate((on_o, on_a, on_r)):
            on_weight, on_bias = found[2 * i], found[2 * i + 1]
            if on_bias is not None:
                on_bias[here] = gradient.sum(0)
            narrow = gradient.to(dtype)
            if on_weight is not None:
                if on_weight.dtype == dtype:
                    torch.mm(narrow.t(), h, out=on_weight[here])
                else:
                    on_weight[here] = torch.mm(narrow.t(), h)
            if grad_h is not None:
                if i == 1 and settings.stop_parameters:  # here the retain logits inside q do reach the features
                    narrow = gradient.add_(on_b).to(dtype)
                if dtype == wide:
                    grad_h.addmm_(narrow, maps[2 * i][here].to(dtype))
                else:
                    grad_h += torch.mm(narrow, maps[2 * i][here].to(dtype))
    return [None if grad_h is None else grad_h.to(features.dtype), *found]


def _walk(blocks: Tensor, num_rows: int, num_classes: int, settings: Settings) -> Iterator[tuple[slice, Tensor]]:
    """Yield which classes a block has, and the memory for its o, a, r and, if they are kept, masks: each (N, width)."""
    parts = 3 + settings.samples if settings.keep else 3
    for i, start in enumerate(range(0, num_classes, settings.block)):
        width = min(settings.block, num_classes - start)
        flat = blocks[i if settings.keep else 0]
        yield slice(start, start + width), flat[: parts * num_rows * width].view(parts, num_rows, width)


def _buffer(num_rows: int, num_classes: int, settings: Settings, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for the logits of all blocks with their masks, or for the logits of one."""
    parts, count = (3 + settings.samples, math.ceil(num_classes / settings.block)) if settings.keep else (3, 1)
    return torch.empty(count, parts * num_rows * settings.block, dtype=dtype, device=device)


def _masks_in(block: Tensor, settings: Settings) -> Tensor:
    return block[3] if settings.samples == 1 else block[3:]


def _product(h: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """Put ``h W^T + b``, computed in the dtype of h, into ``out``."""
    if h.dtype == out.dtype:
        torch.addmm(bias.to(h.dtype), h, weight.to(h.dtype).t(), out=out)
    else:
        out.copy_(torch.addmm(bias.to(h.dtype), h, weight.to(h.dtype).t()))


# --- noise ------------------------------------------------------------------------------------------------------------


def is_seed(noise: Tensor) -> bool:
    """Say whether this is a seed, and not the noise itself."""
    return not noise.is_floating_point()


def _hashes(noise: Tensor, num_rows: int, num_classes: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the hashes of rows and classes, from which each block makes its noise; nothing if it is there already."""
    if not is_seed(noise):
        return noise, noise
    by_row, by_class = hashes(noise, num_rows * settings.samples, settings.first_class, num_classes)
    return by_row if settings.samples == 1 else by_row.view(settings.samples, num_rows, 1), by_class


def _noise_of(noise: Tensor, here: slice, by_row: Tensor, by_class: Tensor) -> tuple[Tensor, ...]:
    return (by_row, by_class[here].clone()) if is_seed(noise) else (noise[..., here],)


def _all_noise(noise: Tensor, like: Tensor, settings: Settings) -> Tensor:
    if not is_seed(noise):
        return noise
    rows, classes = like.shape
    whole = uniform(noise, rows * settings.samples, settings.first_class, classes, _wide_dtype(like.dtype))
    return whole if settings.samples == 1 else whole.view(settings.samples, rows, classes)


# --- the arithmetic of a block ----------------------------------------------------------------------------------------


def _mask(b: Tensor, noise: tuple[Tensor, ...], column: Tensor, temperature: float) -> Tensor:
    """Draw the relaxed masks of a block; the target's is 1."""
    drawn = logistic(noise[0]) if len(noise) == 1 else combine(noise[0], noise[1], b.dtype).logit_()
    return _put(drawn.add_(b).mul_(1 / temperature).sigmoid_(), column, 1.0)


def _forward_block(
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
) -> tuple[Tensor, Sums]:
    """Return the masks of a block, and the sums with this block; ``column`` (N, 1) is where in it the target is."""
    b = a + r
    z = _mask(b, noise, column, temperature)

    # sum_k (z_k + epsilon) exp(o_k - max o) is at least epsilon: no logarithm of z is needed.
    highest = torch.maximum(sums.highest, o.amax(-1))
    unmasked = (o - highest.unsqueeze(-1)).exp_()
    weighed = sums.weighed * (sums.highest - highest).exp() + unmasked.mul(z + epsilon).sum(-1)

    # With c(x) = log(1 + exp(-|x|)) and s(x) = sigmoid(-|x|), entropy and KL have no large numbers that cancel:
    #   H  = c(a) + |a| s(a)
    #   KL = c(a) - c(b) - sign(b) r s(b), and |a| more where a and b differ in sign; for the target c(a) + max(-a, 0)
    size = a.abs()
    c, s = _c_and_s(size)
    entropy = torch.addcmul(c, size, s).sum(-1)
    at_target = _pick(c, column) + _pick(a, column).neg().clamp_min(0)
    c_b, s = _c_and_s(b.abs())
    sign = b.sign()
    c.sub_(c_b).sub_(s.mul_(sign).mul_(r)).sub_(sign.mul_(a).clamp_max_(0))
    kl = _put(c, column, 0.0).sum(-1) + at_target

    shifted = r - base_rate
    c, _ = _c_and_s(shifted.abs())
    auxiliary = c.add_(shifted.clamp(min=0)).sum(-1) - _pick(shifted, column)

    kept, kept_weight, kept_logit = sums.kept, sums.kept_weight, sums.kept_logit
    if smooth:
        share = z if class_weight is None else z * class_weight
        kept = kept + z.sum(-1)
        kept_weight = kept_weight + share.sum(-1)
        kept_logit = kept_logit + (share * (o + (z + epsilon).log_())).sum(-1)
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


def _backward_block(
    o: Tensor,
    a: Tensor,
    r: Tensor,
    z: Tensor | None,
    noise: tuple[Tensor, ...] | None,
    column: Tensor,
    log_normaliser: Tensor,
    on_softmax: Tensor,
    on_spread: Tensor | None,
    on: RowTerms,
    class_weight: Tensor | None,
    temperature: float,
    epsilon: float,
    base_rate: float,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of o, a and r, and of the a inside ``b = a + r``, which only the features may see."""
    on_nll, _, on_kl, on_entropy, on_auxiliary = (x.unsqueeze(-1) for x in on)
    b = a + r
    if z is None:
        if noise is None:
            raise ValueError("a block needs its masks or its noise")
        z = _mask(b, noise, column, temperature)
    left = z + epsilon
    unmasked = (o - log_normaliser.unsqueeze(-1)).exp_().mul_(on_softmax.unsqueeze(-1))
    if on_spread is not None:
        spread = z / left * on_spread.unsqueeze(-1)
        unmasked.sub_(spread if class_weight is None else spread.mul_(class_weight))
    on_o = _add_at(_sum_samples(unmasked * left), column, -on_nll)

    g = b.sigmoid_()
    on_b = _put(torch.ops.aten.sigmoid_backward(r, g).mul_(on_kl), column, 0.0)
    if mask_gradient:
        # d(z_k + epsilon)/db_k = z_k (1 - z_k) / temperature, which is 0 for z_t = 1
        on_b.add_(_sum_samples(torch.ops.aten.sigmoid_backward(unmasked, z)), alpha=1 / temperature)
    on_r = _add_at(torch.addcmul(on_b, (r - base_rate).sigmoid_(), on_auxiliary), column, -on_auxiliary)

    # KL: rho - g, where the target has g = 1; entropy: -a rho (1 - rho)
    rho = a.sigmoid()
    spread = torch.ops.aten.sigmoid_backward(a, rho)
    on_a = rho.sub_(_put(g, column, 1.0)).mul_(on_kl).addcmul_(spread, on_entropy, value=-1)
    return on_o, on_a, on_r, on_b


def _c_and_s(size: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log(1 + exp(-size))`` and ``sigmoid(-size)`` for size >= 0."""
    small = (-size).exp_()
    one_more = small + 1
    # log1p takes five times as long as log. What rounding took from 1 + small is added again: all of it where small is
    # small, and where it is not, nobody sees it.
    c = one_more.log().add_(small - (one_more - 1))
    return c, small.div_(one_more)


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


def _over_samples(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.mean(0)


# --- dtypes and compilation -------------------------------------------------------------------------------------------


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(features: Tensor, maps: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype in which ``nn.Linear`` would compute here: that of autocast where it is on."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, (x.dtype for x in maps), features.dtype)


_OPTIONS = (
    "ScalarType dtype, int block, bool keep, float temperature, float epsilon, int samples, bool smooth, "
    "float base_rate, bool mask_gradient, bool stop_parameters, int first_class"
)
_TENSORS = "Tensor features, Tensor[] maps, Tensor target, Tensor noise, Tensor? class_weight"


@torch.library.custom_op("dropmax::blocked_forward", mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> Tensor[]")
def _forward_op(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    class_weight: Tensor | None,
    dtype: torch.dtype,
    *options: Any,
) -> list[Tensor]:
    """:func:`forward_walk` as one operation, into which a compiler does not look."""
    sums, blocks = forward_walk(features, maps, target, noise, class_weight, Settings(*options), dtype, compiled=True)
    return [*(x.clone() for x in sums), blocks]


@_forward_op.register_fake
def _(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    class_weight: Tensor | None,
    dtype: torch.dtype,
    *options: Any,
) -> list[Tensor]:
    settings = Settings(*options)
    num_rows, num_classes = len(features), len(maps[0])
    wide = _wide_dtype(dtype)
    shape = (num_rows,) if settings.samples == 1 else (settings.samples, num_rows)
    several = {"weighed", "kept", "kept_weight", "kept_logit"}
    sums = [features.new_empty(shape if name in several else num_rows, dtype=wide) for name in Sums._fields]
    blocks = _buffer(num_rows, num_classes, settings, wide, features.device)
    return [*sums, blocks if settings.keep else blocks[:0].clone()]


@torch.library.custom_op(
    "dropmax::blocked_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor[] rows, bool[] needed, {_OPTIONS}) -> Tensor[]",
)
def _backward_op(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    class_weight: Tensor | None,
    rows: Sequence[Tensor],
    needed: Sequence[bool],
    dtype: torch.dtype,
    *options: Any,
) -> list[Tensor]:
    """:func:`backward_walk` as one operation; what is not needed is an empty tensor."""
    known = Known(target, noise, class_weight, *rows[:4])
    found = backward_walk(features, maps, known, RowTerms(*rows[4:]), Settings(*options), dtype, needed, compiled=True)
    return [features.new_empty(0) if x is None else x for x in found]


@_backward_op.register_fake
def _(
    features: Tensor,
    maps: Sequence[Tensor],
    target: Tensor,
    noise: Tensor,
    class_weight: Tensor | None,
    rows: Sequence[Tensor],
    needed: Sequence[bool],
    dtype: torch.dtype,
    *options: Any,
) -> list[Tensor]:
    pairs = zip((features, *maps), needed, strict=True)
    return [torch.empty_like(x) if need else features.new_empty(0) for x, need in pairs]


@functools.lru_cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the arithmetic of a block; where that fails (no C++ compiler), say so once and go on without."""
    chosen: list[Callable[..., Any]] = [torch.compile(function, dynamic=False)]

    def call(*arguments: Any) -> Any:
        try:
            return chosen[-1](*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            if len(chosen) == 2:
                raise
            warnings.warn(f"blocks of classes are not compiled: {error}", stacklevel=2)
            chosen.append(function)
            return function(*arguments)

    return call
