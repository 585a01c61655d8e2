"""Exact inference against sampling: the predictive distribution, and a training step with either likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import harness
from benchmarks.rows import table
from dropmax import exact, make_head

BATCH, FEATURES, SAMPLES = 128, 512, 1000
CLASSES = (10, 100, 1_000, 10_000)
QUICK_CLASSES = (10, 100)

#: How many samples are timed, and the time scaled up to SAMPLES: the cost of sampling is proportional to their number.
TIMED_SAMPLES = {10: 1000, 100: 200, 1_000: 20, 10_000: 2}

SPEED_AIM, ERROR_AIM = 20, 1000  # sampling takes this many times longer, and is this many times less accurate
STEP_AIM = {100: 2.0, 1_000: 3.0}  # a training step takes at most this many times the sampled one


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure prediction and training for every number of classes, with two threads where there are two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    timing: dict[str, Any] = {"budget": 0.1, "sample": 1e-3} if quick else {"budget": 6.0}
    try:
        sizes = QUICK_CLASSES if quick else CLASSES
        return [_prediction(k, timing) for k in sizes] + [_training(k, timing) for k in sizes]
    finally:
        torch.set_num_threads(threads)


def sampled_predictive(logits: Tensor, retain_logits: Tensor, samples: int) -> Tensor:
    """Average the softmax over random hard masks, a quarter of a million numbers at a time."""
    retain = torch.sigmoid(retain_logits)
    total = torch.zeros_like(logits)
    chunk = max(1, (1 << 18) // logits.numel())
    for first in range(0, samples, chunk):
        masks = torch.rand(min(chunk, samples - first), *logits.shape) < retain
        masks |= ~masks.any(-1, keepdim=True)  # softmax over all classes where none was kept
        total += torch.softmax(logits.masked_fill(~masks, -torch.inf), -1).sum(0)
    return total / samples


def _prediction(classes: int, timing: dict[str, Any]) -> dict[str, Any]:
    logits, retain_logits = 3 * torch.randn(BATCH, classes), 2 * torch.randn(BATCH, classes)
    truth = exact.predictive(logits.double(), retain_logits.double())
    timed = TIMED_SAMPLES[classes]
    timings = harness.measure(
        {
            "exact": lambda: exact.predictive(logits, retain_logits),
            "sampled": lambda: sampled_predictive(logits, retain_logits, timed),
        },
        baseline="exact",
        **timing,
    )
    scale = SAMPLES / timed
    exact_error = float((exact.predictive(logits, retain_logits) - truth).abs().max())
    sampled_error = float((sampled_predictive(logits, retain_logits, SAMPLES) - truth).abs().max())
    return {
        "what": "prediction",
        "classes": classes,
        "exact": timings["exact"].median,
        "sampled": scale * timings["sampled"].median,
        "ratio": scale * timings["sampled"].ratio,
        "ratio_low": scale * timings["sampled"].ratio_low,
        "ratio_high": scale * timings["sampled"].ratio_high,
        "exact_error": exact_error,
        "sampled_error": sampled_error,
        "error_ratio": sampled_error / exact_error,
        "aim": f"> {SPEED_AIM}, errors > {ERROR_AIM}",
        "met": scale * timings["sampled"].ratio_low > SPEED_AIM and sampled_error > ERROR_AIM * exact_error,
    }


def _training(classes: int, timing: dict[str, Any]) -> dict[str, Any]:
    """Time the whole objective of the head, forward and backward: only its likelihood differs."""
    features, target = torch.randn(BATCH, FEATURES), torch.randint(classes, (BATCH,))

    def step(likelihood: str) -> Callable[[], None]:
        head = make_head("dropmax", FEATURES, classes, likelihood=likelihood)

        def one_step() -> None:
            head.zero_grad()
            head.loss(features, target).total.backward()  # type: ignore[no-untyped-call]

        return one_step

    timings = harness.measure({"sampled": step("sampled"), "exact": step("exact")}, baseline="sampled", **timing)
    aim, measured = STEP_AIM.get(classes), timings["exact"]
    return {
        "what": "training step",
        "classes": classes,
        "exact": measured.median,
        "sampled": timings["sampled"].median,
        "ratio": measured.ratio,
        "ratio_low": measured.ratio_low,
        "ratio_high": measured.ratio_high,
        "aim": None if aim is None else f"< {aim:g}",
        "met": None if aim is None else measured.ratio_high < aim,
    }


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return one table for prediction and one for training."""
    prediction = table(
        f"Predictive distribution, batch {BATCH}: exact against {SAMPLES} hard masks.\n"
        f"Aim: {SPEED_AIM} times faster, {ERROR_AIM} times smaller largest error",
        ("classes", "exact ms", "sampled ms", "ratio", "95 %", "error", "sampled", "aim"),
        left=["aim"],
    )
    training = table(
        f"Training step, batch {BATCH}, {FEATURES} features: DropMax with the exact likelihood against the sampled.\n"
        f"Aim: at most {STEP_AIM[100]:g} times as long with 100 classes, {STEP_AIM[1000]:g} times with 1,000",
        ("classes", "exact ms", "sampled ms", "ratio", "95 %", "aim"),
        left=["aim"],
    )
    for row in rows:
        is_prediction = row["what"] == "prediction"
        digits = 0 if is_prediction else 2
        cells = [
            f"{row['classes']:,}",
            f"{1e3 * row['exact']:.2f}",
            f"{1e3 * row['sampled']:.2f}",
            f"{row['ratio']:.{digits}f}",
            f"{row['ratio_low']:.{digits}f}-{row['ratio_high']:.{digits}f}",
        ]
        errors = [f"{row[name]:.0e}" for name in ("exact_error", "sampled_error")] if is_prediction else []
        verdict = {True: "met", False: "not met", None: ""}[row["met"]]
        (prediction if is_prediction else training).add_row(*cells, *errors, verdict)
    return [prediction, training]
