"""The best classes without the others: topk, and predictions block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dropmax.topk as topk
from dropmax import HEADS, DropMax, make_head, walk
from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import base
from tests.close import close


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything large: blocks of seven classes or two rows."""
    for module in (base, topk):
        monkeypatch.setattr(module, "BLOCK_NUMBERS", 60)
    monkeypatch.setattr(walk, "LEAST_BLOCK", 7)
    monkeypatch.setattr(walk, "BLOCK_NUMBERS", 7)


@pytest.mark.parametrize("mode", ["mean", "exact"])
@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.usefixtures("small_blocks")
def test_topk_is_that_of_all_probabilities(name: str, mode: str) -> None:
    head = make_head(name, 6, 230, dtype=torch.float64)
    features = torch.randn(3, 2, 6, dtype=torch.float64)
    expected = torch.stack([head.predict_proba(row, mode) for row in features.view(-1, 6)]).view(3, 2, 230).topk(9)
    values, indices = head.topk(features, 9, mode)
    torch.testing.assert_close(values, expected.values)
    positive = expected.values > 0  # any order among the zeros of sparsemax
    assert torch.equal(indices[positive], expected.indices[positive])
    assert not values.requires_grad


@pytest.mark.parametrize("k", [1, 5, 23])
def test_any_k_in_small_batches_too(k: int) -> None:
    head = DropMax(6, 23)
    features = torch.randn(4, 6)
    torch.testing.assert_close(head.topk(features, k).values, head.predict_proba(features).topk(k).values)
    assert head.topk(features[:0], k).indices.shape == (0, k)
    assert head.topk(features[0], k).indices.shape == (k,)


@pytest.mark.parametrize("mode", ["mean", "exact", "mc"])
@pytest.mark.usefixtures("small_blocks")
def test_predictions_row_by_row_are_those_of_the_whole_batch(mode: str) -> None:
    head = DropMax(6, 50, dtype=torch.float64)
    features = torch.randn(3, 2, 6, dtype=torch.float64)
    whole = head.predict_proba(features, mode, samples=4000)  # with a graph, so in one piece
    with torch.no_grad():
        found = head.predict_proba(features, mode, samples=4000)
    assert whole.requires_grad or mode == "mc"
    torch.testing.assert_close(found, whole.detach(), rtol=0, atol=0.05 if mode == "mc" else 1e-9)


@pytest.mark.parametrize("mode", ["mean", "exact"])
@pytest.mark.parametrize("name", ["dropmax", "dropmax-qp", "softmax"])
def test_predictions_without_a_gradient_are_those_with_one_and_touch_nothing_else(name: str, mode: str) -> None:
    head = make_head(name, 6, 5)
    features = 1000 * torch.randn(4, 6)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for linear in head.children():
        linear.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
    with_gradient = head.predict_proba(features, mode)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            close(head.predict_proba(features, mode), with_gradient, scale=float(head(features).abs().max()))
    assert len(seen) >= 3
    assert all(torch.equal(kept, copied) for kept, copied in seen)


@pytest.mark.usefixtures("small_blocks")
def test_a_mean_topk_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    head = DropMax(6, 230)
    widths = []
    linear = nn.functional.linear

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        widths.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", watched)
    head.topk(torch.randn(5, 6), 3)
    assert len(widths) > 6
    assert max(widths) <= 64


@pytest.mark.parametrize(
    ("k", "kind", "message"),
    [
        (0, InvalidValue, "k must be at least 1, got 0"),
        (4, InvalidValue, "k must be at most the number of classes, 3, got 4"),
        (1.0, InvalidType, "k must be a whole number"),
    ],
)
def test_impossible_k(k: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        DropMax(2, 3).topk(torch.zeros(1, 2), k)
