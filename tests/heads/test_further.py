"""The further baselines, against formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dropmax import HEADS, make_head
from dropmax.errors import DropMaxError
from dropmax.heads import FURTHER
from tests.close import close

F64 = torch.float64
WEIGHT = [0.5, 1.0, 2.0, 3.0]


def batch(n: int = 6, d: int = 5, k: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, d, dtype=F64), torch.randint(k, (n,))


def test_they_are_made_by_name_but_are_not_among_the_papers_eight() -> None:
    assert not set(FURTHER) & set(HEADS)
    for name in FURTHER:
        assert make_head(**make_head(name, 3, 4).config()).name == name


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_focal_loss_with_smoothing_and_weights(gamma: float, smoothing: float, weight: list[float] | None) -> None:
    head = make_head("focal", 5, 4, gamma=gamma, label_smoothing=smoothing, class_weight=weight, dtype=F64)
    h, target = batch()
    p = head.classifier(h).exp() / head.classifier(h).exp().sum(-1, keepdim=True)
    y = (1 - smoothing) * nn.functional.one_hot(target, 4).double() + smoothing / 4
    w = torch.tensor(weight or [1.0] * 4, dtype=F64)
    rows = -(y * w * (1 - p) ** gamma * p.log()).sum(-1)
    close(head.loss(h, target, reduction="none").total, rows, terms=9, scale=10)
    close(head.loss(h, target).total, rows.sum() / w[target].sum(), terms=9, scale=10)
    if gamma == 0:
        softmax = make_head("softmax", 5, 4, label_smoothing=smoothing, class_weight=weight, dtype=F64)
        softmax.load_state_dict(head.state_dict())
        close(head.loss(h, target).total, softmax.loss(h, target).total, terms=9, scale=10)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_the_gradient_of_focal_loss_is_finite_where_a_row_is_certain(gamma: float) -> None:
    head = make_head("focal", 2, 3, gamma=gamma, label_smoothing=0.1)
    with torch.no_grad():
        head.classifier.weight.copy_(torch.tensor([[100.0, 0.0], [0.0, 100.0], [0.0, 0.0]]))
    head.loss(torch.eye(2), torch.tensor([0, 0])).total.backward()
    assert bool(head.classifier.weight.grad.isfinite().all())


def test_focal_refuses_a_gamma_that_makes_no_sense() -> None:
    for gamma in (-1.0, float("nan"), "two"):
        with pytest.raises(DropMaxError, match="gamma"):
            make_head("focal", 5, 4, gamma=gamma)
