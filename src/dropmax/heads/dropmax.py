"""DropMax: a softmax that learns, for each input, which rival classes deserve attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax import exact
from dropmax.blocked import KEPT_BYTES, RowTerms, Settings, blocked_terms, choose_block
from dropmax.checks import (
    check_choice,
    check_count,
    check_features,
    check_flag,
    check_target,
    check_weight,
    is_transformed,
)
from dropmax.errors import InvalidValue
from dropmax.functional import _wide, mask_entropy
from dropmax.heads.base import keep_target
from dropmax.heads.masked import MaskedHead
from dropmax.heads.options import SharedOptions
from dropmax.objective import LEAST_EPSILON, regularisers

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Options that make the objective of :class:`DropMax` the one printed in the paper.
PAPER_OBJECTIVE: dict[str, bool | float] = {
    "prior_correction": False,
    "mask_gradient": True,
    "kl_weight": 1.0,
    "entropy_weight": 1.0,
}

#: KL and entropy are sums over the classes. Up to this many classes they count in full, as in the paper; beyond, they
#: are scaled down so that they never weigh more than this many classes would.
FULL_WEIGHT_CLASSES = 10

#: Without ``chunk_classes``, the loss is computed block by block where the logits of a batch would need more than this.
WHOLE_BYTES = 2**25


class DropMax(MaskedHead):
    """The adaptive variational softmax of Lee et al. (NeurIPS 2018), equations 4 to 13.

    Three linear maps of the feature vector h: class logits o (psi), retain logits a (theta) with
    ``rho = sigmoid(a)``, and the correction r (phi) that turns the prior p(z | x) = Bernoulli(rho) into the posterior
    q(z | x, y) = Bernoulli(sigmoid(stop(a) + r)) with the target's mask fixed at 1. The loss of a row is::

        -log p(y | x, z)  +  w (KL[q || p]  -  H[p])  +  auxiliary(r),      z ~ q,      w = min(1, 10 / K)

    The objective printed in the paper has w = 1, leaves the base rate in the auxiliary loss, and lets the likelihood's
    gradient reach q through the masks: ``DropMax(..., **PAPER_OBJECTIVE)``. With ten classes the two are much the
    same; with a hundred the printed one lets go of the input (docs/many-classes.md says why, with measurements).

    Args:
        likelihood: how the first term is computed. ``"sampled"`` draws relaxed masks, as in the paper. ``"exact"``
            takes the expectation over all masks of q (:func:`dropmax.exact.expected_nll`): no relaxation, no
            temperature, no noise. ``"marginal"``, for study, does without q: it maximises the exact log p(y | x) plus
            the entropy, and has no KL and no auxiliary term.
        temperature: tau of the relaxed masks (equation 6).
        samples: S, masks drawn for each row.
        stop_gradient: what ``stop`` in the posterior stops. ``"logits"`` (the authors' code) stops the whole retain
            logit; ``"parameters"`` (the paper's text) stops W_theta and b_theta only, so that a gradient still
            reaches the features.
        prior_correction: take the base rate log(K - 1) out of the auxiliary loss, see
            :func:`dropmax.functional.auxiliary`. The paper leaves it in, and r then answers with the base rate.
        mask_gradient: let the likelihood's gradient reach q through the relaxed masks, as in the paper. Otherwise the
            masks are drawn from q without a gradient, and r learns from the labels, not from what dropping rivals pays.
        kl_weight, entropy_weight: w of the two terms; None is min(1, 10 / K), the paper has 1.
        cross_entropy_weight, auxiliary_weight: weights of the other terms.
        epsilon: what is left of a dropped class.
        chunk_classes: compute the loss block by block, this many classes at a time, without ever holding the logits of
            all classes (:mod:`dropmax.blocked`): the same loss and gradients in memory of size batch x block. None
            decides by the size of the logits, 0 never does. Needs ``likelihood="sampled"``.

    >>> import torch
    >>> head = DropMax(in_features=512, num_classes=100)
    >>> features, target = torch.randn(8, 512), torch.arange(8)
    >>> head(features).shape
    torch.Size([8, 100])
    >>> head.loss(features, target).total.backward()
    """

    name = "dropmax"
    maps: ClassVar[dict[str, str]] = {"psi": "classifier", "theta": "retain", "phi": "correction"}

    correction: nn.Linear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        likelihood: str = "sampled",
        temperature: float = 0.1,
        samples: int = 1,
        stop_gradient: str = "logits",
        prior_correction: bool = True,
        mask_gradient: bool = False,
        cross_entropy_weight: float = 1.0,
        kl_weight: float | None = None,
        entropy_weight: float | None = None,
        auxiliary_weight: float = 1.0,
        epsilon: float = 1e-20,
        chunk_classes: int | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(in_features, num_classes, temperature=temperature, samples=samples, epsilon=epsilon, **shared)
        check_choice("likelihood", likelihood, ("sampled", "exact", "marginal"))
        check_choice("stop_gradient", stop_gradient, ("logits", "parameters"))
        check_flag("prior_correction", prior_correction)
        check_flag("mask_gradient", mask_gradient)
        check_weight("cross_entropy_weight", cross_entropy_weight)
        if kl_weight is not None:
            check_weight("kl_weight", kl_weight)
        if entropy_weight is not None:
            check_weight("entropy_weight", entropy_weight)
        check_weight("auxiliary_weight", auxiliary_weight)
        if likelihood != "sampled" and self.label_smoothing:
            raise InvalidValue(
                f"label_smoothing={self.label_smoothing} needs likelihood='sampled', not {likelihood!r}: spread "
                "over the retained classes of all masks at once, it has no closed form"
            )
        if chunk_classes is not None:
            check_count("chunk_classes", chunk_classes, least=0)
        self.chunk_classes = chunk_classes
        self.likelihood = likelihood
        self.stop_gradient = stop_gradient
        self.prior_correction = prior_correction
        self.mask_gradient = mask_gradient
        self.cross_entropy_weight = cross_entropy_weight
        self.kl_weight = kl_weight
        self.entropy_weight = entropy_weight
        self.auxiliary_weight = auxiliary_weight
        if chunk_classes and self._why_whole() is not None:
            raise InvalidValue(f"chunk_classes={chunk_classes} is not possible: {self._why_whole()}")

    def posterior_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Return q(z | x, y) of equation 12: ``sigmoid(a + r)``, and 1 for the target."""
        check_features(features, self.in_features)
        target = check_target(target, features.shape[:-1], self.num_classes)
        b = _wide(self.retain(features)) + _wide(self.correction(features))
        return self._finite("posterior probabilities", keep_target(b.sigmoid(), target))

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return the shape of the noise behind the masks; None with an exact likelihood, which draws none."""
        return super().noise_shape(num_rows) if self.likelihood == "sampled" else None

    def _coefficients(self) -> dict[str, float]:
        full = min(1.0, FULL_WEIGHT_CLASSES / self.num_classes)
        return {
            "cross_entropy": self.cross_entropy_weight,
            "kl": full if self.kl_weight is None else self.kl_weight,
            "entropy": -(full if self.entropy_weight is None else self.entropy_weight),
            "auxiliary": self.auxiliary_weight,
        }

    def _loss_inputs(self) -> tuple[str, ...]:
        if self.likelihood == "marginal":
            return ("classifier", "retain")
        of_features = () if self.stop_gradient == "logits" else ("_retain_logits_of_features_only",)
        return ("classifier", "retain", "correction", *of_features)

    # --- block by block ------------------------------------------------------------------------------------------

    def _row_terms(
        self, rows: Tensor, target: Tensor, noise: Tensor | None, batch_shape: Sequence[int]
    ) -> dict[str, Tensor]:
        block = self._block_size(rows)
        if not block:
            return super()._row_terms(rows, target, noise, batch_shape)
        seed_or_noise = self._seed(rows.device) if noise is None else self._noise(rows, noise, batch_shape)
        linear = [getattr(self, name) for name in self.maps.values()]
        settings = self._block_settings(rows, block)
        if self._shards is not None:
            from dropmax.sharding import sharded_terms

            terms = sharded_terms(rows, linear, target, seed_or_noise, settings, self.class_weight)
        else:
            maps = [p for x in linear for p in (x.weight, x.bias)]
            terms = blocked_terms(rows, maps, target, seed_or_noise, settings, self.class_weight)
        return self._named_terms(terms, target)

    def _block_size(self, rows: Tensor) -> int:
        """Return how many classes to compute at a time, 0 for all of them with the plain equations."""
        if self.chunk_classes == 0 or self._why_whole() is not None:
            return 0
        linear = [getattr(self, name) for name in self.maps.values()]
        kind = nn.Linear if self._shards is None else type(self._shards)
        if any(type(x) is not kind or x.bias is None for x in linear):  # somebody's adapter or parametrisation
            return 0
        if any(is_transformed(x) for x in (rows, *(p for x in linear for p in x.parameters()))):
            return 0
        if self.chunk_classes:
            return min(self.chunk_classes, self.num_classes)
        size = 3 * len(rows) * self.num_classes * _wide(rows).element_size()
        if size <= WHOLE_BYTES and self._shards is None:
            return 0
        return choose_block(len(rows), self.num_classes)

    def _block_settings(self, rows: Tensor, block: int) -> Settings:
        size = (3 + self.samples) * len(rows) * self.num_classes * _wide(rows).element_size()
        return Settings(
            block=block,
            keep=torch.is_grad_enabled() and size <= KEPT_BYTES,
            temperature=self.temperature,
            epsilon=self.epsilon,
            samples=self.samples,
            smooth=self.label_smoothing > 0,
            base_rate=math.log(self.num_classes - 1) if self.prior_correction else 0.0,
            mask_gradient=self.mask_gradient,
            stop_parameters=self.stop_gradient == "parameters",
        )

    def _why_whole(self) -> str | None:
        """Return why the loss of this head needs the logits of all classes at once; None if it does not."""
        if self.likelihood != "sampled":
            return f"likelihood={self.likelihood!r} integrates over the masks of all classes together, use 'sampled'"
        if self.epsilon < LEAST_EPSILON:
            return f"epsilon={self.epsilon} would underflow, use at least {LEAST_EPSILON}"
        if type(self)._terms_of_logits is not DropMax._terms_of_logits or len(self.maps) != 3:
            return f"the loss of {self.name!r} has no blocked form"
        return None

    def _named_terms(self, terms: RowTerms, target: Tensor) -> dict[str, Tensor]:
        cross_entropy = self._class_weighted(terms.nll, target)
        if self.label_smoothing:
            cross_entropy = (1 - self.label_smoothing) * cross_entropy + self.label_smoothing * terms.smooth
        return {
            "cross_entropy": cross_entropy,
            "kl": terms.kl,
            "entropy": terms.entropy,
            "auxiliary": terms.auxiliary,
        }

    # --- from whole logits ---------------------------------------------------------------------------------------

    def _terms_of_logits(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor) -> dict[str, Tensor]:
        o, a = _wide(logits["classifier"]), _wide(logits["retain"])
        if self.likelihood == "marginal":
            nll = -exact.log_marginal(o, a, target)
            return {"cross_entropy": self._class_weighted(nll, target), "entropy": mask_entropy(a)}
        r = _wide(logits["correction"])
        stopped = a.detach() if self.stop_gradient == "logits" else _wide(logits["_retain_logits_of_features_only"])
        b = stopped + r
        if not self.mask_gradient:
            b = b.detach()
        if self.likelihood == "exact":
            nll = self._class_weighted(exact.expected_nll(o, b, target), target)
        else:
            nll = self._sampled_nll(o, b, noise, target)
        others = regularisers(a, stopped, r, target, prior_correction=self.prior_correction)
        return {"cross_entropy": nll, **others._asdict()}

    def _retain_logits_of_features_only(self, rows: Tensor) -> Tensor:
        return _wide(F.linear(rows, self.retain.weight.detach(), self.retain.bias.detach()))
