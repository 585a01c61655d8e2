"""The integrals and their derivatives, on plain (rows, classes) tensors: no autograd, no transforms.

Notation: x = s w_k; ``kept`` = exp(-x)/f; the hazard h_k = rho_k x kept = -d log f_k / d o_k; and, for the retain
logit a_k, -d log f_k / d a_k = rho_k (1 - rho_k) (1 - exp(-x))/f. docs/exact.md derives all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from dropmax.exact.quadrature import Block, Walk

NEGLIGIBLE = {torch.float32: 1e-12, torch.float64: 1e-30}


def weighted(node: Tensor, factors: Tensor) -> Tensor:
    """Sum (R, n) node weights times (R, n, K) factors over the nodes, (R, K)."""
    return torch.bmm(node[:, None], factors)[:, 0]


def without_underflow(node: Tensor) -> Tensor:
    """Set negligible weights of nodes to zero: products that underflow are a hundred times slower than others."""
    return torch.threshold(node, NEGLIGIBLE[node.dtype], 0.0)


def all_dropped(retain_logits: Tensor) -> Tensor:
    """Return P(z = 0) = prod_k (1 - rho_k), (R, 1)."""
    return logsigmoid(-retain_logits).sum(-1, keepdim=True).exp()


def moments(logits: Tensor, retain_logits: Tensor, order: int) -> tuple[Tensor, ...]:
    """Return the mean of p(y=k | x, z) over z and, for order 2, its second moment too, each (R, K)."""
    walk = Walk(logits, retain_logits)
    none = all_dropped(retain_logits)
    results = tuple(torch.zeros_like(walk.logits) for _ in range(order))
    for rows in walk.chunks():
        for block in walk.blocks(rows):
            product = block.log_product.exp()
            node = without_underflow(product * block.weight)
            scale = block.w
            for result in results:
                node = node * block.s
                result[rows].addcmul_(weighted(node, block.kept), scale)
                scale = scale * block.w
            # The integrals further right add up to exactly F(s) - P(z = 0) over the classes.
            if bool((product[:, -1:] - none[rows]).amax() < walk.rule.tolerance):
                break
    softmax = torch.softmax(walk.logits, -1)
    for power, result in enumerate(results, start=1):
        result.mul_(walk.retain).addcmul_(none, softmax**power)
    return results


def expected_entropy(logits: Tensor, retain_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return E_z H[p(y | x, z)] (R,) and the mean of p(y=k | x, z) (R, K), from the same walk.

    If some class is kept, H = log X - sum_k p_k log w_k. Given that, log X has mean int ((1 - P0) e^-s - (F - P0)) du.
    Cutting a gap between logits shifts log X and the log w_k of every mask that notices by the same amount.
    """
    walk = Walk(logits, retain_logits)
    none = all_dropped(retain_logits)
    mean, log_x = torch.zeros_like(walk.logits), torch.zeros_like(none)
    for rows in walk.chunks():
        for block in walk.blocks(rows):
            product = block.log_product.exp()
            node = without_underflow(product * block.weight) * block.s
            mean[rows].addcmul_(weighted(node, block.kept), block.w)
            one = torch.exp(-block.position.clamp_max(7.0).exp())
            some = product - none[rows]
            log_x[rows] += ((1 - none[rows]) * one - some) @ block.weight[:, None]
            # X is at most 1, so exp(-s) has died where F - P(z = 0) has.
            if bool(some[:, -1:].amax() < walk.rule.tolerance):
                break
    mean.mul_(walk.retain)
    log_w = walk.logits - walk.shift
    kept = log_x - torch.where(mean > 0, mean * log_w, 0.0).sum(-1, keepdim=True)
    log_softmax = torch.log_softmax(walk.logits, -1)
    softmax = log_softmax.exp()
    dropped = -torch.where(softmax > 0, softmax * log_softmax, 0.0).sum(-1, keepdim=True)
    return (kept + none * dropped).clamp_min(0)[:, 0], mean.addcmul_(none, softmax)


def moments_backward(
    logits: Tensor, retain_logits: Tensor, mean_grad: Tensor, second_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of sum(mean_grad * mean) + sum(second_grad * second moment), each (R, K)."""
    walk = Walk(logits, retain_logits)
    none = all_dropped(retain_logits)
    on_logits, on_retain = torch.zeros_like(walk.logits), torch.zeros_like(walk.logits)
    for rows in walk.chunks():
        g1, g2 = mean_grad[rows, None], None if second_grad is None else second_grad[rows, None]
        retain, drop = walk.retain[rows], walk.drop[rows]
        for block in walk.blocks(rows):
            product = block.log_product.exp()
            node = without_underflow(product * block.weight)
            x = (block.s[:, None] * block.w[:, None]).clamp_max_(1e4)  # exp(-1e4) is 0; keeps 0 * inf away
            hazard = block.kept * x * retain[:, None]
            stay = drop[:, None] / block.factor  # 1 - rho kept
            # The integrand is F sum_k slope_k hazard_k.
            slope = g1 if g2 is None else torch.addcmul(g1, g2, x)
            total = (slope * hazard).sum(-1)
            direct = (1 - x * stay) * slope
            if g2 is not None:
                direct += g2 * x
            on_logits[rows] += weighted(node, direct * hazard) - weighted(node * total, hazard)
            through_factors = weighted(node * total, block.half_dropped.div_(block.factor))
            on_retain[rows] += weighted(node, stay * hazard * slope) - 2 * retain * drop * through_factors
            if bool((product[:, -1:] - none[rows]).amax() < walk.rule.tolerance):
                break
    softmax = torch.softmax(walk.logits, -1)
    for power, grad in ((1, mean_grad), (2, second_grad)):
        if grad is None:
            continue
        share = grad * softmax**power
        total = share.sum(-1, keepdim=True)
        on_logits += none * power * (share - softmax * total)
        on_retain -= none * total * walk.retain
    return on_logits, on_retain


def add_factor_gradients(sums: Sequence[Tensor], rows: slice, block: Block, node: Tensor) -> None:
    """Add to ``sums``, two of (rows, K), these nodes' -d log f_k / d o_k and -d log f_k / d a_k, still to be scaled."""
    sums[0][rows].addcmul_(weighted(node * block.s, block.kept), block.w)
    sums[1][rows].add_(weighted(node, block.half_dropped.div_(block.factor)))


def scale_factor_gradients(sums: Sequence[Tensor], walk: Walk) -> None:
    """Multiply by what is the same at all nodes: rho, and rho (1 - rho) twice."""
    sums[0].mul_(walk.retain)
    sums[1].mul_(walk.retain).mul_(walk.drop).mul_(2)


def fill_target_by_shift(logits_grad: Tensor, target: Tensor) -> None:
    """Set the target's gradient: nothing changes when all logits move together, so each row sums to zero."""
    others = logits_grad.scatter_(-1, target, 0.0).sum(-1, keepdim=True)
    logits_grad.scatter_(-1, target, -others)


def expected_nll(logits: Tensor, posterior_logits: Tensor, target: Tensor, with_gradients: bool) -> tuple[Tensor, ...]:
    """Return the value (R,) and, if wanted, its gradients (R, K) from the same walk."""
    walk = Walk(logits, posterior_logits, target)
    value = walk.logits.new_zeros(len(logits))
    gradients = tuple(torch.zeros_like(walk.logits) for _ in range(2 if with_gradients else 0))
    for rows in walk.chunks():
        position, weight = walk.nodes(rows)
        stretch = walk.stretch(rows, position)
        if stretch is not None:  # the integrand is constant in a gap: the next node takes the part that was cut out
            weight = weight + pad(stretch.diff(dim=-1), (1, 0))
        seen = 0
        for block in walk.blocks(rows):
            here = slice(seen, seen + len(block.s))
            seen = here.stop
            target_factor = torch.exp(-walk.target_exponent(rows, block.origin, block.position))
            alone = target_factor * weight[..., here]
            value[rows] -= (alone * torch.expm1(block.log_product)).sum(-1)
            product = block.log_product.exp()
            if with_gradients:
                add_factor_gradients(gradients, rows, block, without_underflow(alone * product))
            if bool((target_factor * product)[:, -1].amax() < walk.rule.tolerance):
                break
        if seen < len(position):  # F is zero from here on
            rest = torch.exp(-walk.target_exponent(rows, float(position[seen]), position[seen:]))
            value[rows] += (rest * weight[..., seen:]).sum(-1)
    if with_gradients:
        scale_factor_gradients(gradients, walk)
        fill_target_by_shift(gradients[0], walk.target)
    return value, *gradients


class LogSpaceSums:
    """Sums over nodes whose weights are known by their logarithms, relative to the largest weight met so far."""

    def __init__(self, like: Tensor, count: int) -> None:
        self.peak = torch.full_like(like[:, :1], -torch.inf)
        self.total = torch.zeros_like(like[:, :1])
        self.sums = [torch.zeros_like(like) for _ in range(count)]

    def take(self, log_integrand: Tensor, weight: Tensor) -> Tensor:
        """Rescale the sums for the next (R, n) nodes, and return these nodes' weights on the new scale."""
        peak = torch.maximum(self.peak, log_integrand.amax(-1, keepdim=True))
        for running in (self.total, *self.sums):
            running.mul_(torch.exp(self.peak - peak))
        self.peak = peak
        node = without_underflow(torch.exp(log_integrand - peak) * weight)
        self.total += node.sum(-1, keepdim=True)
        return node

    @property
    def log_total(self) -> Tensor:
        """The logarithm of the integral so far, (R, 1)."""
        return self.peak + self.total.log()


def log_integrand(walk: Walk, rows: slice, block: Block) -> tuple[Tensor, Tensor]:
    """Return the log of s w_t exp(-s w_t) F(s), and of exp(-s w_t) F(s), which bounds its integral further right."""
    bound = block.log_product - walk.target_exponent(rows, block.origin, block.position)
    top = walk.top[rows]
    stretch = walk.stretch(rows, block.position)
    if stretch is not None:  # gaps below the target do not count: exp(-s w_t) has died there
        top = top - torch.minimum(stretch, walk.of_target(walk.top - walk.shift, rows))
    return bound + walk.target_log_x(rows, top, block.origin, block.position), bound


def given_target(logits: Tensor, retain_logits: Tensor, target: Tensor, with_gradients: bool) -> tuple[Tensor, ...]:
    """Return log p(y=t | x) (R,), followed by its two gradients (R, K) or by p(z_k=1 | x, y=t) (R, K)."""
    walk = Walk(logits, retain_logits, target)
    log_some = walk.logits.new_zeros(len(logits), 1)
    means = tuple(torch.zeros_like(walk.logits) for _ in range(2 if with_gradients else 1))
    for rows in walk.chunks():
        running = LogSpaceSums(walk.logits[rows], len(means))
        for block in walk.blocks(rows):
            log_node, log_bound = log_integrand(walk, rows, block)
            node = running.take(log_node, block.weight)
            if with_gradients:
                add_factor_gradients(running.sums, slice(None), block, node)
            else:
                running.sums[0].add_(weighted(node, block.kept))
            if bool((log_bound[:, -1:] - running.log_total).amax() < math.log(walk.rule.tolerance)):
                break
        log_some[rows] = running.log_total
        for mean, total in zip(means, running.sums, strict=True):
            mean[rows] = total / running.total
    # Either the target was kept, with some rivals or none, or every class was dropped.
    everyone = slice(0, len(logits))
    log_some += logsigmoid(walk.of_target(retain_logits, everyone))
    log_softmax = torch.log_softmax(walk.logits, -1)
    log_none = logsigmoid(-retain_logits).sum(-1, keepdim=True) + walk.of_target(log_softmax, everyone)
    log_p = torch.logaddexp(log_some, log_none)
    some, none = torch.exp(log_some - log_p), torch.exp(log_none - log_p)
    if not with_gradients:
        return log_p[:, 0], (some * walk.retain * means[0]).scatter(-1, walk.target, some)
    scale_factor_gradients(means, walk)
    retain = torch.sigmoid(retain_logits)
    on_logits = -some * means[0] - none * log_softmax.exp()
    fill_target_by_shift(on_logits, walk.target)
    on_retain = (-some * means[1] - none * retain).scatter(-1, walk.target, some - walk.of_target(retain, everyone))
    return log_p[:, 0], on_logits, on_retain


def posterior_backward(
    logits: Tensor,
    retain_logits: Tensor,
    target: Tensor,
    log_p: Tensor,
    posterior: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of sum(grad * posterior), from the results of :func:`given_target`."""
    walk = Walk(logits, retain_logits, target)
    everyone = slice(0, len(logits))
    some = walk.of_target(posterior, everyone)
    value = (grad * posterior).sum(-1, keepdim=True)
    on_target = walk.of_target(grad, everyone)
    log_scale = logsigmoid(walk.of_target(retain_logits, everyone)) - log_p[:, None]
    on_logits, on_retain = torch.zeros_like(walk.logits), torch.zeros_like(walk.logits)
    for rows in walk.chunks():
        retain, drop, g = walk.retain[rows], walk.drop[rows], grad[rows, None]
        for block in walk.blocks(rows):
            log_node, log_bound = log_integrand(walk, rows, block)
            node = without_underflow(torch.exp(log_node + log_scale[rows]) * block.weight)  # these sum to ``some``
            x = (block.s[:, None] * block.w[:, None]).clamp_max_(1e4)
            kept = block.kept * retain[:, None]  # P(z_k = 1) at this s
            stay = drop[:, None] / block.factor  # P(z_k = 0) at this s
            excess = node * ((kept * g).sum(-1) + on_target[rows] - value[rows])
            direct = kept * stay * g
            on_logits[rows] -= weighted(node, direct * x) + weighted(excess, kept * x)
            through_factors = weighted(excess, block.half_dropped.div_(block.factor))
            on_retain[rows] += weighted(node, direct) - 2 * retain * drop * through_factors
            if bool((log_bound[:, -1:] + log_scale[rows]).amax() < math.log(walk.rule.tolerance)):
                break
    none = 1 - some
    on_logits += none * value * torch.softmax(walk.logits, -1)
    fill_target_by_shift(on_logits, walk.target)
    retain = torch.sigmoid(retain_logits)
    on_retain += none * value * retain
    return on_logits, on_retain.scatter_(-1, walk.target, none * value)
