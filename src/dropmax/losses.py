"""The DropMax objective of each row as a function with a gradient, for autograd, compilers and ranks.

:func:`losses` starts from the last linear maps and walks over blocks of classes (:mod:`dropmax.walk`).
:func:`losses_of_logits` does the same from logits that exist already, as one block. Differentiated twice, both fall
back on the plain form of :mod:`dropmax.functional`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dropmax import walk
from dropmax.noise import uniform
from dropmax.objective import Options, RowSums, plain_terms
from dropmax.walk import Maps, Plan, Rows, backward_walk, forward_walk, is_words, wide

__all__ = ["RowResults", "losses", "losses_of_logits"]


class RowResults(NamedTuple):
    """The objective of each row, and what :class:`dropmax.Loss` reports of it. Only ``total`` has a gradient."""

    total: Tensor
    cross_entropy: Tensor
    kl_less_entropy: Tensor
    entropy: Tensor  # zeros unless Options.sum_entropy
    auxiliary: Tensor
    retain_logits: Tensor  # (N, K), from which to compute the entropy where it is zeros; else empty


def losses(
    maps: Maps,
    rows: Rows,
    options: Options,
    *,
    block_size: int,
    keep: bool = True,
    group: dist.ProcessGroup | None = None,
    first_class: int = 0,
    all_classes: int = 0,
) -> RowResults:
    """Return the objective of each row, walking over blocks of ``block_size`` classes.

    With ``keep``, the forward pass keeps the gradients of all blocks where they fit into memory. Otherwise the backward
    pass computes each block again. Where ``group`` shares the classes, the maps are this rank's part of them.

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
    if not one_block or group is not None or torch.compiler.is_compiling():  # retain logits are not kept for later
        options = options._replace(sum_entropy=True)
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in maps)
    keep = gradients and ((one_block and group is None) or (keep and _may_keep(maps, options)))
    # A compiler refuses the same tensor twice, and its gradient is added up here in one place.
    inputs = maps.inputs()
    shared = tuple(next(j for j in range(4) if inputs[j] is inputs[i]) for i in range(4))
    a_inputs, r_inputs, b_inputs = (inputs[i] if shared[i] == i else None for i in (1, 2, 3))
    maps = maps._replace(a_inputs=a_inputs, r_inputs=r_inputs, b_inputs=b_inputs)
    compiled, all_classes = walk.blocks_are_compiled(), all_classes or num_classes
    plan = Plan(block_size, _product_dtype(maps), gradients, keep, compiled, first_class, all_classes, shared)
    arguments = (*maps, *rows, options, plan, group)
    if not _autocasts(maps.o_inputs):
        return RowResults(*_OfMaps.apply(*arguments))  # type: ignore[no-untyped-call]
    with torch.autocast(maps.o_inputs.device.type, enabled=False):  # products have that dtype already, sums must not
        return RowResults(*_OfMaps.apply(*arguments))  # type: ignore[no-untyped-call]


def _may_keep(maps: Maps, options: Options) -> bool:
    """Say whether gradients of several blocks can be kept, and fit into memory."""
    if options.mask_gradient or options.label_smoothing or options.samples > 1:
        return False  # they depend on sums over all classes, and not by one factor per row
    kinds = 3 + (maps.b_inputs is not None)
    size = kinds * len(maps.o_inputs) * len(maps.o_weight) * 4
    weights = sum(x.numel() * x.element_size() for x in (maps.o_weight, maps.a_weight, maps.r_weight))
    return size <= max(walk.KEPT_BYTES, weights)


def _autocasts(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def _product_dtype(maps: Maps) -> torch.dtype:
    """Return the dtype in which ``nn.Linear`` would compute here: that of autocast where it is on."""
    if _autocasts(maps.o_inputs) and maps.o_inputs.dtype != torch.float64:
        return torch.get_autocast_dtype(maps.o_inputs.device.type)
    found = {x.dtype for x in maps if x is not None}
    return found.pop() if len(found) == 1 else functools.reduce(torch.promote_types, found)


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


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Any, a: Tensor, stopped: Any, r: Any, *arguments: Any) -> tuple[Tensor, ...]:
        rows, options = Rows(*arguments[:4]), arguments[4]
        num_classes = a.shape[-1]
        plan = Plan(num_classes, compiled=walk.blocks_are_compiled(), all_classes=num_classes)
        drawn = () if o is None else walk.draw(rows.noise, len(a), num_classes, options, plan)
        x = walk.make_block(o, a, r, rows, slice(0, num_classes), plan, drawn)
        of_b = stopped is not None or r is None
        sums, found = plan.work()(x, options, gradients=any(ctx.needs_input_grad[:4]), posterior=of_b)
        if r is None and found.a is not None and found.b is not None:
            found = found._replace(a=found.a + found.b)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(o, a, stopped, r, *rows, *found)
        ctx.options = options
        result = _finish(sums, rows, options, a, likelihood=o is not None)
        ctx.mark_non_differentiable(*result[1:])
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:
            return (None,) * 9
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
        options, plan, group = arguments[14:]
        if torch.compiler.is_compiling() and plan.block < len(maps.o_weight):  # it would unroll a thousand blocks
            parts = _forward_op(list(maps), list(rows), *options, *plan)
            sums, kept, retain_logits = RowSums(*parts[:9]), parts[9:], maps.o_inputs.new_empty(0)
        else:
            sums, kept, retain_logits = forward_walk(maps, rows, options, plan, group)
        known = () if plan.keep else (sums.highest, sums.weighed, sums.kept, sums.kept_weight)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*maps, *rows, *known, *kept)
        ctx.settings = options, plan, group
        result = _finish(sums, rows, options, retain_logits)
        ctx.mark_non_differentiable(*result[1:])
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:
            return (None,) * 17
        saved = ctx.saved_tensors
        maps, rows, rest = Maps(*saved[:10]), Rows(*saved[10:14]), saved[14:]  # what is kept, or known of the rows
        options, plan, group = ctx.settings
        needed, nothing = ctx.needs_input_grad[:10], (None,) * 7
        if torch.compiler.is_compiling() and plan.block < len(maps.o_weight):
            found = _backward_op(list(maps), list(rows), [*rest, gradients[0]], list(needed), *options, *plan)
            return (*(x if need else None for x, need in zip(found, needed, strict=True)), *nothing)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if group is not None:
                raise RuntimeError("a head whose classes are shared by ranks cannot be differentiated twice")

            def plain(*maps: Any) -> Tensor:
                return _plain_totals_of_maps(Maps(*maps), rows, options, plan)

            return (*_by_autograd(plain, maps, gradients[0], needed), *nothing)
        found = backward_walk(maps, rows, options, plan, rest, gradients[0], needed)
        if group is not None:
            for on_inputs in (found[0], found[3], found[6], found[9]):
                if on_inputs is not None:
                    dist.all_reduce(on_inputs, group=group)
        return (*found, *nothing)


def _finish(sums: RowSums, rows: Rows, options: Options, retain_logits: Tensor, likelihood: bool = True) -> RowResults:
    cross_entropy = sums.cross_entropy(options, rows.row_weight) if likelihood else torch.zeros_like(sums.entropy)
    total = sums.total(cross_entropy, options, rows.row_weight)
    return RowResults(total, cross_entropy, sums.kl_less_entropy, sums.entropy, sums.auxiliary, retain_logits)


# --- differentiated twice ----------------------------------------------------------------------------------------


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
    if plan.kinds(maps) == 4:
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
    """Return the noise of all rows and classes, from words if need be."""
    if not is_words(noise):
        return noise
    num_rows, num_classes = like.shape
    whole = uniform(noise, num_rows * options.samples, wide(like.dtype))
    return whole if options.samples == 1 else whole.view(options.samples, num_rows, num_classes)


# --- the walk over several blocks, as operations into which a compiler does not look -------------------------------

_SETTINGS = (
    "float temperature, float epsilon, int samples, float label_smoothing, float base_rate, "
    "bool mask_gradient, float cross_entropy_weight, float kl_weight, float entropy_weight, float auxiliary_weight, "
    "bool sum_entropy, int block, ScalarType dtype, bool gradients, bool keep, bool compiled, int first_class, "
    "int all_classes, int[] shared"
)
_TENSORS = "Tensor?[] maps, Tensor?[] rows"


def _settings(values: Sequence[Any]) -> tuple[Options, Plan]:
    count = len(Options._fields)
    return Options(*values[:count]), Plan(*values[count:])._replace(compiled=True)


@torch.library.custom_op("dropmax::forward_walk", mutates_args=(), schema=f"({_TENSORS}, {_SETTINGS}) -> Tensor[]")
def _forward_op(maps: Sequence[Tensor | None], rows: Sequence[Tensor | None], *values: Any) -> list[Tensor]:
    """:func:`forward_walk` as one operation."""
    sums, kept, _ = forward_walk(Maps(*maps), Rows(*rows), *_settings(values))  # type: ignore[arg-type]
    return [*(x.clone() for x in sums), *kept]


@_forward_op.register_fake
def _(maps: Sequence[Tensor | None], rows: Sequence[Tensor | None], *values: Any) -> list[Tensor]:
    options, plan = _settings(values)
    inputs, num_rows, num_classes = maps[0], len(maps[0]), len(maps[1])  # type: ignore[arg-type]
    shape = (num_rows,) if options.samples == 1 else (options.samples, num_rows)
    several = {"weighed", "kept", "kept_weight", "kept_logit"}
    like = functools.partial(inputs.new_empty, dtype=wide(plan.dtype))  # type: ignore[union-attr]
    found = [like(shape if name in several else (num_rows,)) for name in RowSums._fields]
    for here in plan.blocks(num_classes) if plan.keep else ():
        found += [like(num_rows, here.stop - here.start) for _ in range(plan.kinds(Maps(*maps)))]  # type: ignore[arg-type]
    return found


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
    """:func:`backward_walk` as one operation; an empty tensor stands for a gradient that is not needed."""
    found = backward_walk(Maps(*maps), Rows(*rows), *_settings(values), tensors[:-1], tensors[-1], needed)  # type: ignore[arg-type]
    return [tensors[-1].new_empty(0) if x is None else x for x in found]


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
