"""Where hostile files are tried: a ground on which code that runs leaves a mark and a victim's files are watched."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import RunDirectory, build
from tests.command import dropmax


@dataclass(frozen=True)
class Ground:
    """Where an attack takes place: the attacker's files, a victim's, and the mark that hostile code leaves."""

    folder: Path
    victim: Path
    mark: Path

    @classmethod
    def make(cls, scratch: Path) -> Ground:
        """Lay it out in an empty directory."""
        ground = cls(scratch / "attacker", scratch / "victim", scratch / "mark")
        ground.folder.mkdir(parents=True)
        ground.victim.mkdir()
        (ground.victim / "diary.txt").write_text("nobody's business")
        return ground

    def check(self) -> None:
        """Expect that no code ran, that the victim's files are as they were, and that nothing was written outside."""
        assert {path.name for path in self.mark.parent.iterdir()} == {"attacker", "victim"}
        assert [path.name for path in self.victim.iterdir()] == ["diary.txt"]
        assert (self.victim / "diary.txt").read_text() == "nobody's business"


class _Call:
    """Pickles as a call of ``eval``."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return eval, (self.code,)


def armed_pickle(mark: Path) -> bytes:
    """Return a pickle that makes the mark when it is loaded, and was seen to do so."""
    found = pickle.dumps([{"epoch": 1}, (_Call(f"open({str(mark)!r}, 'w').close()"),)], protocol=2)
    pickle.loads(found)
    mark.unlink()
    return found


def command(*arguments: object, terminal: bool = False) -> tuple[int, str]:
    """Run ``dropmax ARGUMENTS`` inside this process; return its exit code and all that it printed."""
    done = dropmax(*arguments, terminal=terminal)
    return done.returncode, done.stdout + ("" if terminal else done.stderr)


def write_model(path: Path, recipe: Recipe, state: dict[str, Tensor], classes: list[str], shape: list[int]) -> Path:
    """Write a model file that says what it is told to."""
    about: dict[str, Any] = {"recipe": recipe.to_dict(), "classes": classes, "input_shape": shape}
    about |= {"stored_size": shape[1] if len(shape) == 3 else 0, "mean": [0.1] * shape[0], "std": [0.3] * shape[0]}
    state = {name: value.contiguous() for name, value in state.items()}
    path.write_bytes(safetensors.torch.save(state, metadata={"dropmax": json.dumps(about)}))
    return path


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
    whole = build(recipe.override({"network.name": "mlp", "network.hidden": [4]}), (4,), 2).state_dict()
    head = {name: value for name, value in whole.items() if name.startswith("head.")}
    write_model(run / "model.safetensors", recipe, head, ["a", "b"], [4])
    return run
