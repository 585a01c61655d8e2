"""Hostile files: nothing they hold is run, and nothing is written elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropmax.errors import DropMaxError
from dropmax.lab.experiments import Store, plan_table, tuned_from
from dropmax.lab.experiments.records import failure
from dropmax.lab.explorer import Explorer
from dropmax.lab.figures.runs import load_runs
from dropmax.workbench.data import load
from dropmax.workbench.data.npz import read_npz_rows
from dropmax.workbench.data.unlabelled import Expected, find_inputs, read_inputs
from dropmax.workbench.export import export
from dropmax.workbench.hub import from_pretrained, save_pretrained
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import RunDirectory, load_model, resume, train
from tests.slow.hostile import MODULE, Ground, armed_pickle, command, hostile_run
from tests.slow.malformed import npy, write_folder


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    made = Ground.make(tmp_path / "ground")
    yield made
    made.check()


# --- pickles wherever a reader looks ----------------------------------------------------------------------------


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def put(folder: Path, payload: bytes, *names: str) -> Path:
    """Write the payload under some names in a folder."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(payload)
    return folder


def predict_from(path: Path) -> object:
    return list(read_inputs(find_inputs([path]), Expected((1, 28, 28), 28)))


def in_cache(folder: Path, payload: bytes) -> object:
    """Replace the cache of decoded images, which the next run opens without decoding."""
    place = write_folder(folder / "set", 4)
    expected = load(place, image_size=8)
    for cache in Path(os.environ["DROPMAX_CACHE"]).rglob("*.npy"):
        cache.write_bytes(npy("|O", (20,), payload))
    found = load(place, image_size=8)
    assert torch.equal(found.train.inputs, expected.train.inputs), "the images of a hostile cache were believed"
    return found


def in_parquet(folder: Path, payload: bytes) -> object:
    """Name an extension type that pyarrow once restored from a pickle in the column's description."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    fields = [pa.field("length", pa.float64(), metadata=about), pa.field("label", pa.int64(), metadata=about)]
    columns = [pa.array([1.0] * 20), pa.array([k % 2 for k in range(20)])]
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), folder / "a.parquet")
    return load(folder / "a.parquet")


# An .npy file of objects is a header and a pickle.
SOUND = npy("<f4", (20, 3), bytes(240))
BINARY_CIFAR = ("data_batch_1.bin", "test_batch.bin", "batches.meta.txt")
#: How a pickle is handed to a reader in a folder; test_loop.py tries checkpoints, and test_cifar.py the pickled CIFAR.
CARRIERS: dict[str, Callable[[Path, bytes], object]] = {
    "the labels of an .npz": lambda at, payload: load(npz(at / "a.npz", x=SOUND, y=npy("|O", (20,), payload))),
    "the inputs of an .npz": lambda at, payload: read_npz_rows(npz(at / "a.npz", x=npy("|O", (20,), payload))),
    "the members of an .npz": lambda at, payload: load(npz(at / "a.npz", x=payload, y=payload)),
    "place of an .npz": lambda at, payload: load(put(at, payload, "a.npz") / "a.npz"),
    "an .npy called .npz": lambda at, payload: load(put(at, npy("|O", (20,), payload), "a.npz") / "a.npz"),
    "an .npy to predict": lambda at, payload: predict_from(put(at, npy("|O", (20,), payload), "a.npy") / "a.npy"),
    "place of an image": lambda at, payload: predict_from(put(at, payload, "a.png") / "a.png"),
    "place of a model": lambda at, payload: from_pretrained(put(at, payload, "model.safetensors", "pytorch_model.bin")),
    "place of the binary release of CIFAR": lambda at, payload: load(
        "cifar-10", data_dir=put(at / "cifar-10-batches-bin", payload, *BINARY_CIFAR).parent
    ),
    "the image cache": in_cache,
    "the column types of a Parquet table": in_parquet,
    "place of a log": lambda at, payload: RunDirectory(put(at / "run", payload, "metrics.jsonl")).metrics(),
    "place of an origin": lambda at, payload: RunDirectory(put(at / "run", payload, "environment.json")).environment(),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_pickle_is_run(carrier: str, ground: Ground) -> None:
    payload = armed_pickle(ground.mark)
    with contextlib.suppress(DropMaxError):  # refusing is an answer
        CARRIERS[carrier](ground.folder, payload)


# --- networks named by an import path ---------------------------------------------------------------------------


def from_command(line: str) -> Callable[[Ground, Path], object]:
    def call(ground: Ground, run: Path) -> object:
        places = {"RUN": run, "CSV": ground.folder / "a.csv", "OUT": ground.folder / "out"}
        code, said = command(*(places.get(word, word) for word in line.split()))
        assert code == 2
        return said

    return call


COMMANDS = (
    "evaluate RUN", "predict RUN CSV", "diagnose RUN", "figures RUN --out OUT", "report RUN --out OUT",
    "explore RUN --port 0", "export RUN --format safetensors --out OUT", "train --resume RUN",
)  # fmt: skip
LOADERS: dict[str, Callable[[Ground, Path], object]] = {
    "load_model": lambda ground, run: load_model(run),
    "load_model of the file": lambda ground, run: load_model(run / "model.safetensors"),
    "resume": lambda ground, run: resume(run, quiet=True),
    "load_runs": lambda ground, run: load_runs([run]),
    "Explorer.open": lambda ground, run: Explorer.open(run),
    "export": lambda ground, run: export(run, ground.folder / "out", format="safetensors"),
    "from_pretrained": lambda ground, run: from_pretrained(run),
    "save_pretrained": lambda ground, run: save_pretrained(run, ground.folder / "out"),
    **{f"dropmax {line}": from_command(line) for line in COMMANDS},
}


@pytest.mark.parametrize("loader", LOADERS)
def test_no_network_is_imported_without_trust(loader: str, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hostile_run(ground)
    monkeypatch.syspath_prepend(str(ground.folder / "modules"))
    # The same file, trusted, must load and leave the mark: or the refusal below refuses nothing.
    load_model(run, trust_code=True)
    ground.mark.unlink()
    del sys.modules[MODULE]
    if "resume" in loader:
        (run / "model.safetensors").unlink()
    try:
        said = LOADERS[loader](ground, run)
    except DropMaxError as error:
        said = str(error)
    assert isinstance(said, str)
    assert "trust" in said


HOSTILE_POINT = {"network.name": f"{MODULE}:Network"}


def stored_table(folder: Path, point: dict[str, Any], said: dict[str, Any]) -> Store:
    """Write a table whose one tuned head was tuned over one point, and whose result says another, maybe."""
    store = Store(folder / "table")
    plan = plan_table(["mnist-1k"], heads=["dropmax-qp"], runs=1, overrides={"training.weight_decay": 0.0})
    group = dataclasses.replace(plan.groups[0], points=(point,))
    store.join(dataclasses.replace(plan, groups=(group,)), "dropmax reproduce")
    metrics = {"mean": {"error": 0.01, "nll": 0.01, "ece": 0.01}}
    (job,) = group.tune_jobs()
    store.append(failure(job, "x").model_copy(update={"status": "done", "point": said, "validation": metrics}))
    return store


def test_tables_of_strangers_name_no_networks(ground: Ground) -> None:
    store = stored_table(ground.folder / "a", HOSTILE_POINT, HOSTILE_POINT)
    with pytest.raises(DropMaxError):
        tuned_from(plan_table(["mnist-5k"], heads=["dropmax-qp"]), store.path)
    store = stored_table(ground.folder / "b", {"head.gamma": 1.0}, HOSTILE_POINT)
    (job,) = store.plan().groups[0].tune_jobs()
    with pytest.raises(DropMaxError):
        store.match(job, store.records()[job.id])


def test_a_variant_named_like_a_path_is_refused(ground: Ground) -> None:
    store = Store(ground.folder / "table")
    store.join(plan_table(["mnist-1k"], heads=["softmax"], runs=1), "dropmax reproduce")
    plan = json.loads(store.file.read_text())
    for group in plan["groups"].values():
        group["variant"] = "../../../victim/diary"
    store.file.write_text(json.dumps(plan) + "\n")
    with pytest.raises(DropMaxError):
        store.plan()


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(kind: str, ground: Ground) -> None:
    path = write_folder(ground.folder / "set", 1) / "dog" / "b.png"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(DropMaxError):
        load(ground.folder / "set")


# --- links in run directories -----------------------------------------------------------------------------------


@pytest.fixture
def tiny(ground: Ground) -> Path:
    """A run of one epoch on forty rows."""
    np.savez(ground.folder / "a.npz", x=np.arange(80.0).reshape(40, 2) % 7, y=np.arange(40) % 2)
    values = {"data.name": str(ground.folder / "a.npz"), "network.hidden": [4], "training.epochs": 1}
    return train(load_recipe("own-features").override(values), ground.folder / "run", quiet=True).path


def test_links_in_a_run_are_replaced_not_followed(tiny: Path, ground: Ground) -> None:
    (tiny / "tensorboard").symlink_to(ground.victim)
    (tiny / "metrics.jsonl").unlink()
    (tiny / "metrics.jsonl").symlink_to(ground.victim / "diary.txt")
    train(RunDirectory(tiny).recipe(), tiny, force=True, quiet=True)
    ground.check()
    for name in ("metrics.jsonl", "model.safetensors", "diagnosis.json"):
        (tiny / name).unlink(missing_ok=True)
    (tiny / "metrics.jsonl").symlink_to(ground.victim / "diary.txt")
    (tiny / ".left.tmp").symlink_to(ground.victim / "diary.txt")
    (tiny / ".right.tmp").mkdir()
    resume(tiny, quiet=True)
    assert not (tiny / "metrics.jsonl").is_symlink()
    assert (tiny / ".right.tmp").is_dir(), "a folder of somebody's is gone"


def test_a_link_is_not_taken_for_a_checkpoint(tiny: Path, ground: Ground) -> None:
    for path in [tiny / "model.safetensors", *RunDirectory(tiny).checkpoints()]:
        path.unlink()
    (tiny / "checkpoint-000001.pt").symlink_to(ground.victim / "diary.txt")
    with pytest.raises(DropMaxError):
        resume(tiny, quiet=True)
