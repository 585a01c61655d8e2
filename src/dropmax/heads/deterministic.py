"""Attention over the classes that is computed, not sampled: with labels (DropMax) and without (Attention)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
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

    retain: nn.Linear

    def forward(self, features: Tensor) -> Tensor:
        """Return ``o + log rho``."""
        check_features(features, self.in_features)
        return self._finite("logits", mean_logits(self.classifier(features), self.retain(features)))

    def retain_probs(self, features: Tensor) -> Tensor:
        """Return the gate rho(x) = sigmoid(W h + b)."""
        check_features(features, self.in_features)
        return self._finite("retain probabilities", _wide(self.retain(features)).sigmoid())

    def _probabilities(self, features: Tensor, mode: str, samples: int, generator: torch.Generator | None) -> Tensor:
        check_features(features, self.in_features)
        return _gated(self.classifier(features), self.retain(features)).softmax(-1)

    def _terms_of_logits(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        return {"cross_entropy": self._cross_entropy(_gated(logits["classifier"], logits["retain"]), target)}


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

    def _terms_of_logits(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        o, a = logits["classifier"], logits["retain"]
        return {
            "cross_entropy": self._cross_entropy(_gated(o, a), target),
            "auxiliary": auxiliary(a, target),
        }

    def _coefficients(self) -> dict[str, float]:
        return {"cross_entropy": 1.0, "auxiliary": 1.0}


def _gated(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return ``o - max o + log rho`` in float32 at least: neither the dtype nor large logits may cost it digits."""
    return mean_logits(_from_highest(_wide(logits)), retain_logits)
