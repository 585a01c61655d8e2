"""``dropmax export`` and ``dropmax train --log`` as a user meets them; test_cli.py has the mistakes."""

from __future__ import annotations

from pathlib import Path

from tests.cli.asking import answer, as_json, refusal, refused_at_once


def test_export(run: Path, tmp_path: Path) -> None:
    found = as_json("export", run, "--format", "torch-export", "--out", "m.pt2", cwd=tmp_path)
    assert set(found) == {"run", "file", "format", "bytes", "largest_difference"}
    assert found["largest_difference"] <= 1e-5
    before = (tmp_path / "m.pt2").read_bytes()
    again = ("export", run, "--format", "safetensors", "--out", "m.pt2")
    assert "m.pt2 exists: replace it with --force" in refusal(*again, cwd=tmp_path)
    assert (tmp_path / "m.pt2").read_bytes() == before
    assert answer(*again, "--force", cwd=tmp_path) == "m.pt2 holds the model (1.8 MB)\n"
    assert as_json("evaluate", "m.pt2", cwd=tmp_path)


def test_export_to_a_directory_with_a_card(run: Path, tmp_path: Path) -> None:
    done = as_json("export", run, "--format", "hub", "--out", "model", cwd=tmp_path)
    assert done == {"run": str(run), "format": "hub", "directory": "model"}
    assert "error %" in (tmp_path / "model" / "README.md").read_text()


def test_train_with_logs(tmp_path: Path) -> None:
    arguments = ["train", "mnist-1k", "--epochs", 1, "--set", "data.train_size=100", "--set", "network.name=mlp"]
    refused_at_once("did you mean 'tensorboard'?", *arguments, "--log", "tensorbord", cwd=tmp_path)
    for options in (["--log", "tensorboard"], ["--tensorboard"], ["--log", "tensorboard", "--tensorboard"]):
        answer(*arguments, *options, "--out", "run", "--force", cwd=tmp_path)
        assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
