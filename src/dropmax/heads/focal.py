"""The focal loss: examples that are already classified well count less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmax.checks import check_weight
from dropmax.functional import _wide
from dropmax.heads.base import Head
from dropmax.heads.options import SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Focal(Head):
    """A linear map and a softmax, trained with the focal loss (Lin et al., 2017).

    The loss of a row is ``sum_k y_k w_k (1 - p_k)^gamma (-log p_k)`` with ``p = softmax(o)``, y the label distribution
    (one-hot without label smoothing) and w the class weights, the paper's alpha. ``gamma=0`` is cross entropy.

    Args:
        gamma: how quickly examples stop to count as their probability grows; 2 in the paper's experiments.

    >>> head = Focal(in_features=8, num_classes=3, gamma=2.0)
    >>> head.loss(torch.zeros(1, 8), torch.tensor([0]), reduction="none").total.shape
    torch.Size([1])
    """

    name = "focal"
    separable = True
    class_weighted = frozenset({"cross_entropy"})

    def __init__(
        self, in_features: int, num_classes: int, *, gamma: float = 2.0, **shared: Unpack[SharedOptions]
    ) -> None:
        super().__init__(in_features, num_classes, **shared)
        check_weight("gamma", gamma)
        self.gamma = gamma

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the focal loss of each row, named as the other heads' cross entropy, so that logs line up."""
        log_p = _wide(logits["classifier"]).log_softmax(-1)
        index = target.unsqueeze(-1)
        row = self._focal(log_p.gather(-1, index), index).squeeze(-1)
        if self.label_smoothing:
            even = self._focal(log_p, torch.arange(self.num_classes, device=log_p.device)).mean(-1)
            row = (1 - self.label_smoothing) * row + self.label_smoothing * even
        return {"cross_entropy": row}

    def _focal(self, log_p: Tensor, classes: Tensor) -> Tensor:
        """Return ``w (1 - p)^gamma (-log p)`` of some classes."""
        # Where p rounds to 1, the slope of a power below 1 would be infinite, and infinity times zero is NaN.
        rest = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny)
        found = rest**self.gamma * -log_p
        return found if self.class_weight is None else found * self.class_weight.to(found.dtype)[classes]
