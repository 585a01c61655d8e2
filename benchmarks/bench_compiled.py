"""The step of a head, DropMax and softmax both compiled: rows of the table of docs/scale.md."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.bench_scale import step_rows, tables

__all__ = ["run", "tables"]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure 1,000 and 10,000 classes with as many threads as torch has."""
    rows: list[dict[str, Any]] = []
    for num_classes in (300,) if quick else (1_000, 10_000):
        torch.compiler.reset()
        rows += step_rows(num_classes, quick, compiled=not quick)
    return [{"threads": torch.get_num_threads(), **row} for row in rows]
