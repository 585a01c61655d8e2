"""DropMax with a prior on theta, which the paper tried in place of the entropy and found ineffective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropmax.checks import check_choice, check_weight
from dropmax.errors import InvalidValue
from dropmax.heads.base import Loss
from dropmax.heads.dropmax import DropMax

__all__ = ["DropMaxThetaPrior"]

PRIORS = ("gaussian", "laplace")


class DropMaxThetaPrior(DropMax):
    """DropMax with a zero-mean prior on the retain map's weights and biases (section 4.4 of the paper).

    The loss of a row gets one more term, ``theta_prior_weight`` times the negative logarithm of the prior's density
    without its constant: ``||theta||^2 / 2`` for ``"gaussian"``, ``sum |theta|`` for ``"laplace"``. The paper asks
    whether a prior keeps p(z | x) from collapsing into q as the entropy does: ``entropy_weight=0`` answers that.

    Args:
        theta_prior: ``"gaussian"`` or ``"laplace"``.
        theta_prior_weight: per row; one over the variance times the number of training examples, for the Gaussian.
        options: of :class:`dropmax.DropMax`.

    >>> head = DropMaxThetaPrior(in_features=8, num_classes=3, theta_prior="laplace", theta_prior_weight=0.1)
    >>> sorted(head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).terms)
    ['auxiliary', 'cross_entropy', 'entropy', 'kl', 'theta_prior']
    """

    name = "dropmax-theta-prior"
    packable = False  # the prior is of parameters, which a packed loss does not see

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        theta_prior: str = "gaussian",
        theta_prior_weight: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        check_choice("theta_prior", theta_prior, PRIORS)
        check_weight("theta_prior_weight", theta_prior_weight)
        self.theta_prior = theta_prior
        self.theta_prior_weight = theta_prior_weight

    def loss(self, features: Tensor, target: Tensor, *, reduction: str = "mean", noise: Tensor | None = None) -> Loss:
        """Return DropMax's loss with the prior added to that of each row that counts."""
        total, terms = super().loss(features, target, reduction=reduction, noise=noise)
        counts = target != self.ignore_index
        penalty = self.theta_penalty().to(total.dtype)
        if reduction == "mean":
            penalty = penalty * counts.any()
        else:
            penalty = penalty * (counts if reduction == "none" else counts.sum())
        return Loss(total + self.theta_prior_weight * penalty, {**terms, "theta_prior": penalty.detach()})

    def theta_penalty(self) -> Tensor:
        """Return ``||theta||^2 / 2`` or ``sum |theta|``, over the weights and biases of the retain map."""
        parts = [p.float() for p in self.retain.parameters()]
        if self.theta_prior == "gaussian":
            return torch.stack([p.square().sum() for p in parts]).sum() / 2
        return torch.stack([p.abs().sum() for p in parts]).sum()

    def shard(self, mesh: Any) -> Any:
        """Refuse: each rank would see the prior of its own classes only."""
        raise InvalidValue(
            f"{self.name} cannot be sharded: use dropmax, with weight decay on theta for a Gaussian prior"
        )
