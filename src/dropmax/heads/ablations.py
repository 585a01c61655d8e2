"""Heads that exist to answer a question about DropMax: which part of it does the work?

They are made by name like the others (``make_head("dropmax-unmasked", ...)``) but are not rows of the paper's table, so
they are not in :data:`dropmax.HEADS`. Use :class:`dropmax.DropMax` for anything but a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dropmax.checks import check_flag
from dropmax.errors import InvalidValue
from dropmax.functional import _wide, log_relaxed_mask, masked_nll
from dropmax.heads.base import Head
from dropmax.heads.dropmax import DropMax
from dropmax.objective import plain_terms

__all__ = ["DropMaxRelaxed", "DropMaxSoftmaxRetain", "DropMaxUnmasked"]


class DropMaxUnmasked(DropMax):
    """All terms of DropMax, but no masks: the likelihood is the plain softmax's.

    KL, entropy and auxiliary loss still train the retain and correction maps, and through them the features;
    the class logits never meet a mask. So what it gains over softmax comes from sharing the features, and what
    DropMax gains over it comes from the masks.

    Args:
        masked_prediction: predict with rho all the same (equation 15); otherwise as softmax does, in every mode.
        options: of :class:`dropmax.DropMax`; the likelihood stays "sampled", where sampling is left out.

    >>> head = DropMaxUnmasked(in_features=8, num_classes=3)
    >>> features = torch.randn(5, 8)
    >>> torch.equal(head(features), head.classifier(features))
    True
    >>> sorted(head.loss(features, torch.zeros(5, dtype=torch.long)).terms)
    ['auxiliary', 'cross_entropy', 'entropy', 'kl']
    """

    name = "dropmax-unmasked"

    def __init__(self, in_features: int, num_classes: int, *, masked_prediction: bool = False, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        check_flag("masked_prediction", masked_prediction)
        if self.likelihood != "sampled":
            raise InvalidValue(f"{self.name} has no masks: likelihood={self.likelihood!r} means nothing, leave it out")
        self.masked_prediction = masked_prediction

    @property
    def masked(self) -> bool:  # type: ignore[override]
        """Whether rho is used for predicting."""
        return self.masked_prediction

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return None: there are no masks to draw."""
        return None

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        """Return the class logits; with ``masked_prediction``, ``o + log rho``."""
        return super().prediction_logits(logits) if self.masked_prediction else logits["classifier"]

    def probabilities(self, logits: Mapping[str, Tensor], *args: Any, **options: Any) -> Tensor:
        """Return the softmax of the class logits; with ``masked_prediction``, what DropMax returns."""
        if self.masked_prediction:
            return super().probabilities(logits, *args, **options)
        return Head.probabilities(self, logits, *args, **options)

    def predictive_std(self, features: Tensor) -> Tensor:
        """Return zeros, or, with ``masked_prediction``, what DropMax returns."""
        return super().predictive_std(features) if self.masked_prediction else Head.predictive_std(self, features)

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the terms of DropMax with the cross entropy of softmax in place of the likelihood."""
        a, r = _wide(logits["retain"]), _wide(logits["correction"])
        stopped = _wide(logits.get("stopped", a.detach()))
        others = plain_terms(None, a, stopped, r, None, target, self.objective())
        return {"cross_entropy": self.cross_entropy(logits["classifier"], target), **others}


class DropMaxSoftmaxRetain(DropMax):
    """DropMax whose retain probabilities are the softmax probabilities themselves: ``rho = softmax(o)``.

    There is no map theta; the retain logits are ``a_k = log p_k - log(1 - p_k)`` with ``p = softmax(o)``, and KL and
    entropy train o through them. It answers whether a second view of the input is needed at all.

    >>> head = DropMaxSoftmaxRetain(in_features=8, num_classes=3)
    >>> features = torch.randn(5, 8)
    >>> torch.allclose(head.retain_probs(features), head.classifier(features).softmax(-1))
    True
    """

    name = "dropmax-softmax-retain"
    maps: ClassVar[dict[str, str]] = {"psi": "classifier", "phi": "correction"}
    separable = False  # the retain logit of a class depends on the logits of all

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        if self.stop_gradient != "logits":
            raise InvalidValue(
                f"{self.name} has no parameters theta of its own: stop_gradient={self.stop_gradient!r} "
                "means nothing here, use 'logits'"
            )

    def retain(self, features: Tensor) -> Tensor:  # type: ignore[override]  # a function where DropMax has a map
        """Return ``logit(softmax(o))``."""
        log_p = _wide(self.classifier(features)).log_softmax(-1)
        # log(1 - p) as log(-expm1(log p)) keeps its digits; a p that rounded to 1 counts as a little less.
        return log_p - torch.log(-torch.expm1(log_p.clamp(max=-torch.finfo(log_p.dtype).eps)))


class DropMaxRelaxed(DropMax):
    """DropMax with ``mask_gradient=False`` as it was before hard masks: relaxed masks, without a gradient.

    It answers whether drawing ``z ~ Bernoulli(q)`` in place of the relaxation of equation 6 costs accuracy.

    >>> head = DropMaxRelaxed(in_features=8, num_classes=3)
    >>> head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).total.shape
    torch.Size([])
    """

    name = "dropmax-relaxed"

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        if self.likelihood != "sampled" or self.mask_gradient:
            raise InvalidValue(
                f"{self.name} draws relaxed masks without a gradient: it needs likelihood='sampled' and "
                f"mask_gradient=False, got {self.likelihood!r} and {self.mask_gradient}"
            )

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the terms of DropMax with the likelihood of relaxed masks."""
        if noise is None:
            raise InvalidValue(f"{self.name} needs noise for its masks")
        o, a, r = (_wide(logits[name]) for name in ("classifier", "retain", "correction"))
        stopped = _wide(logits.get("stopped", a.detach()))
        log_mask = log_relaxed_mask((stopped + r).detach(), noise, self.temperature)
        nll = masked_nll(
            o,
            log_mask,
            target,
            epsilon=self.epsilon,
            label_smoothing=self.label_smoothing,
            class_weight=self.class_weight,
        )
        return {"cross_entropy": nll, **plain_terms(None, a, stopped, r, None, target, self.objective())}
