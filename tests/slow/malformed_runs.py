"""Malformed recipes, studies, checkpoints, models, logs and results: how to make them, and the call that reads them."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import struct
import tempfile
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dropmax.lab.experiments import Store, plan_table
from dropmax.lab.experiments.records import RunRecord, failure
from dropmax.workbench.data import Dataset, Split
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import RunDirectory, Session, build, load_model
from dropmax.workbench.training.session import make_optimizer
from tests.slow.damage import WORDS, damage_bytes, damage_text, damage_tree, nested

_TOML_WORDS = (
    *WORDS, "1979-05-27", "07:32:00", "[1, 'a']", "{ a = 1 }", '"lenet"', '"os:system"', "[[x]]", "1e400", "0b1",
    '"\\u0000"', '"\x7f"', "[nan]", "-0", "inf", "[data]", "[heads.dropmax]", "heads = 3", '"mnist-1k"', "a.b.c = 1",
)  # fmt: skip


@functools.cache
def small_recipe() -> Recipe:
    """Return a recipe of a network of a few numbers."""
    values = {"network.name": "mlp", "network.hidden": [5], "data.name": "mine.csv", "training.epochs": 3}
    return load_recipe("mnist-1k").override(values)


# --- recipes and studies ----------------------------------------------------------------------------------------


def make_recipe(rng: Random, folder: Path) -> None:
    """Write a recipe with other words in it."""
    text = rng.choice((load_recipe("mnist-1k"), load_recipe("cifar-100"), small_recipe())).to_toml()
    text += rng.choice(("", "", "[heads.softmax]\nlabel_smoothing = 0.1\n"))
    (folder / "a.toml").write_bytes(damage_text(rng, text, _TOML_WORDS))


def read_recipe(folder: Path) -> object:
    """Load it; what loads must be writable, and load again as the same."""
    recipe = load_recipe(folder / "a.toml")
    (folder / "b.toml").write_text(recipe.to_toml(), encoding="utf-8")
    if load_recipe(folder / "b.toml").to_toml() != recipe.to_toml():
        raise AssertionError("a recipe that was written out is another when it is read")
    return recipe


STUDY = """[base]
data = ["mnist-1k", "mnist-5k"]
recipe = "released"
runs = 3
overrides."training.epochs" = 50

[variants.plain]
"head.name" = "softmax"

[variants.smoothed]
"head.name" = "softmax"
grid."head.label_smoothing" = [0.05, 0.1]
grid."training.learning_rate" = [0.1, 0.2, 0.3]
"""


def make_study(rng: Random, folder: Path) -> None:
    """Write a study with other words in it, or a grid of more points than there are atoms."""
    text = STUDY
    if rng.random() < 0.02:
        text += "".join(f'grid."training.x{k}" = {list(range(50))}\n' for k in range(rng.choice((2, 20))))
    (folder / "a.toml").write_bytes(damage_text(rng, text, _TOML_WORDS))


# --- checkpoints ------------------------------------------------------------------------------------------------


@functools.cache
def _state() -> dict[str, Any]:
    recipe = small_recipe()
    torch.manual_seed(0)
    model = build(recipe, (4,), 3)
    optimizer = make_optimizer(model, recipe)
    total, _ = model(torch.randn(6, 4), torch.arange(6) % 3)
    total.backward()
    optimizer.step()
    row = '{"epoch": 1, "train": {"total": 1.0}}\n'
    about = {"epoch": 1, "log": row, "recipe": recipe.to_toml(), "scaler": {}}
    states = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    return about | states | {"order": torch.Generator().get_state(), "noise": torch.get_rng_state()}


def make_checkpoint(rng: Random, folder: Path) -> None:
    """Write a checkpoint with another state, a changed pickle, or damaged bytes."""
    (folder / "recipe.toml").write_text(small_recipe().to_toml())
    kind, buffer = rng.random(), io.BytesIO()
    state = _damaged_state(rng) if kind < 0.45 else _state()
    torch.save(state, buffer, _use_new_zipfile_serialization=not 0.44 < kind < 0.45)
    data = buffer.getvalue()
    if 0.45 < kind < 0.65:
        data = _with_pickle(rng, data)
    elif 0.65 < kind < 0.9:
        data = damage_bytes(rng, data, most=2)
    (folder / "checkpoint-000001.pt").write_bytes(data)


def _damaged_state(rng: Random) -> Any:
    changed = copy.deepcopy(_state())
    if rng.random() < 0.5:
        return damage_tree(rng, changed)
    holder = rng.choice((changed, changed["model"], changed["optimizer"]["state"][0]))
    holder[rng.choice(list(holder))] = rng.choice((
        torch.zeros(3), torch.zeros(0), torch.zeros(1).expand(1000, 1000, 1000), torch.tensor(5),
        torch.ones(5, 4).to_sparse(), torch.full((5, 4), float("nan")), torch.zeros(5, 4, dtype=torch.int64),
        torch.zeros(5, 4, dtype=torch.complex64), torch.zeros(5056, dtype=torch.uint8), torch.zeros(2, device="meta"),
    ))  # fmt: skip
    return changed


def _with_pickle(rng: Random, data: bytes) -> bytes:
    """Put another pickle, or other sizes, into the archive that a checkpoint is."""
    buffer, packing = io.BytesIO(), rng.choice((0, 0, 0, 8))
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w", packing) as archive:
        for info in source.infolist():
            content = source.read(info)
            if info.filename.endswith("data.pkl"):
                big = b"cbuiltins\nbytearray\n(J" + struct.pack("<i", 2**30) + b"tR."
                content = rng.choice((
                    damage_bytes(rng, content), b"", pickle.dumps({"epoch": 1}), content[:2] + big,
                    b"N" * 200_000 + b".", b"(" * 100_000 + b".", b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
                ))  # fmt: skip
            elif rng.random() < 0.1:
                content = rng.choice((b"", content * 2, bytes(3_000_000) if packing else b"\xff" * 100))
            archive.writestr(zipfile.ZipInfo(info.filename), content, packing)
    return buffer.getvalue()


def read_checkpoint(folder: Path) -> object:
    """Load it and put it into the model it says it is of, as ``resume`` does."""
    run = RunDirectory.open(folder)
    recipe, checkpoint, before = run.recipe(), run.load_checkpoint(), torch.get_rng_state()
    if checkpoint is None:
        return None
    rows = Split(torch.zeros(3, 4), torch.arange(3))
    data = Dataset("mine.csv", rows, rows, rows, ("a", "b", "c"), (0.0,) * 4, (1.0,) * 4)
    try:
        return Session(recipe, data, device="cpu").load(checkpoint, str(folder))
    finally:
        torch.set_rng_state(before)


# --- models -----------------------------------------------------------------------------------------------------


def small_model() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description of a model."""
    recipe = small_recipe()
    torch.manual_seed(0)
    state = {name: value.contiguous() for name, value in build(recipe, (4,), 3).state_dict().items()}
    about = {"recipe": recipe.to_dict(), "classes": ["a", "b", "c"], "input_shape": [4], "stored_size": 0}
    return state, json.loads(json.dumps(about | {"mean": [0.0] * 4, "std": [1.0] * 4}))


def make_model(rng: Random, folder: Path) -> None:
    """Write a model whose description, tensors, header or bytes lie."""
    (state, about), kind = small_model(), rng.random()
    if kind < 0.5:
        about = damage_tree(rng, about)
    elif kind < 0.6:
        about["recipe"]["network"] = rng.choice((
            {"name": "mlp", "hidden": [100_000, 100_000]}, {"name": "mlp", "hidden": [5] * 3000},
            {"name": "cifar-resnet", "depth": 6 * 10**9 + 2}, {"name": "small-cnn", "convs_per_block": 10**9},
            {"name": "lenet", "hidden": 10**12}, {"name": "os.path:join"}, {"name": "antigravity:Net"},
            {"name": "torch.nn:Linear", "in_features": 10**5, "out_features": 10**5}, {"name": "torch.nn:Flatten"},
            {"name": "resnet34", "widths": [2**20] * 4},
        ))  # fmt: skip
        about["input_shape"] = rng.choice(([4], [3, 32, 32], [1, 28, 28], [10**6, 10**6], [3, 10**9, 10**9]))
    elif kind < 0.7:
        name = rng.choice(list(state))
        others = (torch.zeros(0), torch.zeros(3, 3), state[name].long(), state[name].half() * float("nan"))
        state[name] = rng.choice(others)
    text = json.dumps(about)
    if rng.random() < 0.05:
        text = rng.choice((nested(rng), "", "5", "[]", text[:-1]))
    data = safetensors.torch.save(state, metadata=rng.choice(({"dropmax": text},) * 12 + ({}, {"other": text})))
    if kind > 0.7:
        data = damage_bytes(rng, data)  # half of the time near its header
    (folder / "model.safetensors").write_bytes(data)


def read_model(folder: Path) -> object:
    """Load it as ``dropmax predict`` does, and let it answer."""
    trained = load_model(folder)
    with torch.no_grad():
        return trained.model.head.retain_probs(trained.model.net(trained.prepare(torch.zeros(1, *trained.input_shape))))


# --- logs, results, plans ---------------------------------------------------------------------------------------


def make_log(rng: Random, folder: Path) -> None:
    """Write the log and the origin of a run."""
    (folder / "recipe.toml").write_text(small_recipe().to_toml())
    row = {"epoch": 1, "step": 10, "learning_rate": 0.1, "train": {"total": 1.0}, "validation": {"error": 0.5}}
    lines = [json.dumps(row | {"epoch": k}) for k in (1, 2, 3)]
    if rng.random() < 0.3:
        lines[rng.randrange(3)] = json.dumps(damage_tree(rng, row))
    text = "\n".join(lines) + "\n"
    (folder / "metrics.jsonl").write_bytes(damage_text(rng, text) if rng.random() < 0.6 else text.encode())
    environment = json.dumps(damage_tree(rng, {"command": "dropmax", "versions": {"torch": "2"}}))
    (folder / "environment.json").write_bytes(damage_text(rng, environment, most=1))


@functools.cache
def _results() -> list[dict[str, Any]]:
    """Return the lines of a file of results: a plan and two runs."""
    plan = plan_table(["mnist-1k"], heads=["softmax", "dropmax-qp"], runs=2, overrides={"training.weight_decay": 0.0})
    metrics = {"mean": {"error": 0.05, "nll": 0.2, "ece": 0.01, "brier": 0.1, "aurc": 0.01}}
    origin = {"commit": "0123abc", "versions": {"torch": "2.13"}, "machine": {"processor": "abacus", "cores": 2}}
    numbers = {"status": "done", "reason": "", "test": metrics, "validation": metrics, "provenance": origin}
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(scratch)
        store.join(plan, "dropmax reproduce")
        for job in plan.groups[0].run_jobs({}, 2):
            store.append(RunRecord.model_validate(json.loads(failure(job, "x").to_json()) | numbers))
        return [json.loads(line) for line in store.file.read_text().splitlines()]


def make_results(rng: Random, folder: Path) -> None:
    """Write a plan and two runs, some lines of them damaged."""
    damaged, lines = rng.choice(("plan", "run", "run")), []
    for row in _results():
        line, kind = json.dumps(row).encode(), rng.random()
        if (row["kind"] == "plan") == (damaged == "plan") and kind < 0.7:
            line = json.dumps(damage_tree(rng, row)).encode() if kind < 0.5 else damage_text(rng, json.dumps(row))
        lines.append(line if kind > 0.03 else nested(rng).encode())
    (folder / "results.jsonl").write_bytes(b"\n".join(lines) + rng.choice((b"", b"\n", b"\n")))
