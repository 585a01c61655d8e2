"""Whole plans, tiny: tuned, stopped in every way, killed, and gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from dropmax import metrics
from dropmax.cli.reproduce import reproduce as command
from dropmax.errors import DropMaxError, RunError
from dropmax.heads import MODES
from dropmax.lab.experiments import Job, Local, Plan, RunRecord, Store, plan_study, plan_table, reproduce
from dropmax.lab.experiments.engines import _gpu, _hear, _Worker
from dropmax.lab.experiments.plan import resolve
from dropmax.lab.experiments.reproduce import Progress, estimate_seconds
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.worker import run_job
from dropmax.workbench.evaluation import predict
from dropmax.workbench.training import load_data, load_model
from tests.lab.experiments.results import begun

TINY: dict[str, Any] = {"training.epochs": 1, "data.train_size": 50, "data.validation_size": 50}
#: Long enough to be caught in the middle; with a checkpoint every epoch there is something to go on from.
SLOW: dict[str, Any] = {
    "training.epochs": 20,
    "data.train_size": 200,
    "data.validation_size": 50,
    "training.checkpoint_seconds": 0,
    "training.validate_every": 1,
}


def plan(overrides: dict[str, Any], **changes: Any) -> Plan:
    given: dict[str, Any] = {"heads": ["softmax"], "runs": 1, "tune": False}
    return plan_table(["mnist-1k"], overrides=overrides, **{**given, **changes})


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def workers_of(parent: int) -> list[int]:
    """Process ids of the workers a process has started."""

    def is_one(process: Path) -> bool:
        with contextlib.suppress(OSError):  # processes come and go
            is_child = int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            return is_child and b"dropmax.lab.experiments.worker" in (process / "cmdline").read_bytes()
        return False

    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if is_one(process)]


# --- a single job ------------------------------------------------------------------------------------------------


def test_a_run_is_measured_in_every_mode_and_a_tuning_run_never_on_the_test_set(tmp_path: Path) -> None:
    group = plan(TINY, heads=["dropmax"], tune=True).groups[0]
    tuning = run_job(group.tune_jobs()[0], tmp_path / "tune", modes=["mean"])
    assert set(tuning.validation) == {"mean"}
    assert "test" not in tuning.examples
    assert not tuning.test
    run = run_job(group.run_jobs(group.points[0], 1)[0], tmp_path / "run")
    assert set(run.test) == set(run.validation) == set(MODES)
    assert run.examples == {"train": 50, "validation": 50, "test": 10_000}
    assert run.recipe["training"]["weight_decay"] == group.points[0]["training.weight_decay"]
    assert run.last_row["epoch"] == 1
    # What training logged at its end is what was measured afterwards: the same model, the same examples.
    assert run.last_row["validation"]["error"] == run.validation["mean"]["error"]
    assert RunRecord.model_validate_json(run.to_json()) == run


def test_the_scaled_metrics_are_those_of_a_temperature_fitted_on_the_held_out_rows(tmp_path: Path) -> None:
    job = plan({**TINY, "training.epochs": 5}, heads=["dropmax"]).groups[0].run_jobs({}, 1)[0]
    run = run_job(job, tmp_path / "run", modes=["mean", "exact"])
    trained, data = load_model(tmp_path / "run"), load_data(job.recipe, None)
    assert set(run.temperature) == {"mean", "exact"}
    for mode, temperature in run.temperature.items():
        held_out, test = (predict(trained.model, trained.batches(x), mode=mode) for x in (data.validation, data.test))

        def nll(t: float, outputs: Any = held_out) -> float:
            log_p = (outputs.probs.double().log() / t).log_softmax(-1)
            return -log_p.gather(1, outputs.labels[:, None]).mean().item()

        assert nll(temperature) <= min(nll(temperature * 1.01), nll(temperature / 1.01)), "it is the minimum"
        scaled = (test.probs.double().log() / temperature).softmax(-1)
        for name, value in metrics.evaluate(scaled, test.labels).items():
            # float32 probabilities against float64 ones; a row of 10,000 may change its bin of the calibration error
            assert run.test[mode][f"{name}_scaled"] == pytest.approx(
                value, rel=1e-4, abs=1e-3 if name == "ece" else 1e-5
            )
        assert run.test[mode]["error_scaled"] == run.test[mode]["error"]
        # The smallest sets by probability whose threshold 49 of 50 held-out rows reach: ceil(51 * 0.95) of them.
        true = held_out.probs.gather(1, held_out.labels[:, None])[:, 0]
        sets = test.probs >= true.sort(descending=True).values[48] - 1e-7
        assert run.test[mode]["set_size"] == pytest.approx(float(sets.sum(1).double().mean()), abs=1e-3)
        assert run.test[mode]["set_coverage"] == pytest.approx(
            float(sets.gather(1, test.labels[:, None]).double().mean()), abs=1e-3
        )
    assert torch.isfinite(torch.tensor(list(run.temperature.values()))).all()
    assert not any(name.endswith("_scaled") for name in run.validation["mean"]), "fitted there, so not measured there"


def test_rows_of_no_class_are_measured_and_never_trained_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.r_[np.arange(120) % 3, np.full(30, -1)]
    x = rng.normal(size=(150, 4)) + 6 * np.eye(4)[np.where(y < 0, 3, y)]  # class k along axis k, the others along 3
    split = np.array(["train"] * 60 + ["validation"] * 30 + ["test"] * 30 + ["outside"] * 30)
    np.savez(tmp_path / "rows.npz", x=x, y=y, split=split)
    overrides = {"training.epochs": 30, "training.weight_decay": 0.0, "head.name": "softmax"}
    recipe = resolve(str(tmp_path / "rows.npz"), None)[1].override(overrides)
    job = Job("runs", "rows", "default", "softmax", recipe)
    run = run_job(job, tmp_path / "run")
    assert run.examples == {"train": 60, "validation": 30, "test": 30}
    assert run.test["mean"]["outside_auroc"] > 0.9


def test_a_run_that_diverges_is_a_result_with_a_reason(tmp_path: Path) -> None:
    job = plan({**TINY, "training.epochs": 3, "training.learning_rate": 1e30}).groups[0].run_jobs({}, 1)[0]
    found = run_job(job, tmp_path / "work")
    assert found.status == "failed"
    assert "try a lower learning rate" in found.reason
    assert str(tmp_path) not in found.reason
    assert not found.test


def test_leftovers_of_another_recipe_are_not_gone_on_with(tmp_path: Path) -> None:
    work = tmp_path / "work"
    run_job(plan(TINY).groups[0].run_jobs({}, 1)[0], work)
    job = plan({**TINY, "training.batch_size": 10}).groups[0].run_jobs({}, 1)[0]
    found = run_job(job, work)
    assert not found.resumed
    assert found.last_row["step"] == 5


def test_estimates_grow_with_the_epochs() -> None:
    def seconds(epochs: int) -> float:
        long = plan({**TINY, "training.epochs": epochs, "training.validate_every": 10**6})
        return next(iter(estimate_seconds(long).values()))

    assert seconds(10_000) > 20 * seconds(10)


def test_the_time_left_counts_the_epochs_of_runs_under_way(tmp_path: Path) -> None:
    two = plan({**TINY, "training.epochs": 100}, runs=2, tune=False)
    (group,) = two.groups
    progress = Progress(Schedule(two, begun(tmp_path / "out", two)), {group.key: 60.0}, workers=2)
    first, second = group.run_jobs({}, 2)
    assert progress.seconds_left() == 60
    assert progress.seconds_left([(first, 50), (second, 50)]) == pytest.approx(30)
    assert progress.seconds_left([(first, 100), (second, 25)]) == pytest.approx(45)  # nobody helps the other


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_names_the_runs_under_way(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = plan({**TINY, "training.epochs": 100})
    schedule = Schedule(one, begun(tmp_path / "out", one))
    (job,) = one.groups[0].run_jobs({}, 1)
    rows = [{"epoch": 40, "validation": {"error": 0.125}}, {"epoch": 41}]
    log = "cut off here\n" + "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(log)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Progress(schedule, {one.groups[0].key: 100.0}, workers=1) as progress:
        progress.show_runs([(job, tmp_path)])  # too soon for a line
        assert terminal or not capsys.readouterr().err
        progress.printed = -1e9
        progress.show_runs([(job, tmp_path)])
    text = capsys.readouterr().err
    assert "0 of 1 runs done, about 59 s left" in text
    assert "mnist-1k.released.softmax.seed0: epoch 41/100, validation error 12.50 %" in text
    with Progress(schedule, {}, workers=1) as progress:
        progress.printed = -1e9
        progress.show_runs([(job, None), (job, tmp_path / "nowhere")])  # on a cluster; not begun yet
    text = capsys.readouterr().err
    assert "0 of 1 runs done" in text
    assert "left" not in text, "without an estimate there is no time left to tell"
    assert text.count("mnist-1k.released.softmax.seed0") >= 2
    with Progress(schedule, {}, workers=1, quiet=True) as progress:
        progress.show_runs([(job, tmp_path)])
    assert capsys.readouterr().err == ""


# --- the local engine's workers -----------------------------------------------------------------------------------


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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert _gpu(0) == {}


def test_a_worker_that_never_began_has_nothing_to_stop_and_nothing_to_say() -> None:
    worker = _Worker(0, queue.Queue())
    worker.ask_to_stop()
    worker.stop()
    assert worker.how_it_ended() == "for an unknown reason"


def test_an_idle_workers_death_costs_nothing_and_its_request_to_stop_ends_all(tmp_path: Path) -> None:
    one = plan({})
    schedule = Schedule(one, begun(tmp_path / "out", one))
    worker = _Worker(0, queue.Queue())
    _hear(worker, None, schedule, {})
    assert (schedule.left, schedule.failed()) == (1, {})
    with pytest.raises(RunError, match="the disk is full"):
        _hear(worker, '{"stop": "the disk is full"}', schedule, {})


# --- whole plans -------------------------------------------------------------------------------------------------


def metrics_of(out: Path) -> dict[str, Any]:
    return {found.job: (found.validation, found.test, found.last_row) for found in Store(out).runs()}


def start(out: Path) -> subprocess.Popen[str]:
    settings = [f"--set={name}={json.dumps(value)}" for name, value in SLOW.items()]
    arguments = [sys.executable, "-m", "dropmax", "reproduce", "mnist-1k", "--heads", "softmax", "--runs", "2"]
    arguments += ["--no-tune", "--workers", "1", "--out", str(out), *settings]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for workers in /proc, which is not here")
def test_stopped_and_killed_in_the_middle_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    wanted = plan(SLOW, runs=2)
    reproduce(wanted, tmp_path / "whole", engine=Local(1), quiet=True)

    out = tmp_path / "broken"
    logs = [out / f"work/runs-mnist-1k.released.softmax.seed{seed}/metrics.jsonl" for seed in range(2)]

    def in_the_middle(seed: int) -> bool:
        return logs[seed].exists() and logs[seed].read_bytes().count(b"\n") >= 4

    driver = start(out)
    wait_for(lambda: in_the_middle(0))
    workers = workers_of(driver.pid)
    driver.send_signal(signal.SIGINT)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 130, said
    assert "stopped with 0 of 2 runs done; the same command resumes from here" in said
    assert workers
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)

    driver = start(out)
    wait_for(lambda: Store(out).runs() and in_the_middle(1))
    workers = workers_of(driver.pid)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers))
    first = Store(out).file.read_bytes()
    assert len(Store(out).runs()) == 1

    outcome = reproduce(wanted, out, engine=Local(1), quiet=True)
    assert (outcome.done, outcome.found, outcome.failed) == (2, 1, {})
    assert Store(out).file.read_bytes().startswith(first)
    assert metrics_of(out) == metrics_of(tmp_path / "whole")
    assert [found.resumed for found in Store(out).runs()] == [True, True]
    assert not list((out / "work").iterdir())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for workers in /proc, which is not here")
def test_a_worker_that_is_killed_costs_one_attempt_of_its_run_only(tmp_path: Path) -> None:
    kills = {0: 2, 1: 1}  # how often a worker dies of a run, by its seed

    def kill() -> None:
        for seed, times in kills.items():
            log = tmp_path / f"out/work/runs-mnist-1k.released.softmax.seed{seed}/metrics.jsonl"
            before: list[int] = []
            for _ in range(times):
                wait_for(lambda: log.exists() and workers_of(os.getpid()) not in ([], before))  # noqa: B023
                wait_for(lambda: log.read_bytes().count(b"\n") >= 2)  # noqa: B023
                before = workers_of(os.getpid())
                os.kill(before[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    outcome = reproduce(plan(SLOW, runs=2), tmp_path / "out", engine=Local(1), quiet=True)
    killer.join(5)
    assert outcome.failed == {"runs/mnist-1k.released.softmax.seed0": "its process died 2 times, by SIGKILL"}
    assert outcome.done == 1
    assert [found.status for found in Store(tmp_path / "out").runs()] == ["failed", "done"]


def test_a_study_with_a_diverging_variant_ends_with_exit_code_1_and_the_others_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(
        """
        [base]
        data = "mnist-1k"
        runs = 1
        overrides.training.epochs = 2
        overrides.data = { train_size = 50, validation_size = 50 }
        overrides.head.name = "softmax"
        [variants.too-fast]
        "training.learning_rate" = 1e30
        [variants.smooth]
        grid."head.label_smoothing" = [0.05, 0.1]
        """
    )
    out = tmp_path / "out"
    with pytest.raises(typer.Exit) as stop:
        command(study=str(study), out=out, workers=1, as_json=True)
    assert stop.value.exit_code == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "failed: runs/mnist-1k.released.too-fast.seed0 (features hold nan" in printed.err
    cells = {cell["row"]: cell for cell in json.loads(printed.out)["tables"]["error"]["cells"]}
    assert cells["smooth"]["runs"] == 1
    assert cells["too-fast"]["note"].startswith("failed: features hold nan")
    assert len(Store(out).runs("tune")) == 2
    table = (out / "tables.md").read_bytes()
    (out / "tables.md").unlink()
    command(out=out, only_tables=True, as_json=True)
    assert (out / "tables.md").read_bytes() == table
    assert plan_study(study).count == 4


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"modes": ["means"]}, "unknown mode 'means': did you mean 'mean'"),
        ({"overrides": {"head.gamma": 1.0}}, {}, "gamma"),
        ({"data": ["cub"]}, {"data_dir": "nowhere"}, "cub was not found in nowhere: it needs CUB_200_2011/ with"),
    ],
)
def test_a_mistake_is_found_before_any_work_and_leaves_no_plan(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"data": ["mnist-1k"], "heads": ["softmax"], "tune": False, **changes}
    with pytest.raises(DropMaxError, match=message):
        reproduce(plan_table(**given), tmp_path / "out", quiet=True, **options)
    assert not Store(tmp_path / "out").file.exists()
    Store(tmp_path / "out").check(plan(TINY))  # the corrected command is welcome


def test_two_at_once_in_one_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropmax.lab.experiments.store._SECONDS_TO_WAIT_FOR_LOCK", 0.0)
    store = Store(tmp_path)
    with store.locked(), pytest.raises(DropMaxError, match="another `dropmax reproduce` is at work"), store.locked():
        pass
