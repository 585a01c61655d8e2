"""Every head, loss, mode and dtype on ordinary and extreme inputs, against a reference in float64.

Features are unit vectors and the weights hold the logits, so that products are exact (:mod:`tests.slow.inputs`): what
differs from the reference is our arithmetic. Probabilities must be close absolutely, losses relative to the larger of
1 and the loss; values and gradients must be finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dropmax.heads import Head
from tests.slow import reference
from tests.slow.inputs import SAMPLES, Batch, Subject, draw, head_with, subjects
from tests.slow.rounds import ROUNDS

DTYPES = [torch.float32, torch.bfloat16] if ROUNDS == 1 else [torch.float32, torch.float64, torch.bfloat16, torch.half]
CLASSES = (2, 3, 5, 7, 10, 100)  #: of the batches, in turn; sums over all masks are compared up to MOST_MASKED
MOST_MASKED = 7
ROWS, MC_SAMPLES = 8, 5
#: What the documentation promises, by the dtype of the arithmetic: half precision is computed in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
#: Of an expected nll in float64, where a class may be 2^20 below the best one: a number of that size is rounded.
TOLERANCE_OF_NLL = 16 * 2.0**20 * torch.finfo(torch.float64).eps
HOPELESS = 1e5  #: what dropmax.exact says of itself: a log p below this says no more than that


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subject", subjects(), ids=str)
def test_finite_input_gives_finite_output_near_the_reference(subject: Subject, dtype: torch.dtype) -> None:
    for number in range(len(CLASSES) * ROUNDS):
        classes = CLASSES[number % len(CLASSES)]
        batch = draw(1000 * number, ROWS if classes < 100 else 2, classes, dtype)
        compare(subject, batch, dtype, f"{subject} {dtype} K={classes} number {number}")


def compare(subject: Subject, batch: Batch, dtype: torch.dtype, where: str) -> None:
    wide = batch.noise.dtype
    head, features = head_with(subject, batch, dtype)
    logits = {name: x.double().numpy() for name, x in batch.logits.items()}
    if subject.what == "loss":
        found, expected = losses(head, features, batch, where), expected_loss(head, logits, batch, wide)
    else:
        found = {"probability": prediction(head, features, subject.what, where)}
        expected = expected_prediction(subject, logits, wide)
    tolerance = TOLERANCE[wide]
    if subject.options.get("likelihood") == "exact":
        tolerance = max(tolerance, TOLERANCE_OF_NLL)
    fair = fair_rows(subject, batch, wide)
    for name, truth_ in expected.items():
        truth, value = torch.from_numpy(np.ascontiguousarray(truth_)), found[name].detach().double()
        if subject.options.get("likelihood") == "marginal" and name == "cross_entropy":
            truth, value = truth.clamp_max(HOPELESS), value.clamp_max(HOPELESS)
        error = (value - truth).abs() / (1 if name == "probability" else truth.abs().clamp_min(1))
        error = (error.amax(-1) if error.dim() == 2 else error)[fair].nan_to_num(nan=0.0)  # NaN: not judged
        assert not bool((error > tolerance).any()), f"{where}: {name} is off by {float(error.max()):.3g}"


def assert_finite(where: str, tensors: dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        assert x is None or bool(x.isfinite().all()), f"{where}: {name} is not finite"


def losses(head: Head, features: Tensor, batch: Batch, where: str) -> dict[str, Tensor]:
    features = features.requires_grad_()
    noise = None if head.noise_shape(1) is None else noise_for(head, batch)
    loss = head.loss(features, batch.target, reduction="none", noise=noise)
    assert_finite(where, {"total": loss.total, **loss.terms})
    torch.autograd.backward(loss.total.sum())
    gradients = {f"gradient of {name}": p.grad for name, p in head.named_parameters()}
    # A sum over classes of gradient times weight need not fit where the weights hardly do: a row looks at its own only.
    largest = torch.stack([x.double().abs().amax(-1) for x in batch.logits.values()]).amax(0)
    fits = largest < torch.finfo(features.dtype).max ** 0.4
    gradients["gradient of features"] = None if features.grad is None else features.grad.diagonal()[fits]
    assert_finite(where, gradients)
    return loss.terms


def prediction(head: Head, features: Tensor, mode: str, where: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        p = head.predict_proba(features, mode, samples=MC_SAMPLES, generator=generator)
        found: dict[str, Tensor | None] = {"logits": head(features), "retain": head.retain_probs(features), mode: p}
        if mode == "exact":
            found["predictive_std"] = head.predictive_std(features)
    if mode != "mc":
        torch.autograd.backward(head.predict_proba(features, mode).square().sum())
        found |= {f"gradient of {k}": p.grad for k, p in head.named_parameters()}
    assert_finite(where, found)
    assert float((p.double().sum(-1) - 1).abs().max()) < 1e-5, where
    assert float(p.min()) >= 0, where
    return p


def noise_for(head: Head, batch: Batch) -> Tensor:
    return batch.noise if getattr(head, "samples", 1) == SAMPLES else batch.noise[0]


def expected_loss(head: Head, logits: reference.Logits, batch: Batch, wide: torch.dtype) -> dict[str, Any]:
    if getattr(head, "likelihood", "sampled") != "sampled" and head.num_classes > MOST_MASKED:
        return {}
    dtype = np.dtype(np.float64 if wide == torch.float64 else np.float32)
    with np.errstate(over="ignore", under="ignore"):
        noise = noise_for(head, batch).double().numpy()
        return reference.terms_of(head.config(), logits, batch.target.numpy(), noise, dtype)


def expected_prediction(subject: Subject, logits: reference.Logits, wide: torch.dtype) -> dict[str, Any]:
    o, a = logits["classifier"], logits["retain"]
    masked = subject.head.startswith("dropmax") and subject.head != "dropmax-unmasked"
    if subject.head == "sigsoftmax":
        return {"probability": np.exp(reference.log_softmax((o - o.max(-1, keepdims=True)) + reference.log_sigmoid(o)))}
    if subject.head == "sparsemax":
        return {"probability": reference.sparsemax(o)}
    if not masked and not subject.head.startswith("deterministic"):
        return {"probability": np.exp(reference.log_softmax(o))}
    if subject.head == "dropmax-softmax-retain":
        log_p = np.minimum(reference.log_softmax(o), -torch.finfo(wide).eps)
        a = log_p - np.log(-np.expm1(log_p))
    if subject.what == "mean" or not masked:
        return {"probability": np.exp(reference.log_softmax((o - o.max(-1, keepdims=True)) + reference.log_sigmoid(a)))}
    if subject.what == "exact":
        return {} if o.shape[-1] > MOST_MASKED else {"probability": reference.predictive(o, a)}
    u = torch.rand(MC_SAMPLES, *o.shape, dtype=wide, generator=torch.Generator().manual_seed(0)).double().numpy()
    rho = reference.sigmoid(a)
    kept = u < rho
    kept |= ~kept.any(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        p = np.exp([reference.log_softmax(np.where(k, o, -np.inf)) for k in kept]).mean(0)
    p[(np.abs(u - rho) < 1e-6).any((0, 2))] = np.nan  # rounding decides whether a class is kept: not judged
    return {"probability": p}


def fair_rows(subject: Subject, batch: Batch, wide: torch.dtype) -> Tensor:
    """Return the rows whose answer does not depend on how one last digit was rounded."""
    if subject.head == "dropmax-softmax-retain":  # 1 - rho of rho = softmax(o) close to 1
        certain = batch.logits["classifier"].double().softmax(-1).amax(-1) > 0.8
        return (batch.ordinary & ~certain).nonzero()[:, 0]
    adds_log_rho = subject.what == "mean" and subject.head.startswith("dropmax")
    if subject.head == "sigsoftmax":  # o + log sigmoid(o), where both may be large
        largest = batch.logits["classifier"].double().abs().amax(-1)
        return (largest * torch.finfo(wide).eps < TOLERANCE[wide]).nonzero()[:, 0]
    if not adds_log_rho and not subject.head.startswith("deterministic"):
        return torch.arange(len(batch.target))
    # o + log rho where all log rho are so large that their last digit decides about small o.
    log_rho = torch.nn.functional.logsigmoid(batch.logits["retain"].double())
    return (log_rho.amin(-1).abs() * torch.finfo(wide).eps < TOLERANCE[wide]).nonzero()[:, 0]
