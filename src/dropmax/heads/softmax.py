"""The baseline."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dropmax.heads.base import Head


class Softmax(Head):
    """A linear map and a softmax, trained with cross entropy (equation 2).

    ``loss`` equals ``torch.nn.functional.cross_entropy(forward(features), target)``, class weights, label smoothing,
    ``ignore_index`` and soft labels included.

    >>> import torch
    >>> head = Softmax(in_features=8, num_classes=3)
    >>> head.predict_proba(torch.randn(5, 8)).shape
    torch.Size([5, 3])
    """

    name = "softmax"
    separable = True
    class_weighted = frozenset({"cross_entropy"})
    soft_targets = True

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropy of each row."""
        return {"cross_entropy": self.cross_entropy(logits["classifier"], target)}
