"""DropMax whose posterior sees the label, which the paper considers and rejects for its number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dropmax.checks import check_features, check_target
from dropmax.errors import InvalidValue
from dropmax.functional import _wide
from dropmax.heads.base import keep_target
from dropmax.heads.dropmax import DropMax

__all__ = ["DropMaxLabelPosterior"]


class DropMaxLabelPosterior(DropMax):
    """DropMax with a posterior that sees [h; y], the features and the one-hot label (section 4.2 of the paper).

    A linear map of [h; y] is one of h plus one row of a K x K matrix E, so that for a rival k::

        q(z_k = 1 | x, y = t) = sigmoid(stop(a_k) + r_k + E[t, k]),       r = W_phi h + b_phi

    E is part of phi, and starts at 0, where this is DropMax. It learns from KL and the likelihood; without
    ``mask_gradient`` only from KL, which pulls q towards p. The auxiliary loss sees r alone: ``r + E[t]`` would have to
    predict a label that is its own input. With ``auxiliary_weight=0``, q is the plain linear map of [h; y] that the
    paper has in mind.

    Args:
        options: of :class:`dropmax.DropMax`.

    >>> import torch
    >>> head = DropMaxLabelPosterior(in_features=8, num_classes=3)
    >>> head.correction.label.shape
    torch.Size([3, 3])
    >>> head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).total.backward()
    """

    name = "dropmax-label-posterior"
    packable = False  # the loss needs E, which is not among the logits of a row

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        if self.likelihood == "marginal":
            raise InvalidValue(f"{self.name} is about q, which likelihood='marginal' does without: use 'sampled'")
        label = self.classifier.weight.new_zeros(num_classes, num_classes)
        self.correction.register_parameter("label", nn.Parameter(label))

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the terms of DropMax with E[t] added to the posterior's logits."""
        stopped = logits.get("stopped", logits["retain"].detach())
        return super().terms({**logits, "stopped": _wide(stopped) + self.of_label(target)}, target, noise)

    def of_label(self, target: Tensor) -> Tensor:
        """Return E[t], what the label adds to the posterior's logits."""
        return _wide(self.correction.get_parameter("label"))[target]

    def posterior_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Return q(z | x, y): ``sigmoid(a + r + E[t])``, and 1 for the target."""
        check_features(features, self.in_features)
        target = check_target(target, features.shape[:-1], self.num_classes)
        b = _wide(self.retain(features)) + _wide(self.correction(features)) + self.of_label(target)
        return self.check_finite("posterior probabilities", keep_target(b.sigmoid(), target))

    def shard(self, mesh: Any) -> Any:
        """Refuse: every rank would need the columns of E for its own classes."""
        raise InvalidValue(f"{self.name} cannot be sharded: use dropmax")
