"""Classes shared between processes: each holds a part of every linear map of a head, ``shard(head, mesh)``.

All ranks of the mesh see the same features and targets. In the loss of DropMax each walks over its own classes; what
crosses the network is a few numbers per row (:func:`dropmax.walk.over_ranks`) and the gradient of the features.
Everything else, prediction included, gathers the outputs of the maps and continues as on one machine. Noise is a
function of words of the row and of the class, which all ranks draw from one seed (:mod:`dropmax.noise`), so the loss
and its gradients do not depend on how many ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from dropmax.errors import InvalidType, InvalidValue
from dropmax.linear import LowRankLinear, Partition, ShardedLinear

if TYPE_CHECKING:
    from dropmax.heads.base import Head

__all__ = ["ShardedLinear", "full_state_dict", "shard"]

_Head = TypeVar("_Head", bound="Head")


def shard(head: _Head, mesh: Any) -> _Head:
    """Share the classes of a head between the ranks of a one-dimensional device mesh, in place; return the head.

    Each rank keeps its part of every linear map; of a low-rank map, all of the small factor. All ranks of the mesh must
    be given the same features and targets; they get the same loss, and the gradients they would get on one machine.
    :func:`full_state_dict` gathers a checkpoint, and ``load_state_dict`` takes one of the whole head. Call it before
    the optimiser is made. For data parallelism on top, take a mesh of two dimensions, shard along one and give
    DistributedDataParallel the group of the other::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "classes"))
        model = Classifier(net, shard(head, mesh["classes"]))
        model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    """
    partition = Partition(head.num_classes, group_of(mesh, head.num_classes))
    owners: list[tuple[nn.Module, str]] = []
    for name in head.maps.values():
        module = getattr(head, name)
        low_rank = isinstance(module, LowRankLinear)
        owner, attribute = (module, "up") if low_rank else (head, name)
        linear = module.up if low_rank else module
        if type(linear) is not nn.Linear:
            raise InvalidValue(f"{name} is a {type(linear).__name__}: a head is sharded once, and before it is changed")
        owners.append((owner, attribute))
    for owner, attribute in owners:
        setattr(owner, attribute, ShardedLinear(getattr(owner, attribute), partition))
    head.partition = partition
    return head


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
                state[f"{prefix}.{name}" if prefix else name] = part.partition.gather(value.detach(), 0)
    return state


def group_of(mesh: Any, num_classes: int) -> dist.ProcessGroup:
    """Return the process group of a one-dimensional device mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise InvalidType(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("classes",)
        raise InvalidValue(
            f"the classes are shared along one dimension, but the mesh has {mesh.ndim}: pass one of them, "
            f"mesh[{names[-1]!r}]"
        )
    group = mesh.get_group()
    ranks = dist.get_world_size(group)
    if num_classes < ranks:
        raise InvalidValue(f"{num_classes} classes cannot be shared by {ranks} ranks: one would have none")
    return group
