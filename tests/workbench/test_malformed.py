"""Malformed files that once ended in a traceback, a hang or too much memory; each is refused or read since."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dropmax.errors import DataError, InvalidType, InvalidValue, RunError
from dropmax.lab.experiments import plan_study
from dropmax.lab.experiments.plan import grid_points
from dropmax.lab.images import open_upload
from dropmax.workbench.data import load
from dropmax.workbench.data.images import decode
from dropmax.workbench.data.tables import read_rows, read_table
from dropmax.workbench.recipes import load_recipe, parse_toml
from dropmax.workbench.terminal import printable
from dropmax.workbench.training import RunDirectory
from tests.slow import malformed, malformed_runs


def test_one_long_cell_does_not_decide_the_memory_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y,label\n" + "1,2,a\n" * 3000 + f"0.{'1' * 100_000},2,b\n")
    assert read_table(path).train.inputs.shape == (3001, 2)
    path.write_text("x,y,label\n1,2,a\n" + f"1,2,{'b' * 300}\n")
    with pytest.raises(DataError, match="line 3: a label has 300 characters"):
        read_table(path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_packed_without_bounds_are_refused(tmp_path: Path, packing: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", packing) as archive:
        archive.writestr("x.npy", b"\x93NUMPY")
    with pytest.raises(DataError, match=r"packed in a way that np\.savez never uses"):
        load(tmp_path / "a.npz")


def test_bombs_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(malformed.npz_of_zeros(60_000, 1200))
    with pytest.raises(DataError, match="would take 72 MB, more than 100 times its size"):
        load(tmp_path / "a.npz")
    (tmp_path / "a.png").write_bytes(malformed.png_of_zeros(40_000, 40_000))
    with pytest.raises(DataError, match="too many pixels"):
        decode(tmp_path / "a.png", 16)
    (tmp_path / "images").write_bytes(malformed.gzip_of_zeros(400_000))
    (tmp_path / "labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]))
    with pytest.raises(DataError, match="no file of MNIST has more"):
        malformed.read_mnist_files(tmp_path)


def test_a_jpeg_of_very_many_passes_is_refused(tmp_path: Path) -> None:
    for size, scans, sound in ((24, 100, True), (4000, 5, True), (4000, 3000, False)):
        (tmp_path / "a.jpg").write_bytes(malformed.long_jpeg(size, size, scans))
        for read in (lambda path: decode(path, 16), lambda path: open_upload(path.read_bytes())):
            if sound:
                read(tmp_path / "a.jpg")
            else:
                with pytest.raises(DataError, match="more passes over its pixels than any sound"):
                    read(tmp_path / "a.jpg")


def test_labels_that_are_no_whole_numbers_of_64_bits_are_refused(tmp_path: Path) -> None:
    for labels in (np.array([0, 2**63 + 1], np.uint64), np.array([0.0, 1e300])):
        np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=labels)
        with pytest.raises(DataError, match="too large for the number of a class"):
            load(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros((40, 3)), y=np.array([0, 1] * 20, np.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # 2**63 is more than half a float's width can hold
        assert load(tmp_path / "a.npz").num_classes == 2
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.array([0, 1]), classes=np.array([], dtype="U1"))
    with pytest.raises(DataError, match="classes must be distinct strings"):
        load(tmp_path / "a.npz")


def test_parquet_tables_are_looked_over_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"length": np.zeros(9_000_000), "label": np.zeros(9_000_000, np.int8)}), path)
    with pytest.raises(DataError, match="would take 144 MB"):
        read_rows(path)
    for names in (["cat", "dog"], [3, 4]):  # a dictionary, as pandas writes categories
        column = pa.array([names[k % 2] for k in range(20)]).dictionary_encode()
        pq.write_table(pa.table({"length": np.arange(20.0), "label": column}), path)
        assert load(path).classes == tuple(map(str, names))
    pq.write_table(pa.table({"length": np.arange(20.0), "label": ["a", "b" * 300] * 10}), path)
    with pytest.raises(DataError, match="a label has 300 characters"):
        load(path)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, InvalidValue, "nested too deep"),
        ("x = " + "9" * 5000, InvalidValue, "not valid TOML"),
        ("[heads]\nsoftmax = 3", InvalidType, r"\[heads\.softmax\] must be a table"),
        ("[network]\nname = 'mlp'\nhidden = 1979-05-27", InvalidType, "must be a string, a number"),
        ("[network]\nname = 'mlp'\n'a b' = 1", InvalidValue, "is not the name of an option"),
        (f"[training]\nlearning_rate = {10**400}", InvalidValue, "must be finite"),
    ],
)
def test_recipes_that_no_one_could_write_out_again(
    tmp_path: Path, text: str, error: type[Exception], says: str
) -> None:
    whole = {"data": "mnist-1k", "head": "softmax", "network": "mlp"}
    rest = "".join(f"[{table}]\nname = '{name}'\n" for table, name in whole.items() if f"[{table}]" not in text)
    (tmp_path / "a.toml").write_text(f"{rest}{text}\n")
    with pytest.raises(error, match=says):
        load_recipe(tmp_path / "a.toml")


def test_characters_that_toml_or_a_terminal_wants_spelt_out() -> None:
    recipe = load_recipe("mnist-1k").override({"data.name": "a\x7fb"})
    assert parse_toml(recipe.to_toml(), "it")["data"]["name"] == "a\x7fb"
    assert printable("a\x1b[2J\x9b\u202e\udcff\n") == r"a\x1b[2J\x9b\u202e\udcff\n"
    assert printable("Zoë 漢字 – ok") == "Zoë 漢字 – ok"
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"


def test_plans_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="a grid of 1,000,000 points"):
        grid_points({name: range(100) for name in "abc"})
    (tmp_path / "a.toml").write_text(malformed_runs.STUDY.replace("runs = 3", f"runs = {10**9}"))
    with pytest.raises(InvalidValue, match="--runs must be at most 1,000"):
        plan_study(tmp_path / "a.toml")


def test_checkpoints_that_ask_for_memory(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", malformed_runs.small_recipe(), {})
    path = run.path / "checkpoint-000001.pt"
    torch.save({"epoch": 1, "model": {"w": torch.zeros(1).expand(1000, 1000, 1000)}}, path)
    with pytest.raises(RunError, match="without the numbers for it"):
        run.load_checkpoint()
    torch.save({"epoch": 1, "model": {}, "x": bytearray(5)}, path)
    with pytest.raises(RunError, match="more than weights and numbers"):
        run.load_checkpoint()
    with zipfile.ZipFile(path) as sound:
        parts = {info.filename: sound.read(info) for info in sound.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(RunError, match="its parts are packed"):
        run.load_checkpoint()
    (run.path / "metrics.jsonl").write_text("5\n")
    with pytest.raises(RunError, match="line 1 is not that of epoch 1"):
        run.metrics()
    (run.path / "environment.json").write_text("[]")
    with pytest.raises(RunError, match=r"it holds \[\], not a table"):
        run.environment()


def test_names_of_files_need_not_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    for label in ("cat", "dog"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for k in range(4):
            name = os.fsencode(tmp_path / "set" / label) + b"/%d\xff.png" % k
            Path(os.fsdecode(name)).write_bytes(malformed.pictures()["colour.png"])
    assert len(load(tmp_path / "set", image_size=8).classes) == 2
    Path(os.fsdecode(os.fsencode(tmp_path / "set") + b"/\xff")).mkdir()
    with pytest.raises(DataError, match=r"has the class '\\udcff', which is not text"):
        load(tmp_path / "set", image_size=8)
