"""A posterior that sees the label, against its formula written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dropmax import DropMax, DropMaxError, PackedHead, make_head
from tests.close import close

F64 = torch.float64
OBJECTIVE = {"prior_correction": False, "mask_gradient": True, "kl_weight": 1.0, "entropy_weight": 1.0}


def made(**options: object) -> tuple[DropMax, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = make_head("dropmax-label-posterior", 6, 4, dtype=F64, **options)
    torch.nn.init.normal_(head.correction.label)
    return head, torch.randn(5, 6, dtype=F64), torch.tensor([0, 1, 2, 3, 1]), torch.rand(5, 4, dtype=F64)


def naive_loss(head: DropMax, h: Tensor, t: int, u: Tensor) -> Tensor:
    """The loss of one row, class by class."""
    o, a, r = head.classifier(h), head.retain(h), head.correction(h)
    rho, kept = a.sigmoid(), []
    loss = torch.zeros((), dtype=F64)
    for k in range(4):
        b = a[k].detach() + r[k] + head.correction.label[t, k]
        g, s = b.sigmoid(), r[k].sigmoid()
        if k == t:
            kept.append(torch.ones((), dtype=F64))
            loss = loss - rho[k].log() - s.log()
        else:
            kept.append(((b + math.log(u[k] / (1 - u[k]))) / 0.1).sigmoid())
            loss = loss + g * (g / rho[k]).log() + (1 - g) * ((1 - g) / (1 - rho[k])).log() - (1 - s).log()
        loss = loss + rho[k] * rho[k].log() + (1 - rho[k]) * (1 - rho[k]).log()
    weighed = (torch.stack(kept) + 1e-20) * o.exp()
    return loss - (weighed[t] / weighed.sum()).log()


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    head, features, target, noise = made(**OBJECTIVE)
    rows = zip(features, target.tolist(), noise, strict=True)
    expected = torch.stack([naive_loss(head, h, t, u) for h, t, u in rows])
    found = head.loss(features, target, reduction="none", noise=noise).total
    close(found, expected, terms=30)
    parameters = dict(head.named_parameters())
    wanted = torch.autograd.grad(expected.sum(), list(parameters.values()))
    for name, g, w in zip(parameters, torch.autograd.grad(found.sum(), list(parameters.values())), wanted, strict=True):
        close(g, w, terms=60, scale=10.0, what=name)
        assert w.abs().max() > 1e-3, name


def test_where_the_matrix_is_zero_it_is_dropmax() -> None:
    head, features, target, noise = made()
    torch.nn.init.zeros_(head.correction.label)
    plain = DropMax(6, 4, dtype=F64)
    plain.load_state_dict({k: v for k, v in head.state_dict().items() if k != "correction.label"})
    close(head.loss(features, target, noise=noise).total, plain.loss(features, target, noise=noise).total, terms=30)
    close(head.posterior_probs(features, target), plain.posterior_probs(features, target), terms=6)


def test_the_posterior_depends_on_the_label_and_the_prior_and_the_auxiliary_loss_do_not() -> None:
    head, features, target, noise = made(likelihood="exact")
    b = head.retain(features) + head.correction(features) + head.correction.label[target]
    expected = b.sigmoid().scatter(1, target[:, None], 1.0)
    close(head.posterior_probs(features, target), expected, terms=6)
    before = head.loss(features, target, noise=noise).terms
    probabilities = head.predict_proba(features)
    torch.nn.init.zeros_(head.correction.label)
    after = head.loss(features, target, noise=noise).terms
    assert torch.equal(head.predict_proba(features), probabilities)
    close(before["auxiliary"], after["auxiliary"], terms=30)
    assert abs(float(before["kl"] - after["kl"])) > 1e-3


def test_the_matrix_is_part_of_phi() -> None:
    head, *_ = made()
    decayed, free = head.param_groups(1e-4, exempt=("theta", "phi"))
    assert any(p is head.correction.label for p in free["params"])
    assert not any(p is head.correction.label for p in decayed["params"])


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(DropMaxError, match="likelihood='marginal'"):
        make_head("dropmax-label-posterior", 6, 4, likelihood="marginal")
    with pytest.raises(DropMaxError, match="cannot be sharded"):
        make_head("dropmax-label-posterior", 6, 4).shard(None)
    with pytest.raises(DropMaxError, match="chunk_classes"):
        make_head("dropmax-label-posterior", 6, 4, chunk_classes=2)
    with pytest.raises(DropMaxError):
        PackedHead(make_head("dropmax-label-posterior", 6, 4))
