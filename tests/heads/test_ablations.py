"""The heads that answer where DropMax's gain comes from, against formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dropmax import PAPER_OBJECTIVE, make_head
from dropmax.errors import InvalidValue
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


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidValue, match="has no masks: likelihood='exact'"):
        make_head("dropmax-unmasked", 3, 4, likelihood="exact")
    with pytest.raises(InvalidValue, match="no parameters theta of its own"):
        make_head("dropmax-softmax-retain", 3, 4, stop_gradient="parameters")


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
    with pytest.raises(InvalidValue, match="mask_gradient=False"):
        make_head("dropmax-relaxed", 5, 4, mask_gradient=True)
