"""The plan: how many runs, the same budget for every head, names that are unique and stay the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dropmax.cli.reproduce import _plan
from dropmax.errors import DropMaxError, InvalidType, InvalidValue
from dropmax.heads import HEADS, PAPER_OBJECTIVE
from dropmax.lab.experiments import Job, plan_study, plan_table, study_names
from dropmax.lab.experiments.plan import TUNING_SEED

MNIST = ["mnist-1k", "mnist-5k", "mnist-55k"]
OTHERS = ["cifar-10", "cifar-100", "awa", "awa2", "cub"]


@pytest.mark.parametrize(("data", "budget"), [(name, 12) for name in MNIST] + [(name, 3) for name in OTHERS])
def test_every_head_gets_the_same_budget(data: str, budget: int) -> None:
    plan = plan_table([data], recipe="paper", runs=5)
    assert [group.variant for group in plan.groups] == list(HEADS)
    assert {len(group.points) for group in plan.groups} == {budget}
    assert plan.count == 8 * (budget + 5)
    for group in plan.groups:
        assert len({json.dumps(point) for point in group.points}) == budget


def test_the_grids_are_the_papers() -> None:
    points = {group.variant: group.points for group in plan_table(["mnist-1k"]).groups}
    for head, own in [("sampled-softmax", "fraction"), ("random-dropmax", "retain"), ("dropmax-qp", "gamma")]:
        assert set(points[head][0]) == {"training.weight_decay", f"head.{own}"}
    for head in HEADS:
        assert {point["training.weight_decay"] for point in points[head]} == {0.0, 1e-5, 1e-4, 1e-3}
    assert {point["head.fraction"] for point in points["sampled-softmax"]} == {0.2, 0.4, 0.6}
    assert {point["head.retain"] for point in points["random-dropmax"]} == {0.2, 0.4, 0.6}
    assert {point["head.gamma"] for point in points["dropmax-qp"]} == {1.0, 0.1, 0.01}
    rates = sorted({point["training.learning_rate"] for point in points["dropmax"]})
    assert rates == pytest.approx([1e-3 / 3, 1e-3, 3e-3], rel=1e-3)


@pytest.mark.parametrize("data", MNIST + OTHERS)
def test_the_papers_search_is_weight_decay_on_mnist_and_the_options_of_three_heads(data: str) -> None:
    own = {
        "sampled-softmax": {"head.fraction": [0.2, 0.4, 0.6]},
        "random-dropmax": {"head.retain": [0.2, 0.4, 0.6]},
        "dropmax-qp": {"head.gamma": [1.0, 0.1, 0.01]},
    }
    decay = {"training.weight_decay": [0.0, 1e-5, 1e-4, 1e-3]} if data in MNIST else {}
    for group in plan_table([data], recipe="paper", tune="paper").groups:
        expected = decay | own.get(group.variant, {})
        assert {name for point in group.points for name in point} == set(expected)
        for name, values in expected.items():
            assert sorted({point[name] for point in group.points}) == sorted(values)
        assert len(group.points) == (math.prod(map(len, expected.values())) if expected else 0)


@pytest.mark.parametrize("data", OTHERS)
def test_the_papers_runs_use_all_training_images_and_tuning_holds_some_out(data: str) -> None:
    (group,) = plan_table([data], recipe="paper", heads=["dropmax-qp"]).groups
    assert {job.recipe.data.validation_size for job in group.run_jobs(group.points[0], 5)} == {0}
    assert {job.recipe.data.validation_size for job in group.tune_jobs()} == {-1}  # the data set's default
    (mine,) = plan_table([data], recipe="paper", heads=["dropmax-qp"], overrides={"data.validation_size": 500}).groups
    assert {job.recipe.data.validation_size for job in mine.tune_jobs() + mine.run_jobs({}, 1)} == {500}


def test_an_unknown_search_is_refused() -> None:
    with pytest.raises(InvalidValue, match="unknown search 'papr': did you mean 'paper'"):
        plan_table(["mnist-1k"], tune="papr")


def test_weight_decay_is_fixed_outside_of_mnist() -> None:
    for group in plan_table(["cub"]).groups:
        assert all("training.weight_decay" not in point for point in group.points)
        assert group.recipe.training.weight_decay == 1e-3


def test_seeds_of_tuning_and_runs_differ_and_recipes_carry_them() -> None:
    group = plan_table(["mnist-1k"], heads=["dropmax-qp"]).groups[0]
    tuning, runs = group.tune_jobs(), group.run_jobs(group.points[5], 3)
    assert {job.seed for job in tuning} == {TUNING_SEED}
    assert [job.seed for job in runs] == [0, 1, 2]
    for job in [*tuning, *runs]:
        assert job.recipe.training.weight_decay == job.point["training.weight_decay"]
        assert job.recipe.head == {"name": "dropmax-qp", "gamma": job.point["head.gamma"]}


def test_names_are_unique_and_stay_as_they_are() -> None:
    plan = plan_table(MNIST, recipe="released")
    ids = [job.id for group in plan.groups for job in group.tune_jobs() + group.run_jobs({}, plan.runs)]
    assert len(ids) == len(set(ids)) == plan.count == 3 * 136
    # Results that people have on disk are found by these.
    for name in (
        "tune/mnist-1k.released.softmax.weight_decay=1e-05,learning_rate=0.0003333",
        "tune/mnist-5k.released.dropmax-qp.weight_decay=0,gamma=0.01",
        "runs/mnist-55k.released.deterministic-dropmax.seed4",
    ):
        assert name in ids


def test_a_job_survives_json() -> None:
    job = plan_table(["mnist-1k"], heads=["dropmax"]).groups[0].tune_jobs()[7]
    back = Job.from_dict(json.loads(json.dumps(job.to_dict())))
    assert back.id == job.id
    assert back.recipe.to_toml() == job.recipe.to_toml()


@pytest.mark.parametrize(("scale", "epochs"), [(1.0, 200), (0.1, 20), (0.001, 1), (2.0, 400)])
def test_the_schedule_is_scaled_and_never_empty(scale: float, epochs: int) -> None:
    recipe = plan_table(["mnist-1k"], heads=["dropmax"], schedule_scale=scale, train_size=300).groups[0].recipe
    assert recipe.training.epochs == epochs
    assert recipe.data.train_size == 300
    assert recipe.training.milestones == (0.3333333333, 0.6666666667)


def test_a_value_that_is_set_is_not_tuned() -> None:
    plan = plan_table(["mnist-1k"], overrides={"training.weight_decay": 0.5})
    assert {len(group.points) for group in plan.groups} == {3}
    for group in plan.groups:
        assert {job.recipe.training.weight_decay for job in group.tune_jobs()} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": ["mnist-1kk"]}, "unknown data set 'mnist-1kk': did you mean 'mnist-1k'"),
        ({"heads": ["dropmaxx"]}, "unknown head 'dropmaxx': did you mean 'dropmax'"),
        ({"recipe": "relased"}, "unknown recipe for mnist-1k 'relased': did you mean 'released'"),
        ({"runs": 0}, "--runs must be at least 1"),
        ({"schedule_scale": 0.0}, "--schedule-scale must be above 0"),
        ({"train_size": -1}, "--train-size must be at least 1"),
        ({"overrides": {"head.name": "softmax"}}, "choose rows with --heads"),
        ({"overrides": {"training.epoch": 1}}, "did you mean 'epochs'"),
        ({"overrides": {"training.learning_rate": 0.1}}, "tuned over 4 points and .* over 12.*--no-tune"),
    ],
)
def test_mistakes_are_explained(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"data": ["mnist-1k"], **arguments}
    with pytest.raises(DropMaxError, match=message):
        plan_table(**given)  # type: ignore[arg-type]


# --- studies -----------------------------------------------------------------------------------------------------


def study(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


def test_a_study_is_read(tmp_path: Path) -> None:
    path = study(
        tmp_path,
        """
        [base]
        data = ["mnist-1k", "mnist-5k"]
        recipe = "released"
        runs = 3
        overrides."training.epochs" = 50
        [variants.no-kl]
        "head.kl_weight" = 0
        [variants.smooth]
        head.name = "softmax"        # without quotes it is a nested table, and means the same
        grid."head.label_smoothing" = [0.05, 0.1]
        """,
    )
    plan = plan_study(path, schedule_scale=0.1, overrides={"data.validation_size": 7})
    assert plan.is_study
    assert plan.runs == 3
    assert [group.key for group in plan.groups] == [
        "mnist-1k.released.no-kl",
        "mnist-1k.released.smooth",
        "mnist-5k.released.no-kl",
        "mnist-5k.released.smooth",
    ]
    no_kl, smooth = plan.groups[:2]
    assert no_kl.recipe.head == {"name": "dropmax", "stop_gradient": "logits", **PAPER_OBJECTIVE, "kl_weight": 0}
    assert no_kl.points == ()
    assert smooth.recipe.head == {"name": "softmax"}
    assert smooth.points == ({"head.label_smoothing": 0.05}, {"head.label_smoothing": 0.1})
    assert {group.recipe.training.epochs for group in plan.groups} == {5}
    assert {group.recipe.data.validation_size for group in plan.groups} == {7}
    assert plan_study(path, runs=2).runs == 2


@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_can_be_built_and_have_no_row_twice(name: str) -> None:
    from dropmax.workbench.training import build

    plan = plan_study(name)
    recipes = [json.dumps([group.data, group.recipe.to_dict(), group.points], sort_keys=True) for group in plan.groups]
    assert len(recipes) == len(set(recipes))
    for group in plan.groups:
        if group.data.startswith("mnist"):
            build(group.recipe, (1, 28, 28), 10)


BASE = '[base]\ndata = "mnist-1k"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"\[base\] must be a table"),
        (BASE, r"\[variants\] must be a table"),
        ("[base]\n[variants.a]\n", r"\[base\] must be a table"),
        ('[base]\nrecipe = "paper"\n[variants.a]\n', "needs data"),
        (BASE + "run = 3\n[variants.a]\n", "unknown key of \\[base\\] 'run': did you mean 'runs'"),
        (BASE + "runs = 2.5\n[variants.a]\n", "base.runs must be a whole number"),
        (BASE + "[variant.a]\n", r"unknown table 'variant': did you mean 'variants'"),
        (BASE + '[variants."a/b"]\n', "letters, digits"),
        (BASE + '[variants.a]\n"training.epoch" = 3\n', r"\[variants.a\].*did you mean 'epochs'"),
        (BASE + '[variants.a]\ngrid."head.gamma" = 3\n', "must be a list of values"),
        (BASE + '[variants.a]\ngrid."training.epochs" = [0]\n', r"\[variants.a\].*at least 1"),
        ("[base", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_study_are_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((InvalidValue, InvalidType), match=message):
        plan_study(study(tmp_path, text))


def test_a_study_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"cannot read the study .*nowhere\.toml"):
        plan_study(tmp_path / "nowhere.toml")
    with pytest.raises(InvalidValue, match="unknown study 'mnist-ablation': did you mean 'mnist-1k-ablation'"):
        plan_study("mnist-ablation")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"study": "many-classes", "heads": "softmax"}, "a --study names its own variants"),
        ({"study": "many-classes", "tune": False}, "a --study names its own variants"),
        ({"data": []}, "name the columns to reproduce"),
    ],
)
def test_a_plan_that_was_asked_for_wrongly(asked: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {
        "data": ["mnist-1k"], "study": None, "recipe": None, "heads": "all", "runs": None, "tune": True,
        "schedule_scale": 1.0, "train_size": 0, "settings": [],
    }  # fmt: skip
    with pytest.raises(InvalidValue, match=message):
        _plan(**{**usual, **asked})  # type: ignore[arg-type]
