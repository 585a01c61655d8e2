"""Predictions for many classes: the best few of each row, in memory of size batch x block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax.checks import check_choice, check_count, check_features
from dropmax.errors import InvalidValue
from dropmax.functional import _wide
from dropmax.linear import Partition, last_map
from dropmax.walk import choose_block

if TYPE_CHECKING:
    from dropmax.heads.base import Head

__all__ = ["TopK", "topk"]

#: Predictions hold about this many numbers at a time, beside what they return.
BLOCK_NUMBERS = 2**22

#: How :meth:`dropmax.Head.predict_proba` treats the masks.
MODES = ("mean", "mc", "exact")


class TopK(NamedTuple):
    """The k most probable classes of each row, best first."""

    values: Tensor
    indices: Tensor


@torch.no_grad()
def topk(
    head: Head,
    features: Tensor,
    k: int,
    mode: str = "mean",
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> TopK:
    """Return the k most probable classes ``(..., k)`` of each row: ``values``, probabilities, and ``indices``.

    Equals ``head.predict_proba(features, mode).topk(k)`` without ever holding probabilities of all rows and classes:
    the mean prediction is computed for a block of classes at a time where the head allows it (:attr:`Head.separable`),
    and everything else for a block of rows. As with ``torch.topk``, the order of classes with equal probability is not
    defined. There is no gradient.

    >>> from dropmax import DropMax
    >>> values, indices = topk(DropMax(in_features=4, num_classes=9), torch.randn(2, 4), k=3)
    >>> indices.shape
    torch.Size([2, 3])
    """
    check_choice("mode", mode, MODES)
    check_count("samples", samples)
    check_count("k", k)
    check_features(features, head.in_features)
    if k > head.num_classes:
        raise InvalidValue(f"k must be at most the number of classes, {head.num_classes}, got {k}")
    rows = features.reshape(-1, head.in_features)
    large = len(rows) * head.num_classes > BLOCK_NUMBERS or head.partition is not None
    best = _by_classes(head, rows, k) if mode == "mean" and large and head.separable else None
    if best is None:
        blocks = row_blocks(len(rows), head.num_classes) if len(rows) else [slice(0, 0)]
        parts = [head.probabilities(head.prediction_maps(rows[x]), mode, samples, generator).topk(k) for x in blocks]
        best = TopK(torch.cat([p.values for p in parts]), torch.cat([p.indices for p in parts]))
    head.check_finite("probabilities", best.values)
    return TopK(*(x.reshape(*features.shape[:-1], k) for x in best))


def row_blocks(num_rows: int, num_classes: int) -> Iterator[slice]:
    """Yield blocks of rows of about BLOCK_NUMBERS numbers."""
    size = max(1, BLOCK_NUMBERS // max(1, num_classes))
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _by_classes(head: Head, rows: Tensor, k: int) -> TopK | None:
    """Walk over blocks of classes; None where a map of the head is not a plain linear one."""
    maps: dict[str, tuple[Tensor, nn.Linear]] = {}
    for name in head.predicts_with:
        found = last_map(getattr(head, name), rows)
        if found is None:
            return None
        maps[name] = found
    mine = head.num_classes if head.partition is None else head.partition.classes.stop - head.partition.classes.start
    size = choose_block(len(rows), mine)
    best: _Best | None = None
    for start in range(0, mine, size):
        here = slice(start, min(start + size, mine))
        parts = {name: _wide(F.linear(x, linear.weight[here], linear.bias[here])) for name, (x, linear) in maps.items()}
        logits = head.prediction_logits(parts)
        values, indices = logits.topk(min(k, logits.shape[-1]))
        found_here = _Best(values, indices + here.start, logits.logsumexp(-1))
        best = found_here if best is None else best.joined(found_here, k)
    if best is None:
        return None
    if head.partition is not None:
        best = best.of_all_ranks(head.partition, k)
    return TopK((best.values - best.normaliser.unsqueeze(-1)).exp(), best.indices)


class _Best(NamedTuple):
    """The largest logits of some classes (N, k), which they are, and the log-sum-exp of all of them (N,)."""

    values: Tensor
    indices: Tensor
    normaliser: Tensor

    def joined(self, other: _Best, k: int) -> _Best:
        values, indices = (torch.cat(pair, -1) for pair in zip(self[:2], other[:2], strict=True))
        values, order = values.topk(min(k, values.shape[-1]))
        return _Best(values, indices.gather(-1, order), torch.logaddexp(self.normaliser, other.normaliser))

    def of_all_ranks(self, partition: Partition, k: int) -> _Best:
        short = min(k, max(partition.sizes)) - self.values.shape[-1]  # messages must have one size
        values = F.pad(self.values, (0, short), value=-torch.inf)
        indices = F.pad(self.indices + partition.classes.start, (0, short))
        parts = [partition.everybodys(x) for x in (values, indices, self.normaliser)]
        every = [_Best(*part) for part in zip(*parts, strict=True)]
        best = every[0]
        for other in every[1:]:
            best = best.joined(other, k)
        return best
