"""Data of one's own on the command line: columns by name, moved files, separate test tables, rows held out."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.command import Run

COLUMNS = ("alpha", "beta", "gamma", "delta")
CLASSES = ("ash", "beech", "oak", "willow")


def rows_of(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Four classes; the class decides which of the four columns is large."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    return rng.normal(size=(count, 4)).astype(np.float32) + 5 * np.eye(4, dtype=np.float32)[labels], labels


def write_csv(path: Path, columns: Sequence[str], values: dict[str, Sequence[Any]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(values[name] for name in columns), strict=True))
    return path


def table(seed: int, count: int) -> dict[str, Sequence[Any]]:
    values, labels = rows_of(seed, count)
    found: dict[str, Sequence[Any]] = {name: values[:, k].tolist() for k, name in enumerate(COLUMNS)}
    return found | {"label": [CLASSES[k] for k in labels], "id": [f"tree-{i}" for i in range(count)]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, dropmax: Run) -> Path:
    """A directory with a table and a run trained on it, named by a relative path."""
    folder = tmp_path_factory.mktemp("own")
    write_csv(folder / "trees.csv", ("label", *COLUMNS, "id"), table(0, 200))
    options = ("--id-column", "id", "--epochs", 15, "--out", "run")
    done = dropmax("train", "trees.csv", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def answers(dropmax: Run, place: Path, file: Path, *options: object) -> tuple[list[dict[str, Any]], str]:
    done = dropmax("predict", place / "run", file, "--format", "json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


# --- columns by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_are_matched_by_name_in_any_order(kind: str, place: Path, tmp_path: Path, dropmax: Run) -> None:
    values = table(1, 100)
    straight = write_csv(tmp_path / "straight.csv", COLUMNS, values)
    mixed = ("note", *reversed(COLUMNS), "label")
    values = values | {"note": ["seen on a walk"] * 100}
    if kind == "csv":
        file = write_csv(tmp_path / "mixed.csv", mixed, values)
    else:
        file = tmp_path / "mixed.parquet"
        pyarrow.parquet.write_table(pyarrow.table({name: list(values[name]) for name in mixed}), file)
    expected, _ = answers(dropmax, place, straight)
    found, said = answers(dropmax, place, file)
    assert [row["class_1"] for row in found] == [row["class_1"] for row in expected]
    np.testing.assert_allclose(
        [row["probability_1"] for row in found], [row["probability_1"] for row in expected], atol=2e-6
    )
    assert np.mean([row["class_1"] == label for row, label in zip(found, values["label"], strict=True)]) > 0.9
    assert "ignored 1 column not trained on: note" in said
    assert len(said.strip().splitlines()) == 1


def test_a_missing_column_is_named(place: Path, tmp_path: Path, dropmax: Run) -> None:
    values = table(1, 10)
    renamed = values | {"gama": values["gamma"]}
    file = write_csv(tmp_path / "short.csv", ("alpha", "beta", "gama", "delta"), renamed)
    done = dropmax("predict", place / "run", file)
    assert done.returncode == 2
    assert "has no column 'gamma', which the model was trained on: did you mean 'gama'?" in done.stderr
    assert not done.stdout


def test_an_npz_says_that_it_has_no_names(place: Path, tmp_path: Path, dropmax: Run) -> None:
    np.savez(tmp_path / "rows.npz", x=rows_of(1, 10)[0])
    _, said = answers(dropmax, place, tmp_path / "rows.npz")
    assert "an .npz has no column names; its columns are taken in the order of training" in said


def test_rows_are_named_by_their_identifiers(place: Path, tmp_path: Path, dropmax: Run) -> None:
    found, _ = answers(dropmax, place, write_csv(tmp_path / "a.csv", (*COLUMNS, "id"), table(2, 3)))
    assert [row["input"] for row in found] == ["tree-0", "tree-1", "tree-2"]


# --- what answers look like --------------------------------------------------------------------------------------


def test_csv_and_json_need_no_parsing(place: Path, tmp_path: Path, dropmax: Run) -> None:
    file = write_csv(tmp_path / "a.csv", COLUMNS, table(1, 20))
    options = ("--top", 3, "--all-probabilities", "--mode", "exact")
    rows, _ = answers(dropmax, place, file, *options)
    for row in rows:
        ranked = [row[f"probability_{rank}"] for rank in (1, 2, 3)]
        assert ranked == sorted(row["probabilities"].values(), reverse=True)[:3]
        assert row["probabilities"][row["class_2"]] == row["probability_2"]
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["std_1"] >= 0
    done = dropmax("predict", place / "run", file, "--format", "csv", *options)
    parsed = list(csv.DictReader(io.StringIO(done.stdout)))
    ranks = [f"{what}_{rank}" for rank in (1, 2, 3) for what in ("class", "probability", "std")]
    rivals = [f"{what}_{rank}" for rank in (1, 2, 3) for what in ("confusable", "retain")]
    assert list(parsed[0]) == ["input", *ranks, "state", "set_size", *rivals, *(f"p_{name}" for name in CLASSES)]
    for row, line in zip(rows, parsed, strict=True):
        assert float(line["probability_3"]) == row["probability_3"]
        assert float(line["p_oak"]) == row["probabilities"]["oak"]
        named = [line[f"confusable_{rank}"] for rank in (1, 2, 3) if line[f"confusable_{rank}"]]
        assert named == [rival["class"] for rival in row["confusable"]]


def test_a_piped_table_is_not_cut(place: Path, tmp_path: Path, dropmax: Run) -> None:
    folder = tmp_path / ("a-folder-with-a-long-name-" * 6)
    folder.mkdir()
    file = write_csv(folder / "a.csv", COLUMNS, table(1, 3))
    done = dropmax("predict", place / "run", file, "--top", 4)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(f"{file}:{row}" in line for row, line in enumerate(lines[1:], 1))
    assert all(name in lines[1] for name in CLASSES)


def test_features_in_other_units_are_noticed(place: Path, tmp_path: Path, dropmax: Run) -> None:
    values = {name: [1000 * x for x in column] for name, column in table(1, 20).items() if name in COLUMNS}
    _, said = answers(dropmax, place, write_csv(tmp_path / "a.csv", COLUMNS, values))
    assert "warning: 20 of 20 rows are far from those the model was trained on" in said


# --- finding the data again --------------------------------------------------------------------------------------


def test_a_run_finds_its_data_from_any_directory(place: Path, tmp_path: Path, dropmax: Run) -> None:
    here = dropmax("evaluate", "run", "--json", cwd=place)
    there = dropmax("evaluate", place / "run", "--json", cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    assert json.loads(here.stdout)["nll"] == json.loads(there.stdout)["nll"]
    done = dropmax("report", place / "run", "--out", "report.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_data_that_has_moved_is_named_and_can_be_given(tmp_path: Path, dropmax: Run) -> None:
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), table(0, 100))
    assert dropmax("train", "trees.csv", "--epochs", 1, "--out", "run", cwd=tmp_path).returncode == 0
    before = json.loads(dropmax("evaluate", "run", "--json", cwd=tmp_path).stdout)
    (tmp_path / "attic").mkdir()
    (tmp_path / "trees.csv").rename(tmp_path / "attic" / "old.csv")
    lost = dropmax("evaluate", "run", cwd=tmp_path)
    assert lost.returncode == 2
    assert f"is not at {tmp_path / 'trees.csv'} any more (it was given as trees.csv)" in lost.stderr
    assert "--data PATH" in lost.stderr
    found = dropmax("evaluate", "run", "--data", "attic/old.csv", "--json", cwd=tmp_path)
    assert json.loads(found.stdout) == before
    os.unlink(tmp_path / "run" / "model.safetensors")
    (tmp_path / "elsewhere").mkdir()
    resumed = dropmax("train", "--resume", tmp_path / "run", "--data", "../attic/old.csv", cwd=tmp_path / "elsewhere")
    assert resumed.returncode == 0, resumed.stderr
    assert dropmax("report", "run", "--data", "attic/old.csv", cwd=tmp_path).returncode == 0


def test_train_says_which_rows_it_holds_out_and_stores_them(tmp_path: Path, dropmax: Run) -> None:
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label", "id"), table(0, 100))
    done = dropmax("train", "trees.csv", "--epochs", 1, "--seed", 7, "--out", "run", "--id-column", "id", cwd=tmp_path)
    assert "test: 20 of 100 rows held out (20 % of each class, the same rows for every seed)" in done.stderr
    assert "validation: 8 of 100 rows held out" in done.stderr
    assert "chosen by seed 7" in done.stderr
    held = json.loads((tmp_path / "run" / "data.json").read_text())["held_out"]
    assert len(held["test"]["rows"]) == 20
    assert len(held["validation"]["rows"]) == 8
    assert not set(held["test"]["rows"]) & set(held["validation"]["rows"])
    assert all(name.startswith("tree-") for name in held["test"]["rows"])
    # The rows stored are the rows tested on.
    kept = table(0, 100)
    chosen = [i for i, name in enumerate(kept["id"]) if name in held["test"]["rows"]]
    only = {name: [column[i] for i in chosen] for name, column in kept.items()}
    write_csv(tmp_path / "held.csv", (*COLUMNS, "label"), only)
    by_run = json.loads(dropmax("evaluate", "run", "--json", cwd=tmp_path).stdout)
    by_rows = json.loads(dropmax("evaluate", "run", "held.csv", "--json", cwd=tmp_path).stdout)
    assert by_rows["nll"] == pytest.approx(by_run["nll"], rel=1e-5)
    assert by_rows["examples"] == 20


# --- new labelled data, and a test table of its own --------------------------------------------------------------


def test_evaluate_scores_new_labelled_data(place: Path, tmp_path: Path, dropmax: Run) -> None:
    values = table(5, 60)
    file = write_csv(tmp_path / "new.csv", ("kind", *reversed(COLUMNS)), values | {"kind": values["label"]})
    found = json.loads(dropmax("evaluate", place / "run", file, "--label-column", "kind", "--json").stdout)
    assert found["examples"] == 60
    assert found["error"] < 0.1
    rows, labels = rows_of(5, 60)
    np.savez(tmp_path / "new.npz", x=rows, y=np.array(CLASSES)[labels])
    again = json.loads(dropmax("evaluate", place / "run", tmp_path / "new.npz", "--json").stdout)
    assert again["nll"] == pytest.approx(found["nll"], rel=1e-5)
    strange = write_csv(tmp_path / "b.csv", (*COLUMNS, "label"), values | {"label": ["oka"] * 60})
    done = dropmax("evaluate", place / "run", strange)
    assert done.returncode == 2
    assert "the label 'oka' is none of the 4 classes of the model: did you mean 'oak'?" in done.stderr


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_a_separate_test_table(kind: str, tmp_path: Path, dropmax: Run) -> None:
    write_csv(tmp_path / "train.csv", (*COLUMNS, "label"), table(0, 100))
    rows, labels = rows_of(9, 40)
    if kind == "csv":
        write_csv(tmp_path / "test.csv", ("label", *reversed(COLUMNS)), table(9, 40))
    elif kind == "parquet":
        names = ("label", *reversed(COLUMNS))
        whole = table(9, 40)
        pyarrow.parquet.write_table(pyarrow.table({n: list(whole[n]) for n in names}), tmp_path / "test.parquet")
    else:
        np.savez(tmp_path / "test.npz", x=rows, y=np.array(CLASSES)[labels])
    done = dropmax("train", "train.csv", "--test", f"test.{kind}", "--epochs", 5, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test:" not in done.stderr, "nothing is held out for testing"
    (tmp_path / "elsewhere").mkdir()
    found = json.loads(dropmax("evaluate", tmp_path / "run", "--json", cwd=tmp_path / "elsewhere").stdout)
    assert found["examples"] == 40
    same = json.loads(dropmax("evaluate", "run", f"test.{kind}", "--json", cwd=tmp_path).stdout)
    assert same["nll"] == pytest.approx(found["nll"], rel=1e-6)


def test_class_weights(tmp_path: Path, dropmax: Run) -> None:
    values = table(0, 200)
    rare = [i for i, label in enumerate(values["label"]) if label != "oak" or i % 5 == 0]
    values = {name: [column[i] for i in rare] for name, column in values.items()}
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), values)
    options = ("--epochs", 1, "--out", "run", "--class-weight", "balanced")
    done = dropmax("train", "trees.csv", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    from dropmax.workbench.training import RunDirectory, load_data

    recipe = RunDirectory(tmp_path / "run").recipe()
    counts = load_data(recipe, run=tmp_path / "run").train.labels.bincount().tolist()
    assert recipe.head["class_weight"] == pytest.approx([sum(counts) / (4 * count) for count in counts], rel=1e-6)
    wrong = dropmax("train", "trees.csv", "--class-weight", "ballanced", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--class-weight takes balanced, or one number per class" in wrong.stderr


def test_no_validation_part(tmp_path: Path, dropmax: Run) -> None:
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), table(0, 100))
    options = ("--set", "data.validation_size=0", "--epochs", 3, "--out", "run")
    done = dropmax("train", "trees.csv", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "there is no validation part" in done.stderr
    assert "validation: " not in done.stderr
    from dropmax.workbench.training import RunDirectory, load_data

    run = RunDirectory(tmp_path / "run")
    assert len(load_data(run.recipe(), run=run.path).train) == 80
    assert [sorted(row) for row in run.metrics()] == [["epoch", "learning_rate", "step", "train"]] * 3
    none = dropmax("evaluate", "run", "--split", "validation", cwd=tmp_path)
    assert none.returncode == 2
    assert "there are no validation examples of trees.csv" in none.stderr
    assert dropmax("report", "run", cwd=tmp_path).returncode == 0


def test_reproduce_takes_a_file(tmp_path: Path, dropmax: Run) -> None:
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), table(0, 80))
    options = ("--heads", "softmax", "--runs", 1, "--no-tune", "--set", "training.epochs=1", "--workers", 1)
    done = dropmax("reproduce", "trees.csv", *options, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["failed"]
    assert "trees" in json.dumps(found["tables"])
    missing = dropmax("reproduce", "bushes.npz", *options, cwd=tmp_path)
    assert missing.returncode == 2
    assert "bushes.npz does not exist" in missing.stderr


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


def test_a_network_in_a_file_works_without_pythonpath(tmp_path: Path, dropmax: Run) -> None:
    (tmp_path / "mynet.py").write_text(NET)
    (tmp_path / "shapes_of_mine.py").write_text("width = 7\n")
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), table(0, 80))
    done = dropmax("train", "trees.csv", "--network", "./mynet.py:Net", "--epochs", 1, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    advice = done.stdout.strip().rpartition("Next: ")[2]
    assert advice == "dropmax evaluate run --trust-code"
    import sys

    for name in [name for name in sys.modules if name.startswith("dropmax_file_mynet")]:
        del sys.modules[name]
    assert "would import the network" in dropmax("evaluate", "run", cwd=tmp_path).stderr
    (tmp_path / "elsewhere").mkdir()
    there = dropmax("evaluate", "../run", "--trust-code", cwd=tmp_path / "elsewhere")
    assert there.returncode == 0, there.stderr
    for name in [name for name in sys.modules if name.startswith("dropmax_file_mynet")]:
        del sys.modules[name]
    (tmp_path / "mynet.py").unlink()
    gone = dropmax("evaluate", "run", "--trust-code", cwd=tmp_path)
    assert gone.returncode == 2
    assert f"there is no file {tmp_path / 'mynet.py'}" in gone.stderr


# --- further than planned ----------------------------------------------------------------------------------------


def test_a_run_is_trained_further_than_it_was_planned(tmp_path: Path, dropmax: Run) -> None:
    write_csv(tmp_path / "trees.csv", (*COLUMNS, "label"), table(0, 80))
    settings = ("--set", "training.schedule=cosine", "--set", "training.learning_rate=0.01")
    assert dropmax("train", "trees.csv", *settings, "--epochs", 2, "--out", "run", cwd=tmp_path).returncode == 0
    done = dropmax("train", "--resume", "run", "--epochs", 4, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch"] == 4
    expected = "follows the schedule of 4 epochs: 0.005 in epoch 2, 0.005 in the next"
    assert expected in done.stderr
    fewer = dropmax("train", "--resume", "run", "--epochs", 3, cwd=tmp_path)
    assert fewer.returncode == 2
    assert "has been trained for 4 epochs already" in fewer.stderr
