"""DropMax: a softmax that learns, for each input, which rival classes deserve attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax import exact
from dropmax.checks import check_choice, check_count, check_features, check_flag, check_target, check_weight
from dropmax.errors import InvalidValue
from dropmax.functional import _wide, mask_entropy
from dropmax.heads.base import keep_target
from dropmax.heads.loss import RowLosses
from dropmax.heads.masked import MaskedHead
from dropmax.heads.options import SharedOptions
from dropmax.linear import LowRankLinear, last_map
from dropmax.losses import losses, losses_of_logits
from dropmax.objective import LEAST_EPSILON, Options, plain_terms
from dropmax.walk import Maps, choose_block

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
        likelihood: how the first term is computed. ``"sampled"`` draws masks, as in the paper. ``"exact"``
            takes the expectation over all masks of q (:func:`dropmax.exact.expected_nll`): no relaxation, no
            temperature, no noise. ``"marginal"``, for study, does without q: it maximises the exact log p(y | x) plus
            the entropy, and has no KL and no auxiliary term.
        temperature: tau of the relaxed masks (equation 6), which only ``mask_gradient`` needs.
        samples: S, masks drawn for each row.
        stop_gradient: what ``stop`` in the posterior stops. ``"logits"`` (the authors' code) stops the whole retain
            logit; ``"parameters"`` (the paper's text) stops W_theta and b_theta only, so that a gradient still
            reaches the features.
        prior_correction: take the base rate log(K - 1) out of the auxiliary loss, see
            :func:`dropmax.functional.auxiliary`. The paper leaves it in, and r then answers with the base rate.
        mask_gradient: draw relaxed masks and let the likelihood's gradient reach q through them, as in the paper.
            Otherwise the masks are hard, z ~ Bernoulli(q), without a gradient, and r learns from the labels, not from
            what dropping rivals pays.
        kl_weight, entropy_weight: w of the two terms; None is min(1, 10 / K), the paper has 1.
        cross_entropy_weight, auxiliary_weight: weights of the other terms.
        epsilon: what is left of a dropped class.
        rank: of the retain and correction maps, ``a = V_a (U_a h) + b_a`` and ``r = V_r (U_r h) + b_r``: with d
            features and K classes, each costs rank (d + K) parameters and products in place of d K. None is full rank.
        chunk_classes: compute the loss block by block, this many classes at a time, without ever holding the logits of
            all classes (:mod:`dropmax.walk`): the same loss and gradients in memory of size batch x block, for more
            time, as the backward pass computes each block again. None uses blocks where the logits are large, and
            keeps gradients where they need less memory than the weights; 0 computes all classes at once. Needs
            ``likelihood="sampled"``.

    >>> import torch
    >>> head = DropMax(in_features=512, num_classes=100)
    >>> features, target = torch.randn(8, 512), torch.arange(8)
    >>> head(features).shape
    torch.Size([8, 100])
    >>> head.loss(features, target).total.backward()
    """

    name = "dropmax"
    maps: ClassVar[dict[str, str]] = {"psi": "classifier", "theta": "retain", "phi": "correction"}
    fused = True
    stops_gradient = True

    correction: nn.Linear | LowRankLinear

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
        rank: int | None = None,
        chunk_classes: int | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        masks = {"temperature": temperature, "epsilon": epsilon}
        super().__init__(in_features, num_classes, samples=samples, rank=rank, **masks, **shared)
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
        if chunk_classes and (reason := self.needs_all_classes()):
            raise InvalidValue(f"chunk_classes={chunk_classes} is not possible: {reason}")

    def posterior_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Return q(z | x, y) of equation 12: ``sigmoid(a + r)``, and 1 for the target."""
        check_features(features, self.in_features)
        target = check_target(target, features.shape[:-1], self.num_classes)
        b = _wide(self.retain(features)) + _wide(self.correction(features))
        return self.check_finite("posterior probabilities", keep_target(b.sigmoid(), target))

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return the shape of the noise behind the masks; None with an exact likelihood, which draws none."""
        return super().noise_shape(num_rows) if self.likelihood == "sampled" else None

    def term_weights(self) -> dict[str, float]:
        """Return the weight of each term in the total; that of the entropy is negative."""
        full = min(1.0, FULL_WEIGHT_CLASSES / self.num_classes)
        return {
            "cross_entropy": self.cross_entropy_weight,
            "kl": full if self.kl_weight is None else self.kl_weight,
            "entropy": -(full if self.entropy_weight is None else self.entropy_weight),
            "auxiliary": self.auxiliary_weight,
        }

    def objective(self) -> Options:
        """Return the options of the objective (:mod:`dropmax.objective`)."""
        base_rate = math.log(self.num_classes - 1) if self.prior_correction else 0.0
        return super().objective()._replace(base_rate=base_rate, mask_gradient=self.mask_gradient)

    # --- the plain form ------------------------------------------------------------------------------------------

    def logits(self, rows: Tensor) -> dict[str, Tensor]:
        """Return o, a and r and, where ``stop_gradient="parameters"``, a as a function of the features alone."""
        names = ("classifier", "retain") if self.likelihood == "marginal" else ("classifier", "retain", "correction")
        found = {name: getattr(self, name)(rows) for name in names}
        if self.stop_gradient == "parameters" and "correction" in found:
            fixed = {name: p.detach() for name, p in self.retain.named_parameters()}
            found["stopped"] = torch.func.functional_call(self.retain, fixed, (rows,))
        return found

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return likelihood, KL, entropy and auxiliary loss of each row, by the equations as they are printed."""
        o, a = _wide(logits["classifier"]), _wide(logits["retain"])
        if self.likelihood == "marginal":
            return {
                "cross_entropy": self._weighted(-exact.log_marginal(o, a, target), target),
                "entropy": mask_entropy(a),
            }
        r, stopped = _wide(logits["correction"]), _wide(logits.get("stopped", a.detach()))
        options = self.objective()
        if self.likelihood == "exact":
            nll = self._expected_nll(o, stopped + r, target)
            return {"cross_entropy": nll, **plain_terms(None, a, stopped, r, noise, target, options)}
        return plain_terms(o, a, stopped, r, noise, target, options, self.class_weight)

    def _expected_nll(self, o: Tensor, b: Tensor, target: Tensor) -> Tensor:
        return self._weighted(exact.expected_nll(o, b if self.mask_gradient else b.detach(), target), target)

    def _weighted(self, nll: Tensor, target: Tensor) -> Tensor:
        return nll if self.class_weight is None else nll * self.class_weight.to(nll.dtype)[target]

    # --- the fast form -------------------------------------------------------------------------------------------

    def row_losses(self, rows: Tensor, target: Tensor, noise: Tensor | None) -> RowLosses:
        """Return the loss of each row, block by block where that is possible."""
        maps = None if self.needs_all_classes() else self._last_maps(rows)
        if maps is None or not self.can_fuse(*(x for x in maps if x is not None)):
            return super().row_losses(rows, target, noise)
        given = self.rows_of(target, noise, rows)
        options, size = self.objective(), self._block_size(rows)
        keep = not self.chunk_classes  # who asks for blocks asks for little memory
        if self.partition is None:
            return self.report(losses(maps, given, options, block_size=size, keep=keep), target)
        mine, group = self.partition.classes, self.partition.group
        part = functools.partial(losses, group=group, first_class=mine.start, all_classes=self.num_classes)
        return self.report(part(maps, given.of_classes(mine), options, block_size=size, keep=keep), target)

    def row_losses_of(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> RowLosses:
        """Return the loss of each row from its logits."""
        if self.likelihood == "marginal" or not self.can_fuse(*logits.values()):
            return super().row_losses_of(logits, target, noise)
        o, a, r = (_wide(logits[name]) for name in ("classifier", "retain", "correction"))
        stopped = _wide(logits["stopped"]) if "stopped" in logits else None
        sampled = self.likelihood == "sampled"
        found = losses_of_logits(
            o if sampled else None, a, stopped, r, self.rows_of(target, noise if sampled else o, o), self.objective()
        )
        if sampled:
            return self.report(found, target)
        nll = self._expected_nll(o, (a.detach() if stopped is None else stopped) + r, target)
        rest = self.report(found, target)
        total = torch.add(rest.total, nll, alpha=self.cross_entropy_weight)
        return RowLosses(total, rest.names, lambda: {**rest.terms(), "cross_entropy": nll})

    def _last_maps(self, rows: Tensor) -> Maps | None:
        """Return the last linear maps of o, a and r; None where one of them is something else."""
        o, a, r = (last_map(getattr(self, name), rows) for name in self.maps.values())
        if o is None or a is None or r is None:
            return None
        b_inputs = None
        if self.stop_gradient == "parameters":
            b_inputs = rows
            if isinstance(self.retain, LowRankLinear):
                b_inputs = F.linear(rows, self.retain.down.weight.detach())
        return Maps(*_tensors(o), *_tensors(a), *_tensors(r), b_inputs)

    def _block_size(self, rows: Tensor) -> int:
        """Return how many classes to compute at a time."""
        mine = self.num_classes if self.partition is None else self.classifier.out_features
        if self.chunk_classes:
            return min(self.chunk_classes, mine)
        size = 3 * len(rows) * mine * _wide(rows).element_size()
        return mine if self.chunk_classes == 0 or size <= WHOLE_BYTES else choose_block(len(rows), mine)

    def needs_all_classes(self) -> str:
        """Return why the loss of this head needs the logits of all classes at once; empty if it does not."""
        if self.likelihood != "sampled":
            return f"likelihood={self.likelihood!r} integrates over the masks of all classes together, use 'sampled'"
        if self.epsilon < LEAST_EPSILON:
            return f"epsilon={self.epsilon} would underflow, use at least {LEAST_EPSILON}"
        if not self.fused or len(self.maps) != 3:
            return f"the loss of {self.name!r} has no blocked form"
        return ""


def _tensors(found: tuple[Tensor, nn.Linear]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, linear = found
    return inputs, linear.weight, linear.bias
