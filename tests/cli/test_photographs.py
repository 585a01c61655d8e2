"""Photographs: the same answer from the explorer and from ``dropmax predict``, warnings, and what is enlarged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dropmax.lab import images
from dropmax.lab.explorer import Explorer
from dropmax.workbench.data import load
from tests.cli.asking import as_json, notes, predicted
from tests.command import Run


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Digits as a person photographs them: dark ink on light, uneven paper, off the centre, larger than MNIST's."""
    folder = tmp_path_factory.mktemp("photographs")
    test = load("mnist-1k").test
    rng = np.random.default_rng(0)
    files = []
    for i in range(20):
        ink = np.kron(test.inputs[i, 0].numpy(), np.ones((6, 6))) / 255
        page = np.full((300, 260), 225.0) + rng.normal(0, 2, (300, 260))
        page[20 : 20 + 168, 60 : 60 + 168] -= 180 * ink
        files.append(folder / f"{i:02}-is-{int(test.labels[i])}.png")
        Image.fromarray(page.clip(0, 255).astype(np.uint8)).save(files[-1])
    return files


def test_predict_and_the_explorer_give_the_same_answer(run: Path, photographs: list[Path], dropmax: Run) -> None:
    done = dropmax("predict", run, *photographs, "--format", "json", "--all-probabilities")
    assert "warning" not in done.stderr
    rows = json.loads(done.stdout)
    explorer = Explorer.open(run)
    for file, row in zip(photographs, rows, strict=True):
        inputs = images.as_digit(images.open_upload(file.read_bytes()))
        answer = explorer.trained.answer(inputs[None])
        probs = torch.tensor(list(row["probabilities"].values()))
        torch.testing.assert_close(probs, answer.probs[0], atol=2e-6, rtol=0)
    right = sum(row["class_1"] == file.stem[-1] for file, row in zip(photographs, rows, strict=True))
    as_is = dropmax("predict", run, *photographs, "--format", "json", "--as-is")
    unprepared = json.loads(as_is.stdout)
    wrong = sum(row["class_1"] == file.stem[-1] for file, row in zip(photographs, unprepared, strict=True))
    assert right > wrong + 5
    assert "20 of 20 images are far lighter than those the model was trained on" in as_is.stderr
    assert "if they are dark on light, invert them" in as_is.stderr


def test_a_picture_of_mnist_is_taken_as_it_is(run: Path, tmp_path: Path) -> None:
    test = load("mnist-1k").test
    for i in range(5):
        Image.fromarray(test.inputs[i, 0].numpy()).save(tmp_path / f"{i}.png")
    np.savez(tmp_path / "rows.npz", x=test.inputs[:5].numpy())
    files, rows = predicted(run, *sorted(tmp_path.glob("*.png"))), predicted(run, tmp_path / "rows.npz")
    assert [row["probability_1"] for row in files] == pytest.approx([row["probability_1"] for row in rows], abs=2e-6)


def test_train_says_that_images_are_enlarged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        (tmp_path / "small" / name).mkdir(parents=True)
        for i in range(8):
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / "small" / name / f"{i}.png")
    shutil.copytree(tmp_path / "small", tmp_path / "other")
    said = notes("train", "small", "--test", "other", "--epochs", 1, "--out", "run", cwd=tmp_path)
    assert "are enlarged to 64 x 64" in said
    assert "32 pixels" in said
    found = as_json("evaluate", "run", cwd=tmp_path)
    assert found["examples"] == 16
    assert as_json("evaluate", "run", "other", cwd=tmp_path)["nll"] == pytest.approx(found["nll"], rel=1e-6)
