"""Every head, loss, mode and dtype on ordinary and extreme inputs, against a reference in float64.

Features are unit vectors and the weights hold the logits, so that the matrix product is exact in every dtype
(bfloat16's may turn subnormal numbers into zeros): what differs from the reference is our arithmetic. Probabilities
must be close absolutely, losses relative to the larger of 1 and the loss; values and gradients must be finite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dropmax import PAPER_OBJECTIVE, make_head
from dropmax.heads import ABLATIONS, FURTHER, HEADS, MODES, Head
from tests.command import ROUNDS
from tests.slow import reference

DTYPES = [torch.float32, torch.bfloat16] if ROUNDS == 1 else [torch.float32, torch.float64, torch.bfloat16, torch.half]
CLASSES = (2, 3, 5, 7, 10, 100)  #: of the batches, in turn
ROWS, MC_SAMPLES = 8, 5
#: What the documentation promises, by the dtype of the arithmetic: half precision is computed in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
#: Of an expected nll in float64, where a class may be 2^20 below the best one: a number of that size is rounded.
TOLERANCE_OF_NLL = 16 * 2.0**20 * torch.finfo(torch.float64).eps
HOPELESS = 1e5  #: what dropmax.exact says of itself: a log p below this says no more than that
SAMPLES = 3  #: masks of heads that draw several
DROPMAX_LOSSES: tuple[dict[str, Any], ...] = (
    PAPER_OBJECTIVE,
    {"prior_correction": False},
    {"mask_gradient": True},
    {"stop_gradient": "parameters", "samples": SAMPLES},
    {"epsilon": 1e-35},
    {"epsilon": 1e-6, "temperature": 1.0},
    {"likelihood": "exact"},
    {"likelihood": "exact", "mask_gradient": True, "prior_correction": False},
    {"likelihood": "marginal"},
    {"chunk_classes": 3},
    {"chunk_classes": 1, "prior_correction": False, "mask_gradient": True},
    {"chunk_classes": 4, "label_smoothing": 0.1, "samples": SAMPLES, "class_weight": True},
    {"chunk_classes": 4, "label_smoothing": 0.1, "stop_gradient": "parameters"},
)


class Subject(NamedTuple):
    """Something whose numbers are tried."""

    head: str
    options: dict[str, Any]
    what: str  # "loss", or a mode of prediction

    def __str__(self) -> str:
        options = "".join(f" {k}={v}" for k, v in self.options.items())
        return f"{self.head}{options} {self.what}"


SUBJECTS = [Subject(name, {}, mode) for name in (*HEADS, *FURTHER, *ABLATIONS) for mode in MODES]
SUBJECTS += [
    Subject(name, options, "loss")
    for name in (*HEADS, *FURTHER, *ABLATIONS)
    if name != "dropmax-theta-prior"  # its loss adds squares of weights, which overflow for the largest inputs
    for options in ({}, {"label_smoothing": 0.1}, {"class_weight": True})
]
SUBJECTS += [Subject("dropmax", options, "loss") for options in DROPMAX_LOSSES]


class Batch(NamedTuple):
    """Logits of some rows in the dtype of the head, their labels, and noise in the dtype of the arithmetic."""

    logits: dict[str, Tensor]  # by the name of the map
    target: Tensor
    noise: Tensor  # (SAMPLES, rows, classes)
    ordinary: Tensor  # rows without any extreme number


def draw(seed: int, rows: int, classes: int, dtype: torch.dtype) -> Batch:
    """Draw a batch: each row gets a family of numbers for each of its o, a and r."""
    generator = torch.Generator().manual_seed(seed)
    logits, ordinary = {}, torch.ones(rows, dtype=torch.bool)
    for name in ("classifier", "retain", "correction"):
        every = torch.stack(families(generator, rows, classes, dtype))
        family = torch.randint(len(every), (rows,), generator=generator)
        family[: rows // 4] = 0  # enough rows where all three are ordinary
        ordinary &= family == 0
        logits[name] = every[family, torch.arange(rows)].to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.rand(SAMPLES, rows, classes, dtype=wide, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    return Batch(logits, target, noise, ordinary)


def families(generator: torch.Generator, rows: int, classes: int, dtype: torch.dtype) -> list[Tensor]:
    """Return logits in float64 of each kind that may go wrong; the first are ordinary."""
    limits, wide = torch.finfo(dtype), dtype if dtype == torch.float64 else torch.float32
    normal = torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    one = torch.nn.functional.one_hot(torch.randint(classes, (rows,), generator=generator), classes).double()
    large = min(1e30, limits.max / 8)
    sizes = torch.tensor([1.0, 1e2, 1e4, large], dtype=torch.float64)
    size = sizes[torch.randint(4, (rows, 1), generator=generator)]
    lowest = max(limits.min / 4, torch.finfo(wide).min / 2000)  # a sum over all classes stays finite
    return [
        3 * normal,
        30 * normal,
        (1e4 * normal).clamp(limits.min / 8, limits.max / 8),
        normal.sign() * large,
        torch.where(normal > 0, normal, lowest),  # how masked-out classes are often written
        normal * limits.tiny / 4,  # subnormal
        (normal[:, :1].sign() * size).expand(rows, classes),  # all equal
        one * size,  # one class ahead
        -one * size,  # one class behind
        torch.copysign(torch.zeros_like(normal), normal),  # zeros of both signs
    ]


def head_with(subject: Subject, batch: Batch, dtype: torch.dtype) -> tuple[Head, Tensor]:
    """Return the head whose logits of row i, given the i-th unit vector, are those of the batch; and these vectors."""
    rows, classes = batch.logits["classifier"].shape
    options = dict(subject.options)
    if "class_weight" in options:
        options["class_weight"] = [0.0, *(1 + k / classes for k in range(1, classes))]  # a weight of 0, too
    head = make_head(subject.head, rows, classes, dtype=dtype, **options)
    with torch.no_grad():
        for name in head.maps.values():
            getattr(head, name).weight.copy_(batch.logits[name].T)
            getattr(head, name).bias.zero_()
    return head, torch.eye(rows, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_finite_input_gives_finite_output_near_the_reference(subject: Subject, dtype: torch.dtype) -> None:
    for number in range(len(CLASSES) * ROUNDS):
        classes = CLASSES[number % len(CLASSES)]
        batch = draw(1000 * number, ROWS if classes < 100 else 2, classes, dtype)
        compare(subject, batch, dtype, f"{subject} {dtype} K={classes} number {number}")


def compare(subject: Subject, batch: Batch, dtype: torch.dtype, where: str) -> None:
    wide = batch.noise.dtype
    head, features = head_with(subject, batch, dtype)
    logits = {name: x.double() for name, x in batch.logits.items()}
    likelihood, expected = subject.options.get("likelihood", "sampled"), {}
    if subject.what == "loss":
        noise = batch.noise if getattr(head, "samples", 1) == SAMPLES else batch.noise[0]
        found = losses(head, features, batch, noise, where)
        if likelihood == "sampled" or head.num_classes <= reference.MOST_MASKED:
            expected = reference.terms_of(head.config(), logits, batch.target, noise.double(), wide)
    else:
        found = {"probability": prediction(head, features, subject.what, where)}
        u = torch.rand(MC_SAMPLES, *batch.noise[0].shape, dtype=wide, generator=torch.Generator().manual_seed(0))
        p = reference.prediction_of(subject.head, subject.what, logits, u.double(), wide)
        expected = {} if p is None else {"probability": p}
    tolerance = max(TOLERANCE[wide], TOLERANCE_OF_NLL if likelihood == "exact" else 0)
    fair = fair_rows(subject, batch, wide)
    for name, truth in expected.items():
        value = found[name].detach().double()
        if likelihood == "marginal" and name == "cross_entropy":
            truth, value = truth.clamp_max(HOPELESS), value.clamp_max(HOPELESS)
        error = (value - truth).abs() / (1 if name == "probability" else truth.abs().clamp_min(1))
        error = (error.amax(-1) if error.dim() == 2 else error)[fair].nan_to_num(nan=0.0)  # NaN: not judged
        assert not bool((error > tolerance).any()), f"{where}: {name} is off by {float(error.max()):.3g}"


def assert_finite(where: str, tensors: dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        assert x is None or bool(x.isfinite().all()), f"{where}: {name} is not finite"


def losses(head: Head, features: Tensor, batch: Batch, noise: Tensor, where: str) -> dict[str, Tensor]:
    features = features.requires_grad_()
    given = None if head.noise_shape(1) is None else noise
    loss = head.loss(features, batch.target, reduction="none", noise=given)
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
