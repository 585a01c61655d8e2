"""The crew of the local engine: who gets which GPU, and what is made of what workers answer."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from dropmax.errors import RunError
from dropmax.lab.experiments import Store, plan_table
from dropmax.lab.experiments.engines import _gpu, _hear, _Worker
from dropmax.lab.experiments.schedule import Schedule


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ["0", "1", "0"]), ("5,7", ["5", "7", "5"]), ("", ["0", "1", "0"])]
)
def test_workers_share_the_gpus_in_turn(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [_gpu(index)["CUDA_VISIBLE_DEVICES"] for index in range(3)] == expected


def test_without_gpus_nothing_is_said_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert _gpu(0) == {}


def test_a_worker_that_never_began_has_nothing_to_stop_and_nothing_to_say() -> None:
    worker = _Worker(0, queue.Queue())
    worker.ask_to_stop()
    worker.stop()
    assert worker.how_it_ended() == "for an unknown reason"


def test_an_idle_workers_death_costs_nothing_and_its_request_to_stop_ends_all(tmp_path: Path) -> None:
    plan = plan_table(["mnist-1k"], heads=["softmax"], runs=1, tune=False)
    store = Store(tmp_path / "out")
    store.join(plan, "dropmax")
    schedule = Schedule(plan, store)
    worker = _Worker(0, queue.Queue())
    _hear(worker, None, schedule, {})
    assert (schedule.left, schedule.failed()) == (1, {})
    with pytest.raises(RunError, match="the disk is full"):
        _hear(worker, '{"stop": "the disk is full"}', schedule, {})
