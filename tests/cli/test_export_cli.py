"""``dropmax export`` and ``dropmax train --log`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Run


def test_export(run: Path, dropmax: Run, tmp_path: Path) -> None:
    done = dropmax("export", run, "--format", "torch-export", "--out", "m.pt2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"run", "file", "format", "bytes", "largest_difference"}
    assert found["largest_difference"] <= 1e-5
    before = (tmp_path / "m.pt2").read_bytes()
    again = dropmax("export", run, "--format", "safetensors", "--out", "m.pt2", cwd=tmp_path)
    assert again.returncode == 2
    assert "m.pt2 exists: replace it with --force" in again.stderr
    assert (tmp_path / "m.pt2").read_bytes() == before
    forced = dropmax("export", run, "--format", "safetensors", "--out", "m.pt2", "--force", cwd=tmp_path)
    assert forced.stdout == "m.pt2 holds the model (1.8 MB)\n"
    assert dropmax("evaluate", "m.pt2", "--json", cwd=tmp_path).returncode == 0


def test_export_to_a_directory_with_a_card(run: Path, dropmax: Run, tmp_path: Path) -> None:
    done = dropmax("export", run, "--format", "hub", "--out", "model", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"run": str(run), "format": "hub", "directory": "model"}
    assert "error %" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--format", "onnx", "--out", "x"], "there is no trained model at nowhere"),
        (["nowhere", "--format", "onxx", "--out", "x"], "did you mean 'onnx'?"),
        (["nowhere", "--format", "onnx"], "say where to write with --out"),
        (["nowhere", "--format", "hub"], "--out, or upload with --push OWNER/NAME"),
        (["nowhere", "--format", "onnx", "--out", "x", "--push", "a/b"], "--push and --private go with --format hub"),
        (["nowhere", "--format", "hub", "--out", "x", "--private"], "--private goes with --push"),
        (["nowhere", "--format", "onnx", "--out", "no/x"], "there is no directory no to write x into"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments: list[str], message: str, dropmax: Run, tmp_path: Path) -> None:
    done = dropmax("export", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_train_with_logs(dropmax: Run, tmp_path: Path) -> None:
    arguments = ["train", "mnist-1k", "--epochs", 1, "--set", "data.train_size=100", "--set", "network.name=mlp"]
    wrong = dropmax(*arguments, "--log", "tensorbord", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'tensorboard'?" in wrong.stderr
    assert not list(tmp_path.iterdir())
    for options in (["--log", "tensorboard"], ["--tensorboard"], ["--log", "tensorboard", "--tensorboard"]):
        done = dropmax(*arguments, *options, "--out", "run", "--force", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
