"""Hyper-parameters taken over from another table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dropmax.errors import InvalidValue, RunError
from dropmax.lab.experiments import Plan, plan_table, tuned_from
from dropmax.lab.experiments.records import failure
from dropmax.lab.experiments.tables import make_table
from tests.lab.experiments.results import begun, result

HEADS = ["softmax", "dropmax-qp"]


def source(path: Path, *, leave_out: int = 0, data: tuple[str, ...] = ("mnist-1k",)) -> Path:
    """A directory in which the grid point number 5 of each head won."""
    plan = plan_table(list(data), heads=HEADS, runs=1)
    store = begun(path, plan)
    for group in plan.groups:
        jobs = group.tune_jobs()
        for number, job in enumerate(jobs[: len(jobs) - leave_out]):
            store.append(result(job, error=0.01 if number == 5 else 0.05))
    return path


def larger(heads: list[str] = HEADS) -> Plan:
    return plan_table(["mnist-5k"], heads=heads, schedule_scale=0.2)


def test_every_head_takes_the_point_that_won_and_is_not_tuned_again(tmp_path: Path) -> None:
    where = source(tmp_path / "small")
    plan = tuned_from(larger(), where)
    assert plan.count == 2 * 5
    assert plan.tuned_on == "mnist-1k.released"
    for group, original in zip(plan.groups, plan_table(["mnist-1k"], heads=HEADS).groups, strict=True):
        won = original.points[5]
        assert group.recipe.override(won) == group.recipe
        assert group.recipe.data.name == "mnist-5k"
        assert group.recipe.training.epochs == 40
    assert plan.groups[0].recipe != larger().groups[0].recipe


def test_the_table_says_where_it_was_tuned_and_the_directory_takes_no_other_plan(tmp_path: Path) -> None:
    plan = tuned_from(larger(), source(tmp_path / "small"))
    store = begun(tmp_path / "large", plan)
    assert store.plan().tuned_on == plan.tuned_on
    assert any("won on the hold-out set of mnist-1k.released" in note for note in make_table(store).notes)
    job = plan.groups[0].run_jobs({}, 1)[0]
    store.append(failure(job, "made up"))
    with pytest.raises(RunError, match=r'--tuned-from: "mnist-1k.released" there and "" here'):
        store.check(larger())


@pytest.mark.parametrize(
    ("options", "heads", "message"),
    [
        ({"leave_out": 2}, HEADS, r"10 of 12 grid points of softmax are done there: finish that table first"),
        ({}, ["sparsemax"], r"has no tuned 'sparsemax', only softmax, dropmax-qp"),
        ({"data": ("mnist-1k", "mnist-5k")}, HEADS, r"holds 2 tuned columns \(mnist-1k.released, mnist-5k.released\)"),
    ],
)
def test_a_source_that_cannot_serve_is_refused(
    tmp_path: Path, options: dict[str, Any], heads: list[str], message: str
) -> None:
    where = source(tmp_path / "small", **options)
    with pytest.raises(InvalidValue, match=message):
        tuned_from(larger(heads), where)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there are no results in"):
        tuned_from(larger(), tmp_path / "nowhere")
