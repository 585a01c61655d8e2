"""Data of one's own on the command line: columns by name, moved files, separate test tables, rows held out."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dropmax.workbench.training import RunDirectory, load_data
from tests.cli.asking import answer, as_json, notes, predicted, refusal
from tests.command import dropmax

COLUMNS = ("alpha", "beta", "gamma", "delta")
CLASSES = ("ash", "beech", "oak", "willow")


def write_csv(path: Path, columns: Sequence[str], values: dict[str, Sequence[Any]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(values[name] for name in columns), strict=True))
    return path


def table(seed: int, count: int) -> dict[str, Sequence[Any]]:
    """Four classes; the class decides which of the four columns is large."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    values = rng.normal(size=(count, 4)).astype(np.float32) + 5 * np.eye(4, dtype=np.float32)[labels]
    found: dict[str, Sequence[Any]] = {name: values[:, k].tolist() for k, name in enumerate(COLUMNS)}
    return found | {"label": [CLASSES[k] for k in labels], "id": [f"tree-{i}" for i in range(count)]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a table and a run trained on it, named by a relative path."""
    folder = tmp_path_factory.mktemp("own")
    write_csv(folder / "trees.csv", ("label", *COLUMNS, "id"), table(0, 200))
    answer("train", "trees.csv", "--id-column", "id", "--epochs", 15, "--out", "run", cwd=folder)
    return folder


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """An empty directory but for a table of a hundred rows."""
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label", "id"), table(0, 100))
    return tmp_path


def write_table(path: Path, columns: Sequence[str], values: dict[str, Sequence[Any]]) -> Path:
    """Write a table as the ending of its name says."""
    if path.suffix == ".csv":
        return write_csv(path, columns, values)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({name: list(values[name]) for name in columns}), path)
    else:
        rows = np.stack([values[name] for name in COLUMNS], 1).astype(np.float32)
        np.savez(path, x=rows, y=np.array(values["label"]))
    return path


# --- columns by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_are_matched_by_name_in_any_order(kind: str, place: Path, tmp_path: Path) -> None:
    values = table(1, 100) | {"note": ["seen on a walk"] * 100}
    straight = write_csv(tmp_path / "straight.csv", COLUMNS, values)
    file = write_table(tmp_path / f"mixed.{kind}", ("note", *reversed(COLUMNS), "label"), values)
    expected = predicted(place / "run", straight)
    done = dropmax("predict", place / "run", file, "--format", "json")
    found, said = json.loads(done.stdout), done.stderr
    assert [row["class_1"] for row in found] == [row["class_1"] for row in expected]
    probabilities = ([row["probability_1"] for row in rows] for rows in (found, expected))
    np.testing.assert_allclose(*probabilities, atol=2e-6)
    assert np.mean([row["class_1"] == label for row, label in zip(found, values["label"], strict=True)]) > 0.9
    assert "ignored 1 column not trained on: note" in said
    assert len(said.strip().splitlines()) == 1


def test_a_missing_column_is_named(place: Path, tmp_path: Path) -> None:
    values = table(1, 10)
    renamed = values | {"gama": values["gamma"]}
    file = write_csv(tmp_path / "short.csv", ("alpha", "beta", "gama", "delta"), renamed)
    said = refusal("predict", place / "run", file)
    assert "has no column 'gamma', which the model was trained on: did you mean 'gama'?" in said


def test_an_npz_says_that_it_has_no_names(place: Path, tmp_path: Path) -> None:
    said = notes("predict", place / "run", write_table(tmp_path / "rows.npz", COLUMNS, table(1, 10)))
    assert "an .npz has no column names; its columns are taken in the order of training" in said


def test_rows_are_named_by_their_identifiers(place: Path, tmp_path: Path) -> None:
    found = predicted(place / "run", write_csv(tmp_path / "a.csv", (*COLUMNS, "id"), table(2, 3)))
    assert [row["input"] for row in found] == ["tree-0", "tree-1", "tree-2"]


# --- what answers look like --------------------------------------------------------------------------------------


def test_csv_and_json_need_no_parsing(place: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", COLUMNS, table(1, 20))
    options = ("--top", 3, "--all-probabilities", "--mode", "exact")
    rows = predicted(place / "run", file, *options)
    for row in rows:
        ranked = [row[f"probability_{rank}"] for rank in (1, 2, 3)]
        assert ranked == sorted(row["probabilities"].values(), reverse=True)[:3]
        assert row["probabilities"][row["class_2"]] == row["probability_2"]
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["std_1"] >= 0
    parsed = list(csv.DictReader(io.StringIO(answer("predict", place / "run", file, "--format", "csv", *options))))
    ranks = [f"{what}_{rank}" for rank in (1, 2, 3) for what in ("class", "probability", "std")]
    rivals = [f"{what}_{rank}" for rank in (1, 2, 3) for what in ("confusable", "retain")]
    assert list(parsed[0]) == ["input", *ranks, "state", "set_size", *rivals, *(f"p_{name}" for name in CLASSES)]
    for row, line in zip(rows, parsed, strict=True):
        assert float(line["probability_3"]) == row["probability_3"]
        assert float(line["p_oak"]) == row["probabilities"]["oak"]
        named = [line[f"confusable_{rank}"] for rank in (1, 2, 3) if line[f"confusable_{rank}"]]
        assert named == [rival["class"] for rival in row["confusable"]]


def test_a_piped_table_is_not_cut(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("a-folder-with-a-long-name-" * 6)
    folder.mkdir()
    file = write_csv(folder / "a.csv", COLUMNS, table(1, 3))
    lines = answer("predict", place / "run", file, "--top", 4).splitlines()
    assert len(lines) == 4
    assert all(f"{file}:{row}" in line for row, line in enumerate(lines[1:], 1))
    assert all(name in lines[1] for name in CLASSES)


def test_features_in_other_units_are_noticed(place: Path, tmp_path: Path) -> None:
    values = {name: [1000 * x for x in column] for name, column in table(1, 20).items() if name in COLUMNS}
    said = notes("predict", place / "run", write_csv(tmp_path / "a.csv", COLUMNS, values))
    assert "warning: 20 of 20 rows are far from those the model was trained on" in said


# --- finding the data again --------------------------------------------------------------------------------------


def test_a_run_finds_its_data_from_any_directory(place: Path, tmp_path: Path) -> None:
    here, there = (as_json("evaluate", place / "run", cwd=folder) for folder in (place, tmp_path))
    assert here["nll"] == there["nll"]
    answer("report", place / "run", "--out", "report.html", cwd=tmp_path)


def test_data_that_has_moved_is_named_and_can_be_given(trees: Path) -> None:
    answer("train", "trees.csv", "--id-column", "id", "--epochs", 1, "--out", "run", cwd=trees)
    before = as_json("evaluate", "run", cwd=trees)
    (trees / "attic").mkdir()
    (trees / "trees.csv").rename(trees / "attic" / "old.csv")
    lost = refusal("evaluate", "run", cwd=trees)
    assert f"is not at {trees / 'trees.csv'} any more (it was given as trees.csv)" in lost
    assert "--data PATH" in lost
    assert as_json("evaluate", "run", "--data", "attic/old.csv", cwd=trees) == before
    os.unlink(trees / "run" / "model.safetensors")
    (trees / "elsewhere").mkdir()
    answer("train", "--resume", trees / "run", "--data", "../attic/old.csv", cwd=trees / "elsewhere")
    answer("report", "run", "--data", "attic/old.csv", cwd=trees)


def test_train_says_which_rows_it_holds_out_and_stores_them(trees: Path) -> None:
    said = notes("train", "trees.csv", "--epochs", 1, "--seed", 7, "--out", "run", "--id-column", "id", cwd=trees)
    assert "test: 20 of 100 rows held out (20 % of each class, the same rows for every seed)" in said
    assert "validation: 8 of 100 rows held out" in said
    assert "chosen by seed 7" in said
    held = json.loads((trees / "run" / "data.json").read_text())["held_out"]
    assert len(held["test"]["rows"]) == 20
    assert len(held["validation"]["rows"]) == 8
    assert not set(held["test"]["rows"]) & set(held["validation"]["rows"])
    assert all(name.startswith("tree-") for name in held["test"]["rows"])
    # The rows stored are the rows tested on.
    kept = table(0, 100)
    chosen = [i for i, name in enumerate(kept["id"]) if name in held["test"]["rows"]]
    only = {name: [column[i] for i in chosen] for name, column in kept.items()}
    write_csv(trees / "held.csv", (*COLUMNS, "label"), only)
    by_run, by_rows = (as_json("evaluate", "run", *file, cwd=trees) for file in ([], ["held.csv"]))
    assert by_rows["nll"] == pytest.approx(by_run["nll"], rel=1e-5)
    assert by_rows["examples"] == 20


# --- new labelled data, and a test table of its own --------------------------------------------------------------


def test_evaluate_scores_new_labelled_data(place: Path, tmp_path: Path) -> None:
    values = table(5, 60)
    file = write_csv(tmp_path / "new.csv", ("kind", *reversed(COLUMNS)), values | {"kind": values["label"]})
    found = as_json("evaluate", place / "run", file, "--label-column", "kind")
    assert found["examples"] == 60
    assert found["error"] < 0.1
    again = as_json("evaluate", place / "run", write_table(tmp_path / "new.npz", COLUMNS, values))
    assert again["nll"] == pytest.approx(found["nll"], rel=1e-5)
    strange = write_csv(tmp_path / "b.csv", (*COLUMNS, "label"), values | {"label": ["oka"] * 60})
    said = refusal("evaluate", place / "run", strange)
    assert "the label 'oka' is none of the 4 classes of the model: did you mean 'oak'?" in said


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_a_separate_test_table(kind: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", (*COLUMNS, "label"), table(0, 100))
    write_table(tmp_path / f"test.{kind}", ("label", *reversed(COLUMNS)), table(9, 40))
    said = notes("train", "train.csv", "--test", f"test.{kind}", "--epochs", 5, "--out", "run", cwd=tmp_path)
    assert "test:" not in said, "nothing is held out for testing"
    (tmp_path / "elsewhere").mkdir()
    found = as_json("evaluate", tmp_path / "run", cwd=tmp_path / "elsewhere")
    assert found["examples"] == 40
    same = as_json("evaluate", "run", f"test.{kind}", cwd=tmp_path)
    assert same["nll"] == pytest.approx(found["nll"], rel=1e-6)


def test_class_weights(tmp_path: Path) -> None:
    values = table(0, 200)
    rare = [i for i, label in enumerate(values["label"]) if label != "oak" or i % 5 == 0]
    values = {name: [column[i] for i in rare] for name, column in values.items()}
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), values)
    answer("train", "trees.csv", "--epochs", 1, "--out", "run", "--class-weight", "balanced", cwd=tmp_path)
    recipe = RunDirectory(tmp_path / "run").recipe()
    counts = load_data(recipe, run=tmp_path / "run").train.labels.bincount().tolist()
    assert recipe.head["class_weight"] == pytest.approx([sum(counts) / (4 * count) for count in counts], rel=1e-6)
    wrong = refusal("train", "trees.csv", "--class-weight", "ballanced", cwd=tmp_path)
    assert "--class-weight takes balanced, or one number per class" in wrong


def test_no_validation_part(trees: Path) -> None:
    options = ("--id-column", "id", "--set", "data.validation_size=0", "--epochs", 3, "--out", "run")
    said = notes("train", "trees.csv", *options, cwd=trees)
    assert "there is no validation part" in said
    assert "validation: " not in said
    run = RunDirectory(trees / "run")
    assert len(load_data(run.recipe(), run=run.path).train) == 80
    assert [sorted(row) for row in run.metrics()] == [["epoch", "learning_rate", "step", "train"]] * 3
    none = refusal("evaluate", "run", "--split", "validation", cwd=trees)
    assert "there are no validation examples of trees.csv" in none
    answer("report", "run", cwd=trees)


def test_reproduce_takes_a_file(trees: Path) -> None:
    options = ("--heads", "softmax", "--runs", 1, "--no-tune", "--set", "training.epochs=1", "--workers", 1)
    found = as_json("reproduce", "trees.csv", *options, "--set", "data.id_column=id", cwd=trees)
    assert not found["failed"]
    assert "trees" in json.dumps(found["tables"])
    assert "bushes.npz does not exist" in refusal("reproduce", "bushes.npz", *options, cwd=trees)


# --- networks of one's own ---------------------------------------------------------------------------------------

NET = """
from torch import nn
from shapes_of_mine import width

class Net(nn.Module):
    def __init__(self, input_shape):
        super().__init__()
        self.out_features = width
        self.layer = nn.Linear(input_shape[0], width)

    def forward(self, x):
        return self.layer(x).relu()
"""


def forget_own_networks() -> None:
    """Let the next command find nothing imported, as a new process would."""
    for name in [name for name in sys.modules if name.startswith("dropmax_file_mynet")]:
        del sys.modules[name]


def test_a_network_in_a_file_works_without_pythonpath(trees: Path) -> None:
    (trees / "mynet.py").write_text(NET)
    (trees / "shapes_of_mine.py").write_text("width = 7\n")
    options = ("--id-column", "id", "--network", "./mynet.py:Net", "--epochs", 1, "--out", "run")
    said = answer("train", "trees.csv", *options, cwd=trees)
    assert said.strip().rpartition("Next: ")[2] == "dropmax evaluate run --trust-code"
    forget_own_networks()
    assert "would import the network" in refusal("evaluate", "run", cwd=trees)
    (trees / "elsewhere").mkdir()
    answer("evaluate", "../run", "--trust-code", cwd=trees / "elsewhere")
    forget_own_networks()
    (trees / "mynet.py").unlink()
    gone = refusal("evaluate", "run", "--trust-code", cwd=trees)
    assert f"there is no file {trees / 'mynet.py'}" in gone


# --- further than planned ----------------------------------------------------------------------------------------


def test_a_run_is_trained_further_than_it_was_planned(trees: Path) -> None:
    settings = ("--id-column", "id", "--set", "training.schedule=cosine", "--set", "training.learning_rate=0.01")
    answer("train", "trees.csv", *settings, "--epochs", 2, "--out", "run", cwd=trees)
    done = dropmax("train", "--resume", "run", "--epochs", 4, "--json", cwd=trees)
    assert json.loads(done.stdout)["epoch"] == 4
    assert "follows the schedule of 4 epochs: 0.005 in epoch 2, 0.005 in the next" in done.stderr
    fewer = refusal("train", "--resume", "run", "--epochs", 3, cwd=trees)
    assert "has been trained for 4 epochs already" in fewer
