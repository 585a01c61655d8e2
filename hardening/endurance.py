"""Two hours of work in one process: train, evaluate, predict in every mode, save and load, fit the estimator.

Resident memory (``/proc/self/statm``) and open file descriptors (``/proc/self/fd``) are sampled after every round of
work, at most once a second. The first tenth of the time is warm-up: caches fill and the allocator finds its size. The
promise is that the median of the last tenth is no more than 1 % above that of the tenth after warm-up, that no more
files are open, and that a round with a seed that was there before ends in the bytes it had then.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dropmax.errors import RunError
from dropmax.heads import HEADS, MODES
from dropmax.metrics import evaluate
from dropmax.workbench.data import Split
from dropmax.workbench.evaluation import measure, predict
from dropmax.workbench.progress import progress
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_data, load_model, save_model, train
from hardening.campaign import Outcome

SECONDS = 2 * 60 * 60
SHORT_SECONDS = 8

#: Growth that counts as flat. Seconds are too short for the allocator to settle: the short form finds gross leaks.
TOLERANCE = 0.01
SHORT_TOLERANCE = 0.05

_SEEDS = 4  # each head is trained with so many seeds before they come round again
_KEPT_SAMPLES = 200


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Work for two hours and see whether memory, open files and results stay as they are."""
    work = Work(scratch, seed)
    heads = len(HEADS)
    if short:
        return watch(work.round, SHORT_SECONDS, SHORT_TOLERANCE, warm_up_rounds=heads, seconds_between_samples=0.0)
    return watch(work.round, SECONDS, TOLERANCE, warm_up_rounds=heads * _SEEDS)


class Work:
    """One round after another of what people do with the package; the heads take turns."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.scratch, self.seed = scratch, seed
        self.digests: dict[tuple[str, int], str] = {}
        torch.set_num_threads(1)

    def round(self, index: int, outcome: Outcome) -> None:
        """Train a head on a few digits, measure it, predict, save, load, fit the estimator; count each."""
        head = list(HEADS)[index % len(HEADS)]
        seed = self.seed + index // len(HEADS) % _SEEDS
        recipe = load_recipe("mnist-1k").override(
            {
                "head.name": head,
                "network.name": ("lenet", "mlp")[seed % 2],
                "training.epochs": 2,
                "training.seed": seed,
                "training.validate_every": 2,
                "training.checkpoint_seconds": 0.0,
                "data.train_size": 100,
                "data.validation_size": 100,
            }
        )
        place = self.scratch / "run"
        try:
            train(recipe, place, quiet=True)
            outcome.count("trained")
            data = load_data(recipe)
            loaded = load_model(place)
            found = measure(loaded.model, loaded.batches(data.validation), seed=seed)
            outcome.count("evaluated")
            digest = hashlib.sha256(repr(found).encode())
            some = Split(data.test.inputs[:100], data.test.labels[:100])
            for mode in MODES:
                generator = torch.Generator().manual_seed(seed)
                answers = predict(loaded.model, loaded.batches(some), mode=mode, samples=10, generator=generator)
                evaluate(answers.probs, answers.labels)
                digest.update(answers.probs.numpy().tobytes())
                outcome.count(f"predicted ({mode})")
            save_model(self.scratch / "again.safetensors", loaded.model, recipe, data)
            again = load_model(self.scratch / "again.safetensors")
            outcome.count("saved and loaded")
            digest.update(predict(again.model, again.batches(some)).probs.numpy().tobytes())
            digest.update(self._fit(head, seed))
            outcome.count("fitted the estimator")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        if self.digests.setdefault((head, seed), digest.hexdigest()) != digest.hexdigest():
            outcome.fail(f"round {index}: head {head}, seed {seed} gave other numbers than the first time")

    def _fit(self, head: str, seed: int) -> bytes:
        from dropmax.sklearn import DropMaxClassifier

        generator = np.random.default_rng(seed)
        x = generator.normal(size=(60, 5))
        y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
        model = DropMaxClassifier((8,), head=head, max_iter=5, tol=0.0, n_iter_no_change=5, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # five passes are too few, and that is not the question here
            model.fit(x, y)
        return b"".join(model.predict_proba(x, mode).tobytes() for mode in MODES)


def watch(
    work: Callable[[int, Outcome], None],
    seconds: float,
    tolerance: float,
    *,
    warm_up_rounds: int = 0,
    seconds_between_samples: float = 1.0,
) -> Outcome:
    """Call ``work`` with 0, 1, ... for so long and judge memory and open files; at least ten rounds after warm-up."""
    outcome = Outcome()
    # Made beforehand and touched, so that the watching itself does not grow.
    samples = np.full((100_000, 3), -1, dtype=np.int64)  # milliseconds, bytes, files
    taken, index, shown = 0, 0, 0
    start, cpu_start = time.monotonic(), time.process_time()
    warm_up_ends, sampled_at = 0.0, -np.inf
    with progress("working", int(seconds), "seconds") as advance:
        while (elapsed := time.monotonic() - start) < seconds or index < warm_up_rounds + 10:
            try:
                work(index, outcome)
            except Exception as error:  # a campaign counts failures, it does not end with the first
                outcome.count("raised")
                outcome.fail(f"round {index} raised {type(error).__name__}: {error}")
            index += 1
            now = time.monotonic() - start
            if index <= warm_up_rounds or now < 0.1 * seconds:
                warm_up_ends = now
            if now - sampled_at >= seconds_between_samples and taken < len(samples):
                samples[taken] = (1000 * now, resident_bytes(), open_files())
                taken, sampled_at = taken + 1, now
            advance(int(min(now, seconds)) - shown)
            shown = int(min(now, seconds))
    outcome.details["rounds"] = index
    outcome.details["seconds"] = round(elapsed, 1)
    outcome.details["cpu_seconds"] = round(time.process_time() - cpu_start, 1)  # a busy machine may leave little
    judge(samples[:taken], warm_up_ends, tolerance, outcome)
    return outcome


def judge(samples: NDArray[np.int64], warm_up_ends: float, tolerance: float, outcome: Outcome) -> None:
    """Compare the last tenth of the samples (milliseconds, bytes, files) with the tenth after warm-up."""
    settled = samples[samples[:, 0] > 1000 * warm_up_ends]
    tenths = np.array_split(settled, 10)
    memory = [float(np.median(tenth[:, 1])) for tenth in tenths]
    files = [int(tenth[:, 2].max()) for tenth in tenths]
    growth = memory[-1] / memory[0] - 1
    for kind, flat, line in (
        (
            "memory",
            growth <= tolerance,
            f"resident memory grew by {growth:.2%}, from {memory[0]:.0f} to {memory[-1]:.0f} bytes",
        ),
        ("open files", files[-1] <= files[0], f"open files grew from {files[0]} to {files[-1]}"),
    ):
        outcome.count(f"{kind} flat" if flat else f"{kind} grew")
        if not flat:
            outcome.fail(line)
    kept = samples[np.unique(np.linspace(0, len(samples) - 1, min(len(samples), _KEPT_SAMPLES)).astype(int))]
    outcome.details |= {
        "warm_up_seconds": round(warm_up_ends, 1),
        "samples": len(samples),
        "tolerance": tolerance,
        "memory_growth": round(growth, 6),
        "memory_of_tenths": [round(value) for value in memory],
        "files_of_tenths": files,
        "series": [{"seconds": int(t) / 1000, "bytes": int(b), "files": int(f)} for t, b, f in kept],
    }


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise RunError("the campaign 'endurance' reads /proc, which only Linux has: run it there") from error


def open_files() -> int:
    """Return how many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
