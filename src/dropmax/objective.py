"""The DropMax objective, fast: values and gradients of a block of classes in one pass.

:mod:`dropmax.functional` holds the same equations in their plain form, one by one; the tests compare the two. Here they
are combined. For a rival k with ``rho = sigmoid(a)``, ``b = a + r``, ``g = sigmoid(b)`` and P = 1 where b > 0, else 0::

    KL - H           = (g - P) r + (rho - P) a + log max(g, 1 - g)           no large numbers that cancel
    d(KL - H) / da   = (rho - g) + a rho (1 - rho)                           stop(a) inside b
    d(KL - H) / dr   = r g (1 - g)
    auxiliary        = max(e, 0) - log max(v, 1 - v),    e = r - log(K - 1),    v = sigmoid(e)

The target is a rival with ``b = infinity``: its mask is 1, its KL is ``-log rho``, and r learns nothing from it.
Logarithms are taken of products of 64 factors, each between 1/2 and 1. What a row adds to the gradients is known, up to
the weight of that row, as soon as its loss is, so both are computed together; the backward pass has nothing left to do
but matrix products (:mod:`dropmax.walk`).

A small head is one block. Blocks of many classes are joined by :func:`join`, and so are the parts of ranks that share
the classes. The functions run eagerly or inside ``torch.compile``, which fuses them into one pass over the block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dropmax.functional import auxiliary, log_hard_mask, log_relaxed_mask, logistic, mask_entropy, mask_kl, masked_nll
from dropmax.noise import combine

__all__ = [
    "GROUP_NUMBERS",
    "LEAST_EPSILON",
    "Block",
    "Gradients",
    "Known",
    "Options",
    "RowSums",
    "add_at_target",
    "block",
    "block_of_rows",
    "entropy",
    "join",
    "plain_terms",
]

#: With a smaller epsilon, exp(o - max o) times it could underflow in float32.
LEAST_EPSILON = 1e-30

#: Without a compiler, work is done for this many numbers at a time, so that they stay in the cache.
GROUP_NUMBERS = 2**17

#: Factors that are multiplied before a logarithm is taken: 2**-64 is far from underflow in float32.
_FACTORS = 64


class Options(NamedTuple):
    """What the objective needs beside tensors; the options of :class:`dropmax.DropMax` under the same names."""

    temperature: float = 0.1
    epsilon: float = 1e-20
    samples: int = 1
    label_smoothing: float = 0.0
    base_rate: float = 0.0  # what the auxiliary loss subtracts from r
    mask_gradient: bool = False  # relaxed masks with a gradient; otherwise hard ones without
    cross_entropy_weight: float = 1.0
    kl_weight: float = 1.0
    entropy_weight: float = 1.0
    auxiliary_weight: float = 1.0
    sum_entropy: bool = False  # also where the total does not need it by itself


class RowSums(NamedTuple):
    """What is known of each row after some classes. With S > 1 masks per row, some are (S, N) and not (N,)."""

    highest: Tensor  # max_k o_k
    weighed: Tensor  # sum_k (z_k + epsilon) exp(o_k - highest)
    target_logit: Tensor  # o_t
    # For label smoothing, with c_k the weight of class k:
    kept: Tensor  # sum_k z_k
    kept_weight: Tensor  # sum_k z_k c_k
    kept_logit: Tensor  # sum_k z_k c_k (o_k - highest + log(z_k + epsilon))
    kl_less_entropy: Tensor
    entropy: Tensor  # zeros unless asked for
    auxiliary: Tensor

    def relative_to(self, highest: Tensor) -> list[Tensor]:
        """Return all but the first, for exp(o_k - highest) with a higher ``highest`` than this one's."""
        moved = self.highest - highest
        kept_logit = self.kept_logit + moved * self.kept_weight
        return [self.weighed * moved.exp(), *self[2:5], kept_logit, *self[6:]]

    def cross_entropy(self, options: Options, row_weight: Tensor | None = None) -> Tensor:
        """Return the first term of each row, from the sums over all classes."""
        log_weighed = self.weighed.log()
        # The large numbers first: what is left of them is as large as the result, and its digits survive.
        nll = (self.highest - self.target_logit) + _over_samples(log_weighed, mean=True) - math.log1p(options.epsilon)
        nll = nll if row_weight is None else nll * row_weight
        if not options.label_smoothing:
            return nll
        spread = _over_samples((log_weighed * self.kept_weight - self.kept_logit) / self.kept, mean=True)
        return (1 - options.label_smoothing) * nll + options.label_smoothing * spread

    def total(self, cross_entropy: Tensor, options: Options, row_weight: Tensor | None = None) -> Tensor:
        """Return the objective of each row, from the sums over all classes."""
        rest = self.kl_less_entropy if options.kl_weight == 1.0 else self.kl_less_entropy * options.kl_weight
        if options.kl_weight != options.entropy_weight:
            rest = rest.add(self.entropy, alpha=options.kl_weight - options.entropy_weight)
        rest = rest.add(self.auxiliary, alpha=options.auxiliary_weight)
        rest = rest if row_weight is None else rest * row_weight
        return rest.add(cross_entropy, alpha=options.cross_entropy_weight)


class Known(NamedTuple):
    """The sums over all classes that gradients need, see :class:`RowSums`."""

    highest: Tensor
    weighed: Tensor
    kept: Tensor
    kept_weight: Tensor


class Block(NamedTuple):
    """Some of the classes, for N rows."""

    o: Tensor | None  # class logits (N, width); None where the likelihood is computed elsewhere
    a: Tensor  # retain logits
    r: Tensor | None  # corrections; None where the posterior is the prior, q = p
    column: Tensor  # (N, 1): where the target of each row is
    inside: Tensor | None = None  # (N, 1): whether it is in this block at all; None: all are
    noise: tuple[Tensor, ...] = ()  # uniform numbers (N, width) or (S, N, width); or words of rows and of classes
    class_weight: Tensor | None = None  # (width,), for label smoothing
    row_weight: Tensor | None = None  # (N, 1), the weight of each row's label, for label smoothing


class Gradients(NamedTuple):
    """The gradients of the row totals; ``b`` is that of the a inside ``b = a + r``, which may go elsewhere."""

    o: Tensor | None = None
    a: Tensor | None = None
    r: Tensor | None = None
    b: Tensor | None = None


def block(
    x: Block,
    options: Options,
    *,
    known: Known | None = None,
    gradients: bool = True,
    posterior: bool = False,
    out: Gradients = Gradients(),  # noqa: B008
) -> tuple[RowSums, Gradients]:
    """Return the sums of each row over a block of classes, and the gradients of the row totals.

    The work is done on some rows at a time where nothing is compiled, so that what they need stays in the cache.

    Args:
        x: the block.
        options: see :class:`Options`.
        known: the sums over all classes, for the gradients; None where they are those of this block.
        gradients: whether to compute them.
        posterior: whether the gradient of b is wanted where ``out`` does not say so.
        out: where to put them; it may be the memory of the logits.

    >>> o, a, r = torch.zeros(3, 1, 4)
    >>> x = Block(o, a, r, torch.tensor([[1]]), noise=(torch.full((1, 4), 0.3),))
    >>> sums, found = block(x, Options())
    >>> sums.weighed, found.o  # u = 0.3 < 1/2: every class is kept
    (tensor([4.]), tensor([[ 0.2500, -0.7500,  0.2500,  0.2500]]))
    """
    num_rows, width = x.a.shape
    size = max(1, GROUP_NUMBERS // max(1, width))
    if torch.compiler.is_compiling() or num_rows <= size:
        return block_of_rows(x, options, known=known, gradients=gradients, out=out)
    if gradients and out.a is None:
        has_b = posterior and (x.r is not None or options.mask_gradient)
        made = [None if y is None else torch.empty_like(y) for y in (x.o, x.a, x.r, x.a if has_b else None)]
        out = Gradients(*made)
    parts = []
    for start in range(0, num_rows, size):
        here = slice(start, start + size)
        o, r, inside, row_weight = (None if y is None else y[here] for y in (x.o, x.r, x.inside, x.row_weight))
        noise = (x.noise[0][..., here, :], *x.noise[1:]) if x.noise else ()
        some = Block(o, x.a[here], r, x.column[here], inside, noise, x.class_weight, row_weight)
        some_known = None if known is None else Known(*(y[..., here] for y in known))
        some_out = Gradients(*(None if y is None else y[here] for y in out))
        parts.append(block_of_rows(some, options, known=some_known, gradients=gradients, out=some_out)[0])
    return RowSums(*(torch.cat(sums, -1) for sums in zip(*parts, strict=True))), out


def block_of_rows(
    x: Block,
    options: Options,
    *,
    known: Known | None = None,
    gradients: bool = True,
    out: Gradients = Gradients(),  # noqa: B008
) -> tuple[RowSums, Gradients]:
    """Return what :func:`block` returns, for all rows at once: the arithmetic itself."""
    b = _put(x.a.clone() if x.r is None else x.a + x.r, x, math.inf)
    g, rho = b.sigmoid(), x.a.sigmoid()
    likelihood, on_o, on_b = _likelihood(x, b, g, options, known, gradients, out.o)

    # Most of the time goes into finding memory: what is no longer needed is overwritten.
    positive = _above(b, 0.0, out=b)
    uncertainty = aux = x.a.new_zeros(x.a.shape[0])
    if options.sum_entropy or options.kl_weight != options.entropy_weight:
        uncertainty = entropy(x.a, rho)
    slope = torch.ops.aten.sigmoid_backward(x.a, rho) if gradients else None
    g_less, rho_less = g.sub_(positive), rho.sub_(positive)
    linear = torch.mul(rho_less, x.a, out=_over(positive))
    if x.r is not None:
        linear.addcmul_(g_less, x.r)
    kl_less_entropy = linear.sum(-1)
    on_a = rho_less.sub_(g_less)
    rarer = g_less.abs_()  # min(g, 1 - g)
    kl_less_entropy += _log_product(torch.sub(1, rarer, out=_over(linear)))
    if x.r is not None:
        aux, rising = _auxiliary(torch.sub(x.r, options.base_rate, out=_over(linear)), x)
    sums = RowSums(*(*likelihood, kl_less_entropy, uncertainty, aux))
    if slope is None:
        return sums, Gradients()

    on_a = _weighted(on_a, options.kl_weight, x.row_weight)
    on_a = torch.add(on_a, _weighted(slope, 1.0, x.row_weight), alpha=options.entropy_weight, out=out.a)
    on_r = None
    if x.r is not None:
        slope = _weighted(_times_slope(x.r, rarer), options.kl_weight, x.row_weight)
        on_b = slope if on_b is None else slope.add_(on_b)
        on_r = torch.add(on_b, _weighted(rising, 1.0, x.row_weight), alpha=options.auxiliary_weight, out=out.r)
    if out.b is not None and on_b is not None:
        on_b = out.b.copy_(on_b)
    return sums, Gradients(on_o, on_a, on_r, on_b)


def _likelihood(
    x: Block, b: Tensor, g: Tensor, options: Options, known: Known | None, gradients: bool, out: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """Return the sums, and the gradients of o and, through relaxed masks, of b."""
    if x.o is None:
        return (x.a.new_zeros(len(x.a)),) * 6, None, None
    z = _mask(b, g, x.noise, options)
    highest = x.o.amax(-1) if known is None else known.highest
    unmasked = (x.o - highest.unsqueeze(-1)).exp_()
    # sum_k (z_k + epsilon) exp(o_k - max o) is at least epsilon: no logarithm of z is needed.
    plain = not (options.label_smoothing or options.mask_gradient or options.samples > 1)
    weighed = z.add_(options.epsilon).mul_(unmasked) if plain else (z + options.epsilon) * unmasked
    total = weighed.sum(-1)
    kept = kept_weight = kept_logit = total  # unused without label smoothing
    share = z if x.class_weight is None else z * x.class_weight
    if options.label_smoothing:
        kept, kept_weight = z.sum(-1), share.sum(-1)
        log_left = (x.o - highest.unsqueeze(-1)) + (z + options.epsilon).log_()
        kept_logit = (share * log_left).sum(-1)
    sums = (highest, total, _pick(x.o, x), kept, kept_weight, kept_logit)
    if not gradients:
        return sums, None, None

    if known is not None:
        total, kept, kept_weight = known.weighed, known.kept, known.kept_weight
    on_nll: Any = options.cross_entropy_weight * (1 - options.label_smoothing)
    if x.row_weight is not None:
        on_nll = on_nll * x.row_weight
    on_softmax = total.unsqueeze(-1).reciprocal()
    if x.row_weight is not None or on_nll != 1.0:
        on_softmax = on_softmax * on_nll
    on_spread = None
    if options.label_smoothing:
        on_spread = (options.cross_entropy_weight * options.label_smoothing / kept).unsqueeze(-1)
        on_softmax = on_softmax + on_spread * (kept_weight / total).unsqueeze(-1)
    if options.samples > 1:
        on_softmax = on_softmax / options.samples
        on_spread = None if on_spread is None else on_spread / options.samples
    on_o = torch.mul(weighed, on_softmax, out=out if plain else None)
    on_o = on_o if on_spread is None else on_o - share * on_spread
    on_o = add_at_target(_over_samples(on_o), x, -on_nll)
    if out is not None and not plain:
        on_o = out.copy_(on_o)
    if not options.mask_gradient:
        return sums, on_o, None
    on_z = unmasked * on_softmax
    if on_spread is not None:
        on_z = on_z - share / (z + options.epsilon) * on_spread
    # dz_k/db_k = z_k (1 - z_k) / temperature, which is 0 for z_t = 1
    return sums, on_o, _over_samples(torch.ops.aten.sigmoid_backward(on_z, z)) / options.temperature


def _mask(b: Tensor, g: Tensor, noise: tuple[Tensor, ...], options: Options) -> Tensor:
    """Draw the masks z: Bernoulli(g), or relaxed ones where a gradient goes through them. The target's is 1."""
    hashed = len(noise) == 2
    drawn = combine(noise[0], noise[1], b.dtype) if hashed else noise[0]
    if options.mask_gradient:
        drawn = drawn.logit_() if hashed else logistic(drawn)
        return drawn.add_(b).mul_(1 / options.temperature).sigmoid_()
    return _above(g, drawn, out=drawn if hashed else None)


def entropy(a: Tensor, rho: Tensor) -> Tensor:
    """Return the entropy of the prior: the sum of ``|a| s - log(1 - s)`` with ``s = min(rho, 1 - rho)``.

    >>> entropy(torch.zeros(1, 2), torch.full((1, 2), 0.5)) / torch.tensor(2.0).log()  # two fair coins: two bits
    tensor([2.])
    """
    rarer = torch.minimum(rho, 1 - rho)
    return _dot(a.abs(), rarer) - _log_product(1 - rarer)


def _auxiliary(evidence: Tensor, x: Block) -> tuple[Tensor, Tensor]:
    """Return the binary cross entropy of ``sigmoid(evidence)`` against the label, and its gradient."""
    wrong = _negate_target(evidence, x)  # what speaks for the wrong answer
    v = wrong.sigmoid()
    value = wrong.clamp_min_(0).sum(-1)
    other = torch.sub(1, v, out=_over(wrong))
    value -= _log_product(torch.maximum(v, other, out=_over(wrong)))
    return value, _negate_target(v, x)


def join(first: RowSums, second: RowSums) -> RowSums:
    """Return the sums over the classes of both.

    >>> one = RowSums(*torch.tensor([[0.0], [1.0], [0.0], [0.0], [0.0], [0.0], [2.0], [3.0], [4.0]]))
    >>> join(one, one).weighed
    tensor([2.])
    """
    highest = torch.maximum(first.highest, second.highest)
    pairs = zip(first.relative_to(highest), second.relative_to(highest), strict=True)
    return RowSums(highest, *(x + y for x, y in pairs))


# --- the target's entry of each row ------------------------------------------------------------------------------
# Gather and scatter touch one number per row. A compiler would start a kernel for each, so there it is a comparison.


def _is_target(y: Tensor, x: Block) -> Tensor:
    found = torch.arange(y.shape[-1], device=y.device) == x.column
    return found if x.inside is None else found & x.inside


def _pick(y: Tensor, x: Block) -> Tensor:
    """Return the target's entry (N,), 0 where the target is in another block."""
    if torch.compiler.is_compiling():
        return torch.where(_is_target(y, x), y, 0.0).sum(-1)
    found = y.gather(-1, x.column)
    return (found if x.inside is None else found * x.inside).squeeze(-1)


def _put(y: Tensor, x: Block, value: float) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.where(_is_target(y, x), value, y)
    if x.inside is None:
        return y.scatter_(-1, x.column, value)
    return y.scatter_(-1, x.column, torch.where(x.inside, value, y.gather(-1, x.column)))


def _negate_target(y: Tensor, x: Block) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.where(_is_target(y, x), -y, y)
    found = y.gather(-1, x.column)
    return y.scatter_(-1, x.column, -found if x.inside is None else torch.where(x.inside, -found, found))


def add_at_target(y: Tensor, x: Block, value: Tensor | float) -> Tensor:
    """Add a value to the target's entry of each row, in place."""
    if torch.compiler.is_compiling():
        return y + torch.where(_is_target(y, x), value, 0.0)
    found = y.gather(-1, x.column) + (value if x.inside is None else x.inside.to(y.dtype) * value)
    return y.scatter_(-1, x.column, found)


# --- one pass over memory each -----------------------------------------------------------------------------------


def _above(x: Tensor, threshold: Tensor | float, out: Tensor | None = None) -> Tensor:
    """Return 1 where ``x > threshold``, else 0, as numbers: a tensor of truth values takes ten times as long."""
    if torch.compiler.is_compiling():
        return (x > threshold).to(x.dtype)
    if out is None:
        out = torch.empty_like(x if isinstance(threshold, float) else threshold)
    return torch.gt(x, threshold, out=out)


def _over(x: Tensor) -> Tensor | None:
    """Return where to put a result that may overwrite ``x``; None inside of a compiler, which decides by itself."""
    return None if torch.compiler.is_compiling() else x


def _times_slope(x: Tensor, s: Tensor) -> Tensor:
    """Return ``x s (1 - s)`` in the memory of ``s``."""
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.aten.sigmoid_backward(x, s)
    else:
        found = torch.ops.aten.sigmoid_backward.grad_input(x, s, grad_input=s)
    return found


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of ``x * y`` over the classes; a matrix product would follow autocast."""
    return (x * y).sum(-1)


def _log_product(factors: Tensor) -> Tensor:
    """Return the sum of the logarithms of numbers between 1/2 and 1 over the classes."""
    whole = factors.shape[-1] // _FACTORS * _FACTORS
    if not whole:
        return factors.prod(-1).log()
    rest = factors[..., whole:].prod(-1).log()
    groups = factors[..., :whole].reshape(*factors.shape[:-1], whole // _FACTORS, _FACTORS)
    return groups.prod(-1).log().sum(-1) + rest


def _weighted(x: Tensor, weight: float, row_weight: Tensor | None) -> Tensor:
    x = x if weight == 1.0 else x.mul_(weight)
    return x if row_weight is None else x.mul_(row_weight)


def _over_samples(x: Tensor, mean: bool = False) -> Tensor:
    """Return the sum over S masks per row, or their mean; ``x`` itself where there is one."""
    rows = 1 if mean else 2
    if x.dim() == rows:
        return x
    return x.mean(0) if mean else x.sum(0)


# --- the plain form ----------------------------------------------------------------------------------------------


def plain_terms(
    o: Tensor | None,
    a: Tensor,
    stopped: Tensor,
    r: Tensor | None,
    uniform: Tensor | None,
    target: Tensor,
    options: Options,
    class_weight: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the terms of each row by the equations of :mod:`dropmax.functional`, for autograd to differentiate.

    ``stopped`` holds the values of ``a``, and says where a gradient of the posterior logits ``b = stopped + r`` goes.
    Without r the posterior is the prior, and there is no auxiliary term.

    >>> o, a, r = torch.zeros(3, 1, 4)
    >>> found = plain_terms(o, a, a, r, torch.full((1, 4), 0.3), torch.tensor([1]), Options())
    >>> {name: round(float(value), 4) for name, value in found.items()}
    {'cross_entropy': 1.3863, 'kl': 0.6931, 'entropy': 2.7726, 'auxiliary': 2.7726}
    """
    b = stopped if r is None else stopped + r
    terms = {}
    if o is not None and uniform is not None:
        log_mask = log_hard_mask(b, uniform)
        if options.mask_gradient:
            log_mask = log_relaxed_mask(b, uniform, options.temperature)
        smoothing = options.label_smoothing
        terms["cross_entropy"] = masked_nll(
            o, log_mask, target, epsilon=options.epsilon, label_smoothing=smoothing, class_weight=class_weight
        )
    terms["kl"] = mask_kl(b, a, target)
    terms["entropy"] = mask_entropy(a)
    if r is not None:
        terms["auxiliary"] = auxiliary(r - options.base_rate, target)
    return terms
