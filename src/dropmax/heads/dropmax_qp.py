"""DropMax whose posterior ignores the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor

from dropmax.checks import check_weight
from dropmax.functional import _wide, mask_entropy
from dropmax.heads.masked import MaskedHead
from dropmax.heads.options import SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DropMaxQP(MaskedHead):
    """DropMax (q = p): masks are drawn from the prior p(z | x), only the target's is fixed at 1 (Figure 2a).

    Then ``KL[q || p] = -log rho_t``; there is no auxiliary term, and the entropy is scaled by gamma:
    ``loss = nll - log rho_t - gamma H``.

    Args:
        gamma: weight of the entropy, {1, 0.1, 0.01} in the paper.
        temperature: of the relaxed masks.
        samples: S, masks drawn for each row.
        epsilon: what is left of a dropped class.

    >>> import torch
    >>> head = DropMaxQP(in_features=8, num_classes=3, gamma=0.1)
    >>> sorted(head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).terms)
    ['cross_entropy', 'entropy', 'kl']
    """

    name = "dropmax-qp"
    maps: ClassVar[dict[str, str]] = {"psi": "classifier", "theta": "retain"}

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        gamma: float = 1.0,
        temperature: float = 0.1,
        samples: int = 1,
        epsilon: float = 1e-20,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(in_features, num_classes, temperature=temperature, samples=samples, epsilon=epsilon, **shared)
        check_weight("gamma", gamma)
        self.gamma = gamma

    def _coefficients(self) -> dict[str, float]:
        return {"cross_entropy": 1.0, "kl": 1.0, "entropy": -self.gamma}

    def _terms_of_logits(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        o, a = _wide(logits["classifier"]), _wide(logits["retain"])
        return {
            "cross_entropy": self._sampled_nll(o, a, noise, target),
            "kl": -F.logsigmoid(a.gather(-1, target.unsqueeze(-1)).squeeze(-1)),
            "entropy": mask_entropy(a),
        }
