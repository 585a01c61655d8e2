"""The heads that answer where DropMax's gain comes from, against formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dropmax import PAPER_OBJECTIVE, DropMax, PackedHead, make_head
from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import MODES
from tests.close import close

F64 = torch.float64


def batch(n: int = 6, d: int = 5, k: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, d, dtype=F64), torch.randint(k, (n,))


def terms_beside_the_likelihood(a: Tensor, r: Tensor, target: Tensor) -> Tensor:
    y = nn.functional.one_hot(target, a.shape[-1])
    rho, g, s = a.sigmoid(), (a + r).sigmoid(), r.sigmoid()
    kl = torch.where(y == 1, -rho.log(), g * (g / rho).log() + (1 - g) * ((1 - g) / (1 - rho)).log())
    negative_entropy = rho * rho.log() + (1 - rho) * (1 - rho).log()
    auxiliary = -(y * s.log() + (1 - y) * (1 - s).log())
    return (kl + negative_entropy + auxiliary).sum(-1)


def test_without_masks_the_likelihood_is_the_cross_entropy_and_the_other_terms_stay() -> None:
    head = make_head("dropmax-unmasked", 5, 4, dtype=F64, **PAPER_OBJECTIVE)
    h, target = batch()
    a, r = head.retain(h), head.correction(h)
    expected = (
        nn.functional.cross_entropy(head.classifier(h), target) + terms_beside_the_likelihood(a, r, target).mean()
    )
    torch.testing.assert_close(head.loss(h, target).total, expected)


@pytest.mark.parametrize("mode", MODES)
def test_without_masks_it_predicts_as_softmax_or_if_asked_with_rho(mode: str) -> None:
    plain = make_head("dropmax-unmasked", 5, 4, dtype=F64)
    masked = make_head("dropmax-unmasked", 5, 4, dtype=F64, masked_prediction=True)
    dropmax = make_head("dropmax", 5, 4, dtype=F64)
    masked.load_state_dict(plain.state_dict())
    dropmax.load_state_dict(plain.state_dict())
    h, _ = batch()
    torch.testing.assert_close(plain.predict_proba(h, mode), plain.classifier(h).softmax(-1))
    assert not plain.predictive_std(h).any()
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    expected = dropmax.predict_proba(h, mode, generator=generators[0])
    torch.testing.assert_close(masked.predict_proba(h, mode, generator=generators[1]), expected)
    torch.testing.assert_close(masked.predictive_std(h), dropmax.predictive_std(h))


def test_retain_probabilities_that_are_the_softmax_probabilities() -> None:
    head = make_head("dropmax-softmax-retain", 5, 4, dtype=F64, **PAPER_OBJECTIVE)
    assert {name.split(".")[0] for name, _ in head.named_parameters()} == {"classifier", "correction"}
    h, target = batch()
    noise = torch.rand(6, 4, dtype=F64)
    o, r = head.classifier(h), head.correction(h)
    p = o.softmax(-1)
    a = (p / (1 - p)).log()
    torch.testing.assert_close(head.retain_probs(h), p)
    z = (((a + r) + noise.log() - (1 - noise).log()) / 0.1).sigmoid().scatter(-1, target[:, None], 1.0)
    kept = (z + 1e-20) * o.exp()
    nll = -(kept / kept.sum(-1, keepdim=True)).gather(-1, target[:, None]).squeeze(-1).log()
    expected = (nll + terms_beside_the_likelihood(a, r, target)).mean()
    torch.testing.assert_close(head.loss(h, target, noise=noise).total, expected)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_a_certain_softmax_leaves_finite_retain_logits_and_gradients(scale: float) -> None:
    head = make_head("dropmax-softmax-retain", 5, 4)
    with torch.no_grad():
        head.classifier.weight.mul_(scale)
    h, target = torch.randn(6, 5), torch.randint(4, (6,))
    head.loss(h, target).total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dropmax-unmasked", {"likelihood": "exact"}, "has no masks: likelihood='exact'"),
        ("dropmax-softmax-retain", {"stop_gradient": "parameters"}, "no parameters theta of its own"),
        ("dropmax-relaxed", {"mask_gradient": True}, "mask_gradient=False"),
        ("dropmax-label-posterior", {"likelihood": "marginal"}, "likelihood='marginal'"),
        ("dropmax-label-posterior", {"chunk_classes": 2}, "chunk_classes"),
        ("dropmax-theta-prior", {"theta_prior": "laplac"}, "unknown theta_prior 'laplac': did you mean 'laplace'"),
        ("dropmax-theta-prior", {"theta_prior_weight": -1}, "theta_prior_weight"),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make_head(name, 5, 4, **options)


@pytest.mark.parametrize("name", ["dropmax-label-posterior", "dropmax-theta-prior"])
def test_what_cannot_be_sharded_or_packed_says_so(name: str) -> None:
    with pytest.raises(InvalidValue, match="cannot be sharded"):
        make_head(name, 6, 4).shard(None)
    with pytest.raises(InvalidType, match="cannot be packed"):
        PackedHead(make_head(name, 6, 4))


def test_relaxed_masks_without_a_gradient_are_dropmax_with_another_likelihood() -> None:
    torch.manual_seed(0)
    relaxed, hard = (make_head(name, 5, 4, dtype=F64) for name in ("dropmax-relaxed", "dropmax"))
    hard.load_state_dict(relaxed.state_dict())
    h, target = batch()
    noise = torch.rand(6, 4, dtype=F64)
    # Far from the threshold u = sigmoid(b), a relaxed mask of 1 - u at a low temperature is the hard one of u.
    noise = torch.where((noise - relaxed.posterior_probs(h, target)).abs() < 0.05, 0.999, noise)
    relaxed.temperature = 1e-3
    results = []
    for head, u in ((relaxed, 1 - noise), (hard, noise)):
        loss = head.loss(h, target, noise=u)
        loss.total.backward()
        results.append([loss.total.detach(), *loss.terms.values(), *(p.grad for p in head.parameters())])
    for found, expected in zip(*results, strict=True):
        close(found, expected, terms=30, scale=10.0)


# --- a posterior that sees the label -----------------------------------------------------------------------------


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
    head, features, target, noise = made(**PAPER_OBJECTIVE)
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


# --- a prior on theta --------------------------------------------------------------------------------------------


def with_prior(prior: str, weight: float) -> tuple[DropMax, DropMax, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    plain = DropMax(6, 4, dtype=F64)
    head = make_head("dropmax-theta-prior", 6, 4, theta_prior=prior, theta_prior_weight=weight, dtype=F64)
    head.load_state_dict(plain.state_dict())
    features, target = torch.randn(5, 6, dtype=F64), torch.tensor([0, 1, 2, 3, -100])
    return plain, head, features, target, torch.rand(5, 4, dtype=F64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("prior", ["gaussian", "laplace"])
def test_the_loss_of_each_row_that_counts_gets_the_prior(prior: str, reduction: str) -> None:
    plain, head, features, target, noise = with_prior(prior, 0.3)
    theta = [x for p in plain.retain.parameters() for x in p.flatten().tolist()]
    expected = sum(x * x / 2 if prior == "gaussian" else abs(x) for x in theta)
    times = {"mean": 1.0, "sum": 4.0, "none": torch.tensor([1.0, 1, 1, 1, 0], dtype=F64)}[reduction]
    prior_too = head.loss(features, target, reduction=reduction, noise=noise)
    without = plain.loss(features, target, reduction=reduction, noise=noise)
    # The penalty is summed in float32: 28 numbers of size 1.
    torch.testing.assert_close(prior_too.total, without.total + 0.3 * expected * times, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(
        prior_too.terms["theta_prior"], torch.as_tensor(expected * times, dtype=F64), atol=1e-5, rtol=1e-6
    )


@pytest.mark.parametrize("prior", ["gaussian", "laplace"])
def test_only_theta_gets_its_gradient(prior: str) -> None:
    plain, head, features, target, noise = with_prior(prior, 0.3)
    for one in (plain, head):
        one.loss(features, target, noise=noise).total.backward()
    for name, p in head.named_parameters():
        extra = p.grad - plain.get_parameter(name).grad
        expected = 0.3 * (p if prior == "gaussian" else p.sign()) if name.startswith("retain") else torch.zeros_like(p)
        torch.testing.assert_close(extra, expected.detach(), atol=1e-6, rtol=1e-6)


def test_a_batch_without_a_row_that_counts_has_no_loss() -> None:
    _, head, features, _, _ = with_prior("gaussian", 0.3)
    assert head.loss(features, torch.full((5,), -100)).total.item() == 0
