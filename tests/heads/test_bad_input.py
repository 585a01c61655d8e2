"""What a user gets for a mistake: our exception, which is also the builtin one expects, quoting what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dropmax import HEADS, DropMaxError, make_head
from dropmax.checks import NotFinite, values_are_readable
from dropmax.heads import ABLATIONS

FEATURES, TARGET = torch.zeros(4, 6), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("features", "target", "kind", "message"),
    [
        (FEATURES, torch.tensor([0, 1, 2, 5]), ValueError, r"label 5, but labels must lie in 0\.\.4"),
        (FEATURES, torch.tensor([0, 1, 2, -1]), ValueError, r"label -1, .* or equal ignore_index=-100"),
        (FEATURES, TARGET.bool(), TypeError, r"integer class indices, or .* soft labels .*, got torch\.bool"),
        (FEATURES, torch.ones(len(TARGET), 5), ValueError, r"probabilities that sum to 1 in each row, got .* sum 5"),
        (FEATURES, TARGET.float(), ValueError, r"soft labels must have one probability per row and class"),
        (FEATURES, TARGET[:3], ValueError, r"target has shape \(3,\), .* shape \(4,\)"),
        (FEATURES, [0, 1, 2, 3], TypeError, r"torch\.Tensor of class indices, got list"),
        (torch.zeros(4, 7), TARGET, ValueError, r"shape \(4, 7\), but this head expects 6 values"),
        (torch.tensor(1.0), TARGET, ValueError, r"shape \(\)"),
        (FEATURES.long(), TARGET, TypeError, r"floating point, got torch\.int64"),
        (FEATURES.numpy(), TARGET, TypeError, r"torch\.Tensor, got ndarray"),
    ],
)
@pytest.mark.parametrize("name", list(HEADS))
def test_bad_tensors(name: str, features: Any, target: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(DropMaxError, match=message) as caught:
        make_head(name, 6, 5).loss(features, target)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("dropmaks", {}, ValueError, r"unknown head 'dropmaks': did you mean 'dropmax'\? Valid are softmax, "),
        ("dropmax", {"temprature": 1}, TypeError, r"of dropmax 'temprature': did you mean 'temperature'\?"),
        ("softmax", {"temperature": 1}, TypeError, r"unknown option of softmax 'temperature': Valid are label_sm"),
        ("dropmax", {"temperature": 0}, ValueError, r"temperature must be a finite number above 0, got 0"),
        ("dropmax", {"temperature": float("nan")}, ValueError, r"temperature .* got nan"),
        ("dropmax", {"temperature": "hot"}, TypeError, r"temperature must be a number, got 'hot'"),
        ("dropmax", {"samples": 0}, ValueError, r"samples must be at least 1, got 0"),
        ("dropmax", {"samples": 1.5}, TypeError, r"samples must be a whole number, got 1\.5"),
        ("dropmax", {"stop_gradient": "logit"}, ValueError, r"'logit': did you mean 'logits'\?"),
        ("dropmax", {"kl_weight": -1}, ValueError, r"kl_weight must be finite and not negative, got -1"),
        ("dropmax", {"auxiliary_weight": None}, TypeError, r"auxiliary_weight must be a number, got None"),
        ("dropmax", {"prior_correction": 1}, TypeError, r"prior_correction must be True or False, got 1"),
        ("dropmax", {"rank": 0}, ValueError, r"rank must lie in 1\.\.5, the smaller of in_features=6 and num_cl"),
        ("dropmax", {"rank": -3}, ValueError, r"or be None for full rank, got -3"),
        ("dropmax", {"rank": 6}, ValueError, r"rank must lie in 1\.\.5.* got 6"),
        ("dropmax", {"rank": 2.0}, TypeError, r"rank must be a whole number, or None for full rank, got 2\.0"),
        ("dropmax", {"rank": True}, TypeError, r"rank must be a whole number.* got True"),
        ("dropmax-qp", {"rank": "64"}, TypeError, r"rank must be a whole number.* got '64'"),
        ("dropmax", {"epsilon": 0}, ValueError, r"epsilon must lie in \(0, 1\), got 0"),
        ("dropmax-qp", {"gamma": float("inf")}, ValueError, r"gamma"),
        ("focal", {"gamma": -1.0}, ValueError, r"gamma must be finite and not negative, got -1.0"),
        ("focal", {"gamma": "two"}, TypeError, r"gamma must be a number, got 'two'"),
        ("random-dropmax", {"retain": 1.0}, ValueError, r"retain must lie in \(0, 1\), got 1\.0"),
        ("random-dropmax", {"retain": True}, TypeError, r"retain must be a number, got True"),
        ("sampled-softmax", {"fraction": 0}, ValueError, r"fraction must lie in \(0, 1\], got 0"),
        ("softmax", {"label_smoothing": 1.0}, ValueError, r"label_smoothing must lie in \[0, 1\), got 1\.0"),
        ("softmax", {"class_weight": [1.0]}, ValueError, r"each of the 5 classes, got shape \(1,\)"),
        ("softmax", {"class_weight": [1.0, -1, 1, 1, 1]}, ValueError, r"not negative"),
        ("softmax", {"class_weight": "balanced"}, TypeError, r"one number per class, got 'balanced'"),
        ("softmax", {"ignore_index": 1.5}, TypeError, r"ignore_index must be a whole number, got 1\.5"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(DropMaxError, match=message) as caught:
        make_head(name, 6, 5, **options)
    assert isinstance(caught.value, kind)


def test_the_constructor_also_knows_its_options() -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        HEADS["dropmax"](6, 5, temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("sizes", "message"), [((6, 1), "num_classes must be at least 2, got 1"), ((0, 5), "in_feat")])
def test_bad_sizes(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(DropMaxError, match=message):
        make_head("dropmax", *sizes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: h.loss(FEATURES, TARGET, reduction="average"), "unknown reduction 'average'"),
        (lambda h: h.loss(FEATURES, TARGET, noise=torch.rand(4, 6)), r"noise has shape \(4, 6\), .* \(4, 5\)"),
        (lambda h: h.predict_proba(FEATURES, "maen"), "unknown mode 'maen': did you mean 'mean'"),
        (lambda h: h.predict_proba(FEATURES, "mc", samples=0), "samples must be at least 1"),
        (lambda h: h.posterior_probs(FEATURES, TARGET + 2), "label 5"),
        (lambda h: h.param_groups(0.1, exempt=("tetha",)), "did you mean 'theta'"),
    ],
)
def test_bad_calls(call: Any, message: str) -> None:
    with pytest.raises(DropMaxError, match=message):
        call(make_head("dropmax", 6, 5))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [*HEADS, *ABLATIONS])
def test_features_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    head, features = make_head(name, 6, 5), FEATURES.clone()
    features[2, 1] = bad
    for call in (
        lambda: head(features),
        lambda: head.loss(features, TARGET),
        lambda: head.predict_proba(features),
        lambda: head.predict_proba(features, "mc"),
        lambda: head.predict_proba(features, "exact"),
        lambda: head.topk(features, 2),
        lambda: head.retain_probs(features),
        lambda: head.posterior_probs(features, TARGET),
        lambda: head.predictive_std(features),
    ):
        with pytest.raises(NotFinite, match=rf"features hold {bad} at \[2, 1\] \(shape \(4, 6\), torch.float32\)"):
            call()


@pytest.mark.parametrize("weight", [torch.nan, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("name", list(HEADS))
def test_weights_that_are_not_finite_or_overflow_are_named(name: str, weight: float) -> None:
    head = make_head(name, 6, 5)
    with torch.no_grad():
        head.classifier.weight[3] = weight
    for call in (lambda: head.loss(FEATURES + 1, TARGET), lambda: head.predict_proba(FEATURES + 1)):
        with pytest.raises(NotFinite, match=rf"so the weights of '{name}' are not, or are too large for the dtype"):
            call()


def test_finite_features_whose_sum_overflows_are_welcome() -> None:
    features = torch.full((1, 6), torch.finfo(torch.float32).max / 4)
    head = make_head("softmax", 6, 5)
    torch.nn.init.zeros_(head.classifier.weight)
    assert head.predict_proba(features).isfinite().all()


def test_checks_look_at_no_values_where_that_would_stall_a_device() -> None:
    assert values_are_readable(torch.zeros(1))
    assert not values_are_readable(torch.zeros(1, device="meta"))
    # The meta device has no values at all: a check that read one would raise something else than this.
    head = make_head("dropmax", 6, 5, device="meta")
    loss = head.loss(torch.zeros(4, 6, device="meta"), torch.zeros(4, dtype=torch.long, device="meta"))
    assert loss.total.device.type == "meta"
    with FakeTensorMode() as mode:  # on the processor, and without values all the same
        fake = make_head("dropmax", 6, 5)(mode.from_tensor(FEATURES))
        assert fake.shape == (4, 5)
        many = make_head("dropmax", 6, 20_000)  # whose noise is hashed
        many.loss(mode.from_tensor(FEATURES), mode.from_tensor(torch.zeros(4, dtype=torch.long))).total.backward()
        assert many.classifier.weight.grad.shape == (20_000, 6)


@pytest.mark.parametrize("name", ["random-dropmax", "sampled-softmax"])
def test_terms_without_the_noise_they_need(name: str) -> None:
    head = make_head(name, 4, 5)
    logits = head.logits(torch.zeros(2, 4))
    with pytest.raises(DropMaxError, match=rf"{name} needs noise of shape \(2, 5\)"):
        head.terms(logits, torch.tensor([0, 1]), None)
