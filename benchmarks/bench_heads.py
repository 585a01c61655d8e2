"""One forward and backward pass of each head's loss, as a multiple of ``nn.Linear`` and ``cross_entropy``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import harness
from benchmarks.bench_scale import SOFTMAX, below, step_of
from benchmarks.rows import table
from dropmax import HEADS, make_head

#: (batch, features, classes)
SIZES = ((128, 512, 10), (128, 512, 100), (128, 512, 1_000), (128, 512, 10_000))
QUICK_SIZES = ((16, 32, 10), (16, 32, 100))

#: What DropMax aims at: a ratio where the matrix products rule, and seconds more than softmax where overheads do.
RATIO_AIM = {(128, 512, 1_000): 3.6, (128, 512, 10_000): 3.6}
EXTRA_AIM = {(128, 512, 10): 2e-3}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every head at every size, eager and compiled; ``quick`` means tiny sizes, and eager only."""
    if quick:
        return [row for size in QUICK_SIZES for row in _rows(size, compiled=False, budget=0.1, sample=1e-3)]
    rows = [row for size in SIZES for row in _rows(size, compiled=False)]
    if _has_compiler():
        rows += [row for size in SIZES for row in _rows(size, compiled=True)]
    else:
        Console(stderr=True).print("No C++ compiler found (set CXX): compiled heads are left out.")
    return rows


def _rows(
    size: tuple[int, int, int], compiled: bool, budget: float = 3.0, sample: float = 0.02
) -> list[dict[str, Any]]:
    batch, in_features, num_classes = size
    features = torch.randn(batch, in_features, requires_grad=True)
    target = torch.randint(num_classes, (batch,))
    rows = []
    for name in HEADS:
        head = make_head(name, in_features, num_classes)
        # One head at a time: compiled code is kept for each line of Python, and eight heads share that of Head.loss.
        torch.compiler.reset()
        timing = harness.measure(
            {
                SOFTMAX: step_of(SOFTMAX, features, target, num_classes, compiled)[1],
                name: _step(head, features, target, compiled),
            },
            baseline=SOFTMAX,
            budget=budget,
            sample=sample,
        )[name]
        rows.append(
            {
                "mode": "compiled" if compiled else "eager",
                "batch": batch,
                "features": in_features,
                "classes": num_classes,
                "head": name,
                "products": len(head.maps),
                **asdict(timing),
                **(_aim(size, timing) if name == "dropmax" else {"aim": None, "met": None}),
            }
        )
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


def _aim(size: tuple[int, int, int], timing: harness.Timing) -> dict[str, Any]:
    if size in RATIO_AIM:
        aim = RATIO_AIM[size]
        return {"aim": f"< {aim}", "met": below(aim, timing.ratio_low, timing.ratio_high)}
    if size in EXTRA_AIM:
        aim = EXTRA_AIM[size]
        return {"aim": f"< +{1e3 * aim:g} ms", "met": below(aim, timing.extra_low, timing.extra_high)}
    return {"aim": None, "met": None}


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return one table for each mode and size."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["mode"], row["batch"], row["features"], row["classes"]), []).append(row)
    return [_table(group) for group in groups.values()]


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    title = "{mode}, batch {batch}, features {features}, classes {classes:,}".format(**rows[0])
    made = table(title, ("head", "ms", "+ms", "ratio", "95 %", "floor", "aim"), left=("head", "aim"))
    for row in rows:
        verdict = {True: "met", False: "not met", None: "unclear"}[row["met"]]
        made.add_row(
            row["head"],
            f"{1e3 * row['median']:.2f}",
            f"{1e3 * row['extra']:+.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
            f"{row['products']}.0",
            "" if row["aim"] is None else f"{row['aim']} {verdict}",
        )
    return made
