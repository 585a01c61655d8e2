"""The heads once more, in float64, from the paper's formulas: what ``test_numerics`` compares with.

Nothing of dropmax is used here. Everything is in log space and relative to the largest logit of a row, so that logits
of 1e30 cost no digits. Logits are (N, K), by the name of the map that computes them; a target is (N,).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.exact import naive

Logits = dict[str, Tensor]
MOST_MASKED = 7  #: classes for which sums over all masks are taken
WIDEST_SPREAD = 2.0**20  #: what dropmax.exact says of itself: a class further than this below the best one is put here


def at(x: Tensor, target: Tensor) -> Tensor:
    return x.gather(-1, target[:, None])[:, 0]


def put(x: Tensor, target: Tensor, value: float) -> Tensor:
    return x.scatter(-1, target[:, None], value)


def shifted(o: Tensor) -> Tensor:
    """Return the logits without what they have in common, so that small numbers can be added to large ones."""
    return o - o.amax(-1, keepdim=True)


def nll_of(o: Tensor, smoothing: float, target: Tensor, log_z: Tensor, spread: Tensor, weight: Tensor) -> Tensor:
    """Cross entropy of ``softmax(o + log_z)`` with the label spread by ``smoothing`` in proportion to ``spread``."""
    log_p = (shifted(o) + log_z).log_softmax(-1)
    nll = -at(log_p, target) * weight[target]
    if not smoothing:
        return nll
    spread = spread / spread.sum(-1, keepdim=True)
    of_kept = -log_p.where(spread > 0, 0.0)  # 0 * inf is 0 here
    return (1 - smoothing) * nll + smoothing * (spread * weight * of_kept).sum(-1)


def hard_log_mask(b: Tensor, u: Tensor, doubt: float) -> Tensor:
    """Return log z of z = 1 where u < sigmoid(b), else 0; NaN where rounding decides which."""
    g = b.sigmoid()
    return (u < g).double().log().masked_fill((u - g).abs() < doubt, math.nan)


def relaxed_log_mask(b: Tensor, u: Tensor, temperature: float, edge: float) -> Tensor:
    u = u.clamp(edge, 1 - edge)
    return logsigmoid((b + u.log() - (-u).log1p()) / temperature)


def kl(a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    rivals = b.sigmoid() * _difference(b, a) + (-b).sigmoid() * _difference(-b, -a)
    return put(rivals, target, 0.0).sum(-1) - logsigmoid(at(a, target))


def _difference(b: Tensor, a: Tensor) -> Tensor:
    """log sigmoid(b) - log sigmoid(a), without the digits that two large numbers lose."""
    return b.clamp_max(0) - a.clamp_max(0) - (-b.abs()).exp().log1p() + (-a.abs()).exp().log1p()


def entropy(a: Tensor) -> Tensor:
    size = a.abs()  # the entropy of a coin is that of its complement
    return ((-size).exp().log1p() + size * (-size).sigmoid()).sum(-1)


def auxiliary(r: Tensor, target: Tensor, shift: float = 0.0) -> Tensor:
    r = r - shift
    return -put(logsigmoid(-r), target, 0.0).sum(-1) - logsigmoid(at(r, target))


def sparsemax(o: Tensor) -> Tensor:
    ordered = shifted(o).sort(descending=True).values
    candidates = (ordered.cumsum(-1) - 1) / torch.arange(1, o.shape[-1] + 1)
    size = (ordered > candidates).sum(-1, keepdim=True)
    return (shifted(o) - candidates.gather(-1, size - 1)).clamp_min(0)


def sparsemax_loss(o: Tensor, target: Tensor, smoothing: float) -> Tensor:
    o, p, even = shifted(o), sparsemax(o), smoothing / o.shape[-1]
    y = put(torch.full_like(o, even), target, 1 - smoothing + even)
    y_o, p_o = ((x * o).where(x > 0, 0.0).sum(-1) for x in (y, p))
    return p_o - y_o + (y**2 - p**2).sum(-1) / 2


def softmax_retain_logits(o: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of rho = softmax(o); as documented, a rho of 1 counts as a little less."""
    log_p = o.log_softmax(-1).clamp_max(-torch.finfo(dtype).eps)
    return log_p - (-log_p.expm1()).log()


def terms_of(options: dict[str, Any], logits: Logits, target: Tensor, u: Tensor, dtype: torch.dtype) -> Logits:
    """Return each term of each row's loss, as ``Head.loss(reduction="none")`` should; ``options`` are its config()."""
    name, num_classes, smoothing = options["name"], options["num_classes"], options["label_smoothing"]
    o, even, ones = logits["classifier"], torch.ones_like(logits["classifier"]), torch.ones(num_classes).double()
    weight = ones if options["class_weight"] is None else torch.tensor(options["class_weight"], dtype=torch.float64)
    nll = functools.partial(nll_of, o, smoothing, target, spread=even, weight=weight)
    if name == "softmax":
        terms = {"cross_entropy": nll(0 * even)}
    elif name == "sparsemax":
        terms = {"cross_entropy": sparsemax_loss(o, target, smoothing) * weight[target]}
    elif name == "sigsoftmax":
        terms = {"cross_entropy": nll(logsigmoid(o))}
    elif name == "focal":
        log_p = o.log_softmax(-1)
        focal = (-log_p.expm1()) ** options["gamma"] * -log_p * weight
        terms = {"cross_entropy": (1 - smoothing) * at(focal, target) + smoothing * focal.mean(-1)}
    elif name == "online-label-smoothing":  # its soft labels start even, and class weights multiply the whole row
        terms = {
            "cross_entropy": nll(0 * even, weight=ones) * weight[target],
            "soft_labels": -o.log_softmax(-1).mean(-1),
        }
    elif name == "random-dropmax":
        kept = put((u < float(torch.tensor(options["retain"], dtype=dtype))).double(), target, 1.0)
        terms = {"cross_entropy": nll(kept.log(), spread=kept)}
    elif name == "sampled-softmax":
        sampled = math.floor(options["fraction"] * num_classes + 0.5) - (not options["target_extra"])
        rank = put(u, target, -1.0).argsort(stable=True).argsort(stable=True)
        kept = (rank < 1 + min(max(1, sampled), num_classes - 1)).double()
        terms = {"cross_entropy": nll(kept.log(), spread=kept)}
    else:
        terms = _attention_terms(options, logits, target, u, dtype, nll)
        if options.get("likelihood", "sampled") != "sampled":
            terms["cross_entropy"] = terms["cross_entropy"] * weight[target]
    return {k: v if k == "cross_entropy" else v * weight[target] for k, v in terms.items()}


def _attention_terms(
    options: dict[str, Any], logits: Logits, target: Tensor, u: Tensor, dtype: torch.dtype, nll: Callable[..., Tensor]
) -> Logits:
    o, name, likelihood = logits["classifier"], options["name"], options.get("likelihood", "sampled")
    a = softmax_retain_logits(o, dtype) if name == "dropmax-softmax-retain" else logits["retain"]
    if name.startswith("deterministic"):
        terms = {"cross_entropy": nll(logsigmoid(a))}
        return terms | ({"auxiliary": auxiliary(a, target)} if name == "deterministic-dropmax" else {})
    within_spread = shifted(o).clamp_min(-WIDEST_SPREAD)
    if likelihood == "marginal":
        return {"cross_entropy": -naive.naive_log_marginal(within_spread, a, target), "entropy": entropy(a)}
    b = a if name == "dropmax-qp" else (a + logits["correction"]).to(dtype).double()
    if name == "dropmax-unmasked":
        terms = {"cross_entropy": nll(torch.zeros_like(o))}
    elif likelihood == "exact":
        terms = {"cross_entropy": naive.naive_expected_nll(within_spread, b, target)}
    else:
        found = []
        for one in u if u.dim() == 3 else [u]:
            if options.get("mask_gradient", True) or name == "dropmax-relaxed":
                log_z = relaxed_log_mask(b, one, options["temperature"], torch.finfo(dtype).eps / 2)
            else:
                log_z = hard_log_mask(b, one, 4 * torch.finfo(dtype).eps)
            log_z = put(log_z, target, 0.0)
            with_epsilon = torch.logaddexp(log_z, torch.tensor(math.log(options["epsilon"]), dtype=torch.float64))
            found.append(nll(with_epsilon, spread=log_z.exp()))
        terms = {"cross_entropy": torch.stack(found).mean(0)}
    if name == "dropmax-qp":
        return terms | {"kl": -logsigmoid(at(a, target)), "entropy": entropy(a)}
    r, shift = logits["correction"], math.log(o.shape[-1] - 1) if options["prior_correction"] else 0.0
    return terms | {"kl": kl(a, a + r, target), "entropy": entropy(a), "auxiliary": auxiliary(r, target, shift)}


def prediction_of(name: str, mode: str, logits: Logits, u: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the probabilities that a head predicts; None where too many masks would have to be added up.

    ``u`` is the noise of the masks that the mode "mc" draws; where rounding decides whether a class is kept, the row
    is NaN.
    """
    o, a = logits["classifier"], logits["retain"]
    masked = name.startswith("dropmax") and name != "dropmax-unmasked"
    if name == "sparsemax":
        return sparsemax(o)
    if name == "dropmax-softmax-retain":
        a = softmax_retain_logits(o, dtype)
    if name == "sigsoftmax":
        return (shifted(o) + logsigmoid(o)).softmax(-1)
    if name.startswith("deterministic") or (masked and mode == "mean"):
        return (shifted(o) + logsigmoid(a)).softmax(-1)
    if not masked:
        return o.softmax(-1)
    if mode == "exact":
        return None if o.shape[-1] > MOST_MASKED else naive.naive_predictive(o, a)
    rho = a.sigmoid()
    kept = u < rho
    kept |= ~kept.any(-1, keepdim=True)
    p = o.where(kept, -math.inf).softmax(-1).mean(0)
    return p.masked_fill(((u - rho).abs() < 1e-6).any(-1).any(0)[:, None], math.nan)
