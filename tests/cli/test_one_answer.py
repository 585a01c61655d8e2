"""Six ways to ask a calibrated model about the same input give the same number."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dropmax.lab.explorer import Explorer
from dropmax.lab.figures.runs import load_runs
from dropmax.lab.report.sections import hardest_section
from dropmax.sklearn import DropMaxClassifier
from dropmax.workbench.export import export
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_data, load_model, train
from dropmax.workbench.training.trained import write_model
from tests.command import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    random = np.random.default_rng(0)
    x = random.normal(size=(600, 8))
    y = (2 * x[:, :4] + random.normal(size=(600, 4))).argmax(1)
    np.savez(place / "rows.npz", x=x.astype(np.float32), y=y)
    values = {"data.name": str(place / "rows.npz"), "training.epochs": 12, "network.hidden": [16]}
    train(load_recipe("own-features").override({**values, "data.validation_size": 120}), place / "run", quiet=True)
    return place / "run"


@pytest.mark.parametrize("mode", ["mean", "exact"])
def test_six_ways_to_ask_have_one_answer(run: Path, mode: str, tmp_path: Path, dropmax: Run) -> None:
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
    asked = dropmax("predict", run, tmp_path / "one.npz", "--format", "json", "--all-probabilities")
    answers["predict"] = list(json.loads(asked.stdout)[0]["probabilities"].values())
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
    measured = json.loads(dropmax("evaluate", run, tmp_path / "one.npz", "--json").stdout)
    assert math.exp(-measured["nll"]) == pytest.approx(expected[truth], rel=1e-4)
    assert measured["mode"] == mode
    assert measured["calibration"]["temperatures"] == dict(chosen.temperatures)
    raw = trained.answer(data.test.inputs[[row]], mode=mode).probs[0]
    assert not torch.allclose(raw, torch.tensor(expected), atol=1e-3)  # the temperature is at work
