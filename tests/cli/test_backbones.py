"""Photographs and sentences of one's own, through a pretrained network: train, evaluate, predict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.asking import answer, as_json, notes, predicted, refusal

TOPICS = {"card": "where is my card", "money": "send money abroad now please", "app": "app"}
COLUMNS = ("--text", "utterance", "--label-column", "intent")
LENGTHS = ("--with", "my_features:lengths")


def lengths(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), text.count(" "), text.count("a")] for text in texts], dtype=torch.float32)


def colours(images: torch.Tensor) -> torch.Tensor:
    return images.float().mean((2, 3)) / 255


@pytest.fixture(autouse=True)
def features(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    module = ModuleType("my_features")
    module.lengths, module.colours = lengths, colours  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_features", module)
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path_factory.mktemp("cache")))
    return module


def write_texts(path: Path, count: int) -> Path:
    rows = [f"{text}{'!' * (i % 3)},{topic}" for i in range(count) for topic, text in TOPICS.items()]
    path.write_text("utterance,intent\n" + "\n".join(rows) + "\n")
    return path


def test_sentences_from_a_table_to_an_answer(tmp_path: Path) -> None:
    table, run = write_texts(tmp_path / "intents.csv", 20), tmp_path / "run"
    answer("train", table, *COLUMNS, *LENGTHS, "--epochs", 30, "--out", run)
    assert [row["class_1"] for row in predicted(run, "where is my card", "app")] == ["card", "app"]
    new = write_texts(tmp_path / "new.csv", 2)
    assert as_json("evaluate", run, new)["error"] == 0
    assert [row["class_1"] for row in predicted(run, new)] == list(TOPICS) * 2


def test_texts_that_are_empty_or_longer_than_a_file_name(tmp_path: Path) -> None:
    table, run = write_texts(tmp_path / "intents.csv", 5), tmp_path / "run"
    answer("train", table, "--text", "utterance", "--label", "intent", *LENGTHS, "--epochs", 1, "--out", run)
    assert "nothing in the text" in refusal("predict", run, "  ")
    assert "misspelt.csv does not exist" in refusal("predict", run, tmp_path / "misspelt.csv")
    assert [len(row["input"]) for row in predicted(run, "a" * 100_000, "Ωμέγα と 漢字")] == [100_000, 10]


def test_photographs_from_a_folder_to_an_answer(tmp_path: Path) -> None:
    for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(15):
            Image.new("RGB", (40, 30), tuple(c + i for c in colour)).save(tmp_path / "photos" / name / f"{i}.jpg")
    (tmp_path / "photos" / "red" / "broken.jpg").write_bytes(b"no image")
    options = ("--with", "my_features:colours", "--epochs", 20, "--out", tmp_path / "run")
    assert "left out red/broken.jpg: " in notes("train", tmp_path / "photos", *options)
    Image.new("RGB", (300, 500), (210, 10, 30)).save(tmp_path / "new.png")
    assert predicted(tmp_path / "run", tmp_path / "new.png")[0]["class_1"] == "red"


def test_features_of_another_backbone_are_refused(tmp_path: Path, features: ModuleType) -> None:
    table = write_texts(tmp_path / "intents.csv", 10)
    features.other = lambda texts: lengths(texts) + 1  # type: ignore[attr-defined]
    for name in ("lengths", "other"):
        answer("embed", table, *COLUMNS, "--with", f"my_features:{name}", "--out", tmp_path / f"{name}.npz")
    arrays = dict(np.load(tmp_path / "other.npz"))
    described = json.loads(str(arrays["backbone"]))
    arrays["backbone"] = np.array(json.dumps({**described, "digest": "ffff"}))
    np.savez(tmp_path / "other.npz", **arrays)
    answer("train", tmp_path / "lengths.npz", "--epochs", 1, "--out", tmp_path / "run")
    said = refusal("predict", tmp_path / "run", tmp_path / "other.npz")
    assert "my_features:other" in said
    assert "my_features:lengths" in said


def test_a_backbone_needs_consent_and_a_known_name(tmp_path: Path) -> None:
    table = write_texts(tmp_path / "intents.csv", 5)
    for name, says in (("strangers_module:f", "--trust-network"), ("wordlama", "did you mean 'wordllama'")):
        assert says in refusal("train", table, *COLUMNS, "--out", tmp_path / "run", "--with", name)
        assert not (tmp_path / "run").exists()


def test_the_split_of_embedded_rows_is_kept(tmp_path: Path) -> None:
    from dropmax.workbench.data import load

    split = np.array(["train"] * 6 + ["val"] * 2 + ["test"] * 3 + ["outside"])
    labels = np.array([0, 1] * 6)
    labels[-1] = -1
    names = np.array([f"r{i}" for i in range(12)])
    classes = np.array(["a", "b"])
    np.savez(tmp_path / "f.npz", x=np.arange(24.0).reshape(12, 2), y=labels, split=split, names=names, classes=classes)
    data = load(tmp_path / "f.npz")
    assert (len(data.train), len(data.validation), len(data.test)) == (6, 2, 3)
    assert data.outside is not None
    assert data.outside.tolist() == [[22.0, 23.0]]
    assert "1 rows of outside are neither trained nor tested on" in data.notes


def test_a_class_of_one_row_is_trained_on_and_a_folder_is_no_sentence(tmp_path: Path) -> None:
    table, run = write_texts(tmp_path / "intents.csv", 8), tmp_path / "run"
    table.write_text(table.read_text() + "something else altogether,rare\n")
    said = notes("train", table, *COLUMNS, *LENGTHS, "--epochs", 2, "--out", run)
    assert "only one row each, so trained on and never tested: rare" in said
    assert predicted(run, "app")
    assert "a model of sentences takes sentences" in refusal("predict", run, tmp_path)
