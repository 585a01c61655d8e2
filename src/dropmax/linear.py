"""The linear maps of a head: through a bottleneck, shared between ranks, or plain ``nn.Linear``."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax.errors import InvalidType, InvalidValue

__all__ = ["LowRankLinear", "Partition", "ShardedLinear", "last_map", "make_map"]


def make_map(in_features: int, num_classes: int, rank: int | None = None, **factory: Any) -> nn.Module:
    """Return ``nn.Linear`` or, given a rank, :class:`LowRankLinear`; ``factory`` is device and dtype.

    >>> make_map(512, 10_000, rank=64)
    LowRankLinear(in_features=512, out_features=10000, rank=64)
    """
    if rank is None:
        return nn.Linear(in_features, num_classes, **factory)
    return LowRankLinear(in_features, num_classes, rank, **factory)


class LowRankLinear(nn.Module):
    """``V (U h) + b`` with U of shape (rank, in_features) and V of shape (out_features, rank).

    Its outputs start with the mean and variance that those of ``nn.Linear(in_features, out_features)`` start with.

    >>> LowRankLinear(512, 10_000, rank=64)(torch.randn(2, 512)).shape
    torch.Size([2, 10000])
    """

    def __init__(self, in_features: int, out_features: int, rank: int, **factory: Any) -> None:
        super().__init__()
        check_rank(rank, in_features, out_features)
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.down = nn.Linear(in_features, rank, bias=False, **factory)
        self.up = nn.Linear(rank, out_features, **factory)
        # U h has the variance that nn.Linear(in_features, ...) gives, and V keeps it: rank * variance(V) = 1.
        nn.init.uniform_(self.up.weight, -math.sqrt(3 / rank), math.sqrt(3 / rank))
        nn.init.uniform_(self.up.bias, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(..., out_features)``."""
        outputs: Tensor = self.up(self.down(features))
        return outputs

    def __repr__(self) -> str:
        return f"LowRankLinear(in_features={self.in_features}, out_features={self.out_features}, rank={self.rank})"


def check_rank(rank: int, in_features: int, num_classes: int) -> None:
    """Refuse anything but a whole number from 1 to the smaller of the two sizes.

    >>> check_rank(64, 512, 10_000)
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise InvalidType(f"rank must be a whole number, or None for full rank, got {rank!r}")
    most = min(in_features, num_classes)
    if not 1 <= rank <= most:
        raise InvalidValue(
            f"rank must lie in 1..{most}, the smaller of in_features={in_features} and num_classes={num_classes}, or "
            f"be None for full rank, got {rank}"
        )


def last_map(module: nn.Module, rows: Tensor) -> tuple[Tensor, nn.Linear] | None:
    """Return the inputs and the last linear layer behind some logits; None where that layer is not all there is to it.

    Blocks of classes and top-k use some rows of its weight. With an adapter, a parametrisation, a hook or no bias, the
    weight alone does not say what the module returns.

    >>> linear = nn.Linear(4, 3)
    >>> last_map(linear, torch.zeros(2, 4))[1] is linear
    True
    """
    inputs, last = rows, module
    if isinstance(module, LowRankLinear) and not _is_watched(module):
        inputs, last = module.down(rows), module.up
    # A subclass, as adapters and parametrisations are, may do something else with its weight.
    if type(last) not in (nn.Linear, ShardedLinear) or not isinstance(last, nn.Linear) or last.bias is None:
        return None
    return None if _is_watched(last) else (inputs, last)


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


class Partition:
    """Which classes belong to which rank of a process group.

    Attributes:
        classes: those of this rank.
        sizes: how many each rank has.
        num_classes: all of them.
    """

    def __init__(self, num_classes: int, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        edges = [num_classes * i // ranks for i in range(ranks + 1)]
        self.group = group
        self.classes = slice(edges[rank], edges[rank + 1])
        self.sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        self.num_classes = num_classes

    def gather(self, mine: Tensor, dim: int = -1) -> Tensor:
        """Put the parts of all ranks together along one dimension; every rank must call it."""
        mine = mine.movedim(dim, 0)
        padded = mine.new_zeros(max(self.sizes), *mine.shape[1:])  # messages must have one size
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in self.sizes]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    def of_first_rank(self, drawn: Tensor) -> Tensor:
        """Return the tensor of the first rank on all of them."""
        dist.broadcast(drawn, dist.get_global_rank(self.group, 0), group=self.group)
        return drawn

    def everybodys(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have one shape."""
        parts = [torch.empty_like(mine) for _ in self.sizes]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return parts


class ShardedLinear(nn.Linear):
    """The rows of a linear map that belong to this rank; ``forward`` returns the outputs of all ranks.

    Made by :func:`dropmax.sharding.shard`. Loading a state dict of the whole map takes this rank's rows from it.
    """

    def __init__(self, whole: nn.Linear, partition: Partition) -> None:
        classes = partition.classes
        # On the meta device nothing is drawn: ranks with parts of different size must not leave the generators apart.
        super().__init__(whole.in_features, classes.stop - classes.start, bias=whole.bias is not None, device="meta")
        for name, value in whole.named_parameters(recurse=False):
            mine = value.detach()[classes].clone()
            setattr(self, name, nn.Parameter(mine, requires_grad=value.requires_grad))
        self.partition = partition

    def forward(self, features: Tensor) -> Tensor:
        """Return ``(..., K)``, the outputs of all ranks."""
        features = _SumGradients.apply(features, self.partition.group)  # type: ignore[no-untyped-call]
        mine = F.linear(features, self.weight, self.bias)
        whole: Tensor = _Gather.apply(mine, self.partition)  # type: ignore[no-untyped-call]
        return whole

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            value = state_dict.get(prefix + name)
            if value is not None and len(value) == self.partition.num_classes:
                state_dict[prefix + name] = value[self.partition.classes]
        super()._load_from_state_dict(state_dict, prefix, *rest)


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
    def forward(ctx: Any, mine: Tensor, partition: Partition) -> Tensor:
        ctx.classes = partition.classes
        return partition.gather(mine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.classes], None
