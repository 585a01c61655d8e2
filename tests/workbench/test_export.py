"""Exported files against PyTorch: every head, any batch size, random and real inputs; and what the files say."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

from dropmax import HEADS, Classifier, make_head
from dropmax.errors import DropMaxError, InvalidType, MissingDependency, RunError
from dropmax.workbench.backbones import Backbone, Origin
from dropmax.workbench.data import Split, load
from dropmax.workbench.export import OUTPUTS, Served, export, raw_shape
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import TrainedModel, build, load_model
from tests.close import close, tolerance

onnxruntime = pytest.importorskip("onnxruntime")

BATCHES = (1, 2, 7, 100)
MLP = {"network.name": "mlp", "network.hidden": [8]}


def model(head: str, shape: tuple[int, ...], classes: Sequence[str], stored: int = 0, **values: Any) -> TrainedModel:
    """A model whose head is sure of itself: logits of about ten, retain logits of about five."""
    base = "mnist-1k" if len(shape) == 3 else "own-features"
    values = {"head.name": head} | ({} if "network.name" in values else MLP) | values
    recipe = load_recipe(base).override(values)
    net = build(recipe, shape, len(classes)).eval()
    with torch.no_grad():
        net.head.classifier.weight *= 40
        if isinstance(getattr(net.head, "retain", None), nn.Linear):
            net.head.retain.weight *= 20
    mean, std = [0.1 + 0.01 * i for i in range(shape[0])], [0.3 + 0.01 * i for i in range(shape[0])]
    return TrainedModel(net, recipe, tuple(classes), shape, tuple(mean), tuple(std), stored)


def expected(trained: TrainedModel, raw: Tensor) -> dict[str, Tensor]:
    """What the model says by the way that evaluation takes."""
    labels = torch.zeros(len(raw), dtype=torch.long)
    crop = trained.input_shape[-1] if trained.is_images and raw_shape(trained) != trained.input_shape else None
    ((x, _),) = trained.batches(Split(raw, labels, crop), batch_size=len(raw))
    head = trained.model.head
    with torch.no_grad():
        h = trained.model.net(x)
        return {
            "mean": head.predict_proba(h),
            "exact": head.predict_proba(h, "exact"),
            "retain": head.retain_probs(h),
            "std": head.predictive_std(h),
        }


def assert_same(run: Callable[[Tensor], dict[str, Tensor]], trained: TrainedModel, inputs: Sequence[Tensor]) -> None:
    for raw in inputs:
        found, wanted = run(raw), expected(trained, raw)
        assert list(found) == list(OUTPUTS)
        for name, value in wanted.items():
            close(found[name], value, what=name, **rounding(trained))


def rounding(trained: TrainedModel) -> dict[str, float]:
    """What a probability may be off by: a sum per input in the first layer, and logits of about ten behind it."""
    return {"terms": math.prod(trained.input_shape), "scale": 10.0}


def with_onnx(file: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    session = onnxruntime.InferenceSession(file)
    names = [output.name for output in session.get_outputs()]
    return lambda raw: {
        name: torch.from_numpy(value)
        for name, value in zip(names, session.run(None, {"inputs": raw.numpy()}), strict=True)
    }


DIGITS = tuple("0123456789")


@pytest.fixture(scope="module")
def digits() -> list[Tensor]:
    """Random pixels and real digits, in batches of every size."""
    real = load("mnist-1k").test.inputs
    return [torch.randint(256, (n, 1, 28, 28), dtype=torch.uint8) for n in BATCHES] + [real[:n] for n in BATCHES]


@pytest.mark.parametrize("head", [head for head in HEADS if head != "dropmax-qp"])  # which the next test takes
def test_onnx_answers_as_pytorch_does(head: str, digits: list[Tensor], tmp_path: Path) -> None:
    trained = model(head, (1, 28, 28), DIGITS, 28)
    found = export(trained, tmp_path / "model.onnx", format="onnx")
    assert found["largest_difference"] <= tolerance(torch.float32, **rounding(trained))
    assert found["bytes"] == (tmp_path / "model.onnx").stat().st_size
    assert_same(with_onnx(tmp_path / "model.onnx"), trained, digits)
    about = onnxruntime.InferenceSession(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    assert list(about) == ["dropmax"]
    _assert_says(json.loads(about["dropmax"]), trained)
    here = str(Path(__file__).parents[2]).encode()
    assert here not in (tmp_path / "model.onnx").read_bytes(), "a path of this machine is in the file"


def test_onnx_of_features_and_of_logits_far_apart(digits: list[Tensor], tmp_path: Path) -> None:
    """onnxruntime's sigmoid is 0 at -20, where the logarithm of rho matters still."""
    trained = model("dropmax-qp", (784,), ["a", "b", "c", "d"], **{"data.name": "table.csv"})
    with torch.no_grad():
        trained.model.head.classifier.bias += torch.tensor([0.0, 60.0, 0.0, 90.0])
        trained.model.head.retain.bias -= torch.tensor([0.0, 60.0, 0.0, 90.0])
    export(trained, tmp_path / "model.onnx")
    inputs = [images.flatten(1) / 32 for images in digits]
    assert expected(trained, inputs[-1])["mean"][:, 1].max() > 0.5
    assert_same(with_onnx(tmp_path / "model.onnx"), trained, inputs)


def test_onnx_crops_colour_images(tmp_path: Path) -> None:
    trained = model("softmax", (3, 8, 8), ["a", "b", "c"], 12, **{"network.name": "cifar-resnet", "network.depth": 8})
    export(trained, tmp_path / "model.onnx")
    images = [torch.randint(256, (n, 3, 12, 12), dtype=torch.uint8) for n in BATCHES]
    assert_same(with_onnx(tmp_path / "model.onnx"), trained, images)


def _assert_says(about: dict[str, Any], trained: TrainedModel) -> None:
    assert about["classes"] == list(trained.classes)
    assert (about["mean"], about["std"]) == (list(trained.mean), list(trained.std))
    assert about["head"] == trained.model.head.config()
    assert about["recipe"] == json.loads(json.dumps(trained.recipe.to_dict()))
    assert about["inputs"]["shape"] == ["batch", *raw_shape(trained)]
    assert about["outputs"] == OUTPUTS
    assert about["version"].startswith("0.")


def test_torch_export_crops_and_normalises_and_needs_no_dropmax(tmp_path: Path) -> None:
    trained = model("dropmax", (3, 8, 8), ["a", "b", "c"], 12)
    file = tmp_path / "model.pt2"
    export(trained, file, format="torch-export")
    extra = {"dropmax": ""}
    program = torch.export.load(file, extra_files=extra)
    _assert_says(json.loads(extra["dropmax"]), trained)
    assert "dropmax" not in str(program.graph)
    inputs = [torch.randint(256, (n, 3, 12, 12), dtype=torch.uint8) for n in BATCHES]
    for run in (program.module(), Served(trained)):  # the graph, and what it was made from
        assert_same(run, trained, inputs)


def test_safetensors_is_what_load_model_reads(tmp_path: Path) -> None:
    trained = model("dropmax", (1, 28, 28), DIGITS, 28)
    export(trained, tmp_path / "model.safetensors", format="safetensors")
    loaded = load_model(tmp_path / "model.safetensors")
    assert loaded.classes == trained.classes
    for name, value in trained.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        _assert_says(json.loads(opened.metadata()["dropmax"]), trained)


def test_nothing_is_overwritten_and_mistakes_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model("softmax", (4,), ["yes", "no"], **{"data.name": "table.csv"})
    file = tmp_path / "mine.safetensors"
    file.write_text("mine")
    with pytest.raises(RunError, match=r"mine\.safetensors exists: replace it with --force"):
        export(trained, file, format="safetensors")
    assert file.read_text() == "mine"
    export(trained, file, format="safetensors", force=True)
    assert load_model(file).classes == ("yes", "no")
    for place, message in ((tmp_path, "is a directory"), (tmp_path / "no" / "x", "there is no directory")):
        with pytest.raises(RunError, match=message):
            export(trained, place)
    with pytest.raises(DropMaxError, match=r"unknown format 'onxx': did you mean 'onnx'\?"):
        export(trained, tmp_path / "x", format="onxx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingDependency, match=r'needs onnxscript, .*"dropmax\[export\]"'):
        export(trained, tmp_path / "x.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def test_what_no_graph_can_hold_or_answers_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moody(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    def wrong(content: bytes) -> Callable[[Tensor], dict[str, Tensor]]:
        return lambda inputs: {name: torch.full((len(inputs), 2), torch.nan) for name in OUTPUTS}

    trained = model("softmax", (4,), ["yes", "no"], **{"data.name": "table.csv", "network.hidden": [4]})
    monkeypatch.setattr("dropmax.workbench.export._torch_runner", wrong)
    with pytest.raises(RunError, match=r"differs from PyTorch by nan, more than 0\.0001: nothing was written"):
        export(trained, tmp_path / "x.pt2", format="torch-export")
    trained.model.net = Moody()
    with pytest.raises(RunError, match=r"torch\.export cannot turn this model into a graph: .+") as caught:
        export(trained, tmp_path / "x.pt2", format="torch-export")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_told_what_can(tmp_path: Path) -> None:
    model = Classifier(torch.nn.Flatten(), make_head("dropmax", 4, 3))
    for wrong, hint in ((model, "does not say how its inputs are normalised"), (object(), "dropmax train")):
        with pytest.raises(InvalidType, match=f"export takes a run directory.* not a {type(wrong).__name__}.*{hint}"):
            export(wrong, tmp_path / "model.onnx", format="torch-export")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def behind(kind: str, graph: nn.Module | None, monkeypatch: pytest.MonkeyPatch) -> TrainedModel:
    """A model of five features that a pretrained network of this kind makes of 3 x 8 x 8 pixels or of texts."""
    origin = Origin("small", kind, "small", "1", "abc", "as it is")
    backbone = Backbone(origin, lambda batch: torch.zeros(len(batch), 5), 8, 8, graph)
    monkeypatch.setattr("dropmax.workbench.export.reload_backbone", lambda text: backbone)
    return replace(model("dropmax", (5,), "abc"), origin=origin.to_json())


def test_photographs_become_answers_in_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)

        def forward(self, images: Tensor) -> Tensor:
            return torch.relu(self.conv(images.float() / 255)).mean((2, 3))

    graph = Graph().eval()
    trained = behind("images", graph, monkeypatch)
    found = export(trained, tmp_path / "m.onnx")
    assert "note" not in found
    pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        wanted = expected(trained, graph(pixels))
    answers = with_onnx(tmp_path / "m.onnx")(pixels)
    for name, value in wanted.items():
        close(answers[name], value, what=name, terms=27 * 36, scale=10.0)


@pytest.mark.parametrize(("kind", "says"), [("text", "a tokenizer is no"), ("images", "torch.export cannot follow it")])
def test_a_graph_of_features_says_why(kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = behind(kind, None, monkeypatch)
    found = export(trained, tmp_path / "m.pt2", format="torch-export")
    assert raw_shape(trained) == (5,)
    assert "the features of small" in found["note"]
    assert says in found["note"]
