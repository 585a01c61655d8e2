"""Timing on a machine that is busy with other things, and result files that say where they came from.

A slow spell on a shared machine lasts for seconds, so functions timed one after another see different machines. Here
they take turns, A B A B ..., and a ratio is taken within each round: a slow spell slows both of its halves.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dropmax.errors import InvalidValue, RunError
from dropmax.workbench.files import make_directory, write_atomically
from dropmax.workbench.provenance import provenance


@dataclass(frozen=True)
class Timing:
    """How long one function took, in seconds per call, and how that compares with the baseline.

    ``low`` and ``high`` are the quartiles of the time. ``ratio`` and ``extra`` are medians over the rounds of
    time / baseline and time - baseline; their intervals cover the true median with 95 % confidence.
    """

    median: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    extra: float
    extra_low: float
    extra_high: float
    rounds: int


def measure(
    functions: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    budget: float = 3.0,
    sample: float = 0.02,
    precision: float = 0.02,
    warm_up: int = 3,
    least_rounds: int = 11,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the functions in turns, until every ratio is known well enough or the budget is spent.

    Args:
        functions: what to time, by name.
        baseline: the name of the one the others are compared with.
        budget: seconds for the rounds; warming up comes on top, and ``least_rounds`` are run whatever they take.
        sample: seconds a sample should last, made of several calls if need be: long enough that the clock costs nothing
            and that a sample sees more than one turn of the scheduler.
        precision: stop when the interval of every ratio is narrower than this share of it.
        warm_up: calls of each function before anything counts; the last tells how many calls fill a sample.
        least_rounds: at least 6, or there is no 95 % interval of a median.
        clock: seconds, ever growing.
    """
    if baseline not in functions:
        raise InvalidValue(f"the baseline {baseline!r} is not among the functions {', '.join(functions)}")
    if least_rounds < 6 or warm_up < 1:
        raise InvalidValue(f"expected least_rounds >= 6 and warm_up >= 1, got {least_rounds} and {warm_up}")
    calls = {}
    for name, function in functions.items():
        for _ in range(warm_up):
            seconds = _time(function, 1, clock)
        calls[name] = max(1, math.ceil(sample / max(seconds, 1e-9)))

    samples: dict[str, list[float]] = {name: [] for name in functions}
    collecting = gc.isenabled()
    gc.disable()  # a collection would land in whichever function happens to be running
    try:
        start = clock()
        while True:
            for name, function in functions.items():
                samples[name].append(_time(function, calls[name], clock))
            if len(samples[baseline]) < least_rounds:
                continue
            timings = {name: _timing(times, samples[baseline]) for name, times in samples.items()}
            known = all(t.ratio_high - t.ratio_low <= precision * t.ratio for t in timings.values())
            if known or clock() - start >= budget:
                return timings
    finally:
        if collecting:
            gc.enable()


def _time(function: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


def _timing(times: Sequence[float], baseline: Sequence[float]) -> Timing:
    own, base = np.array(times), np.array(baseline)
    low, median, high = (float(quantile) for quantile in np.quantile(own, [0.25, 0.5, 0.75]))
    return Timing(median, low, high, *_median_and_interval(own / base), *_median_and_interval(own - base), len(own))


def _median_and_interval(values: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    # How many of n rounds fall below the true median is Binomial(n, 1/2), whatever the noise looks like: so the
    # median lies between these two of the sorted values 95 times in 100.
    n = len(values)
    rank = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    ordered = np.sort(values)
    return float(np.median(values)), float(ordered[rank]), float(ordered[n - 1 - rank])


# --- results ---------------------------------------------------------------------------------------------------------


def result_path(out: Path, name: str, quick: bool) -> Path:
    """Return where the result of a benchmark goes; a quick run never replaces a real one."""
    return out / f"{name}{'.quick' if quick else ''}.json"


def check_replaceable(path: Path, name: str) -> None:
    """Refuse to replace a file that is not an earlier result of the same benchmark."""
    if not path.exists():
        return
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError):
        earlier = None
    if not isinstance(earlier, dict) or earlier.get("benchmark") != name:
        raise RunError(
            f"{path} exists and is not a result of the benchmark {name!r}: move it away, or choose another --out"
        )


def origin(command: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the provenance of a result, with the load of the machine: take it before the benchmark adds its own."""
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {**provenance(command, list(seeds)), "load_average": load}


def write_result(path: Path, name: str, rows: list[dict[str, Any]], origin: dict[str, Any], quick: bool) -> None:
    """Write rows and provenance as JSON, in one step."""
    check_replaceable(path, name)
    make_directory(path.parent)
    result = {"benchmark": name, "quick": quick, "provenance": origin, "rows": rows}
    write_atomically(path, json.dumps(result, indent=2) + "\n")


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a column for every key: for benchmarks that bring no table of their own."""
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        numbers = all(isinstance(row.get(column), (int, float, type(None))) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(*paths: Path) -> str:
    """Return the ratios in stored results as a table of Markdown, each beside what it should be.

    Rows that growth alone has are left out: they have a plot.
    """
    lines = ["| figure | threads | ratio | 95 % interval | aim | |", "|---|---|---|---|---|---|"]
    for path in paths:
        stored = json.loads(path.read_text(encoding="utf-8"))
        for row in stored["rows"]:
            if "what" not in row:
                continue
            interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}" if "ratio_low" in row else ""
            verdict = {True: "met", False: "**missed**", None: "unclear"}[row["met"]] if row["aim"] else ""
            timed = interval or "time per class" in row["what"]
            threads = row.get("threads", stored["provenance"]["machine"]["threads"] if timed else "")
            aim = f"{row['aim']:g}" if row["aim"] else ""
            lines.append(f"| {row['what']} | {threads} | {row['ratio']:.2f} | {interval} | {aim} | {verdict} |")
    return "\n".join(lines)
