"""One rank of tests/test_sharding.py: ``python sharding_worker.py STORE RANK RANKS CASE``."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dropmax import HEADS, Classifier, DropMax, Head, make_head
from dropmax.errors import InvalidType, InvalidValue
from dropmax.sharding import ShardedLinear, full_state_dict

CLASSES, FEATURES, ROWS = 23, 6, 5
OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk_classes": 3, "label_smoothing": 0.1, "class_weight": [1.0 + i for i in range(CLASSES)]},
    {"chunk_classes": 4, "stop_gradient": "parameters", "samples": 2, "prior_correction": True},
    {"likelihood": "exact"},
    {"likelihood": "exact", "rank": 4, "stop_gradient": "parameters"},
    {"mask_gradient": True, "chunk_classes": 0},
    {"rank": 4},
    {"rank": 4, "stop_gradient": "parameters", "mask_gradient": True, "chunk_classes": 3},
    {"kl_weight": 0.5, "entropy_weight": 0.1, "chunk_classes": 3},
]


def pair(name: str, **options: Any) -> tuple[Head, Head]:
    """Return a head and its copy, the same on all ranks."""
    torch.manual_seed(0)
    head = make_head(name, FEATURES, CLASSES, dtype=torch.float64, **options)
    copy = make_head(name, FEATURES, CLASSES, dtype=torch.float64, **options)
    copy.load_state_dict(head.state_dict())
    return head, copy


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (ROWS,))


def gradients(head: Head) -> dict[str, Tensor]:
    found = {}
    for name, p in head.named_parameters():
        part = head.get_submodule(name.rpartition(".")[0])
        if p.grad is not None:
            found[name] = part.partition.gather(p.grad, 0) if isinstance(part, ShardedLinear) else p.grad
    return found


def same_loss_and_gradients(mesh: Any) -> None:
    features, target = data()
    for options in OPTIONS:
        sharded, whole = pair("dropmax", **options)
        sharded.shard(mesh)
        shape = sharded.noise_shape(ROWS)
        noise = None if shape is None else torch.rand(*shape, dtype=torch.float64)
        results = []
        for head in (sharded, whole):
            h = features.clone().requires_grad_()
            loss = head.loss(h, target, noise=noise)
            loss.total.backward()
            results.append({"total": loss.total, **loss.terms, "features": h.grad, **gradients(head)})
        assert results[0].keys() == results[1].keys()
        for name, expected in results[1].items():
            torch.testing.assert_close(results[0][name], expected, rtol=1e-9, atol=1e-11, msg=f"{options}: {name}")


def noise_does_not_depend_on_the_ranks(mesh: Any) -> None:
    sharded, whole = pair("dropmax", chunk_classes=4)
    sharded.shard(mesh)
    features, target = data()
    torch.manual_seed(7 + dist.get_rank())  # ranks that disagree: the first one's seed counts
    found = sharded.loss(features, target).total
    torch.manual_seed(7 + dist.get_global_rank(mesh.get_group(), 0))
    torch.testing.assert_close(found, whole.loss(features, target).total)


def predictions_of_every_head(mesh: Any) -> None:
    features, target = data()
    for name in HEADS:
        sharded, whole = pair(name)
        sharded.shard(mesh)
        for method in ("forward", "predict_proba", "retain_probs"):
            found, expected = (getattr(head, method)(features) for head in (sharded, whole))
            torch.testing.assert_close(found, expected)
        for mode in ("mean", "exact"):
            found, expected = sharded.topk(features, 20, mode), whole.predict_proba(features, mode).topk(20)
            torch.testing.assert_close(found.values, expected.values)
            positive = expected.values > 0  # sparsemax: any order among the zeros
            assert torch.equal(found.indices[positive], expected.indices[positive])
        loss = sharded.loss(features, target).total
        others = [torch.empty_like(loss) for _ in range(mesh.size())]
        dist.all_gather(others, loss.detach(), group=mesh.get_group())
        assert all(torch.equal(others[0], other) for other in others)


def checkpoints(mesh: Any) -> None:
    for rank in (None, 4):
        checkpoints_of(mesh, rank)


def checkpoints_of(mesh: Any, rank: int | None) -> None:
    sharded, whole = pair("dropmax", rank=rank)
    sharded.shard(mesh)
    state = full_state_dict(Classifier(nn.Identity(), sharded))
    assert all(torch.equal(state[f"head.{k}"], v) for k, v in whole.state_dict().items())
    other = DropMax(FEATURES, CLASSES, rank=rank, dtype=torch.float64)
    other.load_state_dict(full_state_dict(sharded))  # sharded -> unsharded
    assert all(torch.equal(x, y) for x, y in zip(other.parameters(), whole.parameters(), strict=True))
    fresh = DropMax(FEATURES, CLASSES, rank=rank, dtype=torch.float64).shard(mesh)
    fresh.load_state_dict(whole.state_dict())  # unsharded -> sharded
    assert all(torch.equal(x, y) for x, y in zip(fresh.parameters(), sharded.parameters(), strict=True))
    fresh.load_state_dict(sharded.state_dict())  # each rank its own part


def mistakes(mesh: Any) -> None:
    for wrong, kind, message in (
        (lambda: DropMax(4, 9).shard("cpu"), InvalidType, "DeviceMesh, got str"),
        (lambda: DropMax(4, 9).shard(mesh).shard(mesh), InvalidValue, "classifier is a ShardedLinear"),
        (lambda: DropMax(4, 2).shard(mesh), InvalidValue, "one would have none"),
    ):
        if mesh.size() > 2 or "none" not in message:
            with pytest.raises(kind, match=message):
                wrong()


def two_by_two(_: Any) -> None:
    """Train with data parallelism over one dimension and shared classes over the other; compare with one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "classes"))
    with pytest.raises(InvalidValue, match=r"the mesh has 2: pass one of them, mesh\['classes'\]"):
        DropMax(4, 9).shard(mesh)
    sharded, whole = pair("dropmax", chunk_classes=4)
    nets = [nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    features, target = data()
    noise = torch.rand(ROWS, CLASSES, dtype=torch.float64)
    rows = [slice(0, 2), slice(2, 4)][mesh["data"].get_local_rank()]
    model = DistributedDataParallel(
        Classifier(nets[0], sharded.shard(mesh["classes"])), process_group=mesh["data"].get_group()
    )
    plain = Classifier(nets[1], whole)
    optimisers = [torch.optim.SGD(x.parameters(), lr=0.1, momentum=0.9) for x in (model, plain)]
    for _ in range(3):
        for optimiser in optimisers:
            optimiser.zero_grad()
        model(features[rows], target[rows], noise=noise[rows]).total.backward()
        plain(features[:4], target[:4], noise=noise[:4]).total.backward()
        for optimiser in optimisers:
            optimiser.step()
    for name, value in full_state_dict(model.module).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


CASES = {
    f.__name__: f
    for f in (
        same_loss_and_gradients,
        noise_does_not_depend_on_the_ranks,
        predictions_of_every_head,
        checkpoints,
        mistakes,
    )
}


def main() -> None:
    store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        for name, case in {**CASES, **({"two_by_two": two_by_two} if ranks == 4 else {})}.items():
            case(mesh)
            print(name, flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
