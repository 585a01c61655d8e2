"""NaN and infinity as input, and finite numbers that overflow: our error or no effect, never a silent NaN."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dropmax import exact, functional, make_head
from dropmax.errors import DropMaxError
from dropmax.heads import MODES, Head
from hardening.campaign import Outcome

Heads = Sequence[tuple[str, dict[str, Any]]]

BAD = (math.nan, math.inf, -math.inf)


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


def try_heads(outcome: Outcome, heads: Heads, dtype: torch.dtype) -> None:
    """Put NaN and infinity into features and parameters: our error, or no effect."""
    for (name, options), bad in itertools.product(heads, BAD):
        head = make_head(name, 4, 3, dtype=dtype, **options)
        features, target = torch.ones(5, 4, dtype=dtype), torch.tensor([0, 1, 2, 0, 1])
        places = {"features": features, **dict(head.named_parameters())}
        for place, tensor in places.items():
            with torch.no_grad():
                kept, tensor.view(-1)[1] = tensor.view(-1)[1].clone(), bad
            for asked, call in calls_of(head, features, target).items():
                where = f"{name} {options} {dtype}: {asked} with {bad} in {place}"
                _try_call(call, where, place == "features", outcome)
            with torch.no_grad():
                tensor.view(-1)[1] = kept


def _try_call(call: Callable[[], Any], where: str, must_refuse: bool, outcome: Outcome) -> None:
    try:
        found = call()
    except DropMaxError:
        outcome.count("not finite: reported")
        return
    except Exception as error:
        outcome.count("not finite: another error")
        outcome.fail(f"{where}: {type(error).__name__}: {error}")
        return
    if must_refuse or not bool(found.isfinite().all()):
        outcome.count("not finite: silently propagated")
        outcome.fail(f"{where}: gives {found.flatten()[:4].tolist()} and no error")
    else:
        outcome.count("not finite: without effect")


def try_overflow(outcome: Outcome, heads: Heads, dtype: torch.dtype) -> None:
    """Finite features times finite weights that do not fit into the dtype: our error, or finite numbers."""
    for name, options in heads:
        head = make_head(name, 4, 3, dtype=dtype, **options)
        large = torch.finfo(dtype).max / 2
        with torch.no_grad():
            for p in head.parameters():
                p.copy_(torch.randn(p.shape).sign() * 4)
        target = torch.tensor([0, 1])
        for features in (torch.full((2, 4), large, dtype=dtype), torch.tensor([[large, -large] * 2] * 2, dtype=dtype)):
            for asked, call in calls_of(head, features, target).items():
                _try_call(call, f"{name} {options} {dtype}: {asked} of features ±{large:.3g}", False, outcome)


def try_exact(outcome: Outcome, dtype: torch.dtype) -> None:
    """NaN, and inf as a class logit, are refused; -inf, and infinite retain logits, have a meaning."""
    target = torch.tensor([0, 1])
    for name, bad, which, row in itertools.product(exact.__all__, BAD, (0, 1), (0, 1)):
        inputs = [torch.randn(2, 4, dtype=dtype, generator=torch.Generator().manual_seed(row)) for _ in range(2)]
        inputs[which][row, 2] = bad
        arguments = (*inputs, target) if name in ("expected_nll", "log_marginal", "posterior") else (*inputs,)
        has_a_meaning = bad == -math.inf or (which == 1 and bad == math.inf)
        where = f"exact.{name} {dtype} with {bad} in row {row} of {('logits', 'retain_logits')[which]}"
        _try_call(functools.partial(getattr(exact, name), *arguments), where, not has_a_meaning, outcome)


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


def try_rows_of_functions(outcome: Outcome) -> None:
    """The equations do not check: a row with NaN is NaN, and no other row changes."""
    target, others = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 3])
    for dtype in (torch.float32, torch.float64):
        o, a = torch.randn(2, 4, 5, dtype=dtype, generator=torch.Generator().manual_seed(0)).unbind()
        functions = functions_of(a, torch.full((4, 5), 0.3, dtype=dtype), target)
        for (name, function), column in itertools.product(functions.items(), range(5)):
            spoilt = o.clone()
            spoilt[1, column] = math.nan
            before, after = function(o), function(spoilt)
            # The target's own posterior logit is looked at by nobody: its mask is fixed at 1.
            looked_at = not (name == "mask_kl" and column == int(target[1]))
            right = bool(after[1].isnan().any()) == looked_at and torch.equal(before[others], after[others])
            outcome.count("not finite: NaN in this row alone, as documented" if right else "not finite: spread or lost")
            if not right:
                outcome.fail(f"functional.{name} {dtype}: NaN in row 1, class {column} gives {after.tolist()}")
