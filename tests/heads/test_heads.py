"""What every head must do, and what tells the heads apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dropmax
from dropmax import HEADS, PAPER_OBJECTIVE, DropMax, make_head
from dropmax.heads import FURTHER
from dropmax.heads.masked import MaskedHead
from tests import enumeration as naive
from tests.close import close
from tests.heads.losses import loss_at

F64 = torch.float64
ALL = [*HEADS, *FURTHER]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALL),
    *((name, {"label_smoothing": 0.1}) for name in ALL),
    *((name, {"class_weight": [1.0, 2.0, 0.5, 1.0, 3.0]}) for name in ALL),
    ("sampled-softmax", {"fraction": 1.0}),
    ("dropmax-qp", {"gamma": 0.1, "samples": 3}),
    ("dropmax", {"samples": 3}),
    ("dropmax", {"samples": 3, "mask_gradient": True, "label_smoothing": 0.1}),
    ("dropmax", {"mask_gradient": True, "class_weight": [1.0, 2.0, 0.5, 1.0, 3.0]}),
    ("dropmax", {"stop_gradient": "parameters"}),
    ("dropmax", {"rank": 2}),
    ("dropmax", {"prior_correction": True, "kl_weight": 0.3, "entropy_weight": 0.2, "auxiliary_weight": 5.0}),
    ("dropmax", {"mask_gradient": False, "label_smoothing": 0.1, "class_weight": [1.0, 2.0, 0.5, 1.0, 3.0]}),
    ("dropmax", {"epsilon": 1e-35}),
]


def batch(n: int = 4, d: int = 6, k: int = 5, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, d, dtype=dtype), torch.randint(k, (n,))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_gradcheck_of_every_loss_with_fixed_noise(name: str, options: dict[str, Any]) -> None:
    head = make_head(name, 6, 5, dtype=F64, **options)
    features, target = batch()
    noise = torch.rand(*((3,) if options.get("samples") else ()), 4, 5, dtype=F64)
    parameters = dict(head.named_parameters())

    def loss(features: Tensor, *values: Tensor) -> Tensor:
        return loss_at(head, dict(zip(parameters, values, strict=True)), features, target, noise)

    # What a loss stops, a numerical derivative does not: there, check the classifier only. The stopped paths of DropMax
    # have their own test; the spread of label smoothing over a mask is a target, which carries no gradient.
    stops = name == "dropmax" or (name == "dropmax-qp" and "label_smoothing" in options)
    values = [p.detach().clone().requires_grad_(not stops or "classifier" in k) for k, p in parameters.items()]
    assert torch.autograd.gradcheck(loss, [features.requires_grad_(not stops), *values])


@pytest.mark.parametrize("stop_gradient", ["logits", "parameters"])
@pytest.mark.parametrize("mask_gradient", [True, False])
def test_numerical_gradient_of_dropmax_with_the_stopped_logit_held_fixed(
    stop_gradient: str, mask_gradient: bool
) -> None:
    """Differences of an independent formula, in which what the loss stops is a constant."""
    options = {**PAPER_OBJECTIVE, "mask_gradient": mask_gradient}
    head = DropMax(6, 5, dtype=F64, stop_gradient=stop_gradient, **options)
    features, target = batch()
    noise = torch.rand(4, 5, dtype=F64)
    reference = {k: v.detach().clone() for k, v in head.named_parameters()}

    def formula(h: Tensor, *values: Tensor) -> Tensor:
        p = dict(zip(reference, values, strict=True))
        o, a, r = (h @ p[f"{m}.weight"].T + p[f"{m}.bias"] for m in ("classifier", "retain", "correction"))
        h_stop = features.detach() if stop_gradient == "logits" else h
        b = h_stop @ reference["retain.weight"].T + reference["retain.bias"] + r
        z = torch.sigmoid((b + noise.log() - (1 - noise).log()) / 0.1)
        if not mask_gradient:  # hard masks of what was there before anything moved
            frozen = features.detach()
            b0 = frozen @ reference["retain.weight"].T + reference["retain.bias"]
            b0 = b0 + frozen @ reference["correction.weight"].T + reference["correction.bias"]
            z = (noise < b0.sigmoid()).to(F64)
        z = z.scatter(-1, target[:, None], 1.0)
        y = nn.functional.one_hot(target, 5)
        g, rho = b.sigmoid(), a.sigmoid()
        nll = -(((z + 1e-20) * o.exp()) / ((z + 1e-20) * o.exp()).sum(-1, keepdim=True)).log()
        kl = torch.where(y == 1, -rho.log(), g * (g / rho).log() + (1 - g) * ((1 - g) / (1 - rho)).log())
        entropy = -(rho * rho.log() + (1 - rho) * (1 - rho).log())
        aux = -(y * r.sigmoid().log() + (1 - y) * (1 - r.sigmoid()).log())
        return ((nll * y) + kl - entropy + aux).sum(-1).mean()

    h = features.clone().requires_grad_()
    head.loss(h, target, noise=noise).total.backward()
    inputs = [features, *reference.values()]
    for index, (x, grad) in enumerate(zip(inputs, [h.grad, *(p.grad for p in head.parameters())], strict=True)):
        assert grad is not None
        for position in [(0, 0), (x.shape[0] - 1, -1)] if x.dim() == 2 else [(0,), (-1,)]:
            step = torch.zeros_like(x)
            step[position] = 1e-6
            moved = [[v + sign * step if i == index else v for i, v in enumerate(inputs)] for sign in (1, -1)]
            difference = (formula(*moved[0]) - formula(*moved[1])) / 2e-6
            assert grad[position].item() == pytest.approx(difference.item(), abs=1e-6, rel=1e-5)


def by_terms(head: dropmax.Head, term: str, features: Tensor, target: Tensor) -> Tensor:
    """One term, by the hooks of the head."""
    noise = torch.rand(head.noise_shape(len(features)) or (), dtype=F64)
    return head.terms(head.logits(features), target, noise)[term].sum()


def by_total(head: dropmax.Head, term: str, features: Tensor, target: Tensor) -> Tensor:
    """The same by the fast form, with the weights of all other terms at zero."""
    for name in ("cross_entropy", "kl", "entropy", "auxiliary"):
        setattr(head, f"{name}_weight", float(name == term))
    return head.loss(features, target).total


def reached(of: Any, head: dropmax.Head, term: str, features: Tensor, target: Tensor) -> dict[str, bool]:
    """Which parameters (and the features) get a gradient from a term."""
    features = features.clone().requires_grad_()
    inputs = {"features": features, **{k: p for k, p in head.named_parameters() if not k.endswith(".bias")}}
    grads = torch.autograd.grad(of(head, term, features, target), list(inputs.values()), allow_unused=True)
    found = zip(inputs, grads, strict=True)
    return {k.removesuffix(".weight"): g is not None and bool((g != 0).any()) for k, g in found}


@pytest.mark.parametrize("of", [by_terms, by_total])
@pytest.mark.parametrize("stop_gradient", ["logits", "parameters"])
def test_which_parameters_learn_from_which_term(stop_gradient: str, of: Any) -> None:
    head = DropMax(6, 5, stop_gradient=stop_gradient, dtype=F64, **PAPER_OBJECTIVE)
    features, target = batch()
    learns = {
        term: reached(of, head, term, features, target) for term in ("cross_entropy", "kl", "entropy", "auxiliary")
    }
    # theta learns from KL and entropy, never from the sampled likelihood.
    assert learns["cross_entropy"] == {"features": True, "classifier": True, "retain": False, "correction": True}
    assert learns["kl"] == {"features": True, "classifier": False, "retain": True, "correction": True}
    assert learns["entropy"] == {"features": True, "classifier": False, "retain": True, "correction": False}
    assert learns["auxiliary"] == {"features": True, "classifier": False, "retain": False, "correction": True}


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("deterministic-dropmax", {}, {"cross_entropy": 1.0, "auxiliary": 1.0}),
        ("deterministic-attention", {}, {"cross_entropy": 1.0}),
        ("dropmax-qp", {"gamma": 0.3}, {"cross_entropy": 1.0, "kl": 1.0, "entropy": -0.3}),
        ("dropmax", {}, {"cross_entropy": 1.0, "kl": 1.0, "entropy": -1.0, "auxiliary": 1.0}),
    ],
)
def test_the_total_is_the_documented_sum_of_the_terms(
    name: str, options: dict[str, Any], weights: dict[str, float]
) -> None:
    loss = make_head(name, 6, 5, dtype=F64, **options).loss(*batch())
    assert set(loss.terms) == set(weights)
    torch.testing.assert_close(
        loss.total, sum((w * loss.terms[k] for k, w in weights.items()), torch.zeros((), dtype=F64))
    )


@pytest.mark.parametrize("name", ["dropmax", "dropmax-qp"])
def test_masks_are_drawn_as_in_the_paper_unless_told_otherwise(name: str) -> None:
    head = make_head(name, 6, 5)
    assert isinstance(head, MaskedHead)
    assert (head.temperature, head.epsilon, head.samples) == (0.1, 1e-20, 1)


@pytest.mark.parametrize(("num_classes", "weight"), [(2, 1.0), (10, 1.0), (11, 10 / 11), (1000, 0.01)])
def test_kl_and_entropy_never_weigh_more_than_ten_classes_would(num_classes: int, weight: float) -> None:
    head = DropMax(6, num_classes, dtype=F64)
    features, target = torch.randn(4, 6, dtype=F64), torch.randint(num_classes, (4,))
    total, terms = head.loss(features, target)
    expected = terms["cross_entropy"] + weight * (terms["kl"] - terms["entropy"]) + terms["auxiliary"]
    torch.testing.assert_close(total, expected)
    printed = DropMax(6, num_classes, dtype=F64, **PAPER_OBJECTIVE)
    total, terms = printed.loss(features, target)
    torch.testing.assert_close(total, terms["cross_entropy"] + terms["kl"] - terms["entropy"] + terms["auxiliary"])
    assert make_head(**head.config()).config() == head.config()


def test_without_mask_gradient_phi_learns_from_kl_and_labels_alone() -> None:
    head = DropMax(6, 5, dtype=F64)  # which is the default
    assert reached(by_terms, head, "cross_entropy", *batch())["correction"] is False
    assert reached(by_terms, head, "kl", *batch())["correction"] is True


@pytest.mark.parametrize("name", ["dropmax", "dropmax-qp"])
def test_monte_carlo_converges_to_the_mean_over_all_masks(name: str) -> None:
    head = make_head(name, 6, 8, dtype=F64)
    features = 3 * torch.randn(3, 6, dtype=F64)
    samples = 20_000
    estimate = head.predict_proba(features, "mc", samples=samples, generator=torch.Generator().manual_seed(3))
    masks = naive.all_masks(8)
    for row, h in zip(estimate, features, strict=True):
        p = naive.mask_probabilities(masks, head.retain_probs(h))
        values = naive.likelihoods(head.classifier(h), masks)
        mean = p @ values
        error = ((p @ (values - mean).square()) / samples).sqrt()
        assert ((row - mean).abs() <= 4 * error + 1e-9).all()


@pytest.mark.parametrize("mask_gradient", [True, False])
def test_the_sampled_likelihood_converges_to_the_enumerated_one_where_the_masks_are_hard(mask_gradient: bool) -> None:
    head = DropMax(6, 6, dtype=F64, temperature=1e-3, samples=20_000, mask_gradient=mask_gradient)
    h, target = torch.randn(1, 6, dtype=F64), torch.tensor([2])
    sampled = head.loss(h, target).terms["cross_entropy"]
    masks = naive.all_masks(6)
    q = naive.mask_probabilities(masks, head.posterior_probs(h, target)[0])
    nll = -naive.likelihoods(head.classifier(h)[0], masks)[:, 2].log()
    expected = (q * nll).sum()
    standard_error = ((q * (nll - expected).square()).sum() / 20_000).sqrt()
    assert abs(sampled - expected) < 4 * standard_error


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1.0, 20.0]), name=st.sampled_from(ALL))
def test_probabilities_sum_to_one_and_follow_a_permutation_of_the_classes(seed: int, scale: float, name: str) -> None:
    torch.manual_seed(seed)
    head, other = (make_head(name, 6, 7, dtype=F64) for _ in range(2))
    permutation = torch.randperm(7)
    other.load_state_dict({k: v[permutation] for k, v in head.state_dict().items()})
    features = scale * torch.randn(3, 6, dtype=F64)
    p = head.predict_proba(features)
    torch.testing.assert_close(p.sum(-1), torch.ones(3, dtype=F64))
    torch.testing.assert_close(other.predict_proba(features), p[:, permutation])
    torch.testing.assert_close(other.retain_probs(features), head.retain_probs(features)[:, permutation])


@given(
    seed=st.integers(0, 10**6),
    shift=st.floats(-50, 50),
    name=st.sampled_from([name for name in ALL if name != "sigsoftmax"]),  # whose sigmoid sees the logits themselves
)
def test_adding_a_constant_to_the_class_logits_changes_nothing(seed: int, shift: float, name: str) -> None:
    torch.manual_seed(seed)
    head = make_head(name, 6, 7, dtype=F64).eval()
    features, target = batch(k=7)
    noise = torch.rand(4, 7, dtype=F64)
    before = head.loss(features, target, noise=noise).total, head.predict_proba(features)
    with torch.no_grad():
        head.classifier.bias += shift
    after = head.loss(features, target, noise=noise).total, head.predict_proba(features)
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", ["dropmax", "dropmax-qp", "deterministic-attention", "deterministic-dropmax"])
def test_equal_and_large_retain_logits_leave_plain_softmax(name: str) -> None:
    head = make_head(name, 6, 7, dtype=F64)
    with torch.no_grad():
        head.retain.weight.zero_()
        head.retain.bias.fill_(40.0)
    features = torch.randn(3, 6, dtype=F64)
    torch.testing.assert_close(head.predict_proba(features), head.classifier(features).softmax(-1))
    torch.testing.assert_close(head.predict_proba(features, "mc", samples=5), head.classifier(features).softmax(-1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"class_weight": [0.5, 1.0, 2.0, 1.0, 4.0]},
        {"label_smoothing": 0.2, "class_weight": [0.5, 1.0, 2.0, 1.0, 4.0]},
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_softmax_is_torchs_cross_entropy_loss(options: dict[str, Any], reduction: str) -> None:
    head = make_head("softmax", 6, 5, dtype=F64, ignore_index=3, **options)
    features, target = torch.randn(20, 6, dtype=F64), torch.arange(20) % 5
    weight = torch.tensor(options["class_weight"], dtype=F64) if "class_weight" in options else None
    reference = nn.CrossEntropyLoss(
        weight=weight, label_smoothing=options.get("label_smoothing", 0.0), ignore_index=3, reduction=reduction
    )
    torch.testing.assert_close(
        head.loss(features, target, reduction=reduction).total, reference(head(features), target)
    )


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_reductions_ignored_rows_and_extra_dimensions_agree(name: str, options: dict[str, Any]) -> None:
    head = make_head(name, 6, 5, dtype=F64, **options).eval()  # a head with state would change between two calls
    samples = (options["samples"],) if "samples" in options else ()
    features, target = torch.randn(2, 3, 6, dtype=F64), torch.randint(5, (2, 3))
    target[1, 2] = -100
    noise = torch.rand(*samples, 2, 3, 5, dtype=F64)
    rows = head.loss(features, target, noise=noise, reduction="none")
    assert rows.total.shape == (2, 3)
    assert rows.total[1, 2] == 0
    flat = head.loss(features.reshape(6, 6)[:5], target.reshape(6)[:5], noise=noise.reshape(*samples, 6, 5)[..., :5, :])
    weight = torch.tensor(options.get("class_weight", [1.0] * 5), dtype=F64)[target.reshape(6)[:5]]
    total = head.loss(features, target, noise=noise, reduction="sum")
    torch.testing.assert_close(total.total, rows.total.sum())
    torch.testing.assert_close(flat.total, rows.total.sum() / weight.sum())
    for term, value in flat.terms.items():
        torch.testing.assert_close(value, rows.terms[term].sum() / weight.sum())


def test_theta_is_exempt_from_weight_decay() -> None:
    head = DropMax(6, 5)
    decayed, free = head.param_groups(weight_decay=0.1)
    assert {id(p) for p in free["params"]} == {id(p) for p in head.retain.parameters()}
    assert free["weight_decay"] == 0
    assert decayed["weight_decay"] == 0.1
    assert len(decayed["params"]) == 4
    released = head.param_groups(0.1, exempt=("theta", "phi"))
    assert [len(group["params"]) for group in released] == [2, 4]
    assert [len(group["params"]) for group in make_head("softmax", 6, 5).param_groups(0.1)] == [2]


@pytest.mark.parametrize(
    ("num_classes", "fraction", "classes", "with_target_extra"),
    [
        (10, 0.2, 2, 3), (10, 0.4, 4, 5), (10, 0.6, 6, 7), (50, 0.2, 10, 11), (100, 0.6, 60, 61), (200, 0.4, 80, 81),
        (5, 0.5, 3, 4), (10, 0.01, 2, 2), (2, 0.2, 2, 2), (10, 1.0, 10, 10),
    ],
)  # fmt: skip
def test_sampled_softmax_draws_the_share_of_all_classes_that_it_says_and_always_the_target(
    num_classes: int, fraction: float, classes: int, with_target_extra: int
) -> None:
    for extra, expected in ((False, classes), (True, with_target_extra)):
        head = make_head("sampled-softmax", 6, num_classes, fraction=fraction, target_extra=extra)
        with torch.no_grad():
            head.classifier.weight.zero_()
            head.classifier.bias.zero_()
        losses = head.loss(torch.randn(50, 6), torch.randint(num_classes, (50,)), reduction="none").total
        torch.testing.assert_close(losses, torch.full((50,), float(expected)).log())  # classes that are all alike


def test_random_dropmax_keeps_the_target_and_the_stated_share_of_rivals() -> None:
    head = make_head("random-dropmax", 6, 101, retain=0.2)
    with torch.no_grad():
        head.classifier.weight.zero_()
        head.classifier.bias.zero_()
    kept = head.loss(torch.randn(2000, 6), torch.randint(101, (2000,)), reduction="none").total.exp() - 1
    assert kept.mean().item() == pytest.approx(20, abs=4 * (100 * 0.2 * 0.8 / 2000) ** 0.5)


@pytest.mark.parametrize("name", ALL)
def test_a_head_is_rebuilt_from_its_config(name: str) -> None:
    head = make_head(name, 6, 3, label_smoothing=0.1, class_weight=[1.0, 2.0, 3.0])
    twin = make_head(**head.config())
    assert repr(twin) == repr(head)
    assert twin.config() == head.config()
    twin.load_state_dict(head.state_dict())


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in ALL), *(("dropmax", {"likelihood": x}) for x in ("exact", "marginal"))],
)
def test_heads_learn_a_separable_problem(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    target = torch.arange(400) % 4
    features = 4 * torch.eye(4)[target] + torch.randn(400, 4)
    head = make_head(name, 4, 4, **options)
    optimiser = torch.optim.Adam(head.param_groups(1e-4), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        head.loss(features, target).total.backward()
        optimiser.step()
    accuracy = (head.predict_proba(features).argmax(-1) == target).float().mean()
    assert accuracy > 0.97


def test_a_low_rank_starts_like_full_rank_and_theta_has_two_factors() -> None:
    torch.manual_seed(0)
    features = torch.randn(64, 96)
    full, low = DropMax(96, 2000), DropMax(96, 2000, rank=16)
    for name in ("retain", "correction"):
        x, y = (getattr(head, name)(features) for head in (full, low))
        assert float(y.std()) == pytest.approx(float(x.std()), rel=0.1)
        assert abs(float(y.mean())) < 0.05
    decayed, free = low.param_groups(weight_decay=0.1)
    assert {id(p) for p in free["params"]} == {id(p) for p in low.retain.parameters()}
    assert [tuple(p.shape) for p in free["params"]] == [(16, 96), (2000, 16), (2000,)]
    assert len(decayed["params"]) == 5
    assert repr(low) == "DropMax(in_features=96, num_classes=2000, rank=16)"
    twin = make_head(**low.config())
    twin.load_state_dict(low.state_dict())
    torch.testing.assert_close(twin(features), low(features))


@pytest.mark.parametrize("likelihood", ["sampled", "exact", "marginal"])
def test_a_low_rank_is_the_full_rank_of_the_product_of_its_factors(likelihood: str) -> None:
    low, full = (DropMax(6, 5, rank=rank, likelihood=likelihood, dtype=F64) for rank in (3, None))
    with torch.no_grad():
        full.classifier.load_state_dict(low.classifier.state_dict())
        for name in ("retain", "correction"):
            factors, product = getattr(low, name), getattr(full, name)
            product.weight.copy_(factors.up.weight @ factors.down.weight)
            product.bias.copy_(factors.up.bias)
    features, target = batch()
    noise = torch.rand(4, 5, dtype=F64)
    results = []
    for head in (low, full):
        h = features.clone().requires_grad_()
        loss = head.loss(h, target, noise=noise)
        loss.total.backward()
        results.append((loss.total, dict(loss.terms), h.grad, head.predict_proba(h, "exact"), head.topk(h, 3).values))
    torch.testing.assert_close(*results)


def test_a_hook_on_one_bottleneck_is_heard() -> None:
    torch.manual_seed(0)
    h, target, noise = torch.randn(4, 6, dtype=F64), torch.tensor([0, 1, 4, 2]), torch.rand(4, 5, dtype=F64)
    head = DropMax(6, 5, rank=3, dtype=F64)
    other = copy.deepcopy(head)
    head.retain.down.register_forward_hook(lambda module, inputs, output: 2 * output)
    with torch.no_grad():
        other.retain.down.weight.mul_(2)
    torch.testing.assert_close(*(x.loss(h, target, noise=noise).total for x in (head, other)))


def test_another_prior_on_the_masks_replaces_the_fast_form() -> None:
    class Favoured(DropMax):
        name = "favoured"

        def terms(self, logits: Any, target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
            return super().terms({**logits, "retain": logits["retain"] + 1.0}, target, noise)

    head, plain = Favoured(6, 5, dtype=F64), DropMax(6, 5, dtype=F64)
    assert (head.fused, plain.fused) == (False, True)
    plain.load_state_dict(head.state_dict())
    with torch.no_grad():
        plain.retain.bias += 1.0
    features, target = batch()
    noise = torch.rand(4, 5, dtype=F64)
    found, expected = (one.loss(features, target, noise=noise).total for one in (head, plain))
    torch.testing.assert_close(found, expected)


def test_a_head_without_terms_says_what_is_missing() -> None:
    class Nothing(dropmax.Head):
        name = "nothing"

    with pytest.raises(NotImplementedError, match=r"Nothing must define terms\(self, logits, target, noise\)"):
        Nothing(6, 5).loss(torch.zeros(1, 6), torch.tensor([0]))


def test_terms_are_computed_when_somebody_looks_and_survive_the_optimiser() -> None:
    head = DropMax(6, 5, dtype=F64)
    features, target = batch()
    noise = torch.rand(4, 5, dtype=F64)
    expected = {k: v.mean() for k, v in head.terms(head.logits(features), target, noise).items()}
    loss = head.loss(features, target, noise=noise)
    loss.total.backward()
    with torch.no_grad():
        for p in head.parameters():
            p.zero_()
    torch.testing.assert_close(dict(loss.terms), {k: v.detach() for k, v in expected.items()})
    assert not any(x.requires_grad for x in loss.terms.values())


# --- soft labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("name", HEADS)
def test_soft_labels_give_mixups_weighted_sum_of_losses(name: str, options: dict[str, Any]) -> None:
    head = make_head(name, 6, 5, dtype=F64, **options)
    features, first = batch()
    second, share = (first + 1) % 5, 0.3
    shape = head.noise_shape(4)
    noise = None if shape is None else torch.rand(*shape, dtype=F64)
    hot = torch.eye(5, dtype=F64)
    soft = share * hot[first] + (1 - share) * hot[second]
    found = head.loss(features, soft, noise=noise)
    one, two = (head.loss(features, y, noise=noise) for y in (first, second))
    close(found.total, share * one.total + (1 - share) * two.total, terms=100, scale=10.0)
    for term in found.terms:
        close(found.terms[term], share * one.terms[term] + (1 - share) * two.terms[term], terms=100, scale=10.0)
    found.total.backward()
    gradient = head.classifier.weight.grad.clone()
    head.zero_grad()
    (share * one.total + (1 - share) * two.total).backward()
    close(gradient, head.classifier.weight.grad, terms=100, scale=10.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "class_weight": [1.0, 2.0, 0.5, 1.0, 3.0]}])
def test_soft_labels_of_softmax_are_torchs(options: dict[str, Any], reduction: str) -> None:
    head = make_head("softmax", 6, 5, dtype=F64, **options)
    features, soft = torch.randn(4, 6, dtype=F64), torch.randn(4, 5, dtype=F64).softmax(-1)
    weight = None if head.class_weight is None else head.class_weight.to(F64)
    torchs = nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=head.label_smoothing)
    close(head.loss(features, soft, reduction=reduction).total, torchs(head(features), soft), terms=30, scale=10.0)
