"""The prior on theta: its value, its gradient, and who gets it."""

from __future__ import annotations

import pytest
import torch

from dropmax import DropMax, DropMaxError, PackedHead, make_head

F64 = torch.float64


def pair(prior: str, weight: float) -> tuple[DropMax, DropMax, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    plain = DropMax(6, 4, dtype=F64)
    head = make_head("dropmax-theta-prior", 6, 4, theta_prior=prior, theta_prior_weight=weight, dtype=F64)
    head.load_state_dict(plain.state_dict())
    features, target = torch.randn(5, 6, dtype=F64), torch.tensor([0, 1, 2, 3, -100])
    return plain, head, features, target, torch.rand(5, 4, dtype=F64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("prior", ["gaussian", "laplace"])
def test_the_loss_of_each_row_that_counts_gets_the_prior(prior: str, reduction: str) -> None:
    plain, head, features, target, noise = pair(prior, 0.3)
    theta = [x for p in plain.retain.parameters() for x in p.flatten().tolist()]
    expected = sum(x * x / 2 if prior == "gaussian" else abs(x) for x in theta)
    times = {"mean": 1.0, "sum": 4.0, "none": torch.tensor([1.0, 1, 1, 1, 0], dtype=F64)}[reduction]
    with_prior = head.loss(features, target, reduction=reduction, noise=noise)
    without = plain.loss(features, target, reduction=reduction, noise=noise)
    # The penalty is summed in float32: 28 numbers of size 1.
    torch.testing.assert_close(with_prior.total, without.total + 0.3 * expected * times, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(
        with_prior.terms["theta_prior"], torch.as_tensor(expected * times, dtype=F64), atol=1e-5, rtol=1e-6
    )


@pytest.mark.parametrize("prior", ["gaussian", "laplace"])
def test_only_theta_gets_its_gradient(prior: str) -> None:
    plain, head, features, target, noise = pair(prior, 0.3)
    for one in (plain, head):
        one.loss(features, target, noise=noise).total.backward()
    for name, p in head.named_parameters():
        extra = p.grad - plain.get_parameter(name).grad
        expected = 0.3 * (p if prior == "gaussian" else p.sign()) if name.startswith("retain") else torch.zeros_like(p)
        torch.testing.assert_close(extra, expected.detach(), atol=1e-6, rtol=1e-6)


def test_a_batch_without_a_row_that_counts_has_no_loss() -> None:
    _, head, features, _, _ = pair("gaussian", 0.3)
    assert head.loss(features, torch.full((5,), -100)).total.item() == 0


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(DropMaxError, match="unknown theta_prior 'laplac': did you mean 'laplace'"):
        make_head("dropmax-theta-prior", 6, 4, theta_prior="laplac")
    with pytest.raises(DropMaxError, match="theta_prior_weight"):
        make_head("dropmax-theta-prior", 6, 4, theta_prior_weight=-1)
    with pytest.raises(DropMaxError, match="cannot be sharded"):
        make_head("dropmax-theta-prior", 6, 4).shard(None)
    with pytest.raises(DropMaxError):
        PackedHead(make_head("dropmax-theta-prior", 6, 4))
