"""The quadrature rule in u = log s behind every integral of :mod:`dropmax.exact`.

Every quantity is an integral over s of products of the class factors

    f_k(s) = 1 - rho_k + rho_k exp(-s w_k),      F(s) = prod_k f_k(s),      w_k = exp(o_k - shift).

A :class:`Walk` visits the nodes s_j from left to right in blocks that fit the processor's cache, so that memory stays
proportional to batch x classes however many nodes there are. docs/exact.md derives the constants below.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_ELEMENTS = 3 << 16  # of one (rows, nodes, classes) work tensor: four of them about fill a processor's cache
BLOCK_ELEMENTS_GPU = 1 << 23
FIRST_NODES, NEXT_NODES = 11, 6  # of a block, unless it is small: F has often died out after the first eleven
BLOCK_WIDTH = 16.0  # in u, see LARGEST_LOG_W

WIDEST_GAP = 48.0  # neighbouring logits further apart than this are moved to this distance; between them u jumps ...
AFTER_GAP = 12.0  # ... this far behind the upper class, which has settled (x > 1e5), and 36 before the lower begins
LARGEST_RETAIN = 1e5  # so that any class has settled behind a gap; retain logits above count as this
WIDEST_SPREAD = float(1 << 20)  # a class further below the top one than this (or at -inf) is put here

# A factor settles soon after x = 1. Where it has, two limits keep the arithmetic fast and finite: exp is a hundred
# times slower where its result underflows, and x exp(-x) must vanish without 0 * inf.
LARGEST_LOG_W = 7.0  # with this, x is at most exp(7 + 16) within a block ...
LARGEST_X = {torch.float32: 60.0, torch.float64: 300.0}  # ... and x exp(-this) is nothing, even divided by f, unless
SATURATED = {torch.float32: 20.0, torch.float64: 40.0}  # a class has a larger retain logit: then 1 - rho is exp(-a)


class Rule(NamedTuple):
    """Nodes log s = start, start + step, start + 2 step, ... of weight ``step``, after a few special ones."""

    step: float
    start: float  # relative to log sum_k w_k = 0, which bounds every X = sum_k z_k w_k by 1
    left: tuple[tuple[float, float], ...]  # (log s, weight) of nodes that stand for all nodes left of the start
    reach: float  # nodes go on to this far past the smallest class, where its exp(-s w) has died
    tolerance: float  # a walk ends early where what is left is smaller than this


@functools.lru_cache
def rule_for(dtype: torch.dtype, step: float | None = None) -> Rule:
    """Return the rule that is accurate to the rounding error of ``dtype``, or the same with another step."""
    # The default steps are short binary fractions: node positions are then exact in float32 even 10,000 from zero.
    if dtype == torch.float64:
        step, start, left_nodes, reach, tolerance = step or 5 / 16, 1.0, 7, 3.6, 1e-15
    else:
        step, start, left_nodes, reach, tolerance = step or 1 / 2, 2.0, 5, 3.0, 5e-9
    left = tuple((start + position, weight) for position, weight in gauss_left_of_zero(step, left_nodes))
    return Rule(step, start, left, reach, tolerance)


def gauss_left_of_zero(step: float, count: int) -> list[tuple[float, float]]:
    """Replace the infinitely many nodes log s = -step, -2 step, ... by ``count``, as (log s, weight).

    Every integrand is s g(s) with g entire, so close to zero it is nearly a polynomial: the Gauss rule of the missing
    sum, step * sum_j s_j g(s_j), is exact for g of degree 2 count - 1. Its nodes are the eigenvalues of the matrix
    that Lanczos' iteration builds from the s_j. All weights are positive.
    """
    s = np.exp(-step * np.arange(1, math.ceil(45 / step) + 1))
    mass = step * s
    basis = [np.sqrt(mass / mass.sum())]
    matrix = np.zeros((count + 1, count + 1))
    for i in range(count):
        vector = s * basis[i]
        matrix[i, i] = basis[i] @ vector
        for known in basis * 2:  # twice, so that the new vector is orthogonal to rounding error
            vector = vector - (known @ vector) * known
        matrix[i, i + 1] = matrix[i + 1, i] = np.linalg.norm(vector)
        basis.append(vector / matrix[i, i + 1])
    nodes, vectors = np.linalg.eigh(matrix[:count, :count])
    weights = mass.sum() * vectors[0] ** 2 / nodes
    return list(zip(np.log(nodes).tolist(), weights.tolist(), strict=True))


@functools.lru_cache(maxsize=32)
def nodes_and_weights(rule: Rule, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return log s and the weight of the first ``count`` nodes, each (count,)."""
    with torch.inference_mode(False):  # the cache outlives the caller's inference mode
        left = torch.tensor(rule.left, dtype=torch.float64)
        right = rule.start + rule.step * torch.arange(count - len(left), dtype=torch.float64)
        position = torch.cat((left[:, 0], right))
        weight = torch.cat((left[:, 1], torch.full_like(right, rule.step)))
        return position.to(device, dtype), weight.to(device, dtype)


class Block(NamedTuple):
    """The factors of R rows and K classes at n neighbouring nodes; x = s w is the argument of each.

    The (R, n, K) tensors live in a workspace that the next block overwrites.
    """

    origin: float  # log s = 0 on the block's own scale; exact in every dtype
    position: Tensor  # (n,) log s
    weight: Tensor  # (n,) quadrature weights
    s: Tensor  # (n,) on the block's own scale
    w: Tensor  # (R, K) on the block's own scale
    kept: Tensor  # (R, n, K) exp(-x) / f
    half_dropped: Tensor  # (R, n, K) (1 - exp(-x)) / 2
    factor: Tensor  # (R, n, K) f
    log_product: Tensor  # (R, n) log F


class Walk:
    """All that one pass over the nodes needs, for class logits and mask logits of shape (rows, classes).

    With a ``target`` (rows,), that class is left out of the product F and has retain probability 0 here; its own
    factor is exp(-x_t), see :meth:`target_exponent`.
    """

    def __init__(self, logits: Tensor, retain_logits: Tensor, target: Tensor | None = None) -> None:
        self.rule = rule_for(logits.dtype)
        self.logits, self.retain_logits = logits, retain_logits.clamp_max(LARGEST_RETAIN)
        lowest, largest = logits.amin(-1, keepdim=True), logits.amax(-1, keepdim=True)
        far = largest.masked_fill(largest.abs() < WIDEST_SPREAD, 0.0)
        if bool(far.any()):  # so far from zero, whole numbers are no longer exact: move the row to where they are
            self.logits = logits = logits - far
            lowest, largest = lowest - far, largest - far
        # log sum_k exp(o_k), rounded up to a whole number so that node positions stay exact.
        self.top = (logits - largest).exp_().sum(-1, keepdim=True).log_().add_(largest).ceil_()
        self.shift = self.top
        self.cuts: Tensor | None = None
        self.spread = finite(self.top - lowest)
        self.widest = float(self.spread.amax()) if len(logits) else 0.0
        if self.widest > 2 * WIDEST_GAP:
            self._cut_gaps(largest)

        # The floor keeps every factor positive. It is far too small to be seen in F, but not in log F.
        self.retain = torch.sigmoid(retain_logits)
        self.drop = torch.neg(retain_logits).sigmoid_().clamp_min_(1e-30)
        self.saturated = bool(len(logits)) and not float(retain_logits.amax()) <= SATURATED[logits.dtype]
        if target is not None:
            self.target = target[:, None]
            self.retain.scatter_(-1, self.target, 0.0)
            self.drop.scatter_(-1, self.target, 1.0)

    def _cut_gaps(self, largest: Tensor) -> None:
        """Move the classes below a wide gap up towards it, by a whole number so that the shift is exact."""
        self.logits = torch.maximum(self.logits, largest - WIDEST_SPREAD)
        ordered, order = self.logits.sort(-1, descending=True)
        cut = (ordered[:, :-1] - ordered[:, 1:] - WIDEST_GAP).floor().clamp_min(0)
        self.cuts = pad(cut.cumsum(-1), (1, 0))
        self.shift = self.top - torch.zeros_like(self.logits).scatter(-1, order, self.cuts)
        self.spread = finite((self.shift - self.logits).amax(-1, keepdim=True))
        self.widest = float(self.spread.amax())
        self.cut_positions = self.top - (ordered[:, :-1] + self.cuts[:, :-1]) + AFTER_GAP

    def chunks(self) -> Iterator[slice]:
        """Split the rows so that FIRST_NODES nodes of one chunk fit the work tensors."""
        rows, classes = self.logits.shape
        size = max(1, block_elements(self.logits.device) // (FIRST_NODES * classes))
        size = math.ceil(rows / math.ceil(rows / size)) if rows else 1  # chunks of equal size, not a small last one
        for first in range(0, rows, size):
            yield slice(first, min(first + size, rows))

    def nodes(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return log s and the weights of all nodes these rows need, each (count,)."""
        spread = self.widest if rows.stop - rows.start == len(self.logits) else float(self.spread[rows].amax())
        right = math.ceil((spread + self.rule.reach - self.rule.start) / self.rule.step)
        count = len(self.rule.left) + max(1, right + 1)
        return nodes_and_weights(self.rule, count, self.logits.dtype, self.logits.device)

    def blocks(self, rows: slice) -> Iterator[Block]:
        """Yield the nodes of some rows in order; the consumer stops as soon as F has died out."""
        logits, shift = self.logits[rows], self.shift[rows]
        retain, drop, retain_logits = self.retain[rows, None], self.drop[rows, None], self.retain_logits[rows, None]
        positions, weights = self.nodes(rows)
        fits = max(1, block_elements(logits.device) // logits.numel())
        widest = min(fits, int(BLOCK_WIDTH / self.rule.step))
        # In float32 a factor near 1 is rounded to a multiple of 6e-8, thousands of classes perhaps the same way.
        compensate = logits.dtype != torch.float64
        first = last = 0
        while last < len(positions):
            first, size = last, max(NEXT_NODES if last else FIRST_NODES, fits // 2)
            last = first + min(size, widest)
            position = positions[first:last]
            origin = self.rule.start + self.rule.step * (first - len(self.rule.left)) if first else 0.0
            s = torch.exp(position - origin)
            # The subtrahend is exact, so that a logit is rounded once, and next to nothing where its x is about 1.
            log_w = logits - (shift - origin)
            if self.saturated:
                settled_x = s[:, None] * log_w.clamp_max(30.0).exp_()[:, None]
            w = log_w.clamp_max_(LARGEST_LOG_W).exp_()
            kept, half_dropped, factor, scratch = workspace((len(logits), len(s), logits.shape[-1]), logits)
            half_x = torch.mul(s[:, None] / 2, w[:, None], out=kept).clamp_max_(LARGEST_X[logits.dtype] / 2)
            if compensate:  # (1 - exp(-x)) / 2 = T / (1 + T) for T = tanh(x/2): accurate like expm1, in half the time
                tanh = torch.tanh(half_x, out=half_dropped)
                tanh.div_(torch.add(tanh, 1.0, out=scratch))
                kept.mul_(-2).exp_()
            else:
                kept.mul_(-2).exp_()
                torch.mul(kept, -0.5, out=half_dropped).add_(0.5)
            torch.addcmul(drop, retain, kept, out=factor)
            log_factor = torch.log(factor, out=scratch)
            if self.saturated:
                exact = torch.logaddexp(-settled_x, -retain_logits)
                far_out = (retain_logits > SATURATED[logits.dtype]) & (retain > 0) & (settled_x > 10)
                torch.where(far_out, exact, log_factor, out=log_factor)
            log_product = log_factor.sum(-1)
            if compensate:  # give back what rounding took: the exact factor is 1 - retain (1 - exp(-x))
                log_product -= torch.sub(factor, 1.0, out=scratch).addcmul_(retain, half_dropped, value=2).sum(-1)
            kept.div_(factor)
            if self.saturated:  # rho exp(-x)/f = sigmoid(a - x), (1 - rho)/f = sigmoid(x - a): no floor, no largest x
                torch.where(far_out, torch.sigmoid(retain_logits - settled_x), kept, out=kept)
                stay = torch.sigmoid(settled_x - retain_logits)
                torch.where(far_out, drop / torch.maximum(stay, drop), factor, out=factor)
            log_product.clamp_max_(0.0)  # rounding may lift it just above
            yield Block(origin, position, weights[first:last], s, w, kept, half_dropped, factor, log_product)

    def stretch(self, rows: slice, position: Tensor) -> Tensor | None:
        """Return how much the true log s exceeds ``position`` (n,) as gaps were cut, (R, n), or None if none was."""
        if self.cuts is None:
            return None
        cut_positions = self.cut_positions[rows]
        before = torch.searchsorted(cut_positions, position.expand(len(cut_positions), -1).contiguous(), right=True)
        return self.cuts[rows].gather(-1, before)

    def of_target(self, values: Tensor, rows: slice) -> Tensor:
        """Pick the target's entry of values (rows, K), or of values (rows, 1) that all classes share: (R, 1)."""
        values = values[rows]
        return values if values.shape[-1] == 1 else values.gather(-1, self.target[rows])

    def target_log_x(self, rows: slice, shift: Tensor, origin: float, position: Tensor) -> Tensor:
        """Return o_t - shift + position, (R, n), rounded little where it is small: ``shift`` - ``origin`` is exact."""
        return self.of_target(self.logits, rows) - (shift - origin) + (position - origin)

    def target_exponent(self, rows: slice, origin: float, position: Tensor) -> Tensor:
        """Return x_t = s w_t at the given log s, (R, n)."""
        log_x = self.target_log_x(rows, self.of_target(self.shift, rows), origin, position)
        return log_x.clamp_max_(40.0).exp_()


def finite(spread: Tensor) -> Tensor:
    """Keep a row with NaN, which stays NaN, from deciding the nodes of other rows."""
    return spread.nan_to_num_(0.0, posinf=WIDEST_SPREAD)


def block_elements(device: torch.device) -> int:
    """Return how many elements a work tensor may have."""
    return BLOCK_ELEMENTS if device.type == "cpu" else BLOCK_ELEMENTS_GPU


_buffers = threading.local()


def workspace(shape: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    """Return four uninitialised tensors, on the CPU always the same memory.

    Asking the operating system for fresh pages in every call took longer than the arithmetic.
    """
    needed = 4 * math.prod(shape)
    flat: Tensor | None
    if like.device.type != "cpu":
        flat = like.new_empty(needed)
    else:
        flat = getattr(_buffers, str(like.dtype), None)
        if flat is None or flat.numel() < needed:
            with torch.inference_mode(False):
                flat = torch.empty(needed, dtype=like.dtype)
            if needed <= 4 * BLOCK_ELEMENTS:
                setattr(_buffers, str(like.dtype), flat)
    return list(flat[:needed].view(4, *shape).unbind())
