"""The command line as a user meets it: answers, errors in one line, exit codes, nothing half-written."""

from __future__ import annotations

import csv
import io
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
from tests.cli.asking import answer, as_json, predicted, refusal, refused_at_once
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
        (["export", "nowhere", "--format", "onnx", "--out", "x"], "there is no trained model at nowhere"),
        (["export", "nowhere", "--format", "onxx", "--out", "x"], "did you mean 'onnx'?"),
        (["export", "nowhere", "--format", "onnx"], "say where to write with --out"),
        (["export", "nowhere", "--format", "hub"], "--out, or upload with --push OWNER/NAME"),
        (
            ["export", "nowhere", "--format", "onnx", "--out", "x", "--push", "a/b"],
            "--push and --private go with --format hub",
        ),
        (["export", "nowhere", "--format", "hub", "--out", "x", "--private"], "--private goes with --push"),
        (["export", "nowhere", "--format", "onnx", "--out", "no/x"], "there is no directory no to write x into"),
        (
            ["report", "nowhere", "--out", "r.html"],
            "dropmax: there is no directory nowhere: `dropmax train` makes one\n",
        ),
        (
            ["report", "nowhere", "--out", "no/r.html"],
            "there is no directory no; name a file in an existing directory with --out",
        ),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    refused_at_once(message, *arguments, cwd=tmp_path)


def test_evaluate(run: Path) -> None:
    text = answer("evaluate", run)
    assert "10,000 test examples" in text
    found = as_json("evaluate", run)
    metrics = {"error", "nll", "brier", "ece", "aurc"}
    assert set(found) == {"run", "split", "mode", "examples", "calibration", "sets"} | metrics
    assert f"{100 * found['error']:.2f} %" in text
    first, again = (as_json("evaluate", run, "--mode", "mc", "--samples", 3, "--split", "validation") for _ in range(2))
    assert first == again
    assert first["examples"] == 100


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    test = load("mnist-1k").test
    (folder / "more").mkdir()
    for i in range(4):
        place = folder / "more" if i % 2 else folder
        image = Image.fromarray(test.inputs[i, 0].numpy()).resize((56, 56))
        image.save(place / f"digit-{i}-is-{int(test.labels[i])}.png")
    np.savez(folder / "rows.npz", x=test.inputs[:5].numpy())
    (folder / "not-an-image.png").write_text("hello")
    (folder / "notes.txt").write_text("not an input")
    return folder


def test_predict_from_images_folders_and_arrays(run: Path, digits: Path) -> None:
    image, arrays = digits / "digit-0-is-7.png", digits / "rows.npz"
    assert re.search(r"could be \(9\d % coverage\)", answer("predict", run, image))
    rows = predicted(run, image, digits / "more", arrays)
    assert [Path(row["input"]).name for row in rows][:5] == [f"rows.npz:{i}" for i in range(1, 6)]
    assert len(rows) == 8
    assert all(set(row) == {"input", "class_1", "probability_1", "state", "set", "confusable"} for row in rows)
    right = [row["class_1"] == row["input"].removesuffix(".png")[-1] for row in rows[5:]]
    assert sum(right) >= 2
    parsed = list(csv.DictReader(io.StringIO(answer("predict", run, arrays, "--format", "csv"))))
    assert [float(row["probability_1"]) for row in parsed] == [row["probability_1"] for row in rows[:5]]


def test_predict_refuses_what_it_cannot_read_and_writes_nothing(run: Path, digits: Path, tmp_path: Path) -> None:
    out = ("--format", "csv", "--out", tmp_path / "answers.csv")
    for culprit, message in [
        (digits / "not-an-image.png", "not-an-image.png is not an image that can be read"),
        (digits / "none.png", "none.png does not exist"),
        (tmp_path, "holds no images"),
    ]:
        assert message in refusal("predict", run, culprit, *out)
        assert not (tmp_path / "answers.csv").exists()
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 5)))
    said = refusal("predict", run, tmp_path / "wide.npz")
    assert "rows of shape (5,), but the model takes (1, 28, 28)" in said
    answer("predict", run, digits / "rows.npz", *out)
    before = (tmp_path / "answers.csv").read_text()
    assert "exists: choose another file" in refusal("predict", run, digits / "rows.npz", *out)
    assert (tmp_path / "answers.csv").read_text() == before


def test_own_images_in_three_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name, colour in {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            pixels = (np.array(colour) + rng.integers(-30, 30, (40, 50, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    answer("train", "photos", "--epochs", 12, "--set", "data.image_size=32", "--out", "run", cwd=tmp_path)
    assert as_json("evaluate", "run", cwd=tmp_path)["error"] < 0.35
    rows = predicted("run", "photos/red", cwd=tmp_path)
    assert len(rows) == 12
    assert sum(row["class_1"] == "red" for row in rows) >= 8


def test_own_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    species = rng.integers(3, size=150)
    values = rng.normal(size=(150, 2)) + 4 * np.stack([species == 1, species == 2], 1)
    names = np.array(["setosa", "virginica", "versicolor"])
    lines = [f"{a:.3f},{names[s]},{b:.3f}" for (a, b), s in zip(values, species, strict=True)]
    (tmp_path / "flowers.csv").write_text("length,species,width\n" + "\n".join(lines) + "\n")
    assert "has no column 'label'" in refusal("train", "flowers.csv", cwd=tmp_path)
    done = as_json("train", "flowers.csv", "--set", "data.label_column=species", "--out", "run", cwd=tmp_path)
    assert done["epoch"] == 60
    assert as_json("evaluate", "run", cwd=tmp_path)["error"] < 0.2
    (tmp_path / "new.csv").write_text("length,width\n4.1,0.2\n0.1,4.2\n")
    assert [row["class_1"] for row in predicted("run", "new.csv", cwd=tmp_path)] == ["virginica", "versicolor"]


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    said = answer("demo", "--quick", cwd=tmp_path)
    assert "softmax" in said
    assert "dropmax predict demo/dropmax-0-quick" in said
    for line in said.partition("Next:\n")[2].splitlines():
        _, name, *arguments = shlex.split(line.partition("  #")[0])
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    with Image.open(tmp_path / "demo" / "demo-quick.png") as picture:
        assert picture.width > 1000
    started = time.monotonic()
    again = as_json("demo", "--quick", cwd=tmp_path)
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
def test_demo_says_why_a_training_failed(tmp_path: Path) -> None:
    (tmp_path / "demo" / "softmax-0-quick").mkdir(parents=True)
    (tmp_path / "demo" / "softmax-0-quick" / "notes.txt").write_text("mine")
    said = refusal("demo", "--quick", cwd=tmp_path)
    assert "training softmax failed: demo/softmax-0-quick is not empty" in said.splitlines()[-1]
