"""What the two heads with learned random masks share: their prior p(z | x) and the ways to predict with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax import exact
from dropmax.checks import check_count, check_features, check_positive, check_probability, is_traced
from dropmax.functional import _from_highest, _wide, mean_logits
from dropmax.heads.base import Head
from dropmax.heads.options import SharedOptions
from dropmax.objective import sampled_nll
from dropmax.topk import BLOCK_NUMBERS, linear_part, row_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Monte Carlo works on this many numbers at once: enough to be fast, small enough for a laptop.
_MC_BLOCK = 2**22


class MaskedHead(Head):
    """A head whose class masks are Bernoulli(rho(x)) with ``rho(x) = sigmoid(W_theta h + b_theta)`` (equation 4).

    >>> from dropmax import DropMax
    >>> issubclass(DropMax, MaskedHead)
    True
    """

    retain: nn.Linear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        temperature: float = 0.1,
        samples: int = 1,
        epsilon: float = 1e-20,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(in_features, num_classes, **shared)
        check_positive("temperature", temperature)
        check_count("samples", samples)
        check_probability("epsilon", epsilon)
        self.temperature = temperature
        self.samples = samples
        self.epsilon = epsilon

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return (N, K), or (S, N, K) for S > 1 masks a row."""
        rows = (num_rows, self.num_classes)
        return rows if self.samples == 1 else (self.samples, *rows)

    def _sampled_nll(self, o: Tensor, mask_logits: Tensor, noise: Tensor, target: Tensor) -> Tensor:
        return sampled_nll(
            o,
            mask_logits,
            noise,
            target,
            temperature=self.temperature,
            epsilon=self.epsilon,
            label_smoothing=self.label_smoothing,
            class_weight=self.class_weight,
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return ``o + log rho``: their softmax is the mean prediction p(y | x, z = rho(x)) of equation 15."""
        check_features(features, self.in_features)
        return self._finite("logits", mean_logits(self.classifier(features), self.retain(features)))

    def _logits_of_classes(self, rows: Tensor, here: slice) -> Tensor | None:
        own = type(self).forward is MaskedHead.forward and type(self)._probabilities is MaskedHead._probabilities
        if not own or not isinstance(self.retain, nn.Linear):
            return None
        o, a = linear_part(self.classifier, rows, here), linear_part(self.retain, rows, here)
        return mean_logits(_wide(o), _wide(a))

    def _probabilities(self, features: Tensor, mode: str, samples: int, generator: torch.Generator | None) -> Tensor:
        check_features(features, self.in_features)
        rows = features.reshape(-1, self.in_features)
        if torch.is_grad_enabled() or is_traced(features) or len(rows) * self.num_classes <= BLOCK_NUMBERS:
            return self._all_probabilities(features, mode, samples, generator)
        # Nothing of size batch x classes but what is returned.
        found = _wide(rows).new_empty(len(rows), self.num_classes)
        for here in row_blocks(len(rows), self.num_classes):
            found[here] = self._all_probabilities(rows[here], mode, samples, generator)
        return found.view(*features.shape[:-1], self.num_classes)

    def _all_probabilities(
        self, features: Tensor, mode: str, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        if mode == "mean" and type(self).forward is not MaskedHead.forward:
            return super()._probabilities(features, mode, samples, generator)
        o, a = _wide(self.classifier(features)), _wide(self.retain(features))
        if mode == "mean":
            return _mean_probabilities(o, a)
        return monte_carlo(o, a, samples, generator) if mode == "mc" else exact.predictive(o, a)

    def predictive_std(self, features: Tensor) -> Tensor:
        """Return the exact standard deviation of ``p(y | x, z)`` over the masks (:func:`dropmax.exact.variance`)."""
        check_features(features, self.in_features)
        return self._finite("the deviations", exact.variance(self.classifier(features), self.retain(features)).sqrt())

    def retain_probs(self, features: Tensor) -> Tensor:
        """Return rho(x): how much each class deserves attention."""
        check_features(features, self.in_features)
        return self._finite("retain probabilities", _wide(self.retain(features)).sigmoid())


def _mean_probabilities(o: Tensor, a: Tensor) -> Tensor:
    """Return the softmax of :func:`mean_logits`, without the digits that large logits cost."""
    if torch.is_grad_enabled() or is_traced(o):
        return mean_logits(_from_highest(o), a).softmax(-1)
    log_rho = F.logsigmoid(a)
    logits = _from_highest(o).add_(log_rho)
    return torch.softmax(logits, -1, out=log_rho)  # finding memory takes as long as filling it


def monte_carlo(
    logits: Tensor, retain_logits: Tensor, samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Average ``softmax`` over ``samples`` sets of classes, each kept with probability ``sigmoid(retain_logits)``.

    >>> o = torch.zeros(1, 4)
    >>> monte_carlo(o, torch.full_like(o, 50.0), samples=3)  # every class kept, every time
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    rho = retain_logits.sigmoid()
    total = torch.zeros_like(logits)
    block = max(1, _MC_BLOCK // max(1, logits.numel()))
    for start in range(0, samples, block):
        size = (min(block, samples - start), *logits.shape)
        kept = torch.rand(size, dtype=rho.dtype, device=rho.device, generator=generator) < rho
        kept |= ~kept.any(-1, keepdim=True)  # nothing kept: the whole softmax
        total += logits.masked_fill(~kept, -torch.inf).softmax(-1).sum(0)
    return total / samples
