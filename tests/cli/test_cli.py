"""The command line as a user meets it: answers, errors in one line, exit codes, nothing half-written."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

from dropmax.cli import app
from dropmax.workbench.data import load
from tests.command import Run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name a data set such as mnist-1k"),
        (["train", "mnist-1q"], "did you mean 'mnist-1k'?"),
        (["train", "mnist-1k", "--recipe", "papr"], "did you mean 'paper'?"),
        (["train", "mnist-1k", "--head", "softmx"], "unknown head 'softmx': did you mean 'softmax'?"),
        (["train", "mnist-1k", "--set", "head.temprature=1"], "did you mean 'temperature'?"),
        (["train", "mnist-1k", "--set", "network.name=lennet"], "did you mean 'lenet'?"),
        (["train", "mnist-1k", "--set", "training.epochs=many"], "training.epochs must be a whole number, got 'many'"),
        (["train", "mnist-1k", "--set", "epochs"], "--set takes NAME=VALUE"),
        (["train", "no-such-file.csv"], "no-such-file.csv does not exist"),
        (["train", "--resume", "nowhere"], "there is no directory nowhere"),
        (["train", "mnist-1k", "--resume", "nowhere"], "leave out DATA"),
        (["train", "mnist-1k", "--device", "abacus"], "the device 'abacus' cannot be used here"),
        (["train", "cub", "--data-dir", "nowhere"], "CUB_200_2011"),
        (["evaluate", "nowhere"], "there is no trained model at nowhere"),
        (["evaluate", "nowhere", "--mode", "maen"], "did you mean 'mean'?"),
        (["evaluate", "nowhere", "--split", "tset"], "did you mean 'test'?"),
        (["predict", "nowhere", "x.png", "--format", "jsn"], "did you mean 'json'?"),
        (["predict", "nowhere", "x.png"], "there is no trained model at nowhere"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments: list[str], message: str, tmp_path: Path, dropmax: Run) -> None:
    done = dropmax(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("dropmax: ")
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_evaluate(run: Path, dropmax: Run) -> None:
    text = dropmax("evaluate", run)
    assert text.returncode == 0, text.stderr
    assert "10,000 test examples" in text.stdout
    found = json.loads(dropmax("evaluate", run, "--json").stdout)
    assert set(found) == {
        "run",
        "split",
        "mode",
        "examples",
        "error",
        "nll",
        "brier",
        "ece",
        "aurc",
        "calibration",
        "sets",
    }
    assert f"{100 * found['error']:.2f} %" in text.stdout
    sampled = [
        json.loads(dropmax("evaluate", run, "--mode", "mc", "--samples", 3, "--json", "--split", "validation").stdout)
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0]["examples"] == 100


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    test = load("mnist-1k").test
    (folder / "more").mkdir()
    for i in range(4):
        place = folder / "more" if i % 2 else folder
        Image.fromarray(test.inputs[i, 0].numpy()).resize((56, 56)).save(
            place / f"digit-{i}-is-{int(test.labels[i])}.png"
        )
    np.savez(folder / "rows.npz", x=test.inputs[:5].numpy())
    (folder / "not-an-image.png").write_text("hello")
    (folder / "notes.txt").write_text("not an input")
    return folder


def test_predict_from_images_folders_and_arrays(run: Path, digits: Path, dropmax: Run) -> None:
    image = digits / "digit-0-is-7.png"
    table = dropmax("predict", run, image)
    assert table.returncode == 0, table.stderr
    assert re.search(r"could be \(9\d % coverage\)", table.stdout)
    rows = json.loads(dropmax("predict", run, image, digits / "more", digits / "rows.npz", "--format", "json").stdout)
    assert [Path(row["input"]).name for row in rows][:5] == [f"rows.npz:{i}" for i in range(1, 6)]
    assert len(rows) == 8
    assert all(set(row) == {"input", "class_1", "probability_1", "state", "set", "confusable"} for row in rows)
    right = [row["class_1"] == row["input"].removesuffix(".png")[-1] for row in rows[5:]]
    assert sum(right) >= 2
    text = dropmax("predict", run, digits / "rows.npz", "--format", "csv").stdout
    parsed = list(csv.DictReader(io.StringIO(text)))
    assert [float(row["probability_1"]) for row in parsed] == [row["probability_1"] for row in rows[:5]]


def test_predict_refuses_what_it_cannot_read_and_writes_nothing(
    run: Path, digits: Path, tmp_path: Path, dropmax: Run
) -> None:
    out = tmp_path / "answers.csv"
    for culprit, message in [
        (digits / "not-an-image.png", "not-an-image.png is not an image that can be read"),
        (digits / "none.png", "none.png does not exist"),
        (tmp_path, "holds no images"),
    ]:
        done = dropmax("predict", run, culprit, "--format", "csv", "--out", out)
        assert done.returncode == 2
        assert message in done.stderr
        assert not out.exists()
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 5)))
    done = dropmax("predict", run, tmp_path / "wide.npz")
    assert "rows of shape (5,), but the model takes (1, 28, 28)" in done.stderr
    assert dropmax("predict", run, digits / "rows.npz", "--format", "csv", "--out", out).returncode == 0
    before = out.read_text()
    again = dropmax("predict", run, digits / "rows.npz", "--format", "csv", "--out", out)
    assert again.returncode == 2
    assert "exists: choose another file" in again.stderr
    assert out.read_text() == before


def test_own_images_in_three_commands(tmp_path: Path, dropmax: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name, colour in {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            noise = rng.integers(-30, 30, (40, 50, 3))
            Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(
                tmp_path / "photos" / name / f"{i}.png"
            )
    trained = dropmax("train", "photos", "--epochs", 12, "--set", "data.image_size=32", "--out", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    found = json.loads(dropmax("evaluate", "run", "--json", cwd=tmp_path).stdout)
    assert found["error"] < 0.35
    rows = json.loads(dropmax("predict", "run", "photos/red", "--format", "json", cwd=tmp_path).stdout)
    assert len(rows) == 12
    assert sum(row["class_1"] == "red" for row in rows) >= 8


def test_own_table(tmp_path: Path, dropmax: Run) -> None:
    rng = np.random.default_rng(0)
    species = rng.integers(3, size=150)
    values = rng.normal(size=(150, 2)) + 4 * np.stack([species == 1, species == 2], 1)
    names = np.array(["setosa", "virginica", "versicolor"])
    lines = [f"{a:.3f},{names[s]},{b:.3f}" for (a, b), s in zip(values, species, strict=True)]
    (tmp_path / "flowers.csv").write_text("length,species,width\n" + "\n".join(lines) + "\n")
    missing = dropmax("train", "flowers.csv", cwd=tmp_path)
    assert missing.returncode == 2
    assert "has no column 'label'" in missing.stderr
    done = dropmax("train", "flowers.csv", "--set", "data.label_column=species", "--json", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch"] == 60
    assert json.loads(dropmax("evaluate", "run", "--json", cwd=tmp_path).stdout)["error"] < 0.2
    (tmp_path / "new.csv").write_text("length,width\n4.1,0.2\n0.1,4.2\n")
    rows = json.loads(dropmax("predict", "run", "new.csv", "--format", "json", cwd=tmp_path).stdout)
    assert [row["class_1"] for row in rows] == ["virginica", "versicolor"]


@pytest.mark.slow
def test_demo(tmp_path: Path, dropmax: Run) -> None:
    done = dropmax("demo", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout
    assert "dropmax predict demo/dropmax-0-quick" in done.stdout
    for line in done.stdout.partition("Next:\n")[2].splitlines():
        _, name, *arguments = shlex.split(line.partition("  #")[0])
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    with Image.open(tmp_path / "demo" / "demo-quick.png") as picture:
        assert picture.width > 1000
    started = time.monotonic()
    again = json.loads(dropmax("demo", "--quick", "--json", cwd=tmp_path).stdout)
    assert again["epochs"] == 10
    assert set(again["test"]) == {"softmax", "dropmax"}
    assert again["seconds"] < time.monotonic() - started


def test_demo_says_what_is_in_the_way(tmp_path: Path, dropmax: Run) -> None:
    (tmp_path / "demo").write_text("a file")
    done = dropmax("demo", "--quick", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("dropmax: cannot write to demo/softmax-0-quick: ")
    assert done.stderr.endswith("demo is not a directory; choose another --out\n")


@pytest.mark.slow
def test_demo_says_why_a_training_failed(tmp_path: Path, dropmax: Run) -> None:
    (tmp_path / "demo" / "softmax-0-quick").mkdir(parents=True)
    (tmp_path / "demo" / "softmax-0-quick" / "notes.txt").write_text("mine")
    done = dropmax("demo", "--quick", cwd=tmp_path)
    assert done.returncode == 2
    assert "training softmax failed: demo/softmax-0-quick is not empty" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
