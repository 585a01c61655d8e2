"""Exact inference against sampling: the predictive distribution, and a training step with either likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.bench_scale import _row
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
        return [row for k in sizes for row in _prediction(k, timing)] + [_training(k, timing) for k in sizes]
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


def _prediction(classes: int, timing: dict[str, Any]) -> list[dict[str, Any]]:
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
    low, middle, high = (scale * getattr(timings["sampled"], name) for name in ("ratio_low", "ratio", "ratio_high"))
    exact_error = float((exact.predictive(logits, retain_logits) - truth).abs().max())
    sampled_error = float((sampled_predictive(logits, retain_logits, SAMPLES) - truth).abs().max())
    where = f"{SAMPLES:,} sampled masks / exact sum, batch {BATCH}, K = {classes:,}"
    speed = {"what": f"prediction: time of {where}", "aim": SPEED_AIM, "at_least": True, "met": low > SPEED_AIM}
    speed |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
    speed |= {"exact": timings["exact"].median, "sampled": scale * timings["sampled"].median}
    ratio = sampled_error / exact_error
    error = {"what": f"prediction: largest error of {where}", "aim": ERROR_AIM, "at_least": True}
    error |= {"met": ratio > ERROR_AIM, "ratio": ratio, "exact": exact_error, "sampled": sampled_error}
    return [speed, error]


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
    what = f"step: exact / sampled likelihood, batch {BATCH}, {FEATURES} features, K = {classes:,}"
    return _row(what, timings["exact"], STEP_AIM.get(classes))
