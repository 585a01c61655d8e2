"""The two walks over blocks of classes: forward for the terms, backward for the gradients."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dropmax.blocked.arithmetic import Scratch, Sums, backward_block, forward_block
from dropmax.blocked.terms import RowTerms, Settings
from dropmax.noise import hashes

#: See :func:`compile_blocks`.
_always_compiled = False

#: Without a compiler, element-wise work is done for this many numbers at a time, so that they stay in the cache.
GROUP_NUMBERS = 2**16


class Known(NamedTuple):
    """What the backward pass knows from the forward pass."""

    target: Tensor
    noise: Tensor
    class_weight: Tensor | None
    highest: Tensor
    log_weighed: Tensor
    kept: Tensor
    kept_weight: Tensor
    blocks: Tensor  # logits and masks of all blocks, or empty


def finish(sums: Sums, log_weighed: Tensor, settings: Settings) -> RowTerms:
    """Return the terms from the sums over all classes."""
    # The large numbers first: what is left of them is as large as the result, and its digits survive.
    nll = (sums.highest - sums.target_logit) + _over_samples(log_weighed) - math.log1p(settings.epsilon)
    smooth = torch.zeros_like(nll)
    if settings.smooth:
        smooth = _over_samples((log_weighed * sums.kept_weight - sums.kept_logit) / sums.kept)
    return RowTerms(nll, smooth, sums.kl, sums.entropy, sums.auxiliary)


def _over_samples(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.mean(0)


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
    compiled = compiled or _always_compiled
    one_block = fused(forward_block) if compiled else forward_block
    num_rows, num_classes, samples = len(features), len(maps[0]), settings.samples
    wide = wide_dtype(dtype)
    h = features.to(dtype)
    blocks = buffer(num_rows, num_classes, settings, wide, features.device)
    by_row, by_class = _hashes(noise, num_rows, num_classes, settings)
    groups, scratch = _groups(blocks, num_rows, settings, compiled)
    sums = [_nothing(features, wide, rows.stop - rows.start, samples) for rows in groups]
    for here, block in _walk(blocks, num_rows, num_classes, settings):
        _logits(h, maps, here, block)
        column = (target - here.start).unsqueeze(-1)
        for i, rows in enumerate(groups):
            o, a, r = block[:3, rows].unbind()
            masks = _masks_in(block, settings)[..., rows, :] if settings.keep else None
            drawn, sums[i] = one_block(
                o,
                a,
                r,
                _noise_of(noise, rows, here, by_row, by_class),
                column[rows],
                sums[i],
                class_weight[here] if class_weight is not None and settings.smooth else None,
                settings.temperature,
                settings.epsilon,
                settings.base_rate,
                settings.smooth,
                scratch.shaped(*o.shape),
                None if compiled else masks,
            )
            if masks is not None and compiled:
                masks.copy_(drawn)
    joined = Sums(*(torch.cat(parts, -1) for parts in zip(*sums, strict=True)))
    return joined, blocks if settings.keep else blocks[:0].clone()


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
    compiled = compiled or _always_compiled
    one_block = fused(backward_block) if compiled else backward_block
    num_rows, num_classes = len(features), len(maps[0])
    wide = wide_dtype(dtype)
    h = features.to(dtype)
    blocks = known.blocks if settings.keep else buffer(num_rows, num_classes, settings, wide, features.device)
    slopes = torch.empty(3 + settings.stop_parameters, num_rows * settings.block, dtype=wide, device=features.device)
    by_row, by_class = _hashes(known.noise, num_rows, num_classes, settings)
    groups, scratch = _groups(blocks, num_rows, settings, compiled)
    grad_h = torch.zeros_like(features, dtype=wide) if needed[0] else None
    found = [torch.empty_like(x) if need else None for x, need in zip(maps, needed[1:], strict=True)]
    on_softmax, on_spread = gradients.nll, None
    if settings.smooth:
        on_spread = gradients.smooth / known.kept / settings.samples
        on_softmax = on_softmax + gradients.smooth * known.kept_weight / known.kept
    on_softmax = on_softmax.expand(known.log_weighed.shape) / settings.samples

    for here, block in _walk(blocks, num_rows, num_classes, settings):
        if not settings.keep:
            _logits(h, maps, here, block)
        column = (known.target - here.start).unsqueeze(-1)
        on = slopes[:, : num_rows * block.shape[-1]].view(len(slopes), num_rows, block.shape[-1])
        for rows in groups:
            o, a, r = block[:3, rows].unbind()
            places = [*on[:, rows].unbind(), *(None,) * (4 - len(on))]
            result = one_block(
                o,
                a,
                r,
                _masks_in(block, settings)[..., rows, :] if settings.keep else None,
                None if settings.keep else _noise_of(known.noise, rows, here, by_row, by_class),
                column[rows],
                known.highest[rows],
                known.log_weighed[..., rows],
                on_softmax[..., rows],
                None if on_spread is None else on_spread[..., rows],
                RowTerms(*(x[rows] for x in gradients)),
                known.class_weight[here] if known.class_weight is not None and settings.smooth else None,
                settings.temperature,
                settings.epsilon,
                settings.base_rate,
                settings.mask_gradient,
                scratch.shaped(*o.shape),
                [None] * 4 if compiled else places,
            )
            for place, value in zip(places, result if compiled else (), strict=False):
                if place is not None:
                    place.copy_(value)
        for i in range(3):
            on_weight, on_bias, narrow = found[2 * i], found[2 * i + 1], on[i].to(dtype)
            if on_bias is not None:
                on_bias[here] = on[i].sum(0)
            if on_weight is not None and on_weight.dtype == dtype:
                torch.mm(narrow.t(), h, out=on_weight[here])
            elif on_weight is not None:
                on_weight[here] = torch.mm(narrow.t(), h)
            if grad_h is not None:
                if i == 1 and settings.stop_parameters:  # here the retain logits inside q do reach the features
                    narrow = on[1].add_(on[3]).to(dtype)
                weight = maps[2 * i][here].to(dtype)
                grad_h = grad_h.addmm_(narrow, weight) if dtype == wide else grad_h.add_(torch.mm(narrow, weight))
    return [None if grad_h is None else grad_h.to(features.dtype), *found]


def _nothing(like: Tensor, dtype: torch.dtype, num_rows: int, samples: int) -> Sums:
    """Return the sums over no classes."""
    none = like.new_zeros(num_rows, dtype=dtype)
    nones = none if samples == 1 else like.new_zeros(samples, num_rows, dtype=dtype)
    return Sums(torch.full_like(none, -torch.inf), nones, none, none, none, none, nones, nones, nones)


def _walk(blocks: Tensor, num_rows: int, num_classes: int, settings: Settings) -> Iterator[tuple[slice, Tensor]]:
    """Yield which classes a block has, and the memory for its o, a, r and, if they are kept, masks: each (N, width)."""
    parts = 3 + settings.samples if settings.keep else 3
    for i, start in enumerate(range(0, num_classes, settings.block)):
        width = min(settings.block, num_classes - start)
        flat = blocks[i if settings.keep else 0]
        yield slice(start, start + width), flat[: parts * num_rows * width].view(parts, num_rows, width)


def buffer(num_rows: int, num_classes: int, settings: Settings, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for the logits of all blocks with their masks, or for the logits of one."""
    parts, count = (3 + settings.samples, math.ceil(num_classes / settings.block)) if settings.keep else (3, 1)
    return torch.empty(count, parts * num_rows * settings.block, dtype=dtype, device=device)


def _groups(like: Tensor, num_rows: int, settings: Settings, compiled: bool) -> tuple[list[slice], Scratch]:
    """Return which rows to work on at a time, and memory to do it in."""
    if compiled:  # one pass over memory, whatever its size
        return [slice(0, num_rows)], Scratch()
    size = min(max(1, GROUP_NUMBERS // settings.block), max(1, num_rows))
    groups = [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)] or [slice(0, 0)]
    return groups, Scratch.like(like.new_empty(size, settings.block), settings.samples)


def _masks_in(block: Tensor, settings: Settings) -> Tensor:
    return block[3] if settings.samples == 1 else block[3:]


def _logits(h: Tensor, maps: Sequence[Tensor], here: slice, block: Tensor) -> None:
    """Put ``h W^T + b`` of the three maps, computed in the dtype of h, into the block."""
    for out, weight, bias in zip(block[:3], maps[0::2], maps[1::2], strict=True):
        weight, bias = weight[here].to(h.dtype), bias[here].to(h.dtype)
        if h.dtype == out.dtype:
            torch.addmm(bias, h, weight.t(), out=out)
        else:
            out.copy_(torch.addmm(bias, h, weight.t()))


def is_seed(noise: Tensor) -> bool:
    """Say whether this is a seed, and not the noise itself."""
    return not noise.is_floating_point()


def _hashes(noise: Tensor, num_rows: int, num_classes: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the hashes of rows and classes, from which each block makes its noise; nothing if it is there already."""
    if not is_seed(noise):
        return noise, noise
    by_row, by_class = hashes(noise, num_rows * settings.samples, settings.first_class, num_classes)
    return by_row if settings.samples == 1 else by_row.view(settings.samples, num_rows, 1), by_class


def _noise_of(noise: Tensor, rows: slice, here: slice, by_row: Tensor, by_class: Tensor) -> tuple[Tensor, ...]:
    return (by_row[..., rows, :], by_class[here].clone()) if is_seed(noise) else (noise[..., rows, here],)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(features: Tensor, maps: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype in which ``nn.Linear`` would compute here: that of autocast where it is on."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, (x.dtype for x in maps), features.dtype)


def compile_blocks(enabled: bool = True) -> None:
    """Compile the arithmetic of a block with ``torch.compile``, also where nobody compiles the rest.

    It needs a C++ compiler and most of a minute at the first step, and makes that arithmetic several times faster:
    worth it for large models trained for long. Where compiling fails, a warning says so and the plain form is used.

    >>> compile_blocks(False)
    """
    global _always_compiled
    _always_compiled = enabled


@functools.lru_cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
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
