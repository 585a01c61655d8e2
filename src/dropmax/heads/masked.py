"""What the heads with learned random masks share: their prior p(z | x) and the ways to predict with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax import exact
from dropmax.checks import (
    check_count,
    check_features,
    check_positive,
    check_probability,
    is_transformed,
    values_are_readable,
)
from dropmax.functional import _from_highest, _wide, mean_logits
from dropmax.heads.base import Head
from dropmax.heads.loss import RowLosses
from dropmax.heads.options import SharedOptions
from dropmax.linear import LowRankLinear
from dropmax.losses import RowResults
from dropmax.objective import GROUP_NUMBERS, LEAST_EPSILON, Options, entropy
from dropmax.walk import Rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Up to this many uniform numbers torch.rand is faster than the hash, which more are made by, block by block.
SMALL_NOISE = 2**14

#: Monte Carlo works on this many numbers at once: enough to be fast, small enough for a laptop.
_MC_BLOCK = 2**22


#: Where rho leaves less than this of the softmax, its logarithm is taken.
_LEAST_KEPT = 1e-3


class MaskedHead(Head):
    """A head whose class masks are Bernoulli(rho(x)) with ``rho(x) = sigmoid(W_theta h + b_theta)`` (equation 4)."""

    predicts_with = ("classifier", "retain")
    separable = True
    masked = True
    class_weighted = frozenset({"cross_entropy"})

    retain: nn.Linear | LowRankLinear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        temperature: float = 0.1,
        samples: int = 1,
        epsilon: float = 1e-20,
        rank: int | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        ranks = {group: rank for group in self.maps if group != "psi"}
        super().__init__(in_features, num_classes, ranks=ranks, **shared)
        check_positive("temperature", temperature)
        check_count("samples", samples)
        check_probability("epsilon", epsilon)
        self.temperature = temperature
        self.samples = samples
        self.epsilon = epsilon
        self.rank = rank

    def noise_shape(self, num_rows: int) -> tuple[int, ...] | None:
        """Return (N, K), or (S, N, K) for S > 1 masks per row."""
        rows = (num_rows, self.num_classes)
        return rows if self.samples == 1 else (self.samples, *rows)

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        """Return ``o + log rho``: their softmax is the mean prediction p(y | x, z = rho(x)) of equation 15."""
        return mean_logits(logits["classifier"], logits["retain"])

    def probabilities(
        self,
        logits: Mapping[str, Tensor],
        mode: str = "mean",
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return p(y | x) with the mean of the masks, ``samples`` masks drawn, or all of them."""
        o, a = _wide(logits["classifier"]), _wide(logits["retain"])
        if mode == "mean":
            return _mean_probabilities(o, a)
        return monte_carlo(o, a, samples, generator) if mode == "mc" else exact.predictive(o, a)

    def predictive_std(self, features: Tensor) -> Tensor:
        """Return the exact standard deviation of ``p(y | x, z)`` over the masks (:func:`dropmax.exact.variance`)."""
        logits = self.prediction_maps(features)
        return self.check_finite("the deviations", exact.variance(logits["classifier"], logits["retain"]).sqrt())

    def retain_probs(self, features: Tensor) -> Tensor:
        """Return rho(x): how much each class deserves attention."""
        check_features(features, self.in_features)
        return self.check_finite("retain probabilities", _wide(self.retain(features)).sigmoid())

    # --- the fast form of the loss -------------------------------------------------------------------------------

    def objective(self) -> Options:
        """Return the options of the objective (:mod:`dropmax.objective`)."""
        weights = self.term_weights()
        return Options(
            temperature=self.temperature,
            epsilon=self.epsilon,
            samples=self.samples,
            label_smoothing=self.label_smoothing,
            cross_entropy_weight=weights.get("cross_entropy", 1.0),
            kl_weight=weights.get("kl", 1.0),
            entropy_weight=-weights.get("entropy", -1.0),
            auxiliary_weight=weights.get("auxiliary", 1.0),
        )

    def can_fuse(self, *tensors: Tensor) -> bool:
        """Say whether the fast form of the loss can be used: not inside torch.func, nor where epsilon underflows."""
        return self.fused and self.epsilon >= LEAST_EPSILON and not is_transformed(*tensors)

    def rows_of(self, target: Tensor, noise: Tensor | None, like: Tensor) -> Rows:
        """Return what the fast form needs beside logits; large noise is words, from which blocks make their own."""
        class_weight = row_weight = None
        if self.class_weight is not None and self.label_smoothing:  # else a factor of the whole row
            class_weight = self.class_weight.to(_wide(like).dtype)
            row_weight = class_weight[target]
        if noise is None:
            shape = self.noise_shape(len(target)) or (0,)
            noise = self.draw_noise(None, like) if math.prod(shape) <= SMALL_NOISE else None
            noise = self.draw_words(shape, like.device) if noise is None else noise
        return Rows(target, noise, class_weight, row_weight)

    def report(self, found: RowResults, target: Tensor) -> RowLosses:
        """Return the loss of each row from the results of the fast form; its terms are computed on first access."""
        weight = None if self.class_weight is None else self.class_weight.to(found.total.dtype)[target]
        total = found.total
        if weight is not None and not self.label_smoothing:
            total = total * weight

        def terms() -> dict[str, Tensor]:
            a = found.retain_logits
            h = entropy(a, a.sigmoid()) if a.numel() else found.entropy
            kl = found.kl_less_entropy + h
            if "auxiliary" not in names and a.numel():  # q = p: all but the target's part cancels
                kl = -F.logsigmoid(a.gather(-1, target.unsqueeze(-1))).squeeze(-1)
            rest = {"kl": kl, "entropy": h, "auxiliary": found.auxiliary}
            named = {"cross_entropy": found.cross_entropy, **{k: v for k, v in rest.items() if k in names}}
            if weight is None:
                return named
            done = {"cross_entropy"} if self.label_smoothing else set()
            return {k: v if k in done else v * weight for k, v in named.items()}

        names = tuple(self.term_weights())
        return RowLosses(total, names, terms)


def _mean_probabilities(o: Tensor, a: Tensor) -> Tensor:
    """Return the softmax of :func:`mean_logits`, without the digits that large logits cost."""
    if torch.is_grad_enabled() or not values_are_readable(o):
        return mean_logits(_from_highest(o), a).softmax(-1)
    # rho softmax(o) over its sum needs no logarithm; a few rows at a time, which stay in the cache.
    found, size = o.new_empty(o.shape), max(1, GROUP_NUMBERS // o.shape[-1])
    rows, retain_rows, places = (x.reshape(-1, o.shape[-1]) for x in (o, a, found))
    for start in range(0, len(rows), size):
        some_o, some_a, out = (x[start : start + size] for x in (rows, retain_rows, places))
        kept = torch.softmax(some_o, -1, out=out).mul_(some_a.sigmoid()).sum(-1, keepdim=True)
        out.div_(kept)
        low = kept.squeeze(-1) < _LEAST_KEPT
        if low.any():  # products that underflowed may be missing from the sum
            out[low] = mean_logits(_from_highest(some_o[low]), some_a[low]).softmax(-1)
    return found


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
        _, probs = sampled(logits, rho, min(block, samples - start), generator)
        total += probs.sum(0)
    return total / samples


def sampled(
    logits: Tensor, retain: Tensor, samples: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``samples`` masks that keep each class with probability ``retain``, and the prediction under each.

    Both have shape (S, ..., K). Where a mask keeps nothing, the prediction is the whole softmax.

    >>> kept, probs = sampled(torch.zeros(3), torch.tensor([1.0, 1.0, 0.0]), 1)
    >>> kept.tolist(), probs.tolist()
    ([[True, True, False]], [[0.5, 0.5, 0.0]])
    """
    size = (samples, *logits.shape)
    kept = torch.rand(size, dtype=retain.dtype, device=retain.device, generator=generator) < retain
    used = kept | ~kept.any(-1, keepdim=True)
    return kept, logits.masked_fill(~used, -torch.inf).softmax(-1)
