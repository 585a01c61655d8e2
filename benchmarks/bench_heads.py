"""One forward and backward pass of each head's loss, as a multiple of ``nn.Linear`` and ``cross_entropy``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import harness
from benchmarks.bench_scale import SOFTMAX, _row, below, step_of
from dropmax import HEADS, make_head

BATCH, FEATURES = 128, 512
CLASSES = (10, 100, 1_000, 10_000)
QUICK_CLASSES = (10, 100)
#: What DropMax aims at: a ratio where the matrix products rule, and milliseconds beyond softmax where overheads do.
AIM = {1_000: 3.6, 10_000: 3.6}
EXTRA_AIM = {10: 2.0}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every head at every size, eager and compiled; ``quick`` means tiny sizes, and eager only."""
    if quick:
        return [row for k in QUICK_CLASSES for row in _rows(16, 32, k, compiled=False, budget=0.1, sample=1e-3)]
    rows = [row for k in CLASSES for row in _rows(BATCH, FEATURES, k, compiled=False)]
    if any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        rows += [row for k in CLASSES for row in _rows(BATCH, FEATURES, k, compiled=True)]
    else:
        Console(stderr=True).print("No C++ compiler found (set CXX): compiled heads are left out.")
    return rows + [in_milliseconds(row) for row in rows if row["head"] == "dropmax" and row["classes"] in EXTRA_AIM]


def in_milliseconds(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for the time beyond softmax's in place of the ratio."""
    low, middle, high = (1e3 * row[name] for name in ("extra_low", "extra", "extra_high"))
    aim = EXTRA_AIM[row["classes"]]
    what = f"{row['what']}: milliseconds beyond softmax"
    return {
        "what": what,
        "aim": aim,
        "met": below(aim, low, high),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def _rows(batch: int, in_features: int, num_classes: int, compiled: bool, **timing: float) -> list[dict[str, Any]]:
    features = torch.randn(batch, in_features, requires_grad=True)
    target = torch.randint(num_classes, (batch,))
    mode = "compiled" if compiled else "eager"
    rows = []
    for name in HEADS:
        head = make_head(name, in_features, num_classes)
        # One head at a time: compiled code is kept for each line of Python, and eight heads share that of Head.loss.
        torch.compiler.reset()
        softmax = step_of(SOFTMAX, features, target, num_classes, compiled)[1]
        steps = {SOFTMAX: softmax, name: _step(head, features, target, compiled)}
        found = harness.measure(steps, baseline=SOFTMAX, **timing)[name]  # type: ignore[arg-type]
        aim = AIM.get(num_classes) if name == "dropmax" else None
        products = len(head.maps)  # each costs as much as the baseline's
        what = f"{name}, {products} maps: step, {mode}, batch {batch}, {in_features} features, K = {num_classes:,}"
        about = {"mode": mode, "head": name, "classes": num_classes, "products": products}
        rows.append({**about, **_row(what, found, aim)})
    return rows


def _step(head: Any, features: Tensor, target: Tensor, compiled: bool) -> Callable[[], None]:
    """Return one training step without the optimiser: gradients go to the weights and on to the features."""

    def loss() -> Tensor:
        found: Tensor = head.loss(features, target).total
        return found

    if compiled:
        loss = torch.compile(loss, fullgraph=True)

    def step() -> None:
        head.zero_grad()
        features.grad = None
        loss().backward()  # type: ignore[no-untyped-call]

    return step
