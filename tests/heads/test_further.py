"""The further baselines, against formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dropmax import DropMaxLoss, PackedHead, make_head
from dropmax.errors import DropMaxError
from tests.close import close

F64 = torch.float64
WEIGHT = [0.5, 1.0, 2.0, 3.0]


def batch(n: int = 6, d: int = 5, k: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, d, dtype=F64), torch.randint(k, (n,))


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


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_sigsoftmax(smoothing: float, weight: list[float] | None) -> None:
    head = make_head("sigsoftmax", 5, 4, label_smoothing=smoothing, class_weight=weight, dtype=F64)
    h, target = batch()
    o = head.classifier(h)
    p = o.exp() / (1 + (-o).exp())
    p = p / p.sum(-1, keepdim=True)
    close(head.predict_proba(h), p, terms=9)
    w = torch.tensor(weight or [1.0] * 4, dtype=F64)
    y = (1 - smoothing) * nn.functional.one_hot(target, 4).double() + smoothing / 4
    close(head.loss(h, target, reduction="none").total, -(y * w * p.log()).sum(-1), terms=9, scale=10)


def naive_soft_labels(soft: Tensor, p: Tensor, target: Tensor, counts: list[bool], memory: int) -> Tensor:
    """Move the averages example by example; within a batch, towards the mean of a class, whatever the order."""
    soft = soft.clone()
    for label in range(soft.shape[0]):
        right = [i for i, t in enumerate(target.tolist()) if t == label and counts[i] and int(p[i].argmax()) == t]
        if right:
            mean = torch.stack([p[i] for i in right]).mean(0)
            for _ in right:
                soft[label] += (mean - soft[label]) / memory
    return soft


@pytest.mark.parametrize("packed", [False, True])
def test_online_label_smoothing_learns_the_soft_labels_of_correct_rows(packed: bool) -> None:
    head = make_head("online-label-smoothing", 5, 4, soft_weight=0.3, memory=7, class_weight=WEIGHT, dtype=F64)
    module, soft = PackedHead(head), torch.full((4, 4), 0.25, dtype=F64)
    w = torch.tensor(WEIGHT, dtype=F64)
    for _ in range(4):
        h, target = batch(40)
        labels = target.clone()
        labels[::5] = -100
        counts = (labels != -100).tolist()
        p = head.classifier(h).softmax(-1)
        rows = -0.7 * p[range(40), target].log() - 0.3 * (soft[target] * p.log()).sum(-1)
        expected = (rows * w[target])[labels != -100].sum() / w[target][labels != -100].sum()
        found = DropMaxLoss(module)(module(h), labels) if packed else head.loss(h, labels).total
        close(found, expected, terms=40, scale=10)
        soft = naive_soft_labels(soft, p, target, counts, 7)
        close(head.soft_labels, soft, terms=40)
        assert not torch.allclose(soft[0], soft[1])
    close(head.soft_labels.sum(-1), torch.ones(4, dtype=F64), terms=40)


def test_soft_labels_move_in_training_only_and_are_part_of_the_state() -> None:
    head = make_head("online-label-smoothing", 5, 4)
    h, target = torch.randn(30, 5), torch.randint(4, (30,))
    before = head.soft_labels.clone()
    head.eval().loss(h, target)
    torch.func.grad(lambda x: head.train().loss(x, target).total)(h)
    assert torch.equal(head.soft_labels, before)
    head.loss(h, target).total.backward()
    assert not torch.equal(head.soft_labels, before)
    twin = make_head(**head.config())
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin.soft_labels, head.soft_labels)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_soft_labels_move_in_compiled_code_too(backend: str) -> None:
    torch._dynamo.reset()
    head, twin = make_head("online-label-smoothing", 5, 4), make_head("online-label-smoothing", 5, 4)
    twin.load_state_dict(head.state_dict())
    compiled = torch.compile(lambda x, y: head.loss(x, y).total, fullgraph=True, backend=backend)
    for _ in range(2):
        h, target = torch.randn(30, 5), torch.randint(4, (30,))
        close(compiled(h, target), twin.loss(h, target).total, terms=30)
        close(head.soft_labels, twin.soft_labels, terms=30)


def test_soft_labels_of_too_many_classes_are_refused() -> None:
    with pytest.raises(DropMaxError, match=r"keeps a soft label per class, 100,000 x 100,000 numbers"):
        make_head("online-label-smoothing", 2, 100_000)
