"""NaN and infinity as input, and finite numbers that overflow: our error or no effect, never a silent NaN."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmax import exact, functional, make_head
from dropmax.errors import DropMaxError
from dropmax.heads import ABLATIONS, FURTHER, HEADS, MODES, Head
from tests.slow.test_numerics import DROPMAX_LOSSES

BAD = (math.nan, math.inf, -math.inf)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPTIONS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*HEADS, *FURTHER, *ABLATIONS)]
OPTIONS += [("dropmax", {k: v for k, v in options.items() if k != "class_weight"}) for options in DROPMAX_LOSSES]

each_head = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def calls_of(head: Head, features: Tensor, target: Tensor) -> dict[str, Callable[[], Any]]:
    """Return all that a user can ask of a head."""
    asked: dict[str, Callable[[], Any]] = {
        "forward": lambda: head(features),
        "loss": lambda: head.loss(features, target).total,
        "rows of the loss": lambda: head.loss(features, target, reduction="none").total,
        "topk": lambda: head.topk(features, 2).values,
        "retain_probs": lambda: head.retain_probs(features),
        "posterior_probs": lambda: head.posterior_probs(features, target),
        "predictive_std": lambda: head.predictive_std(features),
    }
    return asked | {mode: lambda mode=mode: head.predict_proba(features, mode, samples=2) for mode in MODES}


def check(call: Callable[[], Any], where: str, must_refuse: bool) -> None:
    """Expect our error, or finite numbers where the bad ones may have no effect."""
    try:
        found = call()
    except DropMaxError:
        return
    assert not must_refuse, f"{where}: no error"
    assert bool(found.isfinite().all()), f"{where}: gives {found.flatten()[:4].tolist()} and no error"


@each_dtype
@each_head
def test_bad_features_and_parameters_are_reported(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for bad in BAD:
        head = make_head(name, 4, 3, dtype=dtype, **options)
        features, target = torch.ones(5, 4, dtype=dtype), torch.tensor([0, 1, 2, 0, 1])
        for place, tensor in {"features": features, **dict(head.named_parameters())}.items():
            with torch.no_grad():
                kept, tensor.view(-1)[1] = tensor.view(-1)[1].clone(), bad
            for asked, call in calls_of(head, features, target).items():
                check(call, f"{asked} with {bad} in {place}", place == "features")
            with torch.no_grad():
                tensor.view(-1)[1] = kept


@each_dtype
@each_head
def test_products_that_overflow_are_reported_or_finite(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    head = make_head(name, 4, 3, dtype=dtype, **options)
    large = torch.finfo(dtype).max / 2
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape).sign() * 4)
    for features in (torch.full((2, 4), large, dtype=dtype), torch.tensor([[large, -large] * 2] * 2, dtype=dtype)):
        for asked, call in calls_of(head, features, torch.tensor([0, 1])).items():
            check(call, asked, False)


@each_dtype
@pytest.mark.parametrize("name", exact.__all__)
def test_exact_refuses_nan_and_infinite_logits(name: str, dtype: torch.dtype) -> None:
    """-inf, and infinite retain logits, have a meaning."""
    function, target = getattr(exact, name), torch.tensor([0, 1])
    for bad in BAD:
        for which in (0, 1):
            inputs = [torch.randn(2, 4, dtype=dtype) for _ in range(2)]
            inputs[which][1, 2] = bad
            arguments = (*inputs, target) if name in ("expected_nll", "log_marginal", "posterior") else (*inputs,)
            has_a_meaning = bad == -math.inf or (which == 1 and bad == math.inf)
            check(functools.partial(function, *arguments), f"{bad} in input {which}", not has_a_meaning)


def functions_of(a: Tensor, u: Tensor, target: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the equations as functions of one tensor of logits."""
    return {
        "cross_entropy": lambda x: functional.cross_entropy(x, target),
        "cross_entropy smoothed": lambda x: functional.cross_entropy(x, target, label_smoothing=0.1),
        "masked_nll": lambda x: functional.masked_nll(x, functional.log_relaxed_mask(a, u), target),
        "mean_logits": lambda x: functional.mean_logits(x, a),
        "mask_kl": lambda x: functional.mask_kl(x, a, target),
        "mask_kl, prior": lambda x: functional.mask_kl(a, x, target),
        "mask_entropy": functional.mask_entropy,
        "auxiliary": lambda x: functional.auxiliary(x, target),
        "sparsemax": functional.sparsemax,
        "sparsemax_loss": lambda x: functional.sparsemax_loss(x, target),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_equations_give_nan_in_the_row_of_a_nan_alone(dtype: torch.dtype) -> None:
    target, others = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 3])
    o, a = torch.randn(2, 4, 5, dtype=dtype).unbind()
    for name, function in functions_of(a, torch.full((4, 5), 0.3, dtype=dtype), target).items():
        for column in range(5):
            spoilt = o.clone()
            spoilt[1, column] = math.nan
            before, after = function(o), function(spoilt)
            # The target's own posterior logit is used nowhere: its mask is fixed at 1.
            used = not (name == "mask_kl" and column == int(target[1]))
            assert bool(after[1].isnan().any()) == used, name
            assert torch.equal(before[others], after[others]), name
