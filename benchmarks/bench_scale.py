"""DropMax against softmax as the number of classes grows: time and memory of a step, and of a prediction.

Memory is the peak resident set of a child process that makes one kind of step, less what it had before it made the
layer, less the weights and their gradients. See docs/scale.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from benchmarks import harness
from dropmax import DropMax, Softmax, walk
from dropmax.classifier import Classifier
from dropmax.workbench import networks

Step = Callable[[], object]

GROWTH = (1_000, 10_000, 100_000, 1_000_000)
QUICK_GROWTH = (100, 1_000)
GIGABYTE = 2**30

COMPILED = "dropmax, compiled blocks"

#: name, shape of an image, classes
NETWORKS = (("lenet", (1, 28, 28), 10), ("cifar-resnet", (3, 32, 32), 100))


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every row of the table, then the growth."""
    sizes = (100, 1_000) if quick else (1_000, 10_000)
    rows = [row for k in sizes for row in _step_rows(k, quick)]
    rows += _network_rows(quick)
    rows.append(_memory_row(1_000 if quick else 100_000, 32 if quick else 256, 64 if quick else 512))
    rows.append(_prediction_row(1_000 if quick else 10_000, quick))
    growth = _growth(QUICK_GROWTH if quick else GROWTH, quick)
    rows += growth
    rows += _growth_rows(growth)
    return rows


# --- steps -----------------------------------------------------------------------------------------------------------


def _timing(quick: bool, budget: float = 20.0) -> dict[str, Any]:
    return {"budget": 0.1, "sample": 1e-3} if quick else {"budget": budget}


def step_of(kind: str, features: Tensor, target: Tensor, num_classes: int) -> tuple[nn.Module, Step]:
    """Return a layer and one forward and backward pass of its loss."""
    size = features.shape[-1]
    loss: Callable[[], Tensor]
    if kind == "linear + cross_entropy":
        linear = nn.Linear(size, num_classes)
        module: nn.Module = linear
        loss = lambda: F.cross_entropy(linear(features), target)  # noqa: E731
    elif kind == "linear_cross_entropy":
        module = linear = nn.Linear(size, num_classes)
        loss = lambda: F.linear_cross_entropy(features, linear.weight, target, linear_bias=linear.bias)  # noqa: E731
    elif kind == "adaptive softmax":
        cutoffs = [num_classes // 50, num_classes // 5]
        module = nn.AdaptiveLogSoftmaxWithLoss(size, num_classes, cutoffs)
        loss = lambda: module(features, target).loss  # noqa: E731
    else:
        module = head = DropMax(size, num_classes)
        loss = lambda: head.loss(features, target).total  # noqa: E731

    def step() -> None:
        module.zero_grad()
        features.grad = None
        walk.compile_blocks(kind == COMPILED)
        loss().backward()
        walk.compile_blocks(False)

    return module, step


def _step_rows(num_classes: int, quick: bool) -> list[dict[str, Any]]:
    features, target = torch.randn(128, 512, requires_grad=True), torch.randint(num_classes, (128,))
    kinds = ("linear + cross_entropy", "dropmax")
    steps = {kind: step_of(kind, features, target, num_classes)[1] for kind in kinds}
    timing = harness.measure(steps, baseline=kinds[0], **_timing(quick))["dropmax"]
    rows = [_row(f"step, batch 128, 512 features, K = {num_classes:,}", timing, 3.3, 3.0)]
    if not quick:
        torch.compiler.reset()
        compiled = {kind: _compiled_step(kind, features, target, num_classes) for kind in kinds}
        timing = harness.measure(compiled, baseline=kinds[0], **_timing(quick))["dropmax"]
        rows.append(_row(f"the same, both compiled, K = {num_classes:,}", timing, 3.3, 3.0))
    return rows


def _compiled_step(kind: str, features: Tensor, target: Tensor, num_classes: int) -> Step:
    if kind == "dropmax":
        head = DropMax(features.shape[-1], num_classes)
        module: nn.Module = head
        loss = torch.compile(lambda features: head.loss(features, target).total, fullgraph=True)
    else:
        module = nn.Linear(features.shape[-1], num_classes)
        loss = torch.compile(lambda features: F.cross_entropy(module(features), target), fullgraph=True)

    def step() -> None:
        module.zero_grad()
        features.grad = None
        loss(features).backward()  # type: ignore[no-untyped-call]

    return step


def _network_rows(quick: bool) -> list[dict[str, Any]]:
    """Whole networks with few classes, where the head is a small part; with the optimiser's step."""
    rows = []
    for name, shape, num_classes in NETWORKS[:1] if quick else NETWORKS:
        images, labels = torch.randn(32 if quick else 64, *shape), torch.randint(num_classes, (32 if quick else 64,))
        steps = {}
        for head in (Softmax, DropMax):
            torch.manual_seed(0)
            model = _network(name, shape, head, num_classes)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

            steps[head.name] = _training_step(model, optimizer, images, labels)
        timing = harness.measure(steps, baseline="softmax", **_timing(quick, 30.0))["dropmax"]
        rows.append(_row(f"whole step of {name}, K = {num_classes}", timing, 1.05, 1.0))
    return rows


def _training_step(model: Classifier, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(images, labels).total.backward()
        optimizer.step()

    return step


def _network(name: str, shape: tuple[int, ...], head: Any, num_classes: int) -> Classifier:
    net = networks.make_network(name, shape)
    with torch.no_grad():
        size = net.eval()(torch.zeros(1, *shape)).shape[-1]
    return Classifier(net.train(), head(size, num_classes))


def _prediction_row(num_classes: int, quick: bool) -> dict[str, Any]:
    features = torch.randn(128, 512)
    heads = {"softmax": Softmax(512, num_classes), "dropmax": DropMax(512, num_classes)}
    with torch.inference_mode():
        calls = {name: (lambda head=head: head.predict_proba(features)) for name, head in heads.items()}
        timing = harness.measure(calls, baseline="softmax", **_timing(quick))["dropmax"]
    return _row(f"mean prediction, batch 128, 512 features, K = {num_classes:,}", timing, 2.2, 2.0)


def _row(what: str, timing: harness.Timing, aim: float, floor: float | None) -> dict[str, Any]:
    met = _below(aim, timing.ratio_low, timing.ratio_high)
    return {"what": what, "aim": aim, "floor": floor, "met": met, **asdict(timing)}


def _below(aim: float, low: float, high: float) -> bool | None:
    """Say whether the interval lies below the aim; None if it holds it."""
    return True if high <= aim else False if low > aim else None


# --- memory, in a process of its own ---------------------------------------------------------------------------------


def _child(kind: str, num_classes: int, batch: int, in_features: int, seconds: float = 0.0) -> dict[str, Any]:
    """Make steps of one kind in a fresh process; return its memory and the time of a step."""
    request = json.dumps([kind, num_classes, batch, in_features, seconds, torch.get_num_threads()])
    command = [sys.executable, "-m", "benchmarks.bench_scale", request]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _be_a_child(
    kind: str, num_classes: int, batch: int, in_features: int, seconds: float, threads: int
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    small, label = torch.randn(batch, 8, requires_grad=True), torch.zeros(batch, dtype=torch.long)
    step_of(kind, small, label, 200)[1]()  # what torch itself needs is not the layer's
    features = torch.randn(batch, in_features, requires_grad=True)
    target = torch.randint(num_classes, (batch,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here: importing has one of its own
    before = _resident("VmRSS")
    module, step = step_of(kind, features, target, num_classes)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - start < seconds and len(times) < 20):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    peak = _resident("VmHWM")  # not getrusage: there a child starts with the peak of its parent
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    return {"peak": peak, "weights": weights, "beyond": peak - before - 2 * weights, "seconds": min(times[1:])}


def _resident(field: str) -> int:
    """Return the resident set now (VmRSS) or at its largest (VmHWM) in bytes; Linux only."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def _memory_row(num_classes: int, batch: int, in_features: int) -> dict[str, Any]:
    found = {kind: _child(kind, num_classes, batch, in_features) for kind in ("linear + cross_entropy", "dropmax")}
    ratio = found["dropmax"]["beyond"] / found["linear + cross_entropy"]["beyond"]
    return {
        "what": f"memory of a step, batch {batch}, {in_features} features, K = {num_classes:,}",
        "aim": 0.5,
        "floor": None,
        "ratio": ratio,
        "met": ratio <= 0.5,
        "bytes": {kind: child.get("beyond") for kind, child in found.items()},
    }


# --- growth ----------------------------------------------------------------------------------------------------------


def _growth(sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """One step of batch 64 with 128 features, at every number of classes: time in turns, memory in children."""
    kinds = ["linear + cross_entropy", "dropmax", "linear_cross_entropy", "adaptive softmax"]
    if not quick:
        kinds.insert(2, COMPILED)
    if not hasattr(F, "linear_cross_entropy"):
        kinds.remove("linear_cross_entropy")
    rows = []
    for num_classes in sizes:
        features, target = torch.randn(64, 128, requires_grad=True), torch.randint(num_classes, (64,))
        steps = {kind: step_of(kind, features, target, num_classes)[1] for kind in kinds}
        timings = harness.measure(
            steps, baseline=kinds[0], warm_up=1 if num_classes > 50_000 else 3, least_rounds=7, **_timing(quick, 10.0)
        )
        del steps
        for kind in kinds:
            child = {} if quick else _child(kind, num_classes, 64, 128)
            rows.append(
                {
                    "growth": kind,
                    "classes": num_classes,
                    **asdict(timings[kind]),
                    "beyond": child.get("beyond"),
                    "peak": child.get("peak"),
                    "weights": child.get("weights"),
                    "error": child.get("error"),
                }
            )
    return rows


def _growth_rows(growth: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table that come from the growth: its largest size, and how straight the lines are."""
    rows = []
    for kind in ("dropmax", COMPILED):
        last = next((row for row in reversed(growth) if row["growth"] == kind), None)
        if last is not None:
            rows.append(
                {
                    "what": f"{kind}: step, batch 64, 128 features, K = {last['classes']:,}",
                    "aim": 3.6,
                    "floor": 3.0,
                    "met": _below(3.6, last["ratio_low"], last["ratio_high"]) and (last["peak"] or 0) < 24 * GIGABYTE,
                    "peak": last["peak"],
                    **{key: last[key] for key in ("median", "ratio", "ratio_low", "ratio_high", "rounds")},
                }
            )
    for kind in ("dropmax", "linear + cross_entropy"):
        ours = [row for row in growth if row["growth"] == kind]
        # From ten thousand classes on as well: below, calling functions costs more than the arithmetic.
        for span in [ours, ours[1:]] if kind == "dropmax" and len(ours) > 2 else [ours]:
            rows += _straightness(kind, span) if span else []
    return rows


def _straightness(kind: str, growth: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much the time and the memory of a class vary over the sizes; of softmax, for comparison only."""
    aim = 1.2 if kind == "dropmax" else None
    memory = [row["beyond"] + 2 * row["weights"] if row["beyond"] else None for row in growth]
    rows = []
    for what, values in (("time", [row["median"] for row in growth]), ("memory, weights and gradients too,", memory)):
        each = [x / row["classes"] for x, row in zip(values, growth, strict=True) if x]
        ratio = max(each) / min(each) if each else float("nan")
        span = f"{growth[0]['classes']:,} to {growth[-1]['classes']:,}"
        rows.append(
            {
                "what": f"{kind}: {what} a class, most / least, K = {span}",
                "aim": aim,
                "floor": 1.0,
                "ratio": ratio,
                "met": None if aim is None else ratio <= aim,
            }
        )
    return rows


# --- tables and plot -------------------------------------------------------------------------------------------------


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the table of aims, and the growth."""
    growth = Table(
        title="Growth: a step of batch 64 with 128 features; memory beyond weights and gradients",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("classes", "layer", "ms", "ratio", "MB"):
        growth.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    for row in rows:
        if "growth" in row:
            memory = "" if row["beyond"] is None else f"{row['beyond'] / 1e6:.0f}"
            cells = (f"{1e3 * row['median']:.1f}", f"{row['ratio']:.2f}", memory)
            growth.add_row(f"{row['classes']:,}", row["growth"], *cells)
    return [aims_table("DropMax / softmax", [row for row in rows if "growth" not in row]), growth]


def aims_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of ratios beside what they should be; a row without an aim is there for comparison."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("what", "ratio", "95 %", "aim", "floor", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right", no_wrap=column != "what")
    for row in rows:
        interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}" if "ratio_low" in row else ""
        sign = "> " if row.get("at_least") else "< "
        floor = "" if row["floor"] is None else f"{row['floor']:g}"
        verdict = {True: "met", False: "missed", None: "unclear"}[row["met"]] if row["aim"] else ""
        aim = f"{sign}{row['aim']:g}" if row["aim"] else ""
        table.add_row(row["what"], f"{row['ratio']:.2f}", interval, aim, floor, verdict)
    return table


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time and memory against the number of classes, on logarithmic axes."""
    from dropmax.workbench.style import LOOKS, PAGE, pyplot, save

    growth = [row for row in rows if "growth" in row]
    figure, axes = pyplot().subplots(1, 2, figsize=(PAGE, 2.8), layout="constrained")
    for kind, (colour, line) in zip(dict.fromkeys(row["growth"] for row in growth), LOOKS, strict=False):
        ours = [row for row in growth if row["growth"] == kind]
        classes = [row["classes"] for row in ours]
        axes[0].plot(
            classes, [1e3 * row["median"] for row in ours], color=colour, linestyle=line, marker="o", label=kind
        )
        memory = [(row["classes"], row["beyond"] / 1e6) for row in ours if row["beyond"] and row["beyond"] > 0]
        axes[1].plot(*zip(*memory, strict=True), color=colour, linestyle=line, marker="o") if memory else None
    for axis, what in zip(axes, ("ms a step", "MB beyond weights and gradients"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="classes", ylabel=what)
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


if __name__ == "__main__":
    print(json.dumps(_be_a_child(*json.loads(sys.argv[1]))))
