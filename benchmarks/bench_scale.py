"""The price of a softmax: DropMax against softmax in time, memory, parameters and calls, with more and more classes.

Times are measured with one thread and, where torch may have two, with two. Memory is the peak resident set of a child
process that makes one kind of step, less what it had before it made the layer, less the weights and their gradients.
See docs/scale.md.
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
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import harness
from dropmax import DropMax, Softmax
from dropmax.classifier import Classifier
from dropmax.workbench import networks

Step = Callable[[], object]

GROWTH = (1_000, 10_000, 100_000, 1_000_000)
QUICK_GROWTH = (100, 1_000)
GIGABYTE = 2**30

SOFTMAX = "linear + cross_entropy"
RANK_64 = "dropmax, rank 64"
CHUNKED = "dropmax, chunk_classes=1024"

#: Kinds of step and the rank of their maps; aims for a step, eager and compiled.
RANKS: dict[str, int | None] = {RANK_64: 64, "dropmax, rank 128": 128, "dropmax, rank 256": 256, "dropmax": None}
STEP_AIMS = {RANK_64: (2.0, 1.6), "dropmax": (3.8, 3.3)}

#: name, shape of an image, classes
NETWORKS = (("lenet", (1, 28, 28), 10), ("cifar-resnet", (3, 32, 32), 100))


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every row of the table but those of the benchmarks compiled and growth."""
    rows = []
    threads = torch.get_num_threads()
    for count in range(1, 2 if quick else min(2, threads) + 1):
        torch.set_num_threads(count)
        timed = [row for k in ((300,) if quick else (1_000, 10_000)) for row in step_rows(k, quick)]
        timed += _network_rows(quick)
        timed += _prediction_rows(1_000 if quick else 10_000, quick)
        rows += [{"threads": count, **row} for row in timed]
    torch.set_num_threads(threads)
    return [*rows, _calls_row(), _parameters_row()]


# --- steps -----------------------------------------------------------------------------------------------------------


def _timing(quick: bool, budget: float = 20.0) -> dict[str, Any]:
    # One thread: the time its core worked for it, in which other programs count for little. Two: wall-clock time.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return {"clock": clock, **({"budget": 0.1, "sample": 1e-3} if quick else {"budget": budget})}


def step_of(
    kind: str, features: Tensor, target: Tensor, num_classes: int, compiled: bool = False
) -> tuple[nn.Module, Step]:
    """Return a layer and one forward and backward pass of its loss."""
    size = features.shape[-1]
    loss: Callable[[], Tensor]
    if kind == SOFTMAX:
        linear = nn.Linear(size, num_classes)
        module: nn.Module = linear
        loss = lambda: F.cross_entropy(linear(features), target)  # noqa: E731
    else:
        module = head = DropMax(
            size, num_classes, rank=RANKS.get(kind), chunk_classes=1024 if kind == CHUNKED else None
        )
        loss = lambda: head.loss(features, target).total  # noqa: E731
    if compiled:
        loss = torch.compile(loss, fullgraph=True)

    def step() -> None:
        module.zero_grad()
        features.grad = None
        loss().backward()  # type: ignore[no-untyped-call]

    return module, step


def step_rows(num_classes: int, quick: bool, compiled: bool = False) -> list[dict[str, Any]]:
    """One head, every rank with an aim or eager, all of them in turns with softmax."""
    features, target = torch.randn(128, 512, requires_grad=True), torch.randint(num_classes, (128,))
    kinds = list(STEP_AIMS if compiled else RANKS)  # compiling takes most of a minute for each
    steps = {kind: step_of(kind, features, target, num_classes, compiled)[1] for kind in (SOFTMAX, *kinds)}
    timings = harness.measure(steps, baseline=SOFTMAX, **_timing(quick))
    rows = []
    for kind in kinds:
        aim = STEP_AIMS[kind][compiled] if kind in STEP_AIMS else None
        mode = "both compiled" if compiled else "eager"
        what = f"{kind}: step, {mode}, batch 128, 512 features, K = {num_classes:,}"
        rows.append(_row(what, timings[kind], aim))
    return rows


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def calls_of(kind: str, num_classes: int = 10) -> int:
    """Return how many calls of torch a forward and backward pass makes."""
    features, target = torch.randn(128, 512, requires_grad=True), torch.randint(num_classes, (128,))
    step = step_of(kind, features, target, num_classes)[1]
    step()
    counter = _Counter()
    with counter:
        step()
    return counter.calls


def _calls_row() -> dict[str, Any]:
    calls = calls_of("dropmax")
    what = "dropmax: calls of torch in a step, K = 10"
    return {"what": what, "aim": 150, "met": calls <= 150, "ratio": calls, "softmax": calls_of(SOFTMAX)}


def _parameters_row() -> dict[str, Any]:
    sizes = [
        sum(p.numel() for p in head.parameters()) for head in (DropMax(512, 10_000, rank=64), Softmax(512, 10_000))
    ]
    ratio = sizes[0] / sizes[1]
    return {"what": f"{RANK_64}: parameters, 512 features, K = 10,000", "aim": 1.3, "met": ratio <= 1.3, "ratio": ratio}


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
        timing = harness.measure(steps, baseline="softmax", **_timing(quick))["dropmax"]
        rows.append(_row(f"dropmax: whole step of {name}, K = {num_classes}", timing, 1.04))
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


def _prediction_rows(num_classes: int, quick: bool) -> list[dict[str, Any]]:
    features = torch.randn(128, 512)
    heads = {
        "softmax": Softmax(512, num_classes),
        **{kind: DropMax(512, num_classes, rank=RANKS[kind]) for kind in STEP_AIMS},
    }
    with torch.inference_mode():
        calls = {name: (lambda head=head: head.predict_proba(features)) for name, head in heads.items()}
        timings = harness.measure(calls, baseline="softmax", **_timing(quick))
    what = f"mean prediction, batch 128, 512 features, K = {num_classes:,}"
    aims = {RANK_64: 1.3, "dropmax": None}
    return [_row(f"{kind}: {what}", timings[kind], aim) for kind, aim in aims.items()]


def _row(what: str, timing: harness.Timing, aim: float | None) -> dict[str, Any]:
    met = None if aim is None else below(aim, timing.ratio_low, timing.ratio_high)
    return {"what": what, "aim": aim, "met": met, **asdict(timing)}


def below(aim: float, low: float, high: float) -> bool | None:
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
    small, label = torch.randn(batch, 64, requires_grad=True), torch.zeros(batch, dtype=torch.long)
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


def memory_rows(num_classes: int, batch: int, in_features: int) -> list[dict[str, Any]]:
    """The memory of a step: all of it, and what is needed beyond weights and their gradients."""
    kinds = {"dropmax": None, RANK_64: None, CHUNKED: 0.5}
    # The least of three: a kernel that takes back unused pages of libraries lets some of them be counted again.
    tried = {kind: [_child(kind, num_classes, batch, in_features) for _ in range(3)] for kind in (SOFTMAX, *kinds)}
    found = {kind: min(children, key=lambda child: child["beyond"]) for kind, children in tried.items()}
    rows = []
    for kind, aim in kinds.items():
        for what, weights in (("memory of a step", 2), ("memory of a step beyond weights and gradients", 0)):
            size = {k: child["beyond"] + weights * child["weights"] for k, child in found.items()}
            ratio, aimed = size[kind] / size[SOFTMAX], None if weights else aim
            rows.append(
                {
                    "what": f"{kind}: {what}, batch {batch}, {in_features} features, K = {num_classes:,}",
                    "aim": aimed,
                    "met": None if aimed is None else ratio <= aimed,
                    "ratio": ratio,
                    "bytes": size[kind],
                }
            )
    return rows


# --- growth ----------------------------------------------------------------------------------------------------------


def growth_steps(sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """One step of batch 64 with 128 features, at every number of classes: time in turns, memory in children."""
    kinds = [SOFTMAX, "dropmax", RANK_64]
    rows = []
    for num_classes in sizes:
        features, target = torch.randn(64, 128, requires_grad=True), torch.randint(num_classes, (64,))
        steps = {kind: step_of(kind, features, target, num_classes)[1] for kind in kinds}
        timings = harness.measure(
            steps, baseline=kinds[0], warm_up=1 if num_classes > 50_000 else 3, least_rounds=7, **_timing(quick, 10.0)
        )
        del steps
        for kind in kinds:
            child = {} if quick or num_classes < max(sizes) else _child(kind, num_classes, 64, 128)
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


def growth_rows(growth: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table that come from the growth: its largest size, and how straight the lines are."""
    rows = []
    for kind, aim in ((RANK_64, 2.5), ("dropmax", None)):
        last = next((row for row in reversed(growth) if row["growth"] == kind), None)
        if last is not None:
            rows.append(
                {
                    "what": f"{kind}: step, batch 64, 128 features, K = {last['classes']:,}",
                    "aim": aim,
                    "met": None if aim is None else below(aim, last["ratio_low"], last["ratio_high"]),
                    "peak": last["peak"],
                    **{key: last[key] for key in ("median", "ratio", "ratio_low", "ratio_high", "rounds")},
                }
            )
    for kind, aim in ((RANK_64, 1.5), ("dropmax", None), (SOFTMAX, None)):
        each = [(row["classes"], row["median"] / row["classes"]) for row in growth if row["growth"] == kind]
        if each:
            ratio = max(x for _, x in each) / min(x for _, x in each)
            what = f"{kind}: time per class, most / least, K = {each[0][0]:,} to {each[-1][0]:,}"
            rows.append({"what": what, "aim": aim, "met": None if aim is None else ratio <= aim, "ratio": ratio})
    return rows


# --- tables and plot -------------------------------------------------------------------------------------------------


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the table of aims, and the growth."""
    growth = Table(
        title="Growth: a step of batch 64 with 128 features; memory with weights and gradients",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("classes", "layer", "ms", "ratio", "MB"):
        growth.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    for row in rows:
        if "growth" in row:
            memory = "" if row["beyond"] is None else f"{(row['beyond'] + 2 * row['weights']) / 1e6:.0f}"
            cells = (f"{1e3 * row['median']:.1f}", f"{row['ratio']:.2f}", memory)
            growth.add_row(f"{row['classes']:,}", row["growth"], *cells)
    found = [aims_table("DropMax / softmax", [row for row in rows if "growth" not in row])]
    return [*found, growth] if growth.rows else found


def aims_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of ratios beside what they should be; a row without an aim is there for comparison."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("what", "threads", "ratio", "95 %", "aim", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right", no_wrap=column != "what")
    for row in rows:
        interval = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}" if "ratio_low" in row else ""
        sign = "> " if row.get("at_least") else "< "
        verdict = {True: "met", False: "missed", None: "unclear"}[row["met"]] if row["aim"] else ""
        aim = f"{sign}{row['aim']:g}" if row["aim"] else ""
        table.add_row(row["what"], str(row.get("threads", "")), f"{row['ratio']:.2f}", interval, aim, verdict)
    return table


def plot_growth(rows: Sequence[dict[str, Any]], path: Path) -> None:
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
    for axis, what in zip(axes, ("ms per step", "MB beyond weights and gradients"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="classes", ylabel=what)
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


if __name__ == "__main__":
    print(json.dumps(_be_a_child(*json.loads(sys.argv[1]))))
