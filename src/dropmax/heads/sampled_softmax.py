"""Softmax over a random subset of the classes while training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmax.checks import check_flag, check_probability
from dropmax.errors import InvalidValue
from dropmax.heads.base import Head
from dropmax.heads.options import SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SampledSoftmax(Head):
    """Trains against a uniform sample of the classes with the target among them; predicts with the whole softmax.

    With uniform sampling the log-Q correction of Bengio & Senécal is the same for every class and cancels.

    Args:
        fraction: share of all K classes that take part, drawn without replacement, separately for each row; at least
            the target and one rival do. The paper tunes it over 0.2, 0.4 and 0.6 "of total classes, while the target
            class is always selected".
        target_extra: the other reading of that sentence, which is also what TensorFlow's ``num_sampled`` means: the
            share counts rivals, and the target comes on top. Otherwise the target is one of the sampled classes.

    >>> head = SampledSoftmax(in_features=8, num_classes=10, fraction=0.4)
    >>> head.num_rivals  # with the target, four classes
    3
    >>> head.loss(torch.randn(5, 8), torch.arange(5)).total.shape
    torch.Size([])
    """

    name = "sampled-softmax"
    separable = True
    class_weighted = frozenset({"cross_entropy"})

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        fraction: float = 0.4,
        target_extra: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **shared)
        check_probability("fraction", fraction, one=True)
        check_flag("target_extra", target_extra)
        self.fraction = fraction
        self.target_extra = target_extra
        sampled = math.floor(fraction * num_classes + 0.5)  # round(2.5) would be 2
        self.num_rivals = min(max(1, sampled - (not target_extra)), num_classes - 1)

    def noise_shape(self, num_rows: int) -> tuple[int, ...]:
        """Return (N, K): one random number per class."""
        return (num_rows, self.num_classes)

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropy of each row over the classes drawn."""
        if noise is None:
            raise InvalidValue(f"{self.name} needs noise of shape {self.noise_shape(len(target))}")
        # The classes with the smallest noise are a uniform sample; -1 makes the target one of them.
        lottery = noise.scatter(-1, target.unsqueeze(-1), -1.0)
        drawn = lottery.topk(1 + self.num_rivals, dim=-1, largest=False, sorted=False).indices
        kept = torch.zeros_like(noise).scatter(-1, drawn, 1.0)
        return {"cross_entropy": self.subset_cross_entropy(logits["classifier"], target, kept)}
