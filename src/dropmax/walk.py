"""The walk over blocks of classes: sums and gradients of the DropMax objective without the logits of all classes.

:func:`forward_walk` takes the last linear maps of the logits, and never holds more logits than a block has. It leaves
behind the gradients of the row totals with respect to the logits, in the memory of the logits. :func:`backward_walk`
multiplies: with c the gradients of the row totals, G those of the logits and x the inputs of a map, the gradients are
``G^T (c x)`` for its weight and ``c (G W)`` for x. Where G of all classes would need more memory than the weights, it
is computed again, block by block.

:mod:`dropmax.losses` makes them functions that autograd and compilers can use.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dropmax.objective import Block, Gradients, Known, Options, RowSums, add_at_target, block, block_of_rows, join

__all__ = ["BLOCK_NUMBERS", "KEPT_BYTES", "Maps", "Plan", "Rows", "choose_block", "compile_blocks"]

#: Gradients of the logits of all blocks are kept for the backward pass where they need no more than this, or no more
#: than the weights.
KEPT_BYTES = 2**26

#: Numbers in a block, by default. Matrix products want wide blocks; the memory used is about ten such.
BLOCK_NUMBERS = 2**19

#: Narrower blocks make matrix products slow.
LEAST_BLOCK = 256

#: See :func:`compile_blocks`.
_always_compiled = False


class Maps(NamedTuple):
    """The last linear map of each kind of logits, ``inputs @ weight.T + bias``, as one flat tuple of tensors."""

    o_inputs: Tensor
    o_weight: Tensor
    o_bias: Tensor
    a_inputs: Tensor | None  # None inside of the walk where they are the same tensor as others, see Plan.shared
    a_weight: Tensor
    a_bias: Tensor
    r_inputs: Tensor | None
    r_weight: Tensor
    r_bias: Tensor
    b_inputs: Tensor | None = None  # inputs that learn from the a inside ``b = a + r``; None: nothing does

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Return the inputs of o, a and r, and those that learn from the a inside b."""
        return self.o_inputs, self.a_inputs, self.r_inputs, self.b_inputs

    def parameters(self, i: int) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the map of o, a or r; of b they are those of a."""
        pairs = (self.o_weight, self.o_bias), (self.a_weight, self.a_bias), (self.r_weight, self.r_bias)
        return pairs[1 if i == 3 else i]


class Rows(NamedTuple):
    """What the objective needs beside logits."""

    target: Tensor  # (N,), counted from the first class here; outside where it belongs to another rank
    noise: Tensor  # uniform numbers (N, K) or (S, N, K), or words of S N rows and all classes (dropmax.noise)
    class_weight: Tensor | None = None  # (K,) and
    row_weight: Tensor | None = None  # (N,), the weight of each row's label: both only with label smoothing

    def of_classes(self, mine: slice) -> Rows:
        """Return these rows for a rank that has some of the classes."""
        noise = self.noise if is_words(self.noise) else self.noise[..., mine]
        class_weight = None if self.class_weight is None else self.class_weight[mine]
        return Rows(self.target - mine.start, noise, class_weight, self.row_weight)


class Plan(NamedTuple):
    """How to walk."""

    block: int  # classes in a block
    dtype: torch.dtype = torch.float32  # of the matrix products
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

    def kinds(self, maps: Maps) -> int:
        """Return how many kinds of logits have a gradient: o, a, r and, if anything learns from it, b."""
        return 3 if maps.inputs()[self.shared[3]] is None else 4

    def blocks(self, num_classes: int) -> Iterator[slice]:
        """Yield the classes of each block."""
        for start in range(0, num_classes, self.block):
            yield slice(start, min(start + self.block, num_classes))

    def work(self) -> Callable[..., tuple[RowSums, Gradients]]:
        """Return :func:`dropmax.objective.block`, or the same compiled."""
        return _compiled() if self.compiled and not torch.compiler.is_compiling() else block


def choose_block(num_rows: int, num_classes: int) -> int:
    """Return a number of classes for a block: as even a split as possible, a multiple of 64 where there are several.

    >>> choose_block(128, 10_000), choose_block(128, 10)
    (3392, 10)
    """
    wanted = max(LEAST_BLOCK, BLOCK_NUMBERS // max(1, num_rows))
    blocks = math.ceil(num_classes / wanted)
    return num_classes if blocks == 1 else math.ceil(num_classes / blocks / 64) * 64


# --- forward -----------------------------------------------------------------------------------------------------


def forward_walk(
    maps: Maps, rows: Rows, options: Options, plan: Plan, group: dist.ProcessGroup | None = None
) -> tuple[RowSums, list[Tensor], Tensor]:
    """Return the sums over all classes, the gradients of each block's logits if kept, and the logits a of one block."""
    num_classes, num_rows = maps.o_weight.shape[0], maps.o_inputs.shape[0]
    drawn, work, kinds = draw(rows.noise, num_rows, num_classes, options, plan), plan.work(), plan.kinds(maps)
    kept: list[Tensor] = []
    retain_logits = maps.o_inputs.new_empty(0)
    seen: list[tuple[Block, RowSums]] = []
    x: Block | None = None
    for here in plan.blocks(num_classes):
        x = _logits_of(maps, rows, plan, here, drawn, None if plan.keep else x)
        out = _places(x, plan, kinds) if plan.keep else Gradients()
        sums, found = work(x, options, gradients=plan.keep, out=out)
        if plan.keep:
            kept += [g for g in found[:kinds] if g is not None]
        if plan.block >= num_classes and not options.sum_entropy:
            retain_logits = x.a
        seen.append((x._replace(o=None, a=x.column, r=None, noise=()), sums))  # the logits go, the target stays
    total = functools.reduce(join, (sums for _, sums in seen))
    total = total if group is None else over_ranks(total, group)
    if plan.keep and (len(seen) > 1 or group is not None):
        for on_o, (target, sums) in zip(kept[::kinds], seen, strict=True):
            _renormalise(on_o, target, sums, total, options)
    return total, kept, retain_logits


def _renormalise(on_o: Tensor, x: Block, sums: RowSums, total: RowSums, options: Options) -> None:
    """Turn gradients of a softmax over one block into those of the softmax over all classes."""
    weight: Tensor | float = options.cross_entropy_weight
    weight = weight if x.row_weight is None else weight * x.row_weight
    share = (sums.highest - total.highest).exp() * sums.weighed / total.weighed
    add_at_target(add_at_target(on_o, x, weight).mul_(share.unsqueeze(-1)), x, -weight)


def _logits_of(
    maps: Maps, rows: Rows, plan: Plan, here: slice, drawn: tuple[Tensor, ...], reuse: Block | None
) -> Block:
    """Compute the logits of some classes, in the memory of a block that is no longer needed if there is one."""
    width = here.stop - here.start
    again: tuple[Tensor | None, ...] = (None,) * 3
    if reuse is not None and reuse.a.shape[-1] == width and not torch.compiler.is_compiling():
        again = reuse[:3]
    o, a, r = (_linear(plan.inputs(maps, i), maps.parameters(i), here, plan.dtype, again[i]) for i in range(3))
    return make_block(o, a, r, rows, here, plan, drawn)


def _linear(
    inputs: Tensor, parameters: tuple[Tensor, Tensor], here: slice, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Return ``inputs @ weight.T + bias`` for some classes: computed in ``dtype``, returned in float32 at least."""
    weight, bias = (_as(_at(x, here), dtype) for x in parameters)
    if out is not None and out.dtype != dtype:
        return out.copy_(torch.addmm(bias, _as(inputs, dtype), weight.t()))
    return _as(torch.addmm(bias, _as(inputs, dtype), weight.t(), out=out), wide(dtype))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, faster where that is ``x``: a head of few classes spends its time in calls."""
    return x if x.dtype == dtype else x.to(dtype)


def _at(x: Tensor, here: slice) -> Tensor:
    """Return some rows of ``x``; ``x`` itself where they are all."""
    return x if here.stop - here.start == x.shape[0] else x[here]


def make_block(
    o: Tensor | None, a: Tensor, r: Tensor | None, rows: Rows, here: slice, plan: Plan, drawn: tuple[Tensor, ...]
) -> Block:
    """Return the block of some classes, from their logits and what :func:`draw` returned."""
    column, inside = (rows.target - here.start if here.start else rows.target).unsqueeze(-1), None
    width = here.stop - here.start
    if width < plan.all_classes:  # some targets are elsewhere
        index = column.clamp(0, width - 1)
        column, inside = index, index == column
    # The last of them has the classes: uniform numbers (..., N, K), or words of the rows and of the classes.
    noise = drawn
    if drawn and drawn[-1].shape[-1] != width:
        noise = (*drawn[:-1], drawn[-1][..., here])
    class_weight = None if rows.class_weight is None else rows.class_weight[here]
    row_weight = None if rows.row_weight is None else rows.row_weight.unsqueeze(-1)
    return Block(o, a, r, column, inside, noise, class_weight, row_weight)


def _places(x: Block, plan: Plan, kinds: int) -> Gradients:
    """Return where the gradients go: into the memory of the logits, but for a of a whole head, which terms may need."""
    if torch.compiler.is_compiling():
        return Gradients()
    whole = x.a.shape[-1] == plan.all_classes
    return Gradients(x.o, torch.empty_like(x.a) if whole else x.a, x.r, torch.empty_like(x.a) if kinds == 4 else None)


def draw(noise: Tensor, num_rows: int, num_classes: int, options: Options, plan: Plan) -> tuple[Tensor, ...]:
    """Return the noise, or the words of rows and of the classes here, from which each block makes its own."""
    if not is_words(noise):
        return (noise,)
    count = num_rows * options.samples
    by_row, by_class = noise[:count, None], noise[count + plan.first_class :][:num_classes]
    return by_row if options.samples == 1 else by_row.view(options.samples, num_rows, 1), by_class


def is_words(noise: Tensor) -> bool:
    """Say whether these are the words of rows and classes, and not the noise itself.

    >>> is_words(torch.rand(2, 3))
    False
    """
    return not noise.is_floating_point()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 at least.

    >>> wide(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- backward ----------------------------------------------------------------------------------------------------


def backward_walk(
    maps: Maps,
    rows: Rows,
    options: Options,
    plan: Plan,
    saved: Sequence[Tensor],
    weight: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the maps, where those of the row totals are ``weight``.

    ``saved`` holds the gradients of each block's logits that :func:`forward_walk` kept, or else the fields of
    :class:`Known`.
    """
    num_classes, dtype, kinds = maps.o_weight.shape[0], plan.dtype, plan.kinds(maps)
    drawn = () if plan.keep else draw(rows.noise, maps.o_inputs.shape[0], num_classes, options, plan)
    work, column = plan.work(), weight.unsqueeze(-1)
    scaled = {i: _as(x * column, dtype) for i, x in enumerate(maps.inputs()) if x is not None and i in plan.shared[:3]}
    found: list[Tensor | None] = [None] * 10
    x: Block | None = None
    for number, here in enumerate(plan.blocks(num_classes)):
        gradients: Sequence[Tensor | None] = saved[number * kinds : (number + 1) * kinds]
        if not plan.keep:
            x = _logits_of(maps, rows, plan, here, drawn, x)
            gradients = work(x, options, known=Known(*saved), gradients=True, out=_places(x, plan, kinds))[1][:kinds]
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            narrow, first, at = _as(gradient, dtype), plan.shared[i], 3 * i + 1
            matrix, bias = maps.parameters(i)
            if i < 3 and needed[at]:
                found[at] = _product_at(found[at], here, narrow.t(), scaled[first], matrix)
            if i < 3 and needed[at + 1]:
                found[at + 1] = _product_at(found[at + 1], here, gradient.t(), weight, bias)
            if needed[3 * first]:
                found[3 * first] = _plus_product(found[3 * first], narrow, _as(_at(matrix, here), dtype))
    for i, inputs in enumerate(maps.inputs()):
        if (on_inputs := found[3 * i]) is not None and inputs is not None:
            found[3 * i] = _as(on_inputs * column, inputs.dtype)
    return found


def _product_at(whole: Tensor | None, here: slice, x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """Put ``x @ y`` into some rows of ``whole``, a gradient like the parameter; where that is all rows, return it."""
    if here.stop - here.start == like.shape[0]:
        return _as(torch.matmul(x, y), like.dtype)
    whole = torch.empty_like(like) if whole is None else whole
    if x.dtype == y.dtype == like.dtype:
        torch.matmul(x, y, out=whole[here])
    else:
        whole[here] = torch.matmul(x, y)
    return whole


def _plus_product(so_far: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """Return ``so_far + x @ y``, summed in float32 at least."""
    if so_far is None:
        return _as(torch.mm(x, y), wide(x.dtype))
    return so_far.addmm_(x, y) if so_far.dtype == x.dtype else so_far + torch.mm(x, y)


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


# --- compiled blocks ---------------------------------------------------------------------------------------------


def compile_blocks(enabled: bool = True) -> None:
    """Compile the arithmetic of a block with ``torch.compile``, even where the rest is not compiled.

    It needs a C++ compiler and most of a minute at the first step, and makes that arithmetic several times faster:
    worth it for large models trained for long. Where compiling fails, a warning says so and the plain form is used.

    >>> compile_blocks(False)
    """
    global _always_compiled
    _always_compiled = enabled


def blocks_are_compiled() -> bool:
    """Say what :func:`compile_blocks` was told.

    >>> blocks_are_compiled()
    False
    """
    return _always_compiled


@functools.lru_cache
def _compiled() -> Callable[..., tuple[RowSums, Gradients]]:
    """Compile the arithmetic of a block; where that fails (no C++ compiler), say so once and do without."""
    chosen: list[Callable[..., Any]] = [torch.compile(block_of_rows, dynamic=False)]

    def call(*arguments: Any, posterior: bool = False, out: Gradients | None = None, **others: Any) -> Any:
        try:
            sums, found = chosen[-1](*arguments, **others)
        except torch._dynamo.exc.TorchDynamoException as error:
            if len(chosen) == 2:
                raise
            warnings.warn(f"blocks of classes are not compiled: {error}", stacklevel=2)
            chosen.append(block_of_rows)
            sums, found = block_of_rows(*arguments, **others)
        pairs = zip(found, out or Gradients(), strict=True)
        return sums, Gradients(*(y if place is None or y is None else place.copy_(y) for y, place in pairs))

    return call
