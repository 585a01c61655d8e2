"""A run directory: everything about one training run, in files a person understands.

========================  ==========================================================================================
``recipe.toml``           the full resolved recipe; `dropmax train --recipe recipe.toml` repeats the run
``environment.json``      command, commit, versions and machine
``metrics.jsonl``         one line an epoch: loss terms, validation metrics
``checkpoint-EPOCH.pt``   the last two states training can go on from
``model.safetensors``     the trained model, there once training has ended
========================  ==========================================================================================
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dropmax.errors import RunError
from dropmax.files import write_atomically
from dropmax.recipes import Recipe, load_recipe

__all__ = ["RunDirectory"]

_CHECKPOINT = re.compile(r"checkpoint-(\d{6})\.pt")
_OURS = (
    "recipe.toml",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "diagnosis.json",
    "diagnosis.png",
)


class RunDirectory:
    """The files of one run.

    >>> import tempfile
    >>> run = RunDirectory.create(Path(tempfile.mkdtemp()) / "run", load_recipe("mnist-1k"), {"command": "doctest"})
    >>> sorted(path.name for path in run.path.iterdir())
    ['environment.json', 'recipe.toml']
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls, path: Path | str, recipe: Recipe, environment: dict[str, Any], *, force: bool = False
    ) -> RunDirectory:
        """Make a new run directory; one that holds anything is refused, or, with ``force``, an old run replaced."""
        run = cls(path)
        if run.path.is_symlink() or (run.path.exists() and not run.path.is_dir()):
            raise RunError(f"{run.path} is not a directory: choose another place with --out")
        if run.path.exists() and any(run.path.iterdir()):
            if not force:
                raise RunError(
                    f"{run.path} is not empty: go on with --resume {run.path}, replace it with --force, or choose "
                    "another place with --out"
                )
            run._remove_old_run()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the run directory {run.path}: {error.strerror or error}") from error
        write_atomically(run.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        write_atomically(run.path / "recipe.toml", recipe.to_toml())
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open the directory of a run that was begun."""
        run = cls(path)
        if not (run.path / "recipe.toml").is_file():
            what = "there is no directory" if not run.path.exists() else "there is no run (no recipe.toml) in"
            raise RunError(f"{what} {run.path}: `dropmax train` makes one")
        return run

    def recipe(self) -> Recipe:
        """Return the resolved recipe of the run."""
        return load_recipe(self.path / "recipe.toml")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the log, one an epoch."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (ValueError, OSError) as error:
            raise RunError(f"{path} is damaged: {error}") from error

    def environment(self) -> dict[str, Any]:
        """Return the command, commit, versions and machine the run was begun with; empty where that was not kept."""
        path = self.path / "environment.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            raise RunError(f"{path} is damaged: {error}") from error
        return found

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: dict[str, Any]) -> Path:
        """Save what training needs to go on, and keep only the last two."""
        path = self.path / f"checkpoint-{state['epoch']:06d}.pt"
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(path, buffer.getvalue())
        for old in self.checkpoints()[:-2]:
            old.unlink(missing_ok=True)
        return path

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints there are, oldest first."""
        return sorted(path for path in self.path.iterdir() if _CHECKPOINT.fullmatch(path.name))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest state, or None where there is no checkpoint. Nothing in a file is ever executed."""
        found = self.checkpoints()
        if not found:
            return None
        path = found[-1]
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise RunError(
                f"{path} is damaged or holds more than weights and numbers, and was not loaded: delete it to go on "
                "from an older checkpoint"
            ) from error
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}): delete it to go on from an older checkpoint") from error
        if not isinstance(state, dict) or "epoch" not in state or "model" not in state:
            raise RunError(f"{path} is not a checkpoint of dropmax: delete it to go on from an older checkpoint")
        return state

    # --- the log -------------------------------------------------------------------------------------------------

    def write_log(self, text: str) -> None:
        """Replace the log by what it was at a checkpoint."""
        write_atomically(self.path / "metrics.jsonl", text)

    def append_log(self, line: str) -> None:
        """Add a row to the log."""
        try:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise RunError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror or error}") from error

    def remove_leftovers(self) -> None:
        """Delete the temporary files of a process that was killed while writing."""
        for path in self.path.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def _remove_old_run(self) -> None:
        """Delete what a run made; refuse where anything else lies there, for that is not ours to delete."""
        strangers = [
            p.name
            for p in self.path.iterdir()
            if p.name not in _OURS
            and not _CHECKPOINT.fullmatch(p.name)
            and p.name not in ("tensorboard", "wandb")
            and not (p.name.startswith(".") and p.name.endswith(".tmp"))
        ]
        if strangers:
            raise RunError(f"{self.path} holds {strangers[0]!r}, which no run made: --force will not delete it")
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else os.unlink(path)
