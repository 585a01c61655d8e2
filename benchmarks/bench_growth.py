"""A step as the number of classes grows to a million, and its memory: rows of the table of docs/scale.md."""

from __future__ import annotations

from typing import Any

from benchmarks.bench_scale import GROWTH, QUICK_GROWTH, growth_rows, growth_steps, memory_rows, tables
from benchmarks.bench_scale import plot_growth as plot

__all__ = ["plot", "run", "tables"]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every size, and memory where the logits no longer fit."""
    growth = growth_steps(QUICK_GROWTH if quick else GROWTH, quick)
    return [*growth, *growth_rows(growth), *memory_rows(*((20_000, 64, 64) if quick else (100_000, 256, 512)))]
