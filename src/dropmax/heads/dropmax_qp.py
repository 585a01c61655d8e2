"""DropMax whose posterior ignores the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from dropmax.checks import check_weight
from dropmax.functional import _wide
from dropmax.heads.loss import RowLosses
from dropmax.heads.masked import MaskedHead
from dropmax.heads.options import SharedOptions
from dropmax.losses import losses_of_logits
from dropmax.objective import Options, plain_terms

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
        rank: of the retain map, see :class:`dropmax.DropMax`.

    >>> import torch
    >>> head = DropMaxQP(in_features=8, num_classes=3, gamma=0.1)
    >>> sorted(head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).terms)
    ['cross_entropy', 'entropy', 'kl']
    """

    name = "dropmax-qp"
    maps: ClassVar[dict[str, str]] = {"psi": "classifier", "theta": "retain"}
    fused = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        gamma: float = 1.0,
        temperature: float = 0.1,
        samples: int = 1,
        epsilon: float = 1e-20,
        rank: int | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        masks = {"temperature": temperature, "epsilon": epsilon}
        super().__init__(in_features, num_classes, samples=samples, rank=rank, **masks, **shared)
        check_weight("gamma", gamma)
        self.gamma = gamma

    def term_weights(self) -> dict[str, float]:
        """Return the weight of each term; that of the entropy is ``-gamma``."""
        return {"cross_entropy": 1.0, "kl": 1.0, "entropy": -self.gamma}

    def objective(self) -> Options:
        """Return the options of the objective: relaxed masks, through which rho learns from the likelihood."""
        return super().objective()._replace(mask_gradient=True)

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return likelihood, ``-log rho_t`` and entropy of each row."""
        o, a = _wide(logits["classifier"]), _wide(logits["retain"])
        return plain_terms(o, a, a, None, noise, target, self.objective(), self.class_weight)

    def row_losses_of(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> RowLosses:
        """Return the loss of each row, by the fast form."""
        if not self.can_fuse(*logits.values()):
            return super().row_losses_of(logits, target, noise)
        o, a = _wide(logits["classifier"]), _wide(logits["retain"])
        return self.report(losses_of_logits(o, a, None, None, self.rows_of(target, noise, o), self.objective()), target)
