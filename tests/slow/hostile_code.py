"""Attacks that would run code: pickles wherever a reader looks, and networks named by an import path."""

from __future__ import annotations

import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from dropmax.errors import DropMaxError
from dropmax.lab.experiments import Store, plan_table, tuned_from
from dropmax.lab.experiments.worker import failure
from dropmax.lab.explorer import Explorer
from dropmax.lab.figures.runs import load_runs
from dropmax.workbench.data import load
from dropmax.workbench.data.tables import read_features
from dropmax.workbench.data.unlabelled import Expected, find_inputs, read_inputs
from dropmax.workbench.export import export
from dropmax.workbench.hub import from_pretrained, save_pretrained
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import RunDirectory, build, load_model, resume
from tests.slow.hostile import Attack, Ground, command, payloads
from tests.slow.image_files import pictures
from tests.slow.run_files import small_recipe


def attacks(short: bool) -> dict[str, Attack]:
    """Return the attacks of this file; in the short form with one payload each."""
    kinds = ["eval", "exec", "system", "open", "mkdir", "nested", "by hand"][: 1 if short else None]
    found: dict[str, Attack] = {}
    for carrier, deliver in _CARRIERS.items():
        for kind in kinds:
            found[f"a pickle ({kind}) in {carrier}"] = partial(_pickle, kind, deliver)
    for way, call in _LOADERS.items():
        found[f"a network to import, through {way}"] = partial(_import, call)
    found["a network to import, in what another table was tuned to"] = _tuned_from
    found["a network to import, in the grid point of a result"] = _result_point
    return found


# --- pickles ----------------------------------------------------------------------------------------------------


def _pickle(kind: str, deliver: Callable[[Ground, bytes], object], ground: Ground) -> str:
    payload = payloads(ground.mark)[kind]
    try:
        deliver(ground, payload)
    except DropMaxError:
        return "refused"
    return "neutralised"


def _npy(payload: bytes) -> bytes:
    """Return an .npy file of objects, which is a header and a pickle."""
    header = "{'descr': '|O', 'fortran_order': False, 'shape': (20,), }".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + payload


def _npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def _sound_npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((20, 3), np.float32))
    return buffer.getvalue()


def _in_labels(ground: Ground, payload: bytes) -> object:
    return load(_npz(ground.folder / "a.npz", x=_sound_npy(), y=_npy(payload)))


def _in_inputs(ground: Ground, payload: bytes) -> object:
    return read_features(_npz(ground.folder / "a.npz", x=_npy(payload)))


def _as_member(ground: Ground, payload: bytes) -> object:
    return load(_npz(ground.folder / "a.npz", x=payload, y=payload))


def _as_npz(ground: Ground, payload: bytes) -> object:
    (ground.folder / "a.npz").write_bytes(payload)
    return load(ground.folder / "a.npz")


def _npy_as_npz(ground: Ground, payload: bytes) -> object:
    (ground.folder / "a.npz").write_bytes(_npy(payload))
    return load(ground.folder / "a.npz")


def _as_npy(ground: Ground, payload: bytes) -> object:
    (ground.folder / "a.npy").write_bytes(_npy(payload))
    files = find_inputs([ground.folder / "a.npy"])
    return list(read_inputs(files, Expected((1, 28, 28), 28)))


def _as_image(ground: Ground, payload: bytes) -> object:
    (ground.folder / "a.png").write_bytes(payload)
    return list(read_inputs([ground.folder / "a.png"], Expected((1, 28, 28), 28)))


def _run(ground: Ground) -> Path:
    run = ground.folder / "run"
    RunDirectory.create(run, small_recipe(), {})
    return run


def _in_checkpoint(ground: Ground, payload: bytes) -> object:
    """Put the pickle where torch looks for its own."""
    run, buffer = _run(ground), io.BytesIO()
    torch.save({"epoch": 1, "model": {}}, buffer)
    with (
        zipfile.ZipFile(io.BytesIO(buffer.getvalue())) as sound,
        zipfile.ZipFile(run / "checkpoint-000001.pt", "w") as archive,
    ):
        for info in sound.infolist():
            archive.writestr(info.filename, payload if info.filename.endswith("data.pkl") else sound.read(info))
    return RunDirectory(run).load_checkpoint()


def _old_checkpoint(ground: Ground, payload: bytes) -> object:
    """Hand over a bare pickle, as torch wrote before there were archives."""
    run = _run(ground)
    (run / "checkpoint-000001.pt").write_bytes(payload)
    return RunDirectory(run).load_checkpoint()


def _as_model(ground: Ground, payload: bytes) -> object:
    (ground.folder / "model.safetensors").write_bytes(payload)
    (ground.folder / "pytorch_model.bin").write_bytes(payload)
    return from_pretrained(ground.folder)


def _as_cifar(ground: Ground, payload: bytes) -> object:
    place = ground.folder / "cifar-10-batches-py"
    place.mkdir()
    for name in ("batches.meta", "data_batch_1", "test_batch"):
        (place / name).write_bytes(payload)
    return load("cifar-10", data_dir=ground.folder)


def _as_cifar_binary(ground: Ground, payload: bytes) -> object:
    place = ground.folder / "cifar-10-batches-bin"
    place.mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin", "batches.meta.txt"):
        (place / name).write_bytes(payload)
    return load("cifar-10", data_dir=ground.folder)


def _in_cache(ground: Ground, payload: bytes) -> object:
    """Replace the cache of decoded images, which the next run opens without decoding."""
    import os

    for label in ("cat", "dog"):
        (ground.folder / "set" / label).mkdir(parents=True)
        for k in range(4):
            (ground.folder / "set" / label / f"{k}.png").write_bytes(pictures()["colour.png"])
    expected = load(ground.folder / "set", image_size=8)
    for cache in Path(os.environ["DROPMAX_CACHE"]).rglob("*.npy"):
        cache.write_bytes(_npy(payload))
    found = load(ground.folder / "set", image_size=8)
    if not torch.equal(found.train.inputs, expected.train.inputs):
        pytest.fail("the images of a hostile cache were believed")
    return found


def _in_parquet(ground: Ground, payload: bytes) -> object:
    """Name an extension type that pyarrow once restored from a pickle in the column's description."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    fields = [pa.field("length", pa.float64(), metadata=about), pa.field("label", pa.int64(), metadata=about)]
    pq.write_table(
        pa.Table.from_arrays([pa.array([1.0] * 20), pa.array([k % 2 for k in range(20)])], schema=pa.schema(fields)),
        ground.folder / "a.parquet",
    )
    return load(ground.folder / "a.parquet")


def _as_json(ground: Ground, payload: bytes) -> object:
    run = _run(ground)
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).write_bytes(payload)
    directory = RunDirectory(run)
    return directory.metrics(), directory.environment()


_CARRIERS: dict[str, Callable[[Ground, bytes], object]] = {
    "the labels of an .npz": _in_labels,
    "the inputs of an .npz": _in_inputs,
    "the members of an .npz": _as_member,
    "place of an .npz": _as_npz,
    "an .npy called .npz": _npy_as_npz,
    "an .npy to predict": _as_npy,
    "place of an image": _as_image,
    "a checkpoint": _in_checkpoint,
    "place of a checkpoint": _old_checkpoint,
    "place of a model": _as_model,
    "the python release of CIFAR": _as_cifar,
    "place of the binary release of CIFAR": _as_cifar_binary,
    "the image cache": _in_cache,
    "the column types of a Parquet table": _in_parquet,
    "place of a log": _as_json,
}


# --- networks named by an import path ---------------------------------------------------------------------------

MODULE = "dropmax_hostile_network"


def hostile_run(ground: Ground) -> Path:
    """Write a run whose model names a network in a module that makes the mark, and put that module within reach."""
    modules = ground.folder / "modules"
    modules.mkdir()
    (modules / f"{MODULE}.py").write_text(
        f"import torch\nopen({str(ground.mark)!r}, 'w').close()\n"
        "class Network(torch.nn.Module):\n"
        "    def __init__(self, input_shape):\n        super().__init__()\n        self.out_features = 4\n"
        "    def forward(self, x):\n        return x\n"
    )
    recipe = load_recipe("own-features").override(
        {"data.name": str(ground.folder / "a.csv"), "network.name": f"{MODULE}:Network", "training.epochs": 1}
    )
    rows = [f"{k % 7},{k % 5},{k % 3},{k},{'ab'[k % 2]}" for k in range(40)]
    (ground.folder / "a.csv").write_text("\n".join(["a,b,c,d,label", *rows]))
    run = ground.folder / "run"
    RunDirectory.create(run, recipe, {})
    head = build(recipe.override({"network.name": "mlp", "network.hidden": [4]}), (4,), 2).state_dict()
    state = {name: value for name, value in head.items() if name.startswith("head.")}
    about = {"recipe": recipe.to_dict(), "classes": ["a", "b"], "input_shape": [4], "stored_size": 0}
    about |= {"mean": [0.0] * 4, "std": [1.0] * 4}
    content = safetensors.torch.save(state, metadata={"dropmax": json.dumps(about)})
    (run / "model.safetensors").write_bytes(content)
    return run


def _import(call: Callable[[Ground, Path], object], ground: Ground) -> str:
    run = hostile_run(ground)
    sys.path.insert(0, str(ground.folder / "modules"))
    try:
        # The same file, trusted, must load and leave the mark: or the refusal below refuses nothing.
        load_model(run, trust_code=True)
        if not ground.mark.exists():
            pytest.fail("the module is not armed")
        ground.mark.unlink()
        # Once the program uses the module, its classes are no news.
        load_model(run)
        del sys.modules[MODULE]
        try:
            said = call(ground, run)
        except DropMaxError as error:
            said = str(error)
        if not isinstance(said, str) or "trust" not in said:
            pytest.fail(f"not refused by a word about trust, but {said!r:.200}")
        return "refused"
    finally:
        sys.path.remove(str(ground.folder / "modules"))
        sys.modules.pop(MODULE, None)


def _resume(ground: Ground, run: Path) -> object:
    (run / "model.safetensors").unlink()
    return resume(run, quiet=True)


def _from_command(*arguments: str) -> Callable[[Ground, Path], object]:
    def call(ground: Ground, run: Path) -> object:
        if arguments[0] == "train":
            (run / "model.safetensors").unlink()
        places = {"RUN": str(run), "CSV": str(ground.folder / "a.csv"), "OUT": str(ground.folder / "out")}
        code, said = command(*(places.get(word, word) for word in arguments))
        return said if code in (1, 2) else f"exit code {code}"

    return call


_LOADERS: dict[str, Callable[[Ground, Path], Any]] = {
    "load_model": lambda ground, run: load_model(run),
    "load_model of the file": lambda ground, run: load_model(run / "model.safetensors"),
    "resume": _resume,
    "load_runs": lambda ground, run: load_runs([run]),
    "Explorer.open": lambda ground, run: Explorer.open(run),
    "export": lambda ground, run: export(run, ground.folder / "out", format="safetensors"),
    "from_pretrained": lambda ground, run: from_pretrained(run),
    "save_pretrained": lambda ground, run: save_pretrained(run, ground.folder / "out"),
    "dropmax evaluate": _from_command("evaluate", "RUN"),
    "dropmax predict": _from_command("predict", "RUN", "CSV"),
    "dropmax diagnose": _from_command("diagnose", "RUN"),
    "dropmax figures": _from_command("figures", "RUN", "--out", "OUT"),
    "dropmax report": _from_command("report", "RUN", "--out", "OUT"),
    "dropmax explore": _from_command("explore", "RUN", "--port", "0"),
    "dropmax export": _from_command("export", "RUN", "--format", "safetensors", "--out", "OUT"),
    "dropmax train --resume": _from_command("train", "--resume", "RUN"),
}


def _stored_table(ground: Ground, point: dict[str, Any], said: dict[str, Any]) -> Store:
    """Write a table whose one tuned head was tuned over one point, and whose result says another, maybe."""
    store = Store(ground.folder / "table")
    plan = plan_table(["mnist-1k"], heads=["dropmax-qp"], runs=1, overrides={"training.weight_decay": 0.0})
    import dataclasses

    group = dataclasses.replace(plan.groups[0], points=(point,))
    plan = dataclasses.replace(plan, groups=(group,))
    store.join(plan, "dropmax reproduce")
    metrics = {"mean": {"error": 0.01, "nll": 0.01, "ece": 0.01}}
    (job,) = group.tune_jobs()
    store.append(failure(job, "x").model_copy(update={"status": "done", "point": said, "validation": metrics}))
    return store


def _tuned_from(ground: Ground) -> str:
    point = {"network.name": f"{MODULE}:Network"}
    store = _stored_table(ground, point, point)
    plan = tuned_from(plan_table(["mnist-5k"], heads=["dropmax-qp"]), store.path)
    pytest.fail(f"the plan took over the network {plan.groups[0].recipe.network['name']!r}")


def _result_point(ground: Ground) -> str:
    store = _stored_table(ground, {"head.gamma": 1.0}, {"network.name": f"{MODULE}:Network"})
    (job,) = store.plan().groups[0].tune_jobs()
    result = store.match(job, store.records()[job.id])
    shutil.rmtree(store.path)
    pytest.fail(f"the point {result.point} was believed")
