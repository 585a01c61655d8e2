"""The step by hand is the step of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn", reason="needs scikit-learn (the extra `sklearn`)")

from dropmax import Classifier, make_head
from dropmax.sklearn_step import by_autograd, by_hand, choose_step
from dropmax.workbench.networks import MLP
from tests.close import close
from tests.estimator.estimators import Conv, quick

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def small(hidden: tuple[int, ...] = (8,), dropout: float = 0.0, head: str = "dropmax", **options: Any) -> Classifier:
    torch.manual_seed(0)
    net = MLP(6, hidden, dropout)
    return Classifier(net, make_head(head, net.out_features, 4, **options))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("hidden", "dropout", "options"),
    [
        ((8,), 0.0, {}),
        ((8,), 0.4, {}),
        ((9, 7), 0.4, {"label_smoothing": 0.1}),
        ((), 0.0, {"samples": 3}),
        ((8,), 0.0, {"mask_gradient": True, "temperature": 0.3}),
        ((8,), 0.0, {"kl_weight": 0.3, "entropy_weight": 0.7, "auxiliary_weight": 2.0, "prior_correction": False}),
    ],
)
def test_gradients_and_losses_agree_in_float64(
    hidden: tuple[int, ...], dropout: float, options: dict[str, Any], weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", _dropout)
    model = small(hidden, dropout, **options).double().train()
    assert choose_step(model, 30) is by_hand
    x, target = torch.randn(30, 6).double(), torch.randint(4, (30,))
    weight = torch.rand(30).double() if weighted else None
    found = []
    for step in (by_hand, by_autograd):
        torch.manual_seed(1)
        found.append([step(model, x, target, weight), *(parameter.grad for parameter in model.parameters())])
    assert all(bool(gradient.any()) for gradient in found[0])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, terms=30)


def _dropout(self: nn.Dropout, h: Tensor) -> Tensor:
    """Draw the units to drop as the step by hand does; torch draws the same distribution from other numbers."""
    return h * torch.rand_like(h).ge_(self.p) / (1 - self.p) if self.p else h


def test_weights_agree_after_some_steps_in_float32() -> None:
    first, x, target = small((16,)), torch.randn(5, 40, 6), torch.randint(4, (5, 40))
    models = first, copy.deepcopy(first)
    for model, step in zip(models, (by_hand, by_autograd), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(2)
        for batch in zip(x, target, strict=True):
            step(model, *batch, None)
            optimizer.step()
    # Adam divides a gradient by its own size, so that the rounding of one near zero may move a weight by a part of
    # the learning rate: 1 % of one step is allowed.
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert float((ours - theirs).detach().abs().max()) < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        small(head="softmax"),
        small(head="dropmax-qp"),
        small(rank=2),
        small(likelihood="exact"),
        small(stop_gradient="parameters"),
        small(epsilon=1e-35),
        small(chunk_classes=2),
        small(class_weight=[1.0, 2.0, 1.0, 1.0]),
        Classifier(nn.Sequential(nn.Linear(6, 8)), small().head),
        Classifier(small().net.requires_grad_(False), small().head),
    ],
    ids=lambda model: repr(model.head)[:60],
)
def test_what_autograd_does(model: Classifier) -> None:
    assert choose_step(model, 30) is by_autograd


def test_the_default_estimator_steps_by_hand_and_large_batches_do_not(iris: tuple[Any, Any]) -> None:
    model = quick(max_iter=1, tol=1e9, n_iter_no_change=1).fit(*iris).model_
    assert choose_step(model, 200) is by_hand
    assert choose_step(model, 10**6) is by_autograd
    assert choose_step(quick(network=Conv, max_iter=1).fit(*iris).model_, 200) is by_autograd
