"""Classes shared between processes: each holds a part of every linear map of a head, ``head.shard(mesh)``.

All ranks of the mesh see the same features and targets. In the blocked loss of DropMax each walks over its own classes;
what crosses the network is a few numbers a row (the running log-sum-exp and the sums of the terms) and the gradient of
the features. Everything else, prediction included, gathers the outputs of the maps and goes on as on one machine.
Noise is a function of a shared seed, the row and the class (:mod:`dropmax.noise`), so that the loss and its gradients
do not depend on how many ranks there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax.blocked.arithmetic import Sums
from dropmax.blocked.terms import RowTerms, Settings
from dropmax.blocked.walk import Known, backward_walk, finish, forward_walk, is_seed, product_dtype
from dropmax.errors import InvalidType, InvalidValue
from dropmax.topk import merge

__all__ = ["ShardedLinear", "full_state_dict"]


class ShardedLinear(nn.Linear):
    """The rows of a linear map that belong to this rank; ``forward`` returns the outputs of all ranks.

    Made by :meth:`dropmax.Head.shard`. Loading a state dict of the whole map takes this rank's rows from it.

    >>> issubclass(ShardedLinear, nn.Linear)
    True
    """

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        edges = [whole.out_features * i // ranks for i in range(ranks + 1)]
        self.classes = slice(edges[rank], edges[rank + 1])
        # On the meta device nothing is drawn: ranks with parts of different size must not leave the generators apart.
        super().__init__(
            whole.in_features, self.classes.stop - self.classes.start, bias=whole.bias is not None, device="meta"
        )
        for name, value in whole.named_parameters(recurse=False):
            mine = value.detach()[self.classes].clone()
            setattr(self, name, nn.Parameter(mine, requires_grad=value.requires_grad))
        self.group = group
        self.part_sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        self.num_classes = whole.out_features

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(..., K)``, the outputs of all ranks."""
        features = _SumGradients.apply(features, self.group)  # type: ignore[no-untyped-call]
        mine = F.linear(features, self.weight, self.bias)
        whole: Tensor = _Gather.apply(mine, self)  # type: ignore[no-untyped-call]
        return whole

    def gather(self, mine: Tensor, dim: int = -1) -> Tensor:
        """Put the parts of all ranks together along one dimension; every rank must call it."""
        mine = mine.movedim(dim, 0)
        padded = mine.new_zeros(max(self.part_sizes), *mine.shape[1:])  # messages must have one size
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in self.part_sizes]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, self.part_sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    def best_of_all(self, values: Tensor, indices: Tensor, normaliser: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Join each rank's best classes and log-sum-exp: (N, k), (N, k) and (N,)."""
        wanted = min(k, max(self.part_sizes))
        short = wanted - values.shape[-1]
        values = F.pad(values, (0, short), value=-torch.inf).contiguous()
        indices = F.pad(indices + self.classes.start, (0, short)).contiguous()
        all_values, all_indices, all_normalisers = (
            [torch.empty_like(x) for _ in self.part_sizes] for x in (values, indices, normaliser)
        )
        for parts, mine in ((all_values, values), (all_indices, indices), (all_normalisers, normaliser)):
            dist.all_gather(parts, mine, group=self.group)
        values, indices = merge(torch.cat(all_values, -1), torch.cat(all_indices, -1), k)
        return values, indices, torch.stack(all_normalisers).logsumexp(0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            value = state_dict.get(prefix + name)
            if value is not None and len(value) == self.num_classes:
                state_dict[prefix + name] = value[self.classes]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict the module would have on one machine; every rank must call it.

    It can be saved as any other, loaded into the head before it was sharded, into one sharded otherwise, or back.

    >>> from dropmax import DropMax
    >>> sorted(full_state_dict(DropMax(4, 3)))[:2]  # nothing is sharded here, nothing is gathered
    ['classifier.bias', 'classifier.weight']
    """
    state: dict[str, Tensor] = dict(module.state_dict())
    for prefix, part in module.named_modules():
        if isinstance(part, ShardedLinear):
            for name, value in part.named_parameters(recurse=False):
                state[f"{prefix}.{name}" if prefix else name] = part.gather(value.detach(), 0)
    return state


def group_of(mesh: Any, num_classes: int) -> dist.ProcessGroup:
    """Return the process group of a one-dimensional device mesh."""
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise InvalidType(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("classes",)
        raise InvalidValue(
            f"the classes are shared along one dimension, but the mesh has {mesh.ndim}: pass one of them, "
            f"mesh[{names[-1]!r}]"
        )
    group: dist.ProcessGroup = mesh.get_group()
    ranks = dist.get_world_size(group)
    if num_classes < ranks:
        raise InvalidValue(f"{num_classes} classes cannot be shared by {ranks} ranks: one would have none")
    return group


def shared_seed(seed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the seed of the group's first rank on all of them."""
    dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    return seed


def sharded_terms(
    features: Tensor,
    maps: Sequence[ShardedLinear],
    target: Tensor,
    noise: Tensor,
    settings: Settings,
    class_weight: Tensor | None = None,
) -> RowTerms:
    """Return what :func:`dropmax.blocked.blocked_terms` returns, each rank walking over its own classes."""
    mine = maps[0].classes
    parameters = [p for x in maps for p in (x.weight, x.bias)]
    if not is_seed(noise):
        noise = noise[..., mine]
    weight = None if class_weight is None else class_weight[mine]
    settings = settings._replace(first_class=mine.start, block=min(settings.block, mine.stop - mine.start))
    dtype = product_dtype(features, parameters)
    with torch.autocast(features.device.type, enabled=False):
        terms = _ShardedObjective.apply(  # type: ignore[no-untyped-call]
            features, *parameters, target - mine.start, noise, weight, settings, dtype, maps[0].group
        )
    return RowTerms(*terms)


class _ShardedObjective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *maps, target, noise, class_weight, settings, dtype, group = arguments
        sums, blocks = forward_walk(features, maps, target, noise, class_weight, settings, dtype)
        sums = _over_ranks(sums, group)
        log_weighed = sums.weighed.log()
        ctx.save_for_backward(
            features, *maps, target, noise, class_weight, sums.highest, log_weighed, sums.kept, sums.kept_weight, blocks
        )
        ctx.settings, ctx.dtype, ctx.group = settings, dtype, group
        return finish(sums, log_weighed, settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, *maps, target, noise, class_weight, highest, log_weighed, kept, kept_weight, blocks = (
            ctx.saved_tensors
        )
        known = Known(target, noise, class_weight, highest, log_weighed, kept, kept_weight, blocks)
        found = backward_walk(
            features, maps, known, RowTerms(*gradients), ctx.settings, ctx.dtype, ctx.needs_input_grad[:7]
        )
        if found[0] is not None:
            dist.all_reduce(found[0], group=ctx.group)
        return (*found, *(None,) * 6)


def _over_ranks(sums: Sums, group: dist.ProcessGroup) -> Sums:
    """Join the sums over each rank's classes: two messages."""
    highest = sums.highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    moved = sums.highest - highest
    parts = (sums.weighed * moved.exp(), *sums[2:-1], sums.kept_logit + moved * sums.kept_weight)
    message = torch.cat([x.flatten() for x in parts])
    dist.all_reduce(message, group=group)
    joined = torch.split(message, [x.numel() for x in parts])
    return Sums(highest, *(x.view(like.shape) for x, like in zip(joined, parts, strict=True)))


class _SumGradients(torch.autograd.Function):
    """Nothing forward; backward, each rank adds what its classes say about the features that all of them share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Gather(torch.autograd.Function):
    """Forward, the outputs of all ranks; backward, this rank's part of the gradient, which all ranks agree about."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, part: ShardedLinear) -> Tensor:
        ctx.classes = part.classes
        return part.gather(mine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.classes], None
