"""Sparse probabilities: most classes get exactly zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dropmax.functional import sparsemax, sparsemax_loss
from dropmax.heads.base import Head


class Sparsemax(Head):
    """A linear map and the sparsemax projection, trained with the sparsemax loss (Martins & Astudillo, 2016).

    Its probabilities are ``sparsemax(forward(features))``, not the softmax of it. Label smoothing spreads the label
    evenly; a class weight multiplies the row.

    >>> import torch
    >>> head = Sparsemax(in_features=8, num_classes=100)
    >>> bool((head.predict_proba(5 * torch.randn(4, 8)) == 0).any())
    True
    """

    name = "sparsemax"

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the sparsemax loss of each row, named as the other heads' cross entropy, so that logs line up."""
        return {"cross_entropy": sparsemax_loss(logits["classifier"], target, label_smoothing=self.label_smoothing)}

    def probabilities(self, logits: Mapping[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Return the sparsemax of the logits, in every mode."""
        return sparsemax(logits["classifier"])
