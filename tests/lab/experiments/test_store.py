"""A directory of results: what belongs together, what is damaged, and what is done about it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dropmax.errors import RunError
from dropmax.lab.experiments import Plan, Store, plan_table
from dropmax.lab.experiments.records import failure
from dropmax.lab.experiments.schedule import Schedule, best_point
from dropmax.lab.experiments.worker import run_job
from dropmax.workbench.files import CannotWrite
from tests.lab.experiments.results import begun, fill, result


def plan(**changes: object) -> Plan:
    given: dict[str, object] = {"data": ["mnist-1k"], "heads": ["softmax", "dropmax"], "runs": 2, "tune": False}
    return plan_table(**{**given, **changes})  # type: ignore[arg-type]


TWO_RUNS = {(head, "mnist-1k"): [0.05, 0.06] for head in ("softmax", "dropmax")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return fill(tmp_path / "out", plan(), TWO_RUNS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule_scale": 0.1}, "--schedule-scale: 1.0 there and 0.1 here"),
        ({"train_size": 500}, "--train-size: 0 there and 500 here"),
        ({"overrides": {"training.epochs": 7}}, "--set: training.epochs is null there and 7 here"),
        ({"recipe": "paper"}, "--recipe for mnist-1k: 'released' there, 'paper' here"),
        ({"tune": True}, "what is tuned for mnist-1k.released.softmax: 0 points there, 12 here"),
    ],
)
def test_a_different_plan_is_refused_and_the_difference_named(
    store: Store, changes: dict[str, object], message: str
) -> None:
    before = store.file.read_bytes()
    with pytest.raises(RunError, match=f"holds results of a different plan: {message}; choose another place"):
        store.join(plan(**changes), "dropmax")
    assert store.file.read_bytes() == before


def test_a_grid_may_grow_but_not_shrink(tmp_path: Path) -> None:
    small, large = plan(tune="paper"), plan(tune=True)  # four weight decays; the same with three learning rates
    small_points = [{**point, "training.learning_rate": 1e-3} for point in small.groups[0].points]
    groups = tuple(dataclasses.replace(group, points=tuple(small_points)) for group in small.groups)
    small = dataclasses.replace(small, groups=groups)
    store = fill(tmp_path / "tuned", small, TWO_RUNS)
    store.join(large, "dropmax")
    assert [len(group.points) for group in store.plan().groups] == [12, 12]
    with pytest.raises(RunError, match="12 points there, 4 here"):
        store.join(small, "dropmax")


def rewrite_plan(store: Store, change: Callable[[dict[str, Any]], object]) -> None:
    first, *rest = store.file.read_text().splitlines()
    plan = json.loads(first)
    change(plan)
    store.file.write_text("\n".join([json.dumps(plan), *rest]) + "\n")


def test_a_recipe_that_changed_under_the_results_is_noticed(store: Store) -> None:
    dropmax = "mnist-1k.released.dropmax"
    rewrite_plan(store, lambda plan: plan["groups"][dropmax]["recipe"]["training"].update(batch_size=64))
    with pytest.raises(RunError, match=r"mnist-1k.released.dropmax: training.batch_size is 64 there and 100 here"):
        store.check(plan())


def test_a_field_that_recipes_got_later_is_no_difference(store: Store) -> None:
    def forget(plan: dict[str, Any]) -> None:
        for group in plan["groups"].values():
            del group["recipe"]["training"]["clip_norm"]

    rewrite_plan(store, forget)
    store.check(plan())
    assert {group.recipe.training.clip_norm for group in store.plan().groups} == {0.0}


def test_a_plan_grows(store: Store) -> None:
    store.join(plan(data=["mnist-5k"], heads=["sparsemax"], runs=3), "again")
    grown = store.plan()
    assert grown.runs == 3
    assert [group.key for group in grown.groups] == [
        "mnist-1k.released.softmax",
        "mnist-1k.released.dropmax",
        "mnist-5k.released.sparsemax",
    ]
    store.join(plan(heads=["softmax"], runs=1), "less")
    assert store.plan() == grown
    record = store.plan_record()
    assert record is not None
    assert record.commands == ["dropmax", "again", "less"]


def test_a_plan_of_which_nothing_was_done_can_be_changed(tmp_path: Path) -> None:
    store = begun(tmp_path, plan())
    store.join(plan(schedule_scale=0.5), "two")
    assert store.plan().schedule_scale == 0.5


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"is not empty and holds no results\.jsonl"):
        Store(tmp_path).join(plan(), "dropmax")
    with pytest.raises(RunError, match="is not a directory"):
        Store(tmp_path / "thesis.tex").join(plan(), "dropmax")
    with pytest.raises(RunError, match="there are no results in"):
        Store(tmp_path / "nowhere").plan()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: json.dumps(row)[:100], "is damaged .Unterminated string"),
        (lambda row: "", "is damaged .Expecting value"),
        (lambda row: "[" * 100_000, "nested too deeply"),
        (lambda row: "[]", "is damaged .Input should be a valid dictionary"),
        (lambda row: "{}", "is damaged .kind: Field required"),
        (lambda row: json.dumps({**row, "seed": "0"}), "seed: Input should be a valid integer"),
        (lambda row: json.dumps({**row, "status": "begun"}), "status: Input should be 'done' or 'failed'"),
        (lambda row: json.dumps({**row, "status": "failed"}), "a failed run needs a reason"),
        (lambda row: json.dumps({**row, "test": 3}), "test: Input should be a valid dictionary"),
        (lambda row: json.dumps({**row, "test": {"mean": {"error": 1.0}}}), "test.mean lacks nll, ece"),
        (lambda row: json.dumps({**row, "test": {"mean": {"error": float("nan")}}}), "finite number"),
        (lambda row: json.dumps({**row, "variant": "../../diary"}), "variant: String should match"),
        (lambda row: json.dumps({**row, "provenance": {"versions": [["python", "3"]]}}), "provenance.versions"),
        (lambda row: json.dumps({**row, "unheard": 1}), "unheard: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_line_is_named_and_done_again_only_when_told(
    store: Store, damage: Callable[[dict[str, Any]], str], message: str
) -> None:
    lines = store.file.read_text().splitlines()
    lines[1] = damage(json.loads(lines[1]))
    store.file.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=rf"results\.jsonl, line 2, {message}.*--repair|line 2, .*{message}.*--repair"):
        Schedule(plan(), store)
    store.repair()
    assert store.file.with_name("results.jsonl.damaged").read_text() == lines[1] + "\n"
    schedule = Schedule(plan(), store, repair=True)
    assert schedule.left == 1
    job = schedule.next()
    assert job is not None
    assert job.id == "runs/mnist-1k.released.softmax.seed0"
    schedule.finished(job, result(job))
    assert Schedule(plan(), store).left == 0


@pytest.mark.parametrize("cut", [1, 2, 50, 200])
def test_the_half_line_of_a_killed_writer_is_ignored_with_a_warning_and_then_removed(store: Store, cut: int) -> None:
    whole = store.file.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    store.file.write_bytes(whole + last[:-cut])
    if cut > 1:
        with pytest.warns(UserWarning, match="ignored the last line, which was not written to its end"):
            assert len(store.records()) == 4
    job = plan(runs=3).groups[0].run_jobs({}, 3)[2]
    store.append(result(job))
    assert len(store.records()) == 5
    kept = whole + (last if cut == 1 else b"")  # a line that lacks only its line break is whole
    assert store.file.read_bytes() == kept + result(job).to_json().encode() + b"\n"


def test_a_full_disk_leaves_no_half_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.file.read_bytes()
    job = plan(runs=3).groups[0].run_jobs({}, 3)[2]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CannotWrite, match="No space left on device"):
            store.append(result(job))
    assert store.file.read_bytes() == before


def test_of_two_records_of_one_job_the_later_counts(store: Store) -> None:
    job = plan().groups[0].run_jobs({}, 1)[0]
    store.append(failure(job, "bad luck"))
    assert store.records()[job.id].status == "failed"
    store.append(result(job, error=0.01))
    assert store.records()[job.id].test["mean"]["error"] == 0.01
    assert len(store.runs()) == 4


def test_a_result_of_another_recipe_or_point_is_not_taken(store: Store) -> None:
    job = plan(overrides={"training.epochs": 7}).groups[0].run_jobs({}, 2)[1]
    store.append(result(job))
    with pytest.raises(RunError, match=r"another recipe .training.epochs is 7 there and 200 here.*--repair"):
        Schedule(plan(), store)
    assert Schedule(plan(), store, repair=True).left == 1
    job = plan().groups[0].run_jobs({}, 2)[1]
    store.append(result(job).model_copy(update={"point": {"head.gamma": 1}}))
    with pytest.raises(RunError, match=r"another grid point .point.head.gamma is 1 there and null here"):
        Schedule(plan(), store)


def test_runs_wait_for_the_grid_and_take_its_best_point(tmp_path: Path) -> None:
    tuned = plan(heads=["softmax", "dropmax-qp"], tune=True)
    store = begun(tmp_path, tuned)
    done: list[str] = []
    schedule = Schedule(tuned, store, on_group_done=lambda group: done.append(group.variant))
    order = []
    while (job := schedule.next()) is not None:
        order.append(job.id)
        good = job.point == {"training.weight_decay": 1e-4, "head.gamma": 0.1}
        schedule.finished(job, result(job, error=0.03 if good else 0.04))
    assert [name.split("/")[0] for name in order] == ["tune"] * 12 + ["runs"] * 2 + ["tune"] * 12 + ["runs"] * 2
    assert done == ["softmax", "dropmax-qp"]
    assert schedule.left == 0
    last = store.records()["runs/mnist-1k.released.dropmax-qp.seed1"]
    assert last.recipe["head"]["gamma"] == 0.1
    assert last.recipe["training"]["weight_decay"] == 1e-4
    assert not any(found.test for found in store.runs("tune"))
    again = Schedule(tuned, store)
    assert (again.left, again.found, again.next()) == (0, 28, None)


def test_where_a_larger_grid_has_another_winner_its_runs_replace_those_of_the_former(tmp_path: Path) -> None:
    large = plan(heads=["softmax"], tune=True)
    (group,) = large.groups
    small = dataclasses.replace(large, groups=(dataclasses.replace(group, points=group.points[:4]),))
    store = begun(tmp_path, small)

    def go_on(plan: Plan, jobs: int, errors: dict[int, float]) -> Schedule:
        store.join(plan, "a test")
        schedule = Schedule(plan, store)
        for _ in range(jobs):
            job = schedule.next()
            assert job is not None
            schedule.finished(job, result(job, error=errors.get(group.points.index(job.point), 0.05)))
        return schedule

    assert go_on(small, 6, {2: 0.04}).next() is None
    assert [run.point for run in store.runs()] == [group.points[2]] * 2
    half = go_on(large, 8 + 1, {7: 0.03})  # the rest of the grid, and one run of its winner
    assert half.left == 1
    assert [(run.seed, run.point) for run in store.runs()] == [(0, group.points[7])]  # not one of each
    assert go_on(large, 1, {7: 0.03}).left == 0
    assert [(run.seed, run.point) for run in store.runs()] == [(seed, group.points[7]) for seed in (0, 1)]
    assert len(store.runs("tune")) == 12


def test_the_best_point_breaks_ties_by_likelihood_and_skips_failures() -> None:
    jobs = plan(heads=["dropmax-qp"], tune=True).groups[0].tune_jobs()
    found = [result(jobs[0], 0.04, 0.3), result(jobs[1], 0.04, 0.2), result(jobs[2], 0.05, 0.1)]
    assert best_point(found) == jobs[1].point
    assert best_point([failure(jobs[3], "x"), found[2]]) == jobs[2].point
    assert best_point([failure(jobs[3], "x")]) is None


def test_a_grid_that_failed_throughout_fails_its_runs(tmp_path: Path) -> None:
    tuned = plan(heads=["softmax"], tune=True)
    store = begun(tmp_path, tuned)
    schedule = Schedule(tuned, store)
    while (job := schedule.next()) is not None:
        schedule.finished(job, failure(job, "no luck"))
    assert schedule.left == 0
    assert schedule.failed()["runs/mnist-1k.released.softmax.seed0"] == (
        "none of the 12 grid points could be trained: no luck"
    )
    # A failed run is a result; --repair gives it another chance.
    assert Schedule(tuned, store).left == 0
    assert Schedule(tuned, store, repair=True).left == 14


def test_a_directory_whose_process_was_killed_before_it_had_a_plan_can_be_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / ".lock").touch()
    store.file.write_text('{"kind": "pl')
    with pytest.warns(UserWarning, match="ignored the last line"):
        store.join(plan(), "a test")
    assert [group.key for group in store.plan().groups] == [group.key for group in plan().groups]


@pytest.mark.parametrize("keep", [False, True])
def test_a_kill_between_the_record_and_the_end_of_its_scratch_directory_leaves_nothing(
    tmp_path: Path, keep: bool
) -> None:
    store = begun(tmp_path, plan())
    done, cut_off, _ = plan(runs=3).groups[0].run_jobs({}, 3)
    for each in (done, cut_off):
        store.work(each).mkdir(parents=True)
        (store.work(each) / "model").touch()
    store.append(result(done))  # and killed here
    schedule = Schedule(plan(runs=3), store, keep_runs=keep)
    assert list(schedule.results) == [done.id]
    assert [path.name for path in (tmp_path / "work").iterdir()] == [store.work(cut_off).name]
    assert (store.model(done) / "model").exists() == keep


def test_a_full_disk_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise CannotWrite("cannot write model.safetensors: No space left on device")

    tiny = {"training.epochs": 1, "data.train_size": 20, "data.validation_size": 20, "network.name": "mlp"}
    job = plan(overrides=tiny).groups[0].run_jobs({}, 1)[0]
    checkpoint = tmp_path / "work" / "checkpoint-000001.pt"
    with monkeypatch.context() as patch:
        patch.setattr("dropmax.workbench.training.loop.save_model", full)
        with pytest.raises(CannotWrite):
            run_job(job, tmp_path / "work")
        before = checkpoint.stat()
        with pytest.raises(CannotWrite):  # nor does it cost what was done before
            run_job(job, tmp_path / "work")
    assert checkpoint.stat().st_ino == before.st_ino
    assert run_job(job, tmp_path / "work").status == "done"
