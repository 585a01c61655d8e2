"""The walks as one differentiable function, and as operations into which a compiler does not look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmax.blocked.arithmetic import Sums
from dropmax.blocked.terms import RowTerms, Settings
from dropmax.blocked.walk import Known, backward_walk, buffer, finish, forward_walk, is_seed, wide_dtype
from dropmax.functional import auxiliary, log_relaxed_mask, mask_entropy, mask_kl, masked_nll
from dropmax.noise import uniform
from dropmax.objective import _by_autograd


class Blocked(torch.autograd.Function):
    """The walks, forward and backward; differentiated twice, the plain equations."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the five tensors of :class:`RowTerms`."""
        *maps, target, noise, class_weight, settings, dtype = arguments
        if torch.compiler.is_compiling():  # it would unroll the walk, which may be a thousand blocks long
            *parts, kept = _forward_op(features, maps, target, noise, class_weight, dtype, *settings)
            sums = Sums(*parts)
        else:
            sums, kept = forward_walk(features, maps, target, noise, class_weight, settings, dtype)
        log_weighed = sums.weighed.log()
        ctx.save_for_backward(
            features, *maps, target, noise, class_weight, sums.highest, log_weighed, sums.kept, sums.kept_weight, kept
        )
        ctx.settings, ctx.dtype = settings, dtype
        return finish(sums, log_weighed, settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the features and the six parameters."""
        features, *maps, target, noise, class_weight, highest, log_weighed, z_sum, z_weight, kept = ctx.saved_tensors
        nothing = (None,) * 5
        if torch.compiler.is_compiling():
            rows = [highest, log_weighed, z_sum, z_weight, kept, *gradients]
            needed = list(ctx.needs_input_grad[:7])
            found = _backward_op(features, maps, target, noise, class_weight, rows, needed, ctx.dtype, *ctx.settings)
            return (*(x if need else None for x, need in zip(found, needed, strict=True)), *nothing)
        if torch.is_grad_enabled():

            def plain(features: Tensor, *maps: Tensor) -> RowTerms:
                return plain_terms(features, maps, target, noise, ctx.settings, class_weight)

            return (*_by_autograd(plain, (features, *maps), gradients, ctx), *nothing)
        known = Known(target, noise, class_weight, highest, log_weighed, z_sum, z_weight, kept)
        found = backward_walk(
            features, maps, known, RowTerms(*gradients), ctx.settings, ctx.dtype, ctx.needs_input_grad[:7]
        )
        return (*found, *nothing)


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


def _all_noise(noise: Tensor, like: Tensor, settings: Settings) -> Tensor:
    if not is_seed(noise):
        return noise
    rows, classes = like.shape
    whole = uniform(noise, rows * settings.samples, settings.first_class, classes, wide_dtype(like.dtype))
    return whole if settings.samples == 1 else whole.view(settings.samples, rows, classes)


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
    wide = wide_dtype(dtype)
    shape = (num_rows,) if settings.samples == 1 else (settings.samples, num_rows)
    several = {"weighed", "kept", "kept_weight", "kept_logit"}
    sums = [features.new_empty(shape if name in several else num_rows, dtype=wide) for name in Sums._fields]
    blocks = buffer(num_rows, num_classes, settings, wide, features.device)
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
    known = Known(target, noise, class_weight, *rows[:5])
    found = backward_walk(features, maps, known, RowTerms(*rows[5:]), Settings(*options), dtype, needed, compiled=True)
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
