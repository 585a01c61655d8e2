"""Two training runs at once, a thread each, against the same runs one after the other with two threads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.bench_scale import _network, _training_step
from dropmax import DropMax

AIM = 1.3


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure how much sooner two runs of LeNet with DropMax are done side by side; starting Python counts."""
    steps = 2 if quick else 100

    def start(threads: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.bench_workers", json.dumps([steps, threads])]
        return subprocess.Popen(command, cwd=Path(__file__).parents[1])

    def at_once() -> None:
        for worker in [start(1), start(1)]:
            worker.wait()

    def in_turn() -> None:
        for _ in range(2):
            start(2).wait()

    timing = harness.measure(
        {"at once": at_once, "in turn": in_turn}, baseline="at once", warm_up=1, least_rounds=6, budget=0.0
    )["in turn"]
    what = "two LeNet runs in turn on two threads / at once on a thread each"
    met = True if timing.ratio_low >= AIM else False if timing.ratio_high < AIM else None
    return [{"what": what, "aim": AIM, "at_least": True, "met": met, **asdict(timing)}]


def _train(steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model = _network("lenet", (1, 28, 28), DropMax, 10)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    step = _training_step(model, optimizer, torch.randn(50, 1, 28, 28), torch.randint(10, (50,)))
    for _ in range(steps):
        step()


if __name__ == "__main__":
    _train(*json.loads(sys.argv[1]))
