"""Six ways to ask a calibrated model about the same input give the same number."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dropmax.lab.explorer import Explorer
from dropmax.lab.figures.runs import load_runs
from dropmax.lab.report.sections import hardest_section
from dropmax.sklearn import DropMaxClassifier
from dropmax.workbench.evaluation import predict
from dropmax.workbench.export import export
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_data, load_model, train
from dropmax.workbench.training.trained import write_model
from tests.cli.asking import answer, as_json, notes, predicted, refusal


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    random = np.random.default_rng(0)
    x = random.normal(size=(600, 8))
    y = (2 * x[:, :4] + random.normal(size=(600, 4))).argmax(1)
    np.savez(place / "rows.npz", x=x.astype(np.float32), y=y)
    values = {"data.name": str(place / "rows.npz"), "training.epochs": 12, "network.hidden": [16]}
    values["training.refit"] = False  # the same model that was calibrated
    train(load_recipe("own-features").override({**values, "data.validation_size": 120}), place / "run", quiet=True)
    return place / "run"


@pytest.mark.parametrize("mode", ["mean", "exact"])
def test_six_ways_to_ask_have_one_answer(run: Path, mode: str, tmp_path: Path) -> None:
    trained = load_model(run)
    found = trained.calibration
    assert found is not None
    trained.model.head.calibration = chosen = replace(found, mode=mode)  # whichever won: both must agree everywhere
    write_model(run / "model.safetensors", trained)
    data = load_data(trained.recipe, run=run)
    report = load_runs([run])[0]
    card = hardest_section(report)[0]
    row, truth = card["index"], int(data.test.labels[card["index"]])
    np.savez(tmp_path / "one.npz", x=data.test.inputs[[row]].numpy(), y=data.test.labels[[row]].numpy())

    answers = {"report": [one["p"] for one in card["classes"]]}
    (asked,) = predicted(run, tmp_path / "one.npz", "--all-probabilities")
    answers["predict"] = list(asked["probabilities"].values())
    answers["explore"] = [one["p"] for one in Explorer.open(run).example(row)["rows"]]
    export(run, tmp_path / "model.pt2", format="torch-export")
    module = torch.export.load(tmp_path / "model.pt2").module()
    answers["export"] = module(data.test.inputs[[row]])["probabilities"][0].tolist()
    estimator = DropMaxClassifier((16,), max_iter=1, tol=1e9, n_iter_no_change=1, early_stopping=False)
    estimator.fit(data.train.inputs.numpy(), data.train.labels.numpy())
    estimator.scaler_.mean_, estimator.scaler_.scale_ = np.array(trained.mean), np.array(trained.std)
    estimator.model_ = load_model(run).model
    estimator.conformalize(data.validation.inputs.numpy(), data.validation.labels.numpy())
    assert estimator.calibration_.temperatures == pytest.approx(dict(found.temperatures), rel=1e-5)
    estimator.model_.head.calibration = replace(estimator.calibration_, mode=mode)
    answers["estimator"] = estimator.predict_proba(data.test.inputs[[row]].numpy(), calibrated=True)[0].tolist()
    expected = trained.answer(data.test.inputs[[row]]).probs[0].tolist()
    for name, numbers in answers.items():
        assert numbers == pytest.approx(expected, abs=2e-6), name  # six digits are printed
    measured = as_json("evaluate", run, tmp_path / "one.npz")
    assert math.exp(-measured["nll"]) == pytest.approx(expected[truth], rel=1e-4)
    assert measured["mode"] == mode
    assert measured["calibration"]["temperatures"] == dict(chosen.temperatures)
    raw = trained.answer(data.test.inputs[[row]], mode=mode).probs[0]
    assert not torch.allclose(raw, torch.tensor(expected), atol=1e-3)  # the temperature is at work


def test_predict_prints_the_set_of_a_coverage(run: Path, tmp_path: Path) -> None:
    trained = load_model(run)
    data = load_data(trained.recipe, run=run)
    np.savez(tmp_path / "rows.npz", x=data.test.inputs.numpy())
    outputs = trained.answer(data.test.inputs)
    states = set()
    for coverage in (0.6, 0.95):
        rows = predicted(run, tmp_path / "rows.npz", "--coverage", coverage)
        for row, verdict in zip(rows, outputs.verdicts(coverage), strict=True):
            assert row["state"] == verdict.state
            states.add(row["state"])
            assert [one["class"] for one in row["set"]] == [trained.classes[k] for k in verdict.classes]
            assert [one["class"] for one in row["confusable"]] == [trained.classes[k] for k in verdict.classes[1:]]
    assert states >= {"sure", "torn"}
    table = answer("predict", run, tmp_path / "rows.npz", "--coverage", 0.95)
    assert "could be (95 % coverage)" in table
    torn = next(line for line, row in zip(table.splitlines()[1:], rows, strict=True) if row["state"] == "torn")
    assert "torn between " in torn
    assert "(ρ 0." in torn


def test_evaluate_measures_sets_and_outside_inputs(run: Path, tmp_path: Path) -> None:
    trained = load_model(run)
    assert trained.calibration is not None
    data = load_data(trained.recipe, run=run)
    split = np.array(["train"] * 2 + ["outside"] * 7)
    np.savez(tmp_path / "far.npz", x=np.zeros((9, 8)), y=np.full(9, -1), split=split)
    found = as_json("evaluate", run, "--outside", tmp_path / "far.npz")
    outputs = trained.answer(data.test.inputs)
    assert [row["coverage"] for row in found["sets"]] == [0.9, 0.95, 0.99]
    for row in found["sets"]:
        sets = outputs.sets(row["coverage"])
        held = sets[torch.arange(len(sets)), data.test.labels].double()
        assert row["measured"] == pytest.approx(float(held.mean()))
        assert row["mean_size"] == pytest.approx(float(sets.sum(-1).double().mean()))
        for k, each in enumerate(row["classes"]):
            mine = data.test.labels == k
            assert each["class"] == trained.classes[k]
            assert each["examples"] == int(mine.sum())
            assert each["measured"] == pytest.approx(float(held[mine].mean()))
    energy = trained.model.head.outside_score
    with torch.no_grad():
        inside = energy(trained.model.net(trained.prepare(data.test.inputs)))
        far = float(energy(trained.model.net(trained.prepare(torch.zeros(1, 8))))[0])
    scores = {row["score"]: row for row in found["outside"]["scores"]}
    assert set(scores) == {"probability", "energy", "entropy", "information"}
    assert scores["energy"]["auroc"] == pytest.approx(float((inside < far).double().mean()), abs=0.01)
    text = answer("evaluate", run, "--outside", tmp_path / "far.npz")
    assert "prediction sets" in text
    assert "AUROC" in text
    raw = as_json("evaluate", run, "--mode", "mean")
    assert raw["calibration"] is None
    assert raw["sets"] == []


def test_calibrating_again_with_other_rows(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    trained = load_model(run)
    data = load_data(trained.recipe, run=run)
    np.savez(tmp_path / "rows.npz", x=data.test.inputs.numpy(), y=data.test.labels.numpy())
    said = answer("calibrate", tmp_path / "run", tmp_path / "rows.npz")
    assert f"fitted on {len(data.test)} rows of rows.npz" in said
    again = load_model(tmp_path / "run").calibration
    assert again is not None
    assert json.loads((tmp_path / "run" / "calibration.json").read_text()) == again.to_dict()
    assert again.labels == tuple(data.test.labels.tolist())
    answer("calibrate", tmp_path / "run")
    back = load_model(tmp_path / "run").calibration
    assert back is not None
    assert back.labels == tuple(data.validation.labels.tolist())
    assert back.temperatures == pytest.approx(dict(trained.calibration.temperatures))  # type: ignore[union-attr]


def test_calibrating_by_class_changes_the_sets_of_all_commands(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    said = answer("calibrate", tmp_path / "run", "--by-class")
    assert "; sets by class." in said
    assert re.search(r"of 90 % coverage holds the classes of probability 0\.\d+ to 0\.\d+ or more", said)
    trained = load_model(tmp_path / "run")
    found = trained.calibration
    assert found is not None
    assert found.by_class
    outputs = predict(trained.model, trained.batches(load_data(trained.recipe, run=run).test))
    measured = as_json("evaluate", tmp_path / "run")
    assert measured["calibration"]["by_class"] is True
    for row in measured["sets"]:
        assert row["mean_size"] == pytest.approx(float(outputs.sets(row["coverage"]).sum(-1).double().mean()))
    assert not torch.equal(outputs.sets(0.9), replace(outputs, calibration=replace(found, by_class=False)).sets(0.9))
    asked = notes("predict", tmp_path / "run", trained.recipe.data.name, "--coverage", 0.99)
    assert "rare classes" in asked  # 120 rows of 4 classes: none has 99
    np.savez(tmp_path / "few.npz", x=np.zeros((4, 8), np.float32), y=np.arange(4))
    refused = refusal("calibrate", tmp_path / "run", tmp_path / "few.npz", "--by-class")
    assert "sets by class need 9 held-out rows of some class" in refused
    assert load_model(tmp_path / "run").calibration == found


def test_without_held_out_rows_nothing_is_calibrated_and_nothing_promised(run: Path, tmp_path: Path) -> None:
    file = load_model(run).recipe.data.name
    bare = tmp_path / "bare"
    options = ("--set", "training.epochs=1", "--set", "network.hidden=[4]", "--out", bare)
    said = answer("train", file, *options, "--set", "data.validation_size=0")
    assert "Not calibrated: no rows were held out." in said
    assert not (bare / "calibration.json").exists()
    assert "Not calibrated" in answer("evaluate", bare)
    refused = refusal("predict", bare, file, "--coverage", 0.9)
    assert "has not been calibrated, so no coverage can be promised" in refused
    assert "could be (not calibrated)" in answer("predict", bare, file)
    assert "was trained on all of its rows" in refusal("calibrate", bare)
    assert "Not calibrated: as asked." in answer("train", file, *options, "--force", "--no-calibrate")
    assert "leave out --no-calibrate" in refusal("train", "--resume", bare, "--no-calibrate")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "RUN", "FILE", "--coverage", "95"], "coverage must lie in (0, 1), got 95.0"),
        (["predict", "RUN", "FILE", "--coverage", "0"], "coverage must lie in (0, 1), got 0.0"),
        (["predict", "RUN", "FILE", "--coverage", "0.999"], "needs at least 999 calibration rows, got 120"),
        (["predict", "RUN", "FILE", "--coverage", "0.9", "--mode", "mean"], "leave out --mode mean"),
        (["predict", "RUN", "FILE", "--mode", "median"], "unknown mode 'median'"),
        (["predict", "RUN", "FILE", "--all-probabilities"], "--all-probabilities needs --format csv or --format json"),
        (["predict", "RUN", "FILE", "--out", "nowhere/out.csv"], "there is no directory nowhere"),
        (["evaluate", "RUN", "--outside", "nowhere.npz"], "--outside nowhere.npz does not exist: name a folder"),
        (["evaluate", "RUN", "--outside", "cifar-100"], "--outside cifar-100 does not exist: name a folder"),
        (["evaluate", "RUN", "mnst-1k"], "mnst-1k does not exist: did you mean 'mnist-1k'?"),
        (["evaluate", "RUN", "--mode", "men"], "unknown mode 'men': did you mean 'mean'"),
        (["calibrate", "RUN", "nowhere.csv"], "nowhere.csv does not exist"),
        (["calibrate", "RUN", "FILE", "--data", "FILE"], "--data is where the data of the run is"),
        (["calibrate", "RUN", "--label-column", "y"], "--label-column and --id-column are for DATA"),
        (["calibrate", "nowhere"], "there is no trained model at nowhere"),
    ],
)
def test_wrong_calls_say_what_to_do(run: Path, arguments: list[str], message: str) -> None:
    before = (run / "model.safetensors").read_bytes()
    places = {"RUN": run, "FILE": load_model(run).recipe.data.name}
    said = refusal(*(places.get(word, word) for word in arguments))
    assert message in said
    assert said.count("\n") == 1
    assert (run / "model.safetensors").read_bytes() == before
