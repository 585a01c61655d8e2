"""The heads once more, in numpy and float64, from the paper's formulas: what ``test_numerics`` compares with.

Nothing of dropmax is used here. Everything is in log space and relative to the largest logit of a row, so that logits
of 1e30 cost no digits. Arrays are (N, K); a target is (N,).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.exact import naive

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
#: o, a and r of some rows, under the names of the maps that compute them.
Logits = dict[str, Array]


def log_sigmoid(x: Array) -> Array:
    return -np.logaddexp(0.0, -x)


def sigmoid(x: Array) -> Array:
    return np.exp(log_sigmoid(x))


def at(x: Array, target: Indices) -> Array:
    return np.take_along_axis(x, target[:, None], -1)[:, 0]


def put(x: Array, target: Indices, value: float) -> Array:
    x = x.copy()
    np.put_along_axis(x, target[:, None], value, -1)
    return x


def log_softmax(x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def nll_of(o: Array, log_z: Array, target: Indices, smoothing: float, spread: Array, weight: Array) -> Array:
    """Cross entropy of ``softmax(o + log_z)`` with the label spread by ``smoothing`` in proportion to ``spread``."""
    # o and log_z are added only after o has lost what it has in common with the others.
    log_p = log_softmax((o - o.max(-1, keepdims=True)) + log_z)
    nll = -at(log_p, target) * weight[target]
    if not smoothing:
        return nll
    spread = spread / spread.sum(-1, keepdims=True)
    of_kept = -np.where(spread > 0, log_p, 0.0)  # 0 * inf is 0 here
    return (1 - smoothing) * nll + smoothing * (spread * weight * of_kept).sum(-1)


def hard_log_mask(b: Array, u: Array, doubt: float) -> Array:
    """Return log z of z = 1 where u < sigmoid(b), else 0; NaN where rounding decides which."""
    g = np.exp(log_sigmoid(b))
    with np.errstate(divide="ignore"):
        log_z = np.log((u < g).astype(np.float64))
    return np.where(np.abs(u - g) < doubt, np.nan, log_z)


def relaxed_log_mask(b: Array, u: Array, temperature: float, edge: float) -> Array:
    u = np.clip(u, edge, 1 - edge)
    return log_sigmoid((b + np.log(u) - np.log1p(-u)) / temperature)


def kl(a: Array, b: Array, target: Indices) -> Array:
    g, not_g = sigmoid(b), sigmoid(-b)
    rivals = g * _difference(b, a) + not_g * _difference(-b, -a)
    return put(rivals, target, 0.0).sum(-1) - log_sigmoid(at(a, target))


def _difference(b: Array, a: Array) -> Array:
    """log sigmoid(b) - log sigmoid(a), without the digits that two large numbers lose."""
    return np.minimum(b, 0) - np.minimum(a, 0) - np.log1p(np.exp(-np.abs(b))) + np.log1p(np.exp(-np.abs(a)))


def entropy(a: Array) -> Array:
    size = np.abs(a)  # the entropy of a coin is that of its complement
    return (np.log1p(np.exp(-size)) + size * sigmoid(-size)).sum(-1)


def auxiliary(r: Array, target: Indices, shift: float = 0.0) -> Array:
    r = r - shift
    return put(np.logaddexp(0.0, r), target, 0.0).sum(-1) + np.logaddexp(0.0, -at(r, target))


def sparsemax(o: Array) -> Array:
    shifted = o - o.max(-1, keepdims=True)
    ordered = -np.sort(-shifted, -1)
    candidates = (np.cumsum(ordered, -1) - 1) / np.arange(1, o.shape[-1] + 1)
    size = (ordered > candidates).sum(-1, keepdims=True)
    return np.maximum(shifted - np.take_along_axis(candidates, size - 1, -1), 0)


def sparsemax_loss(o: Array, target: Indices, smoothing: float) -> Array:
    o = o - o.max(-1, keepdims=True)
    p = sparsemax(o)
    y = put(np.full_like(o, smoothing / o.shape[-1]), target, 1 - smoothing + smoothing / o.shape[-1])
    y_o = (np.where(y > 0, y * o, 0.0)).sum(-1)
    return np.where(p > 0, p * o, 0.0).sum(-1) - y_o + (y**2 - p**2).sum(-1) / 2


# --- over all masks: the naive twins of dropmax.exact ------------------------------------------------------------

WIDEST_SPREAD = 2.0**20  #: what dropmax.exact says of itself: a class further than this below the best one is put here


def within_spread(o: Array) -> Array:
    return np.maximum(o - o.max(-1, keepdims=True), -WIDEST_SPREAD)


def over_masks(function: Callable[..., Tensor], *arrays: Array | Indices) -> Array:
    found: Array = function(*(torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)).numpy()
    return found


# --- the terms of each head --------------------------------------------------------------------------------------


def terms_of(
    options: dict[str, Any], logits: Logits, target: Indices, u: Array, dtype: np.dtype[Any]
) -> dict[str, Array]:
    """Return each term of each row's loss, as ``Head.loss(reduction="none")`` should; ``options`` are its config()."""
    name, num_classes, smoothing = options["name"], options["num_classes"], options["label_smoothing"]
    o, even = logits["classifier"], np.ones_like(logits["classifier"])
    weight = np.ones(num_classes) if options["class_weight"] is None else np.asarray(options["class_weight"], float)

    def nll(log_z: Array, spread: Array = even, weight: Array = weight) -> Array:
        return nll_of(o, log_z, target, smoothing, spread, weight)

    if name == "softmax":
        terms = {"cross_entropy": nll(0 * even)}
    elif name == "sparsemax":
        terms = {"cross_entropy": sparsemax_loss(o, target, smoothing) * weight[target]}
    elif name == "sigsoftmax":
        terms = {"cross_entropy": nll(log_sigmoid(o))}
    elif name == "focal":
        log_p = log_softmax(o)
        focal = (-np.expm1(log_p)) ** options["gamma"] * -log_p * weight
        terms = {"cross_entropy": (1 - smoothing) * at(focal, target) + smoothing * focal.mean(-1)}
    elif name == "online-label-smoothing":  # its soft labels start even, and class weights multiply the whole row
        hard = nll(0 * even, weight=np.ones(num_classes)) * weight[target]
        terms = {"cross_entropy": hard, "soft_labels": -log_softmax(o).mean(-1)}
    elif name == "random-dropmax":
        kept = put((u < float(dtype.type(options["retain"]))).astype(float), target, 1.0)
        terms = {"cross_entropy": nll(np.where(kept > 0, 0.0, -np.inf), kept)}
    elif name == "sampled-softmax":
        sampled = math.floor(options["fraction"] * num_classes + 0.5) - (not options["target_extra"])
        rank = np.argsort(np.argsort(put(u, target, -1.0), -1, kind="stable"), -1, kind="stable")
        kept = (rank < 1 + min(max(1, sampled), num_classes - 1)).astype(float)
        terms = {"cross_entropy": nll(np.where(kept > 0, 0.0, -np.inf), kept)}
    else:
        terms = _attention_terms(options, logits, target, u, dtype, nll)
        if options.get("likelihood", "sampled") != "sampled":
            terms["cross_entropy"] = terms["cross_entropy"] * weight[target]
    return {k: v if k == "cross_entropy" else v * weight[target] for k, v in terms.items()}


def _attention_terms(
    options: dict[str, Any],
    logits: Logits,
    target: Indices,
    u: Array,
    dtype: np.dtype[Any],
    nll: Callable[..., Array],
) -> dict[str, Array]:
    o, name, likelihood = logits["classifier"], options["name"], options.get("likelihood", "sampled")
    if name == "dropmax-softmax-retain":
        log_p = np.minimum(log_softmax(o), -np.finfo(dtype).eps)  # documented: a p of 1 counts as a little less
        a = log_p - np.log(-np.expm1(log_p))
    else:
        a = logits["retain"]
    if name.startswith("deterministic"):
        terms = {"cross_entropy": nll(log_sigmoid(a))}
        return terms | ({"auxiliary": auxiliary(a, target)} if name == "deterministic-dropmax" else {})
    if likelihood == "marginal":
        log_marginal = over_masks(naive.naive_log_marginal, within_spread(o), a, target)
        return {"cross_entropy": -log_marginal, "entropy": entropy(a)}
    b = a if name == "dropmax-qp" else (a + logits["correction"]).astype(dtype).astype(np.float64)
    if name == "dropmax-unmasked":
        terms = {"cross_entropy": nll(np.zeros_like(o))}
    elif likelihood == "exact":
        terms = {"cross_entropy": over_masks(naive.naive_expected_nll, within_spread(o), b, target)}
    else:
        found = []
        for one in u if u.ndim == 3 else [u]:
            if options.get("mask_gradient", True) or name == "dropmax-relaxed":
                log_z = relaxed_log_mask(b, one, options["temperature"], np.finfo(dtype).eps / 2)
            else:
                log_z = hard_log_mask(b, one, 4 * float(np.finfo(dtype).eps))
            log_z = put(log_z, target, 0.0)
            found.append(nll(np.logaddexp(log_z, np.log(options["epsilon"])), np.exp(log_z)))
        terms = {"cross_entropy": np.mean(found, 0)}
    if name == "dropmax-qp":
        return terms | {"kl": -log_sigmoid(at(a, target)), "entropy": entropy(a)}
    r, shift = logits["correction"], float(np.log(o.shape[-1] - 1)) if options["prior_correction"] else 0.0
    return terms | {"kl": kl(a, a + r, target), "entropy": entropy(a), "auxiliary": auxiliary(r, target, shift)}
