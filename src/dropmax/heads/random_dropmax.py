"""Class dropout without learning: the control experiment for DropMax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from dropmax.checks import check_probability
from dropmax.errors import InvalidValue
from dropmax.heads.base import Head, keep_target
from dropmax.heads.options import SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RandomDropMax(Head):
    """Drops each rival with a fixed probability while training; predicts with the whole softmax.

    Equation 3 with one rho for all classes and inputs, the target always kept. As rho is the same everywhere,
    ``softmax(o + log rho)`` is plain softmax.

    Args:
        retain: the probability that a rival stays, the paper's rho in {0.2, 0.4, 0.6}.

    >>> import torch
    >>> head = RandomDropMax(in_features=8, num_classes=3, retain=0.2)
    >>> head.retain_probs(torch.randn(1, 8))
    tensor([[0.2000, 0.2000, 0.2000]])
    """

    name = "random-dropmax"
    separable = True
    class_weighted = frozenset({"cross_entropy"})

    def __init__(
        self, in_features: int, num_classes: int, *, retain: float = 0.4, **shared: Unpack[SharedOptions]
    ) -> None:
        super().__init__(in_features, num_classes, **shared)
        check_probability("retain", retain)
        self.retain = retain

    def noise_shape(self, num_rows: int) -> tuple[int, ...]:
        """Return (N, K): one uniform number per class."""
        return (num_rows, self.num_classes)

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropy of each row over the classes kept."""
        if noise is None:
            raise InvalidValue(f"{self.name} needs noise of shape {self.noise_shape(len(target))}")
        kept = keep_target((noise < self.retain).to(noise.dtype), target)
        return {"cross_entropy": self.subset_cross_entropy(logits["classifier"], target, kept)}

    def retain_probs(self, features: Tensor) -> Tensor:
        """Return the fixed retain probability for every class."""
        return super().retain_probs(features) * self.retain
