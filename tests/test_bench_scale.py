"""The benchmark of many classes: its steps run, its children answer, its table says what was measured."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import bench_scale


@pytest.mark.parametrize("kind", ["linear + cross_entropy", "linear_cross_entropy", "adaptive softmax", "dropmax"])
def test_every_kind_of_step_leaves_gradients(kind: str) -> None:
    if kind == "linear_cross_entropy" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    features = torch.randn(6, 8, requires_grad=True)
    module, step = bench_scale.step_of(kind, features, torch.randint(200, (6,)), 200)
    step()
    assert features.grad is not None
    assert any(p.grad is not None and p.grad.any() for p in module.parameters())


def test_a_child_measures_its_own_memory() -> None:
    found = bench_scale._child("dropmax", 3000, 16, 32)
    assert found["weights"] == 3 * 3000 * 33 * 4
    assert found["peak"] > 50e6  # python and torch alone are more
    assert found["beyond"] < found["peak"]
    assert found["seconds"] > 0


def growth_row(kind: str, classes: int, seconds: float, peak: float, ratio: float = 1.0) -> dict[str, Any]:
    timing = {"median": seconds, "ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.1, "rounds": 9}
    return {
        "growth": kind,
        "classes": classes,
        **timing,
        "peak": peak,
        "beyond": peak / 10,
        "weights": 1,
        "error": None,
    }


@pytest.mark.parametrize(("last", "met"), [(1.1, True), (1.4, False)])
def test_straight_lines_are_told_from_bent_ones(last: float, met: bool, tmp_path: Path) -> None:
    rows = [growth_row("dropmax", k, 1e-6 * k, 1e3 * k, 3.2) for k in (1_000, 10_000, 100_000)]
    rows.append(growth_row("dropmax", 1_000_000, last, 1e9, 3.5))
    rows += [
        growth_row("linear + cross_entropy", k, 2e-6 * k if k > 1_000 else 0.01, 1e3 * k, 1.0) for k in (1_000, 10_000)
    ]
    table = bench_scale._growth_rows(rows)
    # a million classes; time and memory from 1,000 on and from 10,000 on; softmax for comparison, without a verdict
    assert [row["met"] for row in table] == [True, met, True, met, True, None, None]
    assert table[1]["ratio"] == pytest.approx(last)
    assert table[5]["ratio"] == pytest.approx(5)
    output = io.StringIO()
    for drawn in bench_scale.tables(rows + table):
        Console(file=output, width=120).print(drawn)
    assert ("missed" in output.getvalue()) is not met
    bench_scale.plot(rows + table, tmp_path / "new" / "scale.png")
    assert (tmp_path / "new" / "scale.png").read_bytes().startswith(b"\x89PNG")
