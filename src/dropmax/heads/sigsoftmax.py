"""Softmax with one more factor: a sigmoid of the same logit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dropmax.functional import _wide, mean_logits
from dropmax.heads.base import Head


class SigSoftmax(Head):
    """A linear map and ``p_k ~ exp(o_k) sigmoid(o_k)``, trained with cross entropy (Kanai et al., NeurIPS 2018).

    That is the softmax of ``o + log sigmoid(o)``: DropMax's mean prediction with the class logits as retain logits. The
    log-probabilities of many inputs can then span more dimensions than the features have.

    >>> import torch
    >>> head = SigSoftmax(in_features=8, num_classes=3)
    >>> o = head.classifier(features := torch.randn(5, 8))
    >>> p = o.exp() * o.sigmoid()
    >>> torch.allclose(head.predict_proba(features), p / p.sum(-1, keepdim=True))
    True
    """

    name = "sigsoftmax"
    separable = True
    class_weighted = frozenset({"cross_entropy"})

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        """Return ``o + log sigmoid(o)``."""
        return mean_logits(logits["classifier"], logits["classifier"])

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropy of each row."""
        wide = {"classifier": _wide(logits["classifier"])}
        return {"cross_entropy": self.cross_entropy(self.prediction_logits(wide), target)}
