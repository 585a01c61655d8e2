"""The walk over blocks of classes: the DropMax objective as a function that autograd and compilers can use.

:func:`losses` takes the last linear maps of the logits, and never holds more logits than a block has. Its forward pass
leaves behind the gradients of the row totals with respect to the logits, in the memory of the logits. The backward pass
multiplies: with c the gradients of the row totals, G those of the logits and x the inputs of a map, they are
``G^T (c x)`` for its weight and ``c (G W)`` for x. Where G of all classes would need more memory than the weights, it
is computed again, block by block.

:func:`losses_of_logits` does the same from logits that exist already.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dropmax.noise import hashes, uniform
from dropmax.objective import (
    Block,
    Gradients,
    Known,
    Options,
    RowSums,
    add_at_target,
    block,
    join,
    plain_terms,
)

__all__ = ["BLOCK_NUMBERS", "KEPT_BYTES", "RowResults", "choose_block", "compile_blocks", "losses", "losses_of_logits"]

#: Gradients of the logits of all blocks are kept for the backward pass where they need no more than this, or no more
#: than the weights.
KEPT_BYTES = 2**26

#: Numbers in a block, if nobody says otherwise. Matrix products want wide blocks; the memory used is about ten such.
BLOCK_NUMBERS = 2**19

#: Narrower blocks make matrix products slow.
LEAST_BLOCK = 256

#: Without a compiler, element-wise work is done for this many numbers at a time, so that they stay in the cache.
GROUP_NUMBERS = 2**16

#: See :func:`compile_blocks`.
_always_compiled = False


class RowResults(NamedTuple):
    """The objective of each row, and what :class:`dropmax.Loss` reports of it. Only ``total`` has a gradient.

    >>> RowResults._fields
    ('total', 'cross_entropy', 'kl_less_entropy', 'entropy', 'auxiliary', 'retain_logits')
    """

    total: Tensor
    cross_entropy: Tensor
    kl_less_entropy: Tensor
    entropy: Tensor  # zeros unless Options.sum_entropy
    auxiliary: Tensor
    retain_logits: Tensor  # (N, K), from which to compute the entropy where it is zeros; else empty


class Maps(NamedTuple):
    """The last linear map of each kind of logits, ``inputs @ weight.T + bias``, as one flat tuple of tensors.

    >>> len(Maps._fields)
    10
    """

    o_inputs: Tensor
    o_weight: Tensor
    o_bias: Tensor
    a_inputs: Tensor | None  # None inside of the walk where they are the same tensor as others, see Plan.shared
    a_weight: Tensor
    a_bias: Tensor
    r_inputs: Tensor | None
    r_weight: Tensor
    r_bias: Tensor
    b_inputs: Tensor | None = None  # inputs that learn from the a inside ``b = a + r``; None: nobody does

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Return the inputs of o, a and r, and those that learn from the a inside b."""
        return self.o_inputs, self.a_inputs, self.r_inputs, self.b_inputs

    def parameters(self, i: int) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the map of o, a or r; of b they are those of a."""
        pairs = (self.o_weight, self.o_bias), (self.a_weight, self.a_bias), (self.r_weight, self.r_bias)
        return pairs[1 if i == 3 else i]


class Rows(NamedTuple):
    """What the objective needs beside logits.

    >>> Rows._fields
    ('target', 'noise', 'class_weight', 'row_weight')
    """

    target: Tensor  # (N,), counted from the first class here; outside where it belongs to another rank
    noise: Tensor  # uniform numbers (N, K) or (S, N, K), or a seed (dropmax.noise)
    class_weight: Tensor | None = None  # (K,) and
    row_weight: Tensor | None = None  # (N,), the weight of each row's label: both only with label smoothing

    def of_classes(self, mine: slice) -> Rows:
        """Return these rows for a rank that has some of the classes."""
        noise = self.noise if is_seed(self.noise) else self.noise[..., mine]
        class_weight = None if self.class_weight is None else self.class_weight[mine]
        return Rows(self.target - mine.start, noise, class_weight, self.row_weight)


class Plan(NamedTuple):
    """How to walk.

    >>> Plan(block=64).keep
    True
    """

    block: int  # classes in a block
    gradients: bool = True  # there will be a backward pass
    keep: bool = True  # for which the gradients of all blocks are kept
    compiled: bool = False  # compile the work on a block
    first_class: int = 0  # index of the first class here, and
    all_classes: int = 0  # how many there are on all ranks
    shared: Sequence[int] = (0, 1, 2, 3)  # for the inputs of o, a, r, b: the first of them that is the same tensor

    def inputs(self, maps: Maps, i: int) -> Tensor:
        """Return the inputs of o, a or r, or those that learn from the a inside b."""
        found = maps.inputs()[self.shared[i]]
        if found is None:
            raise ValueError(f"map {i} has no inputs")
        return found

    def planes(self, maps: Maps) -> int:
        """Return how many kinds of logits have a gradient: o, a, r and, if somebody learns from it, b."""
        return 3 if maps.inputs()[self.shared[3]] is None else 4


def choose_block(num_rows: int, num_classes: int) -> int:
    """Return a number of classes for a block: as even a split as possible, a multiple of 64 where there are several.

    >>> choose_block(128, 10_000), choose_block(128, 10)
    (3392, 10)
    """
    wanted = max(LEAST_BLOCK, BLOCK_NUMBERS // max(1, num_rows))
    blocks = math.ceil(num_classes / wanted)
    return num_classes if blocks == 1 else math.ceil(num_classes / blocks / 64) * 64


def losses(
    maps: Maps,
    rows: Rows,
    options: Options,
    *,
    block_size: int,
    group: dist.ProcessGroup | None = None,
    first_class: int = 0,
    all_classes: int = 0,
) -> RowResults:
    """Return the objective of each row, walking over blocks of ``block_size`` classes.

    Where ``group`` shares the classes, the maps are this rank's part of them.

    >>> h, target, noise = torch.randn(4, 8), torch.tensor([0, 9, 5, 4]), torch.rand(4, 10)
    >>> o, a, r = maps = [torch.nn.Linear(8, 10) for _ in range(3)]
    >>> flat = Maps(*(x for linear in maps for x in (h, linear.weight, linear.bias)))
    >>> blocks = losses(flat, Rows(target, noise), Options(), block_size=3)
    >>> whole = losses_of_logits(o(h), a(h), None, r(h), Rows(target, noise), Options())
    >>> torch.allclose(blocks.total, whole.total, rtol=1e-4)
    True
    """
    num_classes = len(maps.o_weight)
    one_block = block_size >= num_classes
    if not one_block or group is not None or torch.compiler.is_compiling():  # no retain logits when somebody looks
        options = options._replace(sum_entropy=True)
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in maps)
    keep = gradients and ((one_block and group is None) or _may_keep(maps, options))
    # A compiler refuses the same tensor twice, and its gradient is added up here in one place.
    inputs = maps.inputs()
    shared = tuple(next(j for j in range(4) if inputs[j] is inputs[i]) for i in range(4))
    a_inputs, r_inputs, b_inputs = (inputs[i] if shared[i] == i else None for i in (1, 2, 3))
    maps = maps._replace(a_inputs=a_inputs, r_inputs=r_inputs, b_inputs=b_inputs)
    plan = Plan(block_size, gradients, keep, _always_compiled, first_class, all_classes or num_classes, shared)
    arguments = (*maps, *rows, options, plan, _product_dtype(maps), group)
    if not _autocasts(maps.o_inputs):
        return RowResults(*_OfMaps.apply(*arguments))  # type: ignore[no-untyped-call]
    with torch.autocast(maps.o_inputs.device.type, enabled=False):  # products have that dtype already, sums must not
        return RowResults(*_OfMaps.apply(*arguments))  # type: ignore[no-untyped-call]


def _may_keep(maps: Maps, options: Options) -> bool:
    """Say whether gradients of several blocks can be kept, and fit into memory."""
    if options.mask_gradient or options.label_smoothing or options.samples > 1:
        return False  # they depend on sums over all classes, and not by one factor per row
    planes = 3 + (maps.b_inputs is not None)
    size = planes * len(maps.o_inputs) * len(maps.o_weight) * 4
    weights = sum(x.numel() * x.element_size() for x in (maps.o_weight, maps.a_weight, maps.r_weight))
    return size <= max(KEPT_BYTES, weights)


def losses_of_logits(
    o: Tensor | None, a: Tensor, stopped: Tensor | None, r: Tensor | None, rows: Rows, options: Options
) -> RowResults:
    """Return the objective of each row from logits (N, K), in float32 at least.

    ``stopped`` holds the values of ``a`` and says where the gradient of the a inside ``b = a + r`` goes; None: nowhere.
    Without ``o`` there is no likelihood. Without ``r`` the posterior is the prior, b is a, which gets all gradients,
    and there is no auxiliary term.
    """
    if torch.compiler.is_compiling():
        options = options._replace(sum_entropy=True)
    return RowResults(*_OfLogits.apply(o, a, stopped, r, *rows, options))  # type: ignore[no-untyped-call]


# --- forward -----------------------------------------------------------------------------------------------------


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Any, a: Tensor, stopped: Any, r: Any, *arguments: Any) -> tuple[Tensor, ...]:
        rows, options = Rows(*arguments[:4]), arguments[4]
        num_classes = a.shape[-1]
        plan = Plan(num_classes, compiled=_always_compiled, all_classes=num_classes)
        drawn = () if o is None else _drawn(rows.noise, len(a), num_classes, options, plan)
        x = _block(o, a, r, rows, slice(0, num_classes), plan, drawn)
        of_b = stopped is not None or r is None
        sums, found = _in_groups(x, options, plan, gradients=any(ctx.needs_input_grad[:4]), posterior=of_b)
        if r is None and found.a is not None and found.b is not None:
            found = found._replace(a=found.a + found.b)
        ctx.save_for_backward(o, a, stopped, r, *rows, *found)
        ctx.options = options
        result = _finish(sums, rows, options, a, likelihood=o is not None)
        ctx.mark_non_differentiable(*result[1:])
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        o, a, stopped, r, *rows, on_o, on_a, on_r, on_b = ctx.saved_tensors
        nothing = (None,) * 5
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():

            def plain(o: Any, a: Any, stopped: Any, r: Any) -> Tensor:
                if stopped is None:
                    stopped = a if r is None else a.detach()
                return _plain_totals(o, a, stopped, r, Rows(*rows), ctx.options)

            return (*_by_autograd(plain, (o, a, stopped, r), gradients[0], ctx.needs_input_grad), *nothing)
        weight = gradients[0].unsqueeze(-1)
        found = (on_o, on_a, on_b if stopped is not None else None, on_r)
        needed = ctx.needs_input_grad[:4]
        return (*(g * weight if n and g is not None else None for g, n in zip(found, needed, strict=True)), *nothing)


class _OfMaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        maps, rows = Maps(*arguments[:10]), Rows(*arguments[10:14])
        options, plan, dtype, group = arguments[14:]
        if torch.compiler.is_compiling() and plan.block < len(maps.o_weight):  # it would unroll a thousand blocks
            parts = _forward_op(list(maps), list(rows), dtype, *options, *plan)
            sums, planes, retain_logits = RowSums(*parts[:9]), parts[9:], maps.o_inputs.new_empty(0)
        else:
            sums, planes, retain_logits = forward_walk(maps, rows, options, plan, dtype, group)
        known = Known(sums.highest, sums.weighed, sums.kept, sums.kept_weight)
        ctx.save_for_backward(*maps, *rows, *known, *planes)
        ctx.settings = options, plan, dtype, group
        result = _finish(sums, rows, options, retain_logits)
        ctx.mark_non_differentiable(*result[1:])
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        maps, rows, known, planes = Maps(*saved[:10]), Rows(*saved[10:14]), Known(*saved[14:18]), list(saved[18:])
        options, plan, dtype, group = ctx.settings
        needed, nothing = ctx.needs_input_grad[:10], (None,) * 8
        if torch.compiler.is_compiling() and plan.block < len(maps.o_weight):
            tensors = [*known, *planes, gradients[0]]
            found = _backward_op(list(maps), list(rows), tensors, list(needed), dtype, *options, *plan)
            return (*(x if need else None for x, need in zip(found, needed, strict=True)), *nothing)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if group is not None:
                raise RuntimeError("a head whose classes are shared by ranks cannot be differentiated twice")

            def plain(*maps: Any) -> Tensor:
                return _plain_totals_of_maps(Maps(*maps), rows, options, plan)

            return (*_by_autograd(plain, maps, gradients[0], needed), *nothing)
        found = backward_walk(maps, rows, known, planes, gradients[0], (options, plan, dtype), needed)
        if group is not None:
            for on_inputs in (found[0], found[3], found[6], found[9]):
                if on_inputs is not None:
                    dist.all_reduce(on_inputs, group=group)
        return (*found, *nothing)


def forward_walk(
    maps: Maps, rows: Rows, options: Options, plan: Plan, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> tuple[RowSums, list[Tensor], Tensor]:
    """Return the sums over all classes, the gradients of the logits if they are kept, and the logits a of one block."""
    num_rows, num_classes = len(maps.o_inputs), len(maps.o_weight)
    drawn = _drawn(rows.noise, num_rows, num_classes, options, plan)
    planes = _planes(maps, num_classes, plan, dtype) if plan.keep else []
    retain_logits = maps.o_inputs.new_empty(0)
    seen: list[tuple[slice, Block, RowSums]] = []
    for here in _walk(num_classes, plan):
        places = [_view(plane, num_rows, here) for plane in planes]
        x, out = _logits_of(maps, rows, here, plan, dtype, drawn, places)
        sums, found = _in_groups(x, options, plan, gradients=plan.keep, out=out)
        if plan.keep and not planes:
            planes = [g.reshape(-1) for g in found[: plan.planes(maps)] if g is not None]
        if plan.block >= num_classes and not options.sum_entropy:
            retain_logits = x.a
        seen.append((here, x._replace(o=None, a=x.column, r=None, noise=()), sums))  # the logits go, the target stays
    total = functools.reduce(join, (sums for *_, sums in seen))
    total = total if group is None else over_ranks(total, group)
    if plan.keep and (len(seen) > 1 or group is not None):
        for here, x, sums in seen:
            _renormalise(_view(planes[0], num_rows, here), x, sums, total, options)
    return total, planes, retain_logits


def _renormalise(on_o: Tensor, x: Block, sums: RowSums, total: RowSums, options: Options) -> None:
    """Turn gradients of a softmax over one block into those of the softmax over all classes."""
    weight = options.cross_entropy_weight
    share = (sums.highest - total.highest).exp() * sums.weighed / total.weighed
    add_at_target(add_at_target(on_o, x, weight).mul_(share.unsqueeze(-1)), x, -weight)


def _logits_of(
    maps: Maps,
    rows: Rows,
    here: slice,
    plan: Plan,
    dtype: torch.dtype,
    drawn: tuple[Tensor, ...],
    places: Sequence[Tensor],
) -> tuple[Block, Gradients]:
    """Compute the logits of some classes, in the ``places`` of their gradients; a of a whole head in its own."""
    at: list[Tensor | None] = [*places[:3]] if places else [None] * 3
    if plan.block >= len(maps.o_weight):
        at[1] = None
    o, a, r = (_linear(plan.inputs(maps, i), maps.parameters(i), here, dtype, at[i]) for i in range(3))
    return _block(o, a, r, rows, here, plan, drawn), Gradients(*places)


def _linear(
    inputs: Tensor, parameters: tuple[Tensor, Tensor], here: slice, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Return ``inputs @ weight.T + bias`` for some classes: computed in ``dtype``, returned in float32 at least."""
    weight, bias = (x[here].to(dtype) for x in parameters)
    if out is not None and out.dtype != dtype:
        return out.copy_(torch.addmm(bias, inputs.to(dtype), weight.t()))
    return torch.addmm(bias, inputs.to(dtype), weight.t(), out=out).to(_wide(dtype))


def _block(
    o: Tensor | None, a: Tensor, r: Tensor | None, rows: Rows, here: slice, plan: Plan, drawn: tuple[Tensor, ...]
) -> Block:
    column, inside = (rows.target - here.start).unsqueeze(-1), None
    width = here.stop - here.start
    if width < plan.all_classes:  # some targets are elsewhere
        index = column.clamp(0, width - 1)
        column, inside = index, index == column
    # The last of them has the classes: uniform numbers (..., N, K), or hashes of the rows and of the classes.
    noise = (*drawn[:-1], drawn[-1][..., here]) if drawn else ()
    class_weight = None if rows.class_weight is None else rows.class_weight[here]
    row_weight = None if rows.row_weight is None else rows.row_weight.unsqueeze(-1)
    return Block(o, a, r, column, inside, noise, class_weight, row_weight)


def _in_groups(
    x: Block,
    options: Options,
    plan: Plan,
    *,
    gradients: bool,
    posterior: bool = False,
    known: Known | None = None,
    out: Gradients = Gradients(),  # noqa: B008
) -> tuple[RowSums, Gradients]:
    """Work on a block: on some rows at a time where nothing is compiled, so that what they need stays in the cache.

    Without ``out`` the gradient of b is left out unless ``posterior`` asks for it.
    """
    if torch.compiler.is_compiling():
        return block(x, options, known=known, gradients=gradients)
    if plan.compiled:
        sums, found = _compiled()(x, options, known=known, gradients=gradients)
        pairs = zip(found, out, strict=True)
        return sums, Gradients(*(y if place is None or y is None else place.copy_(y) for y, place in pairs))
    num_rows, width = x.a.shape
    size = max(1, GROUP_NUMBERS // max(1, width))
    if num_rows <= size:
        return block(x, options, known=known, gradients=gradients, out=out)
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
        parts.append(block(some, options, known=some_known, gradients=gradients, out=some_out)[0])
    return RowSums(*(torch.cat(sums, -1) for sums in zip(*parts, strict=True))), out


def _drawn(noise: Tensor, num_rows: int, num_classes: int, options: Options, plan: Plan) -> tuple[Tensor, ...]:
    """Return the noise, or from a seed the hashes of rows and of classes, from which each block makes its own."""
    if not is_seed(noise):
        return (noise,)
    by_row, by_class = hashes(noise, num_rows * options.samples, plan.first_class, num_classes)
    return by_row if options.samples == 1 else by_row.view(options.samples, num_rows, 1), by_class


def is_seed(noise: Tensor) -> bool:
    """Say whether this is a seed, and not the noise itself.

    >>> is_seed(torch.rand(2, 3))
    False
    """
    return not noise.is_floating_point()


def _finish(sums: RowSums, rows: Rows, options: Options, retain_logits: Tensor, likelihood: bool = True) -> RowResults:
    cross_entropy = sums.cross_entropy(options, rows.row_weight) if likelihood else torch.zeros_like(sums.entropy)
    total = sums.total(cross_entropy, options, rows.row_weight)
    return RowResults(total, cross_entropy, sums.kl_less_entropy, sums.entropy, sums.auxiliary, retain_logits)


def _walk(num_classes: int, plan: Plan) -> Iterator[slice]:
    for start in range(0, num_classes, plan.block):
        yield slice(start, min(start + plan.block, num_classes))


def _planes(maps: Maps, num_classes: int, plan: Plan, dtype: torch.dtype) -> list[Tensor]:
    """Return memory for the gradients of o, a, r and, if somebody learns from it, of the a inside b."""
    if torch.compiler.is_compiling():
        return []
    size = len(maps.o_inputs) * num_classes
    return [maps.o_inputs.new_empty(size, dtype=_wide(dtype)) for _ in range(plan.planes(maps))]


def _view(plane: Tensor, num_rows: int, here: slice) -> Tensor:
    """Return the part of a plane that belongs to a block: (N, width), without gaps."""
    return plane[num_rows * here.start : num_rows * here.stop].view(num_rows, here.stop - here.start)


# --- backward ----------------------------------------------------------------------------------------------------


def backward_walk(
    maps: Maps,
    rows: Rows,
    known: Known,
    planes: Sequence[Tensor],
    weight: Tensor,
    settings: tuple[Options, Plan, torch.dtype],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the maps, where those of the row totals are ``weight``."""
    options, plan, dtype = settings
    num_rows, num_classes = len(maps.o_inputs), len(maps.o_weight)
    drawn = () if plan.keep else _drawn(rows.noise, num_rows, num_classes, options, plan)
    places = [] if plan.keep else _planes(maps, min(plan.block, num_classes), plan, dtype)
    scaled = {
        i: (x * weight.unsqueeze(-1)).to(dtype)
        for i, x in enumerate(maps.inputs())
        if x is not None and i in plan.shared[:3]
    }
    found: list[Tensor | None] = [None] * 10
    for here in _walk(num_classes, plan):
        if plan.keep:
            gradients: Sequence[Tensor] = [_view(plane, num_rows, here) for plane in planes]
        else:
            part = slice(0, here.stop - here.start)
            at = [_view(place, num_rows, part) for place in places]
            x, out = _logits_of(maps, rows, here, plan, dtype, drawn, at)
            parts = _in_groups(x, options, plan, gradients=True, known=known, out=out)[1]
            gradients = parts[: plan.planes(maps)]  # type: ignore[assignment]
        for i, gradient in enumerate(gradients):
            narrow, first = gradient.to(dtype), plan.shared[i]
            if i < 3 and needed[3 * i + 1]:
                found[3 * i + 1] = _product_at(found[3 * i + 1], here, narrow.t(), scaled[first], maps.parameters(i)[0])
            if i < 3 and needed[3 * i + 2]:
                found[3 * i + 2] = _product_at(found[3 * i + 2], here, gradient.t(), weight, maps.parameters(i)[1])
            if needed[3 * first]:
                matrix = maps.parameters(i)[0][here].to(dtype)
                so_far, more = found[3 * first], torch.mm(narrow, matrix)
                found[3 * first] = more.to(_wide(dtype)) if so_far is None else so_far + more
    for i, inputs in enumerate(maps.inputs()):
        if (on_inputs := found[3 * i]) is not None and inputs is not None:
            found[3 * i] = (on_inputs * weight.unsqueeze(-1)).to(inputs.dtype)
    return found


def _product_at(whole: Tensor | None, here: slice, x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """Put ``x @ y`` into some rows of ``whole``, a gradient like the parameter; where that is all rows, return it."""
    if here == slice(0, len(like)):
        return torch.matmul(x, y).to(like.dtype)
    whole = torch.empty_like(like) if whole is None else whole
    whole[here] = torch.matmul(x, y)
    return whole


def _by_autograd(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Differentiate the plain form instead, so that the result can be differentiated again (``create_graph=True``)."""
    wanted = [x for x, need in zip(inputs, needed, strict=False) if need and x is not None]
    found = iter(torch.autograd.grad(function(*inputs), wanted, gradient, create_graph=True, materialize_grads=True))
    return [next(found) if need and x is not None else None for x, need in zip(inputs, needed, strict=False)]


def _plain_totals_of_maps(maps: Maps, rows: Rows, options: Options, plan: Plan) -> Tensor:
    o, a, r = (F.linear(plan.inputs(maps, i), *maps.parameters(i)) for i in range(3))
    stopped = a.detach()
    if plan.planes(maps) == 4:
        stopped = F.linear(plan.inputs(maps, 3), *(x.detach() for x in maps.parameters(3)))
    return _plain_totals(o, a, stopped, r, rows, options)


def _plain_totals(
    o: Tensor | None, a: Tensor, stopped: Tensor, r: Tensor | None, rows: Rows, options: Options
) -> Tensor:
    noise = all_noise(rows.noise, a, options)
    terms = plain_terms(o, a, stopped, r, noise, rows.target, options, rows.class_weight)
    total = options.kl_weight * terms["kl"] - options.entropy_weight * terms["entropy"]
    if r is not None:
        total = total + options.auxiliary_weight * terms["auxiliary"]
    if rows.row_weight is not None:
        total = total * rows.row_weight
    return total if o is None else total + options.cross_entropy_weight * terms["cross_entropy"]


def all_noise(noise: Tensor, like: Tensor, options: Options) -> Tensor:
    """Return the noise of all rows and classes, from a seed if need be."""
    if not is_seed(noise):
        return noise
    num_rows, num_classes = like.shape
    whole = uniform(noise, num_rows * options.samples, 0, num_classes, _wide(like.dtype))
    return whole if options.samples == 1 else whole.view(options.samples, num_rows, num_classes)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _autocasts(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def _product_dtype(maps: Maps) -> torch.dtype:
    """Return the dtype in which ``nn.Linear`` would compute here: that of autocast where it is on."""
    if _autocasts(maps.o_inputs) and maps.o_inputs.dtype != torch.float64:
        return torch.get_autocast_dtype(maps.o_inputs.device.type)
    return functools.reduce(torch.promote_types, (x.dtype for x in maps[1:] if x is not None), maps.o_inputs.dtype)


# --- ranks that share the classes --------------------------------------------------------------------------------


def over_ranks(sums: RowSums, group: dist.ProcessGroup) -> RowSums:
    """Join the sums over each rank's classes: two messages, a few numbers per row."""
    highest = sums.highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    parts = sums.relative_to(highest)
    message = torch.cat([x.flatten() for x in parts])
    dist.all_reduce(message, group=group)
    joined = torch.split(message, [x.numel() for x in parts])
    return RowSums(highest, *(x.view(like.shape) for x, like in zip(joined, parts, strict=True)))


# --- compilers ---------------------------------------------------------------------------------------------------


def compile_blocks(enabled: bool = True) -> None:
    """Compile the arithmetic of a block with ``torch.compile``, also where nobody compiles the rest.

    It needs a C++ compiler and most of a minute at the first step, and makes that arithmetic several times faster:
    worth it for large models trained for long. Where compiling fails, a warning says so and the plain form is used.

    >>> compile_blocks(False)
    """
    global _always_compiled
    _always_compiled = enabled


@functools.lru_cache
def _compiled() -> Callable[..., Any]:
    """Compile the arithmetic of a block; where that fails (no C++ compiler), say so once and go on without."""
    chosen: list[Callable[..., Any]] = [torch.compile(block, dynamic=False)]

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return chosen[-1](*arguments, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            if len(chosen) == 2:
                raise
            warnings.warn(f"blocks of classes are not compiled: {error}", stacklevel=2)
            chosen.append(block)
            return block(*arguments, **options)

    return call


_SETTINGS = (
    "ScalarType dtype, float temperature, float epsilon, int samples, float label_smoothing, float base_rate, "
    "bool mask_gradient, float cross_entropy_weight, float kl_weight, float entropy_weight, float auxiliary_weight, "
    "bool sum_entropy, int block, bool gradients, bool keep, bool compiled, int first_class, int all_classes, "
    "int[] shared"
)
_TENSORS = "Tensor?[] maps, Tensor?[] rows"


def _settings(values: Sequence[Any]) -> tuple[Options, Plan, torch.dtype]:
    count = len(Options._fields)
    return Options(*values[1 : 1 + count]), Plan(*values[1 + count :])._replace(compiled=True), values[0]


@torch.library.custom_op("dropmax::forward_walk", mutates_args=(), schema=f"({_TENSORS}, {_SETTINGS}) -> Tensor[]")
def _forward_op(maps: Sequence[Tensor | None], rows: Sequence[Tensor | None], *values: Any) -> list[Tensor]:
    """:func:`forward_walk` as one operation, into which a compiler does not look."""
    options, plan, dtype = _settings(values)
    sums, planes, _ = forward_walk(Maps(*maps), Rows(*rows), options, plan, dtype)  # type: ignore[arg-type]
    return [*(x.clone() for x in sums), *planes]


@_forward_op.register_fake
def _(maps: Sequence[Tensor | None], rows: Sequence[Tensor | None], *values: Any) -> list[Tensor]:
    options, plan, dtype = _settings(values)
    inputs, num_rows, num_classes = maps[0], len(maps[0]), len(maps[1])  # type: ignore[arg-type]
    shape = (num_rows,) if options.samples == 1 else (options.samples, num_rows)
    several = {"weighed", "kept", "kept_weight", "kept_logit"}
    like = functools.partial(inputs.new_empty, dtype=_wide(dtype))  # type: ignore[union-attr]
    sums = [like(shape if name in several else (num_rows,)) for name in RowSums._fields]
    count = plan.planes(Maps(*maps)) if plan.keep else 0  # type: ignore[arg-type]
    return [*sums, *(like(num_rows * num_classes) for _ in range(count))]


@torch.library.custom_op(
    "dropmax::backward_walk",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor[] tensors, bool[] needed, {_SETTINGS}) -> Tensor[]",
)
def _backward_op(
    maps: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    *values: Any,
) -> list[Tensor]:
    """:func:`backward_walk` as one operation; what there is not, is an empty tensor."""
    known, planes, weight = Known(*tensors[:4]), tensors[4:-1], tensors[-1]
    found = backward_walk(Maps(*maps), Rows(*rows), known, planes, weight, _settings(values), needed)  # type: ignore[arg-type]
    return [weight.new_empty(0) if x is None else x for x in found]


@_backward_op.register_fake
def _(
    maps: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    *values: Any,
) -> list[Tensor]:
    none = tensors[-1]
    return [
        torch.empty_like(x) if x is not None and need else none.new_empty(0)
        for x, need in zip(maps, needed, strict=True)
    ]
