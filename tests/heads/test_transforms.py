"""torch.export and torch.func work on every head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dropmax import HEADS, Head, make_head
from dropmax.heads import FURTHER

ALL = [*HEADS, *FURTHER]


@pytest.mark.parametrize("name", ALL)
def test_forward_exports_with_a_dynamic_batch(name: str) -> None:
    head = make_head(name, 6, 5)
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(head, (torch.randn(4, 6),), dynamic_shapes=({0: batch},))
    features = torch.randn(7, 6)
    torch.testing.assert_close(program.module()(features), head(features))


class _Objective(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, target: Tensor, noise: Tensor) -> Tensor:
        return self.head.loss(features, target, noise=noise).total


@pytest.mark.parametrize("name", ALL)
def test_per_example_gradients_by_vmap(name: str) -> None:
    head = make_head(name, 6, 5, dtype=torch.float64)
    objective = _Objective(head)
    parameters = dict(objective.named_parameters())
    features, target = torch.randn(4, 6, dtype=torch.float64), torch.randint(5, (4,))
    noise = torch.rand(4, 5, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], *row: Tensor) -> Tensor:
        return torch.func.functional_call(objective, parameters, tuple(x[None] for x in row))

    rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(parameters, features, target, noise)
    whole = torch.autograd.grad(objective(features, target, noise), list(parameters.values()))
    for per_row, expected in zip(rows.values(), whole, strict=True):
        torch.testing.assert_close(per_row.mean(0), expected)


@pytest.mark.parametrize("name", ALL)
def test_an_ensemble_of_heads_by_vmap_draws_its_own_noise(name: str) -> None:
    head = make_head(name, 6, 5)
    stacked = {k: torch.stack([v, v]) for k, v in head.state_dict().items()}
    features, target = torch.randn(64, 6), torch.randint(5, (64,))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        inside = {f"head.{k}": v for k, v in parameters.items()}
        return torch.func.functional_call(_Drawn(head), inside, (features, target))

    first, second = torch.vmap(loss, randomness="different")(stacked)
    assert first.isfinite()
    draws = {"sampled-softmax", "random-dropmax", "dropmax-qp", "dropmax"}
    assert (first != second) == (name in draws)


class _Drawn(_Objective):
    def forward(self, features: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return self.head.loss(features, target).total
