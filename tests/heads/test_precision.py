"""Every dtype, extreme logits, few and very many classes: finite, and float32 close to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dropmax import HEADS, Head, make_head
from dropmax.heads import FURTHER

ALL = [*HEADS, *FURTHER]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def extreme_head(name: str, num_classes: int, dtype: torch.dtype) -> tuple[Head, Tensor, Tensor]:
    """Features are 1 and the maps hold the logits themselves: class logits of size 1e4, retain logits of size 1e3."""
    generator = torch.Generator().manual_seed(5)
    head = make_head(name, 1, num_classes, dtype=torch.float64)
    with torch.no_grad():
        for attribute in head.maps.values():
            scale = 1e4 if attribute == "classifier" else 1e3
            values = scale * (2 * torch.rand(num_classes, 1, dtype=torch.float64, generator=generator) - 1)
            getattr(head, attribute).weight.copy_(values.to(dtype))
            getattr(head, attribute).bias.zero_()
    target = torch.randint(num_classes, (2,), generator=generator)
    return head.to(dtype), torch.ones(2, 1, dtype=dtype), target


@pytest.mark.parametrize("num_classes", [2, 100_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_extreme_logits_give_a_finite_loss_and_gradient(name: str, dtype: torch.dtype, num_classes: int) -> None:
    if name == "online-label-smoothing":
        num_classes = min(num_classes, 1000)  # it keeps a soft label per class
    head, features, target = extreme_head(name, num_classes, dtype)
    features.requires_grad_()
    loss = head.loss(features, target)
    assert loss.total.isfinite()
    assert all(term.isfinite() for term in loss.terms.values())
    loss.total.backward()
    for p in head.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()
    if dtype != torch.float16:  # the sum over 100,000 classes of gradient times 1e4 does not fit into float16
        assert features.grad is not None
        assert features.grad.isfinite().all()
    p = head.predict_proba(features)
    assert p.isfinite().all()
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[:, 0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["deterministic-attention", "dropmax-qp", "dropmax"])
def test_retain_logits_at_the_edge_of_float16_leave_probabilities(name: str) -> None:
    # o + log rho of -120,000 would be -inf for every class in float16, and its softmax NaN.
    head = make_head(name, 1, 3, dtype=torch.float16)
    with torch.no_grad():
        for p in head.parameters():
            p.zero_()
        head.classifier.weight.copy_(torch.tensor([[-6e4], [-6e4], [-6e4]]))
        head.retain.weight.copy_(torch.tensor([[-6e4], [-6e4], [-6e4]]))
        head.retain.bias.copy_(torch.tensor([0.0, -32.0, 0.0]))
    features = torch.ones(1, 1, dtype=torch.float16)
    assert head(features).isfinite().all()
    torch.testing.assert_close(head.predict_proba(features), torch.tensor([[0.5, 0.0, 0.5]]))


@pytest.mark.parametrize("num_classes", [2, 1000])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", ALL)
def test_float32_is_within_1e_5_of_float64(name: str, scale: float, num_classes: int) -> None:
    # The logits are multiples of 1/8, exact in float32: what differs is our arithmetic, not the matrix product.
    wide = make_head(name, 1, num_classes, dtype=torch.float64)
    with torch.no_grad():
        for p in wide.parameters():
            p.copy_((scale * torch.randn(p.shape) * 8).round() / 8)
    narrow = make_head(name, 1, num_classes)
    narrow.load_state_dict(wide.state_dict())
    target = torch.randint(num_classes, (16,))
    noise = torch.rand(16, num_classes)
    results = {}
    for head, dtype in ((wide, torch.float64), (narrow, torch.float32)):
        loss = head.loss(torch.ones(16, 1, dtype=dtype), target, noise=noise)
        loss.total.backward()
        results[dtype] = loss, [p.grad for p in head.parameters()], head.predict_proba(torch.ones(1, 1, dtype=dtype))
    (loss64, grad64, p64), (loss32, grad32, p32) = results[torch.float64], results[torch.float32]
    for term, value in loss64.terms.items():
        torch.testing.assert_close(loss32.terms[term].double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss32.total.double(), loss64.total, rtol=1e-5, atol=1e-5)
    for x, y in zip(grad32, grad64, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-6 * max(1.0, y.abs().max().item()))
    torch.testing.assert_close(p32.double(), p64, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_under_autocast_the_loss_is_float32_and_close(name: str, dtype: torch.dtype) -> None:
    head = make_head(name, 32, 10)
    features, target = torch.randn(64, 32), torch.randint(10, (64,))
    noise = torch.rand(64, 10)
    exact = head.loss(features, target, noise=noise).total
    with torch.autocast("cpu", dtype=dtype):
        loss = head.loss(features, target, noise=noise).total
        probs = head.predict_proba(features)
    assert loss.dtype == torch.float32
    assert probs.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


@pytest.mark.parametrize("size", [1.0, 30.0, 200.0, 1e4])
def test_the_mean_prediction_keeps_its_digits_where_rho_is_tiny(size: float) -> None:
    head = make_head("dropmax", 1, 6)
    with torch.no_grad():
        for p in head.parameters():
            p.zero_()
        head.classifier.bias.copy_(torch.tensor([3.0, 2.0, 0.0, -50.0, -80.0, 1.0]))
        head.retain.bias.copy_(-size + torch.tensor([-90.0, 0.5, 0.0, 1.0, 60.0, -3.0]))
        features = torch.zeros(3, 1)
        p = head.predict_proba(features)
        expected = head.double().predict_proba(features.double())
    torch.testing.assert_close(p.double(), expected, rtol=max(1e-5, 2e-7 * size), atol=1e-38)
    with torch.enable_grad():
        torch.testing.assert_close(head.predict_proba(features.double()), expected, rtol=1e-12, atol=1e-300)
