"""Attention over the classes that is computed, not sampled: with labels (DropMax) and without (Attention)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from dropmax.checks import check_features
from dropmax.functional import _from_highest, _wide, auxiliary, mean_logits
from dropmax.heads.base import Head


class DeterministicAttention(Head):
    """Softmax with a learned sigmoid gate on each class: ``p(y) ~ rho(x) exp(o)``.

    Trained by the cross entropy of exactly that, so training and prediction are one function. The paper adds a small
    epsilon to rho; in log space nothing can vanish, and none is needed.

    >>> import torch
    >>> head = DeterministicAttention(in_features=8, num_classes=3)
    >>> bool(head.retain_probs(torch.randn(5, 8)).lt(1).all())
    True
    """

    name = "deterministic-attention"
    maps: ClassVar[dict[str, str]] = {"psi": "classifier", "theta": "retain"}
    predicts_with = ("classifier", "retain")
    separable = True
    class_weighted = frozenset({"cross_entropy"})

    retain: nn.Linear

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        """Return ``o + log rho``."""
        return mean_logits(logits["classifier"], logits["retain"])

    def retain_probs(self, features: Tensor) -> Tensor:
        """Return the gate rho(x) = sigmoid(W h + b)."""
        check_features(features, self.in_features)
        return self.check_finite("retain probabilities", _wide(self.retain(features)).sigmoid())

    def probabilities(self, logits: Mapping[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Return the softmax of ``o + log rho``, in every mode."""
        return _gated(logits).softmax(-1)

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropy of ``rho exp(o)`` of each row."""
        return {"cross_entropy": self.cross_entropy(_gated(logits), target)}


class DeterministicDropMax(DeterministicAttention):
    """Deterministic attention whose gate is also taught the label, by a binary cross entropy of rho for each class.

    The loss is the cross entropy of ``rho exp(o)`` plus, as the term ``auxiliary``, ``-sum_k [y log rho +
    (1 - y) log(1 - rho)]``.

    >>> import torch
    >>> head = DeterministicDropMax(in_features=8, num_classes=3)
    >>> sorted(head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).terms)
    ['auxiliary', 'cross_entropy']
    """

    name = "deterministic-dropmax"

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropy and the binary cross entropy of the gate of each row."""
        return {**super().terms(logits, target, noise), "auxiliary": auxiliary(logits["retain"], target)}


def _gated(logits: Mapping[str, Tensor]) -> Tensor:
    """Return ``o - max o + log rho`` in float32 at least: neither the dtype nor large logits may cost it digits."""
    return mean_logits(_from_highest(_wide(logits["classifier"])), logits["retain"])
