"""torch.export and torch.func work on every head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dropmax import HEADS, make_head
from dropmax.heads import FURTHER
from tests.heads.losses import loss_at

ALL = [*HEADS, *FURTHER]


@pytest.mark.parametrize("name", ALL)
def test_forward_exports_with_a_dynamic_batch(name: str) -> None:
    head = make_head(name, 6, 5)
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(head, (torch.randn(4, 6),), dynamic_shapes=({0: batch},))
    features = torch.randn(7, 6)
    torch.testing.assert_close(program.module()(features), head(features))


@pytest.mark.parametrize("name", ALL)
def test_per_example_gradients_by_vmap(name: str) -> None:
    head = make_head(name, 6, 5, dtype=torch.float64)
    parameters = dict(head.named_parameters())
    features, target = torch.randn(4, 6, dtype=torch.float64), torch.randint(5, (4,))
    noise = torch.rand(4, 5, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], *row: Tensor) -> Tensor:
        return loss_at(head, parameters, *(x[None] for x in row))

    rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(parameters, features, target, noise)
    whole = torch.autograd.grad(head.loss(features, target, noise=noise).total, list(parameters.values()))
    for per_row, expected in zip(rows.values(), whole, strict=True):
        torch.testing.assert_close(per_row.mean(0), expected)


@pytest.mark.parametrize("name", ALL)
def test_an_ensemble_of_heads_by_vmap_draws_its_own_noise(name: str) -> None:
    head = make_head(name, 6, 5)
    stacked = {k: torch.stack([v, v]) for k, v in head.state_dict().items()}
    features, target = torch.randn(64, 6), torch.randint(5, (64,))

    first, second = torch.vmap(lambda own: loss_at(head, own, features, target), randomness="different")(stacked)
    assert first.isfinite()
    draws = {"sampled-softmax", "random-dropmax", "dropmax-qp", "dropmax"}
    assert (first != second) == (name in draws)
