"""Every head, loss, prediction mode and dtype on thousands of random and adversarial inputs.

What is tried, and why the products are exact, is in :mod:`hardening.numerics_inputs`: what differs from the float64
reference (:mod:`hardening.numerics_reference`) is our arithmetic. Then:

- values must be close to the reference: probabilities absolutely, losses relative to the larger of 1 and the loss;
- neither values nor gradients may hold NaN or infinity;
- NaN and infinity in features or parameters must end in our error, or have no effect.
"""

from __future__ import annotations

import os

# Some virtual machines announce AMX and then die of it (SIGILL) in a bfloat16 product. oneDNN reads this once, early.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import collections
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropmax import exact
from dropmax.errors import DropMaxError
from dropmax.heads import ABLATIONS, HEADS, Head
from dropmax.workbench.progress import progress
from hardening import not_finite
from hardening import numerics_reference as reference
from hardening.campaign import Outcome
from hardening.numerics_inputs import DROPMAX_LOSSES, SAMPLES, Batch, Subject, draw, head_with, subjects

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Rows a subject (a head with options, a mode or the loss, and a dtype) is tried on.
INPUTS, SHORT_INPUTS = 10_000, 24
ROWS = 250  # in a batch, but fewer of many classes: a hundred logits 1e4 apart need thousands of quadrature nodes
#: The numbers of classes of the batches, in turn. Sums over all masks are compared up to MOST_MASKED.
CLASSES = (2, 3, 5, 7, 10, 100)
MOST_MASKED = 7
MANY_CLASSES = 100_000

#: What the documentation promises, by the dtype of the arithmetic: half precision is computed in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
#: Of an expected nll in float64, where a class may be 2^20 below the best one: a number of that size is rounded.
TOLERANCE_OF_NLL = 16 * 2.0**20 * torch.finfo(torch.float64).eps

#: What dropmax.exact says of itself: a log p below this says no more than that.
HOPELESS = 1e5


# --- finite input ------------------------------------------------------------------------------------------------


class Errors:
    """Errors of one subject in one dtype."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = collections.defaultdict(list)
        self.inputs = 0

    def add(self, which: str, errors: Tensor) -> None:
        self.parts[which].append(errors.flatten())

    def row(self) -> dict[str, float]:
        """Return a row of the table."""
        found: dict[str, float] = {"inputs": self.inputs}
        for which, parts in self.parts.items():
            errors = torch.cat(parts)
            if errors.numel():
                found[f"{which} max"] = float(f"{errors.max():.2g}")
                found[f"{which} 99.9 %"] = float(f"{errors.quantile(0.999):.2g}")
        return found


def try_batch(subject: Subject, batch: Batch, dtype: torch.dtype, errors: Errors, outcome: Outcome, seed: int) -> None:
    """Compare one batch with the reference, and look for NaN and infinity in what comes out."""
    wide = batch.noise.dtype
    head, features = head_with(subject, batch, dtype)
    logits = {name: x.double().numpy() for name, x in batch.logits.items()}
    rows, classes = logits["classifier"].shape
    where = f"{subject} {str(dtype).removeprefix('torch.')} K={classes} seed={seed}"
    errors.inputs += rows
    try:
        if subject.what == "loss":
            found = _loss(head, features, batch, where, outcome)
            expected = _expected_loss(subject, head, logits, batch, wide)
        else:
            found = {"probability": _prediction(head, features, subject.what, seed, where, outcome)}
            expected = _expected_prediction(subject, logits, seed, wide)
    except DropMaxError as refusal:
        outcome.count("finite input refused", rows)
        outcome.fail(f"{where}: finite input was refused: {refusal}")
        return
    if not expected:
        outcome.count("finite, too many masks to add up here", rows)
        return
    tolerance = TOLERANCE[wide]
    if subject.options.get("likelihood") == "exact":
        tolerance = max(tolerance, TOLERANCE_OF_NLL)
    fair = _fair_rows(subject, batch, wide)
    wrong, unknown = torch.zeros(2, rows, dtype=torch.bool).unbind()
    for name, truth in expected.items():
        truth_, value = torch.from_numpy(np.ascontiguousarray(truth)), found[name].detach().double()
        if subject.options.get("likelihood") == "marginal" and name == "cross_entropy":
            truth_, value = truth_.clamp_max(HOPELESS), value.clamp_max(HOPELESS)
        error = (value - truth_).abs() if name == "probability" else (value - truth_).abs() / truth_.abs().clamp_min(1)
        error = error.amax(-1) if error.dim() == 2 else error
        unknown |= error.isnan()  # NaN: the reference does not judge
        error = error.nan_to_num(nan=0.0)[fair]
        errors.add("ordinary", error[batch.ordinary[fair]])
        errors.add("extreme", error[~batch.ordinary[fair]])
        wrong[fair] |= error > tolerance
        if bool((error > tolerance).any()):
            row = int(fair[error.argmax()])
            outcome.fail(f"{where}: {name} of row {row} is {_show(value, row)}, should be {_show(truth_, row)}")
    outcome.count("further off than promised", int(wrong.sum()))
    compared = int((~unknown[fair]).sum())
    outcome.count("close to the reference", compared - int(wrong.sum()))
    outcome.count("finite, too ill-conditioned to compare", rows - compared)


def _show(x: Tensor, row: int) -> str:
    return f"{x[row].item():.7g}" if x.dim() == 1 else str([float(f"{v:.6g}") for v in x[row].tolist()[:8]])


def _loss(head: Head, features: Tensor, batch: Batch, where: str, outcome: Outcome) -> dict[str, Tensor]:
    features = features.requires_grad_()
    noise = None if head.noise_shape(1) is None else _noise(head, batch)
    loss = head.loss(features, batch.target, reduction="none", noise=noise)
    _refuse(where, {"total": loss.total, **loss.terms}, outcome)
    torch.autograd.backward(loss.total.sum())
    gradients = {name: p.grad for name, p in head.named_parameters()}
    # A sum over classes of gradient times weight need not fit where the weights hardly do: a row looks at its own only.
    largest = torch.stack([x.double().abs().amax(-1) for x in batch.logits.values()]).amax(0)
    fits = largest < torch.finfo(features.dtype).max ** 0.4
    gradients["features"] = None if features.grad is None else features.grad.diagonal()[fits]
    _refuse(where, {f"gradient of {k}": g for k, g in gradients.items() if g is not None}, outcome)
    return loss.terms


def _prediction(head: Head, features: Tensor, mode: str, seed: int, where: str, outcome: Outcome) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        found: dict[str, Tensor] = {
            "logits": head(features),
            "retain_probs": head.retain_probs(features),
            "probabilities": head.predict_proba(features, mode, samples=MC_SAMPLES, generator=generator),
        }
        if mode == "exact":
            found["predictive_std"] = head.predictive_std(features)
    if mode != "mc":  # which has the logits' gradients of every sample: no other code
        torch.autograd.backward(head.predict_proba(features, mode).square().sum())
        found |= {f"gradient of {k}": p.grad for k, p in head.named_parameters() if p.grad is not None}
    _refuse(where, found, outcome)
    p = found["probabilities"]
    total = (p.double().sum(-1) - 1).abs().max()
    if not total < 1e-5 or p.min() < 0:
        outcome.fail(f"{where}: probabilities are {float(p.min()):.3g} or more and add up to 1 ± {float(total):.3g}")
    return p


MC_SAMPLES = 5


def _refuse(where: str, tensors: dict[str, Tensor], outcome: Outcome) -> None:
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            bad = int((~x.isfinite()).sum())
            outcome.count("NaN or infinity from finite input", 1)
            outcome.fail(f"{where}: {name} holds {bad} numbers that are not finite")


def _expected_loss(
    subject: Subject, head: Head, logits: reference.Logits, batch: Batch, wide: torch.dtype
) -> dict[str, Any]:
    if getattr(head, "likelihood", "sampled") != "sampled" and head.num_classes > MOST_MASKED:
        return {}
    dtype = np.dtype(np.float64 if wide == torch.float64 else np.float32)
    with np.errstate(over="ignore", under="ignore"):
        noise = _noise(head, batch).double().numpy()
        return reference.terms_of(head.config(), logits, batch.target.numpy(), noise, dtype)


def _noise(head: Head, batch: Batch) -> Tensor:
    return batch.noise if getattr(head, "samples", 1) == SAMPLES else batch.noise[0]


def _expected_prediction(subject: Subject, logits: reference.Logits, seed: int, wide: torch.dtype) -> dict[str, Any]:
    o, a = logits["classifier"], logits["retain"]
    masked = subject.head in ("dropmax", "dropmax-qp", "dropmax-softmax-retain")
    if subject.head == "sparsemax":
        return {"probability": reference.sparsemax(o)}
    if not masked and not subject.head.startswith("deterministic"):
        return {"probability": np.exp(reference.log_softmax(o))}
    if subject.head == "dropmax-softmax-retain":
        log_p = np.minimum(reference.log_softmax(o), -torch.finfo(wide).eps)
        a = log_p - np.log(-np.expm1(log_p))
    if subject.what == "mean" or not masked:
        p = np.exp(reference.log_softmax((o - o.max(-1, keepdims=True)) + reference.log_sigmoid(a)))
    elif subject.what == "exact":
        if o.shape[-1] > MOST_MASKED:
            return {}
        p = reference.predictive(o, a)
    else:
        generator = torch.Generator().manual_seed(seed)
        u = torch.rand(MC_SAMPLES, *o.shape, dtype=wide, generator=generator).double().numpy()
        rho = reference.sigmoid(a)
        kept = u < rho
        kept |= ~kept.any(-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            p = np.exp([reference.log_softmax(np.where(k, o, -np.inf)) for k in kept]).mean(0)
        p[(np.abs(u - rho) < 1e-6).any((0, 2))] = np.nan  # rounding decides whether a class is kept: not judged
    return {"probability": p}


def _fair_rows(subject: Subject, batch: Batch, wide: torch.dtype) -> Tensor:
    """Return the rows whose answer does not depend on how one last digit was rounded."""
    if subject.head == "dropmax-softmax-retain":  # 1 - rho of rho = softmax(o) close to 1
        certain = batch.logits["classifier"].double().softmax(-1).amax(-1) > 0.8
        return (batch.ordinary & ~certain).nonzero()[:, 0]
    adds_log_rho = subject.what == "mean" and subject.head in ("dropmax", "dropmax-qp")
    if not adds_log_rho and not subject.head.startswith("deterministic"):
        return torch.arange(len(batch.target))
    # o + log rho where all log rho are so large that their last digit decides about small o.
    log_rho = torch.nn.functional.logsigmoid(batch.logits["retain"].double())
    return (log_rho.amin(-1).abs() * torch.finfo(wide).eps < TOLERANCE[wide]).nonzero()[:, 0]


def _sizes(inputs: int, seed: int) -> list[tuple[int, int, int]]:
    """Return seed, rows and classes of each batch, ``inputs`` rows together."""
    found: list[tuple[int, int, int]] = []
    left = inputs
    while left > 0:
        classes = CLASSES[len(found) % len(CLASSES)]
        most = max(1, min(ROWS, 10 * ROWS // classes, math.ceil(inputs / len(CLASSES))))
        found.append((seed + 1000 * len(found), min(most, left), classes))
        left -= most
    return found


def try_finite(
    inputs: int, seed: int, outcome: Outcome, everything: Sequence[Subject], dtypes: dict[str, torch.dtype] = DTYPES
) -> dict[str, Any]:
    """Try every subject in every dtype; return the table of errors."""
    table = {(subject, name): Errors() for name in dtypes for subject in map(str, everything)}
    with progress("numerics", inputs * len(table), "inputs") as advance:
        for (name, dtype), (batch_seed, rows, classes) in itertools.product(dtypes.items(), _sizes(inputs, seed)):
            batch = draw(batch_seed, rows, classes, dtype)
            for subject in everything:
                try_batch(subject, batch, dtype, table[str(subject), name], outcome, batch_seed)
                advance(rows)
    return {f"{subject}, {name}": errors.row() for (subject, name), errors in table.items()}


def try_many_classes(seed: int, outcome: Outcome, everything: Sequence[Subject]) -> None:
    """A few rows of 100,000 classes: finite, adding up to one, and right where a closed form is known."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):  # products in float16 are slow, and no other code
        batch = draw(seed, 4, MANY_CLASSES, dtype)
        for subject in everything:
            if "chunk_classes" in subject.options:
                subject = subject._replace(options=subject.options | {"chunk_classes": 4096})
            exactly = subject.what == "exact" or subject.options.get("likelihood") is not None
            # Logits 1e4 apart and 100,000 of them would need as many quadrature nodes: the ordinary row.
            try_batch(subject, batch.first(1) if exactly else batch, dtype, Errors(), outcome, seed)
    for (name, dtype), lead, a in itertools.product(DTYPES.items(), (0.0, 3.0, 12.0), (-8.0, 0.0, 5.0)):
        o = torch.zeros(1, MANY_CLASSES, dtype=dtype)
        o[0, 7] = lead
        retain, target = torch.full_like(o, a), torch.tensor([7])
        truth = reference.two_levels(MANY_CLASSES - 1, lead, a)
        found = {
            "predictive": float(exact.predictive(o, retain)[0, 7]),
            "expected_nll": float(exact.expected_nll(o, retain, target)),
            "log_marginal": float(exact.log_marginal(o, retain, target)),
        }
        truth["log_marginal"] = math.log(truth["predictive"])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for what, value in found.items():
            error = abs(value - truth[what]) / (1 if what == "predictive" else max(1.0, abs(truth[what])))
            close = error < max(TOLERANCE[wide], 1e-9)  # gammaln of 1e5 has no more digits
            outcome.count("close to the reference" if close else "further off than promised")
            if not close:
                outcome.fail(
                    f"exact.{what} {name} K={MANY_CLASSES} lead {lead} a {a}: {value}, should be {truth[what]}"
                )


def judge_the_reference(seed: int, rows: int, outcome: Outcome) -> None:
    """Compare the reference itself with 60 digits of mpmath, so that both cannot share a mistake."""
    for row in range(rows):
        batch = draw(seed + row, 1, 4, torch.float64)
        if any(bool((x.abs() > 1e4).any()) for x in batch.logits.values()):
            continue
        o, a, r = (batch.logits[name].numpy() for name in ("classifier", "retain", "correction"))
        target = batch.target.numpy()
        truth = reference.referee(o[0].tolist(), a[0].tolist(), r[0].tolist(), int(target[0]))
        found = {
            "predictive": reference.predictive(o, a)[0, target[0]],
            "expected_nll": reference.expected_nll(o, a + r, target)[0],
            "kl": reference.kl(a, a + r, target)[0],
            "entropy": reference.entropy(a)[0],
            "auxiliary": reference.auxiliary(r, target)[0],
        }
        for name, value in found.items():
            right = abs(value - truth[name]) <= 1e-11 * max(1.0, abs(truth[name]))
            outcome.count("reference confirmed by mpmath" if right else "reference refuted by mpmath")
            if not right:
                outcome.fail(f"the reference itself: {name} of row {seed + row} is {value}, mpmath says {truth[name]}")


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Run the campaign; nothing is written to ``scratch``."""
    outcome = Outcome()
    everything = subjects()
    heads: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*HEADS, *ABLATIONS)]
    heads += [("dropmax", {k: v for k, v in options.items() if k != "class_weight"}) for options in DROPMAX_LOSSES]
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)  # of masks that no noise was given for
    try:
        judge_the_reference(seed, 20 if short else 500, outcome)
        not_finite.try_rows_of_functions(outcome)
        for dtype in DTYPES.values():
            not_finite.try_overflow(outcome, heads, dtype)
            not_finite.try_heads(outcome, heads[::4] if short else heads, dtype)
            not_finite.try_exact(outcome, dtype)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16} if short else DTYPES
        table = try_finite(SHORT_INPUTS if short else INPUTS, seed, outcome, everything, dtypes)
        if not short:
            try_many_classes(seed, outcome, everything)
    finally:
        torch.set_rng_state(generator_state)
    outcome.details["errors"] = table
    outcome.details["units"] = "absolute for probabilities; for losses relative to the larger of 1 and the term"
    outcome.details["tolerance"] = {str(dtype): tolerance for dtype, tolerance in TOLERANCE.items()}
    return outcome
