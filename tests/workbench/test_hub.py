"""Models as directories: a round trip without a network, a card that holds what was measured, uploads to a stand-in."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from dropmax import metrics
from dropmax.errors import DropMaxError, InvalidValue, MissingDependency, RunError
from dropmax.workbench.data import load
from dropmax.workbench.evaluation import predict
from dropmax.workbench.hub import from_pretrained, push_to_hub, save_pretrained
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_model, train
from tests.close import close

FILES = ["README.md", "confusable.png", "model.safetensors", "recipe.toml"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"training.epochs": 2, "data.validation_size": 100, "network.name": "mlp", "network.hidden": [16]}
    return train(load_recipe("mnist-1k").override(values), tmp_path_factory.mktemp("hub") / "run", quiet=True).path


@pytest.fixture(scope="module")
def saved(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(run, tmp_path_factory.mktemp("hub") / "model")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_round_trip_gives_the_same_model(run: Path, saved: Path) -> None:
    assert names(saved) == FILES
    ours, theirs = from_pretrained(saved), load_model(run)
    assert ours.classes == theirs.classes
    assert ours.recipe == theirs.recipe
    images = load("mnist-1k").test.inputs[:20]
    with torch.no_grad():
        for trained in (ours, theirs):
            assert not trained.model.training
        close(ours.model(ours.prepare(images)), theirs.model(theirs.prepare(images)), terms=images[0].numel())
    again = from_pretrained(str(saved / "model.safetensors"))
    assert again.classes == theirs.classes


def test_the_card_holds_what_was_measured(run: Path, saved: Path) -> None:
    card = (saved / "README.md").read_text()
    trained = load_model(run)
    for mode in ("mean", "exact"):
        outputs = predict(trained.model, trained.batches(load("mnist-1k").test), mode=mode)
        scores = metrics.evaluate(outputs.probs, outputs.labels)
        row = next(line for line in card.splitlines() if line.startswith(f"| test | {mode} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == "10,000"
        shown = [100 * scores["error"], scores["nll"], scores["brier"], 100 * scores["ece"], scores["aurc"]]
        assert [float(cell) for cell in cells[3:]] == pytest.approx(shown, rel=1e-3)
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation"]
    row = next(line for line in card.splitlines() if line.startswith("| validation | mean |"))
    assert f"{100 * logged['error']:.4g}" in row
    assert "![Which classes are confused with which](confusable.png)" in card
    with Image.open(saved / "confusable.png") as picture:
        assert picture.width > 400
    environment = json.loads((run / "environment.json").read_text())
    for text in (environment["commit"] or "not recorded", environment["command"], (saved / "recipe.toml").read_text()):
        assert text.strip() in card


def test_a_hub_can_read_the_card_and_its_code_runs(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (saved / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(code, {})
    said = capsys.readouterr().out
    assert said.startswith("tensor([[")
    assert re.search(r"sure: \d|torn between \d|unlike anything", said)
    data = pytest.importorskip("huggingface_hub").ModelCard(card).data
    assert (data.library_name, data.pipeline_tag) == ("dropmax", "image-classification")
    assert {result.metric_type for result in data.eval_results} >= {"error", "nll", "ece"}


def test_without_matplotlib_the_card_has_a_table(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    place = save_pretrained(run, tmp_path / "model")
    assert names(place) == ["README.md", "model.safetensors", "recipe.toml"]
    card = (place / "README.md").read_text()
    assert "![" not in card
    assert "| true class | rival | value |" in card
    rows = re.findall(r"^\| (\d) \| (\d) \| (0\.\d{3}) \|$", card, re.MULTILINE)
    assert len(rows) == 10
    assert all(i != j for i, j, _ in rows)
    assert [float(value) for *_, value in rows] == sorted((float(value) for *_, value in rows), reverse=True)


def test_nothing_is_invented(run: Path, tmp_path: Path) -> None:
    """A model on its own, whose data is nowhere: no numbers, and no claim about where it comes from."""
    trained = load_model(run)
    recipe = trained.recipe.override({"data.name": str(tmp_path / "gone.npz")})
    card = (save_pretrained(replace(trained, recipe=recipe), tmp_path / "model") / "README.md").read_text()
    for text in (
        "Nothing was measured: ",
        "gone.npz",
        "Not measured, as there was no test set at hand.",
        "The run that made it was not kept with the model",
        "# dropmax on gone.npz\n",  # the path of somebody's data is their business
    ):
        assert text in card
    assert "model-index" not in card


def test_nothing_of_the_users_is_overwritten(run: Path, saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "README.md").write_text("mine")
    with pytest.raises(RunError, match="is not empty: replace the model in it with --force"):
        save_pretrained(saved, place)
    assert (place / "README.md").read_text() == "mine"
    (place / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"holds 'thesis\.tex', which is not part of a saved model"):
        save_pretrained(saved, place, force=True)
    (place / "thesis.tex").unlink()
    save_pretrained(saved, place, force=True)
    assert names(place) == FILES
    for taken, message in ((run, "is a run directory"), (saved / "README.md", "is not a directory")):
        with pytest.raises(RunError, match=message):
            save_pretrained(saved, taken, force=True)


class FakeApi:
    """Stands for huggingface_hub.HfApi: remembers what was uploaded."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.uploaded: dict[str, bytes] = {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        self.private = private
        return f"https://example.org/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, allow_patterns: list[str]) -> None:
        if self.error is not None:
            raise self.error
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        self.uploaded = {name: files[name] for name in allow_patterns if name in files}


def test_push_uploads_a_saved_directory_as_it_is_and_makes_the_card_of_a_run(run: Path, tmp_path: Path) -> None:
    place = save_pretrained(run, tmp_path / "model")
    (place / "README.md").write_text("edited")
    (place / "password.txt").write_text("secret")
    api, other = FakeApi(), FakeApi()
    assert push_to_hub(place, "me/digits", api=api, private=True) == "https://example.org/me/digits"
    assert api.private
    assert api.uploaded["README.md"] == b"edited"
    push_to_hub(run, "me/digits", api=other)
    assert b"from_pretrained('me/digits')" in other.uploaded["README.md"]
    assert sorted(api.uploaded) == sorted(other.uploaded) == FILES
    with pytest.raises(RunError, match="cannot upload to me/digits: 401 Unauthorised"):
        push_to_hub(place, "me/digits", api=FakeApi(OSError("401 Unauthorised\nmore")))
    with pytest.raises(InvalidValue, match="a repository is named owner/name, got 'digits'"):
        push_to_hub(place, "digits", api=api)


def test_from_a_repository(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(repository: str, file: str, *, revision: str | None, token: str | None) -> str:
        asked.append((repository, file, revision))
        if repository == "me/none":
            raise OSError("404: there is no such repository\nand more")
        return str((tmp_path if repository == "me/foreign" else saved) / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert from_pretrained("me/digits", revision="v1").classes == tuple("0123456789")
    assert asked == [("me/digits", "model.safetensors", "v1")]
    with pytest.raises(RunError, match=r"cannot download model\.safetensors of me/none: 404: there is no such"):
        from_pretrained("me/none")

    # A model that names a class of its own would run that module's code.
    (tmp_path / "spy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with safetensors.safe_open(saved / "model.safetensors", framework="pt") as opened:
        about = json.loads(opened.metadata()["dropmax"])
    about["recipe"]["network"] = {"name": "spy:Network"}
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"dropmax": json.dumps(about)})
    with pytest.raises(RunError, match=r"would import the network 'spy:.*pass trust_code=True"):
        from_pretrained("me/foreign")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DropMaxError):
        from_pretrained("me/foreign", trust_code=True)
    assert (tmp_path / "ran").exists(), "the refusal above refused nothing"


def test_the_local_part_needs_no_hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert from_pretrained(saved).classes[0] == "0"
    for call in (lambda: from_pretrained("me/digits"), lambda: push_to_hub(saved, "me/digits")):
        with pytest.raises(MissingDependency, match=r'needs huggingface_hub, .*"dropmax\[hub\]"'):
            call()
    with pytest.raises(RunError, match="there is no directory or file 'nowhere'"):
        from_pretrained("nowhere")
