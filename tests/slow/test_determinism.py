"""The same seed gives the same bytes: in another process, after an interruption, and in a model that was loaded.

One thread count on one machine, as promised; two threads may end in other last digits than one.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dropmax.heads import HEADS, MODES
from dropmax.workbench.data import Split
from dropmax.workbench.evaluation import predict
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import Interrupted, load_data, load_model, resume, save_model, train
from tests.command import ROUNDS

NETWORKS = ("mlp",) if ROUNDS == 1 else ("lenet", "tutorial-cnn", "small-cnn", "mlp")
HEADS_TRIED = ("softmax", "dropmax", "sampled-softmax") if ROUNDS == 1 else tuple(HEADS)


def recipe_of(head: str, network: str) -> Recipe:
    values: dict[str, Any] = {"head.name": head, "network.name": network, "training.epochs": 3, "data.train_size": 60}
    values |= {"training.batch_size": 50, "data.validation_size": 100, "training.checkpoint_seconds": 0.0}
    return load_recipe("mnist-1k").override(values)


class Stop:
    """Presses Ctrl-C at the end of the second epoch."""

    def epoch(self, row: dict[str, Any]) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt


def digests(path: Path) -> dict[str, str]:
    """What a run left, and what its model answers in every mode, before and after it is saved once more."""
    found = {name: digest((path / name).read_bytes()) for name in ("model.safetensors", "metrics.jsonl")}
    trained = load_model(path)
    data = load_data(trained.recipe)
    some = Split(data.test.inputs[:200], data.test.labels[:200])
    again = path.with_name(path.name + ".again.safetensors")
    save_model(again, trained.model, trained.recipe, data)
    for suffix, model in (("", trained), (", loaded", load_model(again))):
        for mode in MODES:
            generator = torch.Generator().manual_seed(0)
            answers = predict(model.model, model.batches(some), mode=mode, samples=20, generator=generator)
            found[mode + suffix] = digest(answers.probs.numpy().tobytes())
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("head", HEADS_TRIED)
def test_runs_that_are_the_same_end_in_the_same_bytes(head: str, network: str, tmp_path: Path) -> None:
    recipe = recipe_of(head, network)
    whole = digests(train(recipe, tmp_path / "whole", quiet=True).path)
    for mode in MODES:
        assert whole[mode] == whole[f"{mode}, loaded"]
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "stopped", quiet=True, callbacks=[Stop()])
    assert digests(resume(tmp_path / "stopped", quiet=True).path) == whole
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    code = f"""import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.slow.test_determinism import *
torch.set_num_threads({torch.get_num_threads()})
print(json.dumps(digests(train(load_recipe(Path('recipe.toml')), Path('other'), quiet=True).path)))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == whole
