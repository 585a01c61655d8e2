"""Softmax over a random subset of the classes while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmax.checks import check_probability
from dropmax.heads.base import Head
from dropmax.heads.options import SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SampledSoftmax(Head):
    """Trains against the target and a uniform sample of its rivals; predicts with the whole softmax.

    With uniform sampling the log-Q correction of Bengio & Senécal is the same for every class and cancels.

    Args:
        fraction: share of the K - 1 rivals drawn, without replacement and afresh for each row; at least one is.

    >>> head = SampledSoftmax(in_features=8, num_classes=11, fraction=0.2)
    >>> head.num_sampled
    2
    >>> head.loss(torch.randn(5, 8), torch.arange(5)).total.shape
    torch.Size([])
    """

    name = "sampled-softmax"

    def __init__(
        self, in_features: int, num_classes: int, *, fraction: float = 0.4, **shared: Unpack[SharedOptions]
    ) -> None:
        super().__init__(in_features, num_classes, **shared)
        check_probability("fraction", fraction, one=True)
        self.fraction = fraction
        self.num_sampled = max(1, round(fraction * (num_classes - 1)))

    def noise_shape(self, num_rows: int) -> tuple[int, ...]:
        """Return (N, K): a lot for each class."""
        return (num_rows, self.num_classes)

    def _terms_of_logits(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        # The classes with the smallest noise are a uniform sample; -1 makes the target one of them.
        lottery = noise.scatter(-1, target.unsqueeze(-1), -1.0)
        drawn = lottery.topk(1 + self.num_sampled, dim=-1, largest=False, sorted=False).indices
        kept = torch.zeros_like(noise).scatter(-1, drawn, 1.0)
        return {"cross_entropy": self._subset_cross_entropy(logits["classifier"], target, kept)}
