"""The long run for some seconds, and whether it would notice leaks."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from dropmax.workbench.training import load_model, train
from hardening import endurance
from hardening.campaign import Outcome
from hardening.kills import tiny_recipe


def test_the_short_run_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "SHORT_SECONDS", 2)
    outcome = endurance.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    done = outcome.details["rounds"]
    kinds = ("trained", "evaluated", "predicted (mean)", "predicted (mc)", "predicted (exact)", "saved and loaded")
    assert {outcome.counts[kind] for kind in (*kinds, "fitted the estimator")} == {done}
    assert len(outcome.details["series"]) == min(done, 200)


def watched(work: object) -> Outcome:
    return endurance.watch(work, 0.2, 0.01, seconds_between_samples=0.0)  # type: ignore[arg-type]


def test_it_notices_memory_that_grows() -> None:
    kept = []
    outcome = watched(lambda index, outcome: kept.append(np.ones(200_000)))
    assert outcome.counts["memory grew"] == 1
    assert any("resident memory grew by" in line for line in outcome.failures)


def test_it_notices_files_that_stay_open() -> None:
    kept = []
    outcome = watched(lambda index, outcome: kept.append(os.open("/dev/null", os.O_RDONLY)) if index < 400 else None)
    for descriptor in kept:
        os.close(descriptor)
    assert outcome.counts["open files grew"] == 1
    assert any("open files grew from" in line for line in outcome.failures)


def test_it_notices_numbers_that_drift_and_work_that_raises(tmp_path: Path) -> None:
    def work(index: int, outcome: Outcome) -> None:
        raise ValueError("no more")

    outcome = watched(work)
    assert outcome.counts["raised"] == outcome.details["rounds"]
    assert outcome.failures[0] == "round 0 raised ValueError: no more"
    rounds = endurance.Work(tmp_path, seed=0)
    rounds.digests["softmax", 0] = "something else"
    outcome = Outcome()
    rounds.round(0, outcome)
    assert outcome.failures == ["round 0: head softmax, seed 0 gave other numbers than the first time"]


@pytest.mark.parametrize(("growth", "flat"), [(1.009, True), (1.011, False), (0.5, True)])
def test_flat_is_within_a_hundredth(growth: float, flat: bool) -> None:
    samples = np.array([[1000 * i, int(1e9 * (growth if i > 900 else 1)), 7] for i in range(1000)])
    samples[:100, 1] = 1  # before warm-up anything goes
    outcome = Outcome()
    endurance.judge(samples, 100.0, 0.01, outcome)
    assert (outcome.failed == 0) is flat
    assert len(outcome.details["series"]) == 200


def test_loading_a_model_keeps_no_memory(tmp_path: Path) -> None:
    run = train(tiny_recipe(epochs=1, train_size=10), tmp_path / "run", quiet=True)
    blocks = []
    for _ in range(4):  # caches of torch and Python fill up at first
        for _ in range(30):
            load_model(run.path)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    assert blocks[3] - blocks[2] < 30 * 8  # it was more than 20 a load, two for every tensor
