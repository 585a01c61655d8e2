"""The harness on functions that take as long as we say, by a clock we hold; and the command line around it."""

from __future__ import annotations

import io
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command_line
from benchmarks import bench_heads, bench_scale, harness
from dropmax import HEADS
from dropmax.errors import InvalidValue


class FakeMachine:
    """A clock, and functions that move it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def function(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds()

        return call


def test_slow_spells_of_the_machine_do_not_reach_the_ratio() -> None:
    machine = FakeMachine()
    generator = np.random.default_rng(0)
    spell = {"factor": 1.0}

    def baseline() -> float:  # the first of a round decides how slow the machine is in this round
        spell["factor"] = float(generator.choice([1.0, 1.5, 20.0]))
        return 0.1 * spell["factor"]

    timings = harness.measure(
        {
            "softmax": machine.function("softmax", baseline),
            "dropmax": machine.function("dropmax", lambda: 0.35 * spell["factor"]),
        },
        baseline="softmax",
        clock=machine.clock,
    )
    assert timings["softmax"].ratio == 1.0
    dropmax = timings["dropmax"]
    assert [dropmax.ratio, dropmax.ratio_low, dropmax.ratio_high] == pytest.approx([3.5] * 3)
    assert dropmax.low < dropmax.high  # the times themselves did suffer


def test_functions_take_turns_after_warming_up_which_is_not_counted() -> None:
    machine = FakeMachine()
    compiling = iter([60.0, 1.0])
    functions = {"a": machine.function("a", lambda: 1.0), "b": machine.function("b", lambda: next(compiling, 2.0))}
    timings = harness.measure(
        functions, baseline="a", warm_up=2, least_rounds=7, budget=0.0, precision=1.0, clock=machine.clock
    )
    assert "".join(machine.calls) == "aabb" + 7 * "ab"
    assert (timings["b"].rounds, timings["b"].high) == (7, 2.0)


def test_short_calls_are_gathered_into_samples() -> None:
    machine = FakeMachine()
    functions = {"a": machine.function("a", lambda: 1e-4), "b": machine.function("b", lambda: 3e-3)}
    timings = harness.measure(functions, baseline="a", warm_up=1, least_rounds=6, sample=0.01, clock=machine.clock)
    assert machine.calls.count("a") == 1 + 6 * 100
    assert machine.calls.count("b") == 1 + 6 * 4
    assert timings["b"].median == pytest.approx(3e-3)
    assert timings["b"].ratio == pytest.approx(30)
    assert timings["b"].extra == pytest.approx(2.9e-3)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 11, 11), (0.2, 90, 120)])
def test_rounds_follow_the_noise_and_end_with_the_budget(noise: float, least: int, most: int) -> None:
    machine = FakeMachine()
    generator = np.random.default_rng(0)
    functions = {name: machine.function(name, lambda: 1.0 + noise * generator.random()) for name in "ab"}
    # A round takes two seconds and a bit: a budget of 220 is about a hundred of them.
    rounds = harness.measure(functions, baseline="a", budget=220.0, precision=1e-3, clock=machine.clock)["b"].rounds
    assert least <= rounds <= most


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        timing = harness._timing(list(generator.lognormal(size=25)), [1.0] * 25)  # whose true median ratio is 1
        covered += timing.ratio_low <= 1.0 <= timing.ratio_high
    assert 0.93 < covered / 2000 < 0.99


@pytest.mark.parametrize(
    ("options", "message"),
    [({"baseline": "c"}, "baseline 'c' is not among the functions a, b"), ({"least_rounds": 5}, "least_rounds >= 6")],
)
def test_impossible_measurements_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        harness.measure({"a": int, "b": int}, **{"baseline": "a", **options})


# --- results and the command line -----------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    output = io.StringIO()
    status = command_line.main(arguments, Console(file=output, width=100))
    return status, output.getvalue()


@pytest.fixture
def fake_benchmark(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stand in for every benchmark: one without a quick form and without a table of its own."""
    module = types.ModuleType("fake")
    module.run = lambda: [{"head": "dropmax", "seconds": 0.123456, "fast": True}]  # type: ignore[attr-defined]
    monkeypatch.setattr(command_line, "names", lambda: ["exact", "heads"])
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    return module


def test_results_say_where_they_came_from(fake_benchmark: types.ModuleType, tmp_path: Path) -> None:
    status, output = run("exact", "--out", str(tmp_path / "new"))
    assert status == 0
    assert "0.1235" in output
    result = json.loads((tmp_path / "new" / "exact.json").read_text())
    assert result["rows"] == fake_benchmark.run()
    origin = result["provenance"]
    assert origin["command"] == f"python -m benchmarks exact --out {tmp_path / 'new'}"
    assert origin["seeds"] == [0]
    assert {"python", "torch", "numpy", "dropmax"} <= set(origin["versions"])
    assert {"processor", "threads", "cores"} <= set(origin["machine"])
    assert {"commit", "date"} <= set(origin)
    assert len(origin["load_average"]) == 3


@pytest.mark.usefixtures("fake_benchmark")
def test_all_run_by_default_and_replace_their_own_results_but_no_quick_run_does(tmp_path: Path) -> None:
    for _ in range(2):
        assert run("--out", str(tmp_path))[0] == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["exact.json", "heads.json"]
    _, output = run("exact", "--quick", "--out", str(tmp_path))
    assert "no quick form" in output
    assert (tmp_path / "exact.quick.json").exists()


@pytest.mark.usefixtures("fake_benchmark")
@pytest.mark.parametrize("content", ["my notes", "[]", '{"benchmark": "heads"}'])
def test_a_foreign_file_is_left_alone(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "exact.json"
    mine.write_text(content)
    assert run("heads", "exact", "--out", str(tmp_path))[0] == 2
    assert "exact.json exists and is not a result of the benchmark 'exact'" in capsys.readouterr().err
    assert mine.read_text() == content
    assert not (tmp_path / "heads.json").exists()  # refused before anything was measured


@pytest.mark.usefixtures("fake_benchmark")
def test_a_place_that_cannot_be_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("exact", "--out", "/dev/null/here") == (2, "")
    assert capsys.readouterr().err.startswith("error: cannot write to /dev/null/here: /dev/null is not a directory")


def test_an_unknown_benchmark_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["haeds"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown benchmark 'haeds': did you mean 'heads'? The benchmarks are ")
    assert error.count("\n") == 1


def test_a_quick_run_of_the_heads(tmp_path: Path) -> None:
    status, output = run("heads", "--quick", "--out", str(tmp_path))
    assert status == 0
    rows = json.loads((tmp_path / "heads.quick.json").read_text())["rows"]
    assert [row["head"] for row in rows] == list(HEADS) * len(bench_heads.QUICK_CLASSES)
    assert {row["mode"] for row in rows} == {"eager"}
    products = {row["head"]: row["products"] for row in rows}
    assert (products["softmax"], products["dropmax-qp"], products["dropmax"]) == (1, 2, 3)
    assert all(0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows)
    assert "dropmax, 3 maps: step, eager, batch 16, 32 features, K = 100" in [row["what"] for row in rows]
    assert "dropmax, 3 maps" in output


@pytest.mark.parametrize(("extra", "met"), [(1e-3, True), (2e-3, None), (3e-3, False)])
def test_few_classes_are_held_to_milliseconds_beyond_softmax(extra: float, met: bool | None) -> None:
    timing = {"extra": extra, "extra_low": extra - 1e-4, "extra_high": extra + 1e-4}
    row = bench_heads.in_milliseconds({"what": "a step", "classes": 10, **timing})
    assert (row["aim"], row["met"]) == (2.0, met)
    assert row["ratio"] == pytest.approx(1e3 * extra)


@pytest.mark.parametrize("name", ["exact", "training"])
def test_a_quick_run_of_other_benchmarks_says_what_was_compared(name: str, tmp_path: Path) -> None:
    assert run(name, "--quick", "--out", str(tmp_path))[0] == 0
    rows = json.loads((tmp_path / f"{name}.quick.json").read_text())["rows"]
    assert all(row["what"] and row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize(("low", "high", "verdict"), [(3.1, 3.5, "met"), (3.5, 3.7, "unclear"), (3.61, 4.0, "missed")])
def test_the_aim_stands_beside_the_measurement(low: float, high: float, verdict: str) -> None:
    timing = harness.Timing(0.1, 0.1, 0.1, (low + high) / 2, low, high, 0.05, 0.05, 0.05, 9)
    output = io.StringIO()
    Console(file=output, width=80).print(command_line._table("heads", [bench_scale._row("a step", timing, 3.6)]))
    assert f"< 3.6 {verdict}" in " ".join(output.getvalue().split())


# --- many classes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bench_scale.SOFTMAX, bench_scale.RANK_64, "dropmax"])
def test_every_kind_of_step_leaves_gradients(kind: str) -> None:
    features = torch.randn(6, 80, requires_grad=True)
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
    memory = {"peak": peak, "beyond": peak / 10, "weights": 1}
    return {"growth": kind, "classes": classes, **timing, **memory, "error": None}


@pytest.mark.parametrize(("last", "met"), [(1.4, True), (1.6, False)])
def test_straight_lines_are_told_from_bent_ones(last: float, met: bool, tmp_path: Path) -> None:
    softmax, ours = bench_scale.SOFTMAX, bench_scale.RANK_64
    rows = [growth_row(ours, k, 1e-6 * k, 1e3 * k, 3.2) for k in (1_000, 10_000, 100_000)]
    rows.append(growth_row(ours, 1_000_000, last, 1e9, 2.3))
    rows += [growth_row(softmax, k, 2e-6 * k if k > 1_000 else 0.01, 1e3 * k, 1.0) for k in (1_000, 10_000)]
    table = bench_scale.growth_rows(rows)
    # a million classes; time per class; softmax for comparison, without a verdict
    assert [row["met"] for row in table] == [True, met, None]
    assert table[1]["ratio"] == pytest.approx(last)
    assert table[2]["ratio"] == pytest.approx(5)
    output = io.StringIO()
    for drawn in bench_scale.tables(rows + table):
        Console(file=output, width=120).print(drawn)
    assert ("missed" in output.getvalue()) is not met
    bench_scale.plot_growth(rows + table, tmp_path / "new" / "scale.png")
    assert (tmp_path / "new" / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_with_ten_classes_makes_few_calls_of_torch() -> None:
    assert 10 < bench_scale.calls_of(bench_scale.SOFTMAX) < bench_scale.calls_of("dropmax") <= 150


def test_a_rank_of_64_has_few_more_parameters_than_softmax() -> None:
    assert bench_scale._parameters_row()["ratio"] == pytest.approx(1.2662, abs=1e-4)
