"""A directory of results: what belongs together, what is damaged, and what is done about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropmax.errors import RunError
from dropmax.lab.experiments import Plan, Store, plan_table
from dropmax.lab.experiments.schedule import Schedule, best_point
from dropmax.lab.experiments.store import _check_result
from dropmax.lab.experiments.worker import failure
from tests.lab.experiments.results import fill, result


def plan(**changes: object) -> Plan:
    given: dict[str, object] = {"data": ["mnist-1k"], "heads": ["softmax", "dropmax"], "runs": 2, "tune": False}
    return plan_table(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "out")
    fill(store, plan(), {(head, "mnist-1k"): [0.05, 0.06] for head in ("softmax", "dropmax")})
    return store


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
    before = (store.path / "plan.json").read_bytes()
    with pytest.raises(RunError, match=f"holds results of a different plan: {message}; choose another place"):
        store.join(plan(**changes), "dropmax")
    assert (store.path / "plan.json").read_bytes() == before


def test_a_recipe_that_changed_under_the_results_is_noticed(store: Store) -> None:
    stored = json.loads((store.path / "plan.json").read_text())
    stored["groups"]["mnist-1k.released.dropmax"]["recipe"]["training"]["batch_size"] = 64
    (store.path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(RunError, match=r"mnist-1k.released.dropmax: training.batch_size is 64 there and 100 here"):
        store.check(plan())


def test_a_field_that_recipes_got_later_is_no_difference(store: Store) -> None:
    stored = json.loads((store.path / "plan.json").read_text())
    for group in stored["groups"].values():
        del group["recipe"]["training"]["clip_norm"]
    (store.path / "plan.json").write_text(json.dumps(stored))
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
    assert store.plan_dict()["commands"] == ["dropmax", "again", "less"]  # type: ignore[index]


def test_a_plan_of_which_nothing_was_done_can_be_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.join(plan(), "one")
    store.join(plan(schedule_scale=0.5), "two")
    assert store.plan().schedule_scale == 0.5


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"is not empty and holds no plan\.json"):
        Store(tmp_path).join(plan(), "dropmax")
    with pytest.raises(RunError, match="is not a directory"):
        Store(tmp_path / "thesis.tex").join(plan(), "dropmax")
    with pytest.raises(RunError, match="there are no results in"):
        Store(tmp_path / "nowhere").plan()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:100], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: "{}", "is damaged .no 'sha256'"),
        (lambda text: text.replace('"error": 0.05', '"error": 0.01'), "changed after it was written"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "format 9, expected 1"),
    ],
)
def test_a_damaged_file_is_named_and_done_again_only_when_told(store: Store, damage: object, message: str) -> None:
    file = store.path / "runs" / "mnist-1k.released.softmax.seed0.json"
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    with pytest.raises(RunError, match=rf"softmax\.seed0\.json.*{message}.*--repair"):
        Schedule(plan(), store)
    schedule = Schedule(plan(), store, repair=True)
    assert schedule.left == 1
    job = schedule.next()
    assert job is not None
    assert job.id == "runs/mnist-1k.released.softmax.seed0"
    schedule.finished(job, result(job))
    assert Schedule(plan(), store).left == 0


def test_a_result_in_the_wrong_place_or_of_another_recipe_is_not_taken(store: Store) -> None:
    runs = store.path / "runs"
    (runs / "mnist-1k.released.softmax.seed1.json").write_bytes(
        (runs / "mnist-1k.released.softmax.seed0.json").read_bytes()
    )
    with pytest.raises(RunError, match=r"holds the result of 'runs/mnist-1k.released.softmax.seed0'"):
        Schedule(plan(), store)
    job = plan(overrides={"training.epochs": 7}).groups[0].run_jobs({}, 2)[1]
    store.write(job, result(job))
    with pytest.raises(RunError, match=r"another recipe .training.epochs is 7 there and 200 here"):
        Schedule(plan(), store)


def test_runs_wait_for_the_grid_and_take_its_best_point(tmp_path: Path) -> None:
    store, tuned = Store(tmp_path), plan(heads=["softmax", "dropmax-qp"], tune=True)
    store.join(tuned, "dropmax")
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
    last = json.loads((tmp_path / "runs" / "mnist-1k.released.dropmax-qp.seed1.json").read_text())
    assert last["recipe"]["head"]["gamma"] == 0.1
    assert last["recipe"]["training"]["weight_decay"] == 1e-4
    assert all("test" not in found for found in store.results("tune"))
    again = Schedule(tuned, store)
    assert (again.left, again.found, again.next()) == (0, 28, None)


def test_the_best_point_breaks_ties_by_likelihood_and_skips_failures() -> None:
    jobs = plan(heads=["dropmax-qp"], tune=True).groups[0].tune_jobs()
    found = [result(jobs[0], 0.04, 0.3), result(jobs[1], 0.04, 0.2), result(jobs[2], 0.05, 0.1)]
    assert best_point(found) == jobs[1].point
    assert best_point([failure(jobs[3], "x"), found[2]]) == jobs[2].point
    assert best_point([failure(jobs[3], "x")]) is None


def test_a_grid_that_failed_throughout_fails_its_runs(tmp_path: Path) -> None:
    store, tuned = Store(tmp_path), plan(heads=["softmax"], tune=True)
    store.join(tuned, "dropmax")
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
    (tmp_path / ".plan.json.abcd_123.tmp").write_text("{")
    store.join(plan(), "a test")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "plan.json", "runs", "tune", "work"]


def test_a_kill_between_the_result_and_the_end_of_its_scratch_directory_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.join(plan(), "a test")
    job, other, kept = plan().groups[0].run_jobs({}, 3)
    for each in (job, other, kept):
        store.work(each).mkdir()
        (store.work(each) / "model").touch()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def written_and_killed(*given: Any) -> None:
        Store(tmp_path).write(*given)
        killed()

    for each, write in ((other, killed), (job, written_and_killed)):
        with monkeypatch.context() as patch:
            patch.setattr(store, "write", write)
            with pytest.raises(KeyboardInterrupt):
                store.finish(each, result(each))
    store.finish(kept, result(kept), keep_run=True)
    assert not store.work(job).exists()
    schedule = Schedule(plan(runs=3), store)
    assert sorted(schedule.results) == [job.id, kept.id]
    # The first has its result. The second had none: its trained model is back. The third was to be kept.
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == sorted(
        store.work(each).name for each in (other, kept)
    )
    assert (store.work(other) / "model").exists()
    store.finish(other, result(other))
    assert [path.name for path in (tmp_path / "work").iterdir()] == [store.work(kept).name]


def test_a_full_disk_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmax.lab.experiments.worker import run_job
    from dropmax.workbench.files import CannotWrite

    def full(*_: object, **__: object) -> None:
        raise CannotWrite("cannot write model.safetensors: No space left on device")

    tiny = {"training.epochs": 1, "data.train_size": 20, "data.validation_size": 20, "network.name": "mlp"}
    job = plan(overrides=tiny).groups[0].run_jobs({}, 1)[0]
    checkpoint = tmp_path / "work" / "checkpoint-000001.pt"
    with monkeypatch.context() as patch:
        patch.setattr("dropmax.workbench.training.loop.save_model", full)
        with pytest.raises(CannotWrite):
            run_job(job, tmp_path / "work")
        begun = checkpoint.stat()
        with pytest.raises(CannotWrite):  # nor does it cost what was done before
            run_job(job, tmp_path / "work")
    assert checkpoint.stat().st_ino == begun.st_ino
    assert run_job(job, tmp_path / "work")["status"] == "done"


@pytest.mark.parametrize(
    "change",
    [
        {"status": "failed", "reason": "x", "test": 3},
        {"status": "failed", "reason": "x", "validation": {"mean": [1]}},
        {"provenance": None},
        {"provenance": {"versions": [["python", "3"]], "machine": {"processor": "", "cores": 2}, "commit": None}},
    ],
)
def test_parts_of_the_wrong_kind_are_found_before_a_table_is_made(store: Store, change: dict[str, object]) -> None:
    file = store.path / "runs" / "mnist-1k.released.softmax.seed0.json"
    whole = json.loads(file.read_text())
    _check_result(whole)
    with pytest.raises((ValueError, TypeError, AttributeError)):  # all of which become "is damaged"
        _check_result({**whole, **change})
