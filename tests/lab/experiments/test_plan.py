"""The plan: how many runs, the same budget for every head, names that are unique and stay the same."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dropmax.cli.reproduce import _plan
from dropmax.errors import DropMaxError, InvalidType, InvalidValue, RunError
from dropmax.heads import HEADS, PAPER_OBJECTIVE, Softmax
from dropmax.lab.experiments import Job, plan_study, plan_table, study_names
from dropmax.lab.experiments.paper import ROWS
from dropmax.lab.experiments.plan import TUNING_SEED
from dropmax.lab.experiments.worker import run_job
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import build

MNIST = ["mnist-1k", "mnist-5k", "mnist-55k"]
OTHERS = ["cifar-10", "cifar-100", "awa", "awa2", "cub"]


@pytest.mark.parametrize(("data", "budget"), [(name, 12) for name in MNIST] + [(name, 3) for name in OTHERS])
def test_every_head_gets_the_same_budget(data: str, budget: int) -> None:
    plan = plan_table([data], recipe="paper", runs=5)
    assert [group.variant for group in plan.groups] == list(ROWS)
    assert {len(group.points) for group in plan.groups} == {budget}
    assert plan.count == 8 * (budget + 5)
    for group in plan.groups:
        assert len({json.dumps(point) for point in group.points}) == budget
        assert all(("training.weight_decay" in point) == (data in MNIST) for point in group.points)


def test_heads_without_an_option_of_their_own_search_the_learning_rate() -> None:
    points = {group.variant: group.points for group in plan_table(["mnist-1k"]).groups}
    assert set(points["dropmax-qp"][0]) == {"training.weight_decay", "head.gamma"}
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
        ({"tune": "papr"}, "unknown search 'papr': did you mean 'paper'"),
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
    expected = [f"{data}.released.{variant}" for data in ("mnist-1k", "mnist-5k") for variant in ("no-kl", "smooth")]
    assert [group.key for group in plan.groups] == expected
    no_kl, smooth = plan.groups[:2]
    assert no_kl.recipe.head == {"name": "dropmax", "stop_gradient": "logits", **PAPER_OBJECTIVE, "kl_weight": 0}
    assert no_kl.points == ()
    assert smooth.recipe.head == {"name": "softmax"}
    assert smooth.points == ({"head.label_smoothing": 0.05}, {"head.label_smoothing": 0.1})
    assert {group.recipe.training.epochs for group in plan.groups} == {5}
    assert {group.recipe.data.validation_size for group in plan.groups} == {7}
    assert plan_study(path, runs=2).runs == 2


def test_rows_without_a_grid_of_their_own_take_the_shared_one(tmp_path: Path) -> None:
    shared = 'grid."training.weight_decay" = [0.0, 1e-4]\n'
    own = '[variants.own]\ngrid."head.kl_weight" = [0.5]\n[variants.untuned]\n"head.kl_weight" = 0.1\ngrid = {}\n'
    plan = plan_study(study(tmp_path, BASE + shared + "[variants.shared]\n" + own))
    decays = ({"training.weight_decay": 0.0}, {"training.weight_decay": 1e-4})
    expected = {"shared": decays, "own": ({"head.kl_weight": 0.5},), "untuned": ()}
    assert {group.variant: group.points for group in plan.groups} == expected
    fixed = plan_study(tmp_path / "study.toml", overrides={"training.weight_decay": 0.1})
    assert fixed.groups[0].points == ()


@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_can_be_built_and_have_no_row_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a study of files looks for them
    for file in ("cub-efficientnet-lite0.npz", "banking77.npz", "clinc150.npz"):
        (tmp_path / file).touch()
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
        (BASE + 'grid."head.gamma" = 3\n[variants.a]\n', r"\[base\]: grid: head.gamma must be a list of values"),
        (BASE + "grid = 3\n[variants.a]\n", r"\[base\]: grid must be a table"),
        (BASE + '[variants.a]\ngrid."head.gama" = [1.0]\n"head.name" = "focal"\n', "'gama': did you mean 'gamma'"),
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
    usual: dict[str, object] = {"data": ["mnist-1k"], "study": None, "heads": "all", "runs": None, "tune": True}
    usual |= {"trust_code": False, "shared": {}}
    with pytest.raises(InvalidValue, match=message):
        _plan(**{**usual, **asked})  # type: ignore[arg-type]


# --- data, recipes and heads of one's own --------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A small table of features, in a folder of its own."""
    rng = np.random.default_rng(0)
    rows = [",".join(f"{v:.3f}" for v in rng.normal(k % 3, 1, 4)) + f",{'abc'[k % 3]}" for k in range(120)]
    path = tmp_path / "my flowers.csv"
    path.write_text("\n".join(["p,q,r,s,label", *rows]))
    return path


def test_a_variant_that_overrides_the_data_has_a_column_of_that_name(tmp_path: Path, table: Path) -> None:
    path = study(
        tmp_path,
        BASE
        + '[variants.small]\n[variants.large]\n"data.name" = "mnist-5k"\n'
        + f'[variants.mine]\n"data.name" = "{table.name}"\n"network.name" = "mlp"\n',
    )
    plan = plan_study(path)
    assert [group.key for group in plan.groups] == [
        "mnist-1k.released.small",
        "mnist-5k.mnist-1k.released.large",
        "my-flowers.mnist-1k.released.mine",
    ]
    assert plan.groups[2].recipe.data.name == str(table), "paths in a study begin at its folder"


def test_set_data_name_names_the_column_too() -> None:
    plan = plan_table(["mnist-1k"], heads=["softmax"], tune=False, overrides={"data.name": "mnist-5k"})
    assert plan.groups[0].data == "mnist-5k"


def test_own_data_and_recipe_files(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (group,) = plan_table([table.name], heads=["softmax"], tune=False).groups
    assert (group.data, group.recipe_name, group.recipe.network["name"]) == ("my-flowers", "default", "mlp")
    assert load_recipe("own-features").training.refit
    assert not group.recipe.training.refit, "runs that are compared keep their held-out rows"
    recipe = tmp_path / "mine.toml"
    recipe.write_text(group.recipe.override({"training.epochs": 3}).to_toml())
    (group,) = plan_table(["mnist-1k"], recipe="mine.toml", heads=["softmax"], tune=False).groups
    assert (group.key, group.recipe.training.epochs) == ("mnist-1k.mine.softmax", 3)
    path = study(tmp_path, '[base]\nrecipe = "mine.toml"\n[variants.a]\n[variants.b]\nrecipe = "mine.toml"\n')
    assert [group.key for group in plan_study(path).groups] == ["my-flowers.mine.a", "my-flowers.mine.b"]
    copy = tmp_path / "copies" / table.name
    copy.parent.mkdir()
    copy.write_text(table.read_text())
    with pytest.raises(InvalidValue, match=r"would both be the column 'my-flowers': rename one"):
        plan_table([str(table), str(copy)], heads=["softmax"], tune=False)
    other = tmp_path / "mnist-1k.csv"
    other.write_text(table.read_text())
    assert plan_table([str(other)], heads=["softmax"], tune=False).groups[0].data == "own-mnist-1k"


FUNCTION = """
import numpy as np
def flowers():
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    return {"train": (rng.normal(labels[:, None], 1, (90, 4)), labels), "test": (np.zeros((9, 4)), labels[:9])}
def broken():
    raise RuntimeError("no petals\\nleft today")
def crooked():
    return np.zeros((3, 4)), np.zeros(2, int)
"""


def test_data_from_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "petals_of_mine.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = study(tmp_path, '[base]\ndata = "petals_of_mine:flowers"\n[variants.a]\n"head.name" = "softmax"\n')
    with pytest.raises(RunError, match=r"study\.toml would import 'petals_of_mine:flowers'.*add --trust-code"):
        plan_study(path)
    assert "petals_of_mine" not in sys.modules
    plan = plan_study(path, runs=1, overrides={"training.epochs": 1}, trust_code=True)
    (group,) = plan.groups
    assert group.key == "petals_of_mine.flowers.default.a"
    result = run_job(group.run_jobs({}, 1)[0], tmp_path / "work")
    assert (result.status, result.examples["test"]) == ("done", 9)
    for name, message in (
        ("petals_of_mine:broken", "RuntimeError: left today"),
        ("petals_of_mine:crooked", "3, 4.* for 2 labels"),
        ("petals_of_mine:none", "has no function 'none'"),
        ("petals_of_nobody:flowers", "there is no module 'petals_of_nobody'"),
    ):
        with pytest.raises(DropMaxError, match=message):
            plan_table([name], heads=["softmax"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[variants.a]\n"network.name" = "stranger:Net"\n', r"would import 'stranger:Net' .network.name.*--trust-code"),
        ('[variants.a]\ngrid."head.name" = ["softmax", "stranger:Head"]\n', "would import 'stranger:Head'"),
        ('[variants.a]\ngrid."data.name" = ["mnist-1k"]\n', "data.name cannot be tuned"),
        ("[variants.a]\n[variants.b]\n[variants.a]\n", r"is not valid TOML: Cannot declare .*'a'.* twice"),
        ('[variants.a]\nrecipe = "nowhere.toml"\n', r"cannot read the recipe .*nowhere\.toml"),
    ],
)
def test_what_a_study_may_not_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DropMaxError, match=message):
        plan_study(study(tmp_path, BASE + text))


def test_a_registered_head_is_a_row_and_all_means_the_papers_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "mine", Softmax)
    groups = plan_table(["mnist-1k"], heads=["mine", "focal", "softmax"]).groups
    assert [group.variant for group in groups] == ["softmax", "mine", "focal"]
    assert [group.variant for group in plan_table(["mnist-1k"]).groups] == list(ROWS)
