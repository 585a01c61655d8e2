"""A run directory: everything about one training run, in files a person understands.

========================  ==========================================================================================
``recipe.toml``           the full resolved recipe; `dropmax train --recipe recipe.toml` repeats the run
``environment.json``      command, commit, versions and machine
``data.json``             where the data is, and which rows were held out
``metrics.jsonl``         one line per epoch: loss terms, validation metrics
``checkpoint-EPOCH.pt``   the last two states to resume from
``model.safetensors``     the trained model, there once training has ended
``calibration.json``      its temperatures, the mode that is the answer and why, and scores of the held-out rows
========================  ==========================================================================================
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import pickle
import pickletools
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from dropmax.errors import DataError, RunError, first_line
from dropmax.workbench.data import NAMES, Dataset, data_directory, load
from dropmax.workbench.data.catalogue import source_of
from dropmax.workbench.files import CannotWrite, make_directory, parse_json, read_json, write_atomically
from dropmax.workbench.recipes import Recipe, load_recipe

_CHECKPOINT = re.compile(r"checkpoint-\d{6}\.pt")
#: Whatever a run may have made.
_OURS = re.compile(
    r"recipe\.toml|(environment|data|calibration|diagnosis)\.json|metrics\.jsonl|model\.safetensors|diagnosis\.png"
    rf"|{_CHECKPOINT.pattern}|tensorboard|wandb|(\..*)?\.tmp",
    re.DOTALL,
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
                    f"{run.path} is not empty: resume with --resume {run.path}, replace it with --force, or choose "
                    "another place with --out"
                )
            run._remove_old_run()
        make_directory(run.path, "run directory")
        write_atomically(run.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        run.write_recipe(recipe)
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

    def write_recipe(self, recipe: Recipe) -> None:
        """Replace the recipe by one with more epochs."""
        write_atomically(self.path / "recipe.toml", recipe.to_toml())

    @property
    def has_model(self) -> bool:
        """Whether training has ended here at least once."""
        return (self.path / "model.safetensors").exists()

    def has_ended(self, recipe: Recipe) -> bool:
        """Whether the model is that of so many epochs: one that is to be trained further has a shorter log."""
        if not self.has_model:
            return False
        patience, rows = recipe.training.patience, self.metrics()
        stopped = patience > 0 and bool(rows) and len(rows) - rows[-1].get("kept", 0) >= patience
        return stopped or len(rows) == recipe.training.epochs

    def kept(self) -> dict[str, Any]:
        """Return the row of the epoch whose weights were kept: the last, or with ``training.patience`` the best.

        For the start of a pretrained network, before its first epoch, and for a run without a log, that is epoch 0.
        """
        rows = self.metrics()
        epoch = rows[-1].get("kept", len(rows)) if rows else 0
        return rows[epoch - 1] if epoch else {"epoch": 0}

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the log, one per epoch."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            rows = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (ValueError, OSError) as error:
            raise RunError(f"{path} is damaged: {error}") from error
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get("train"), dict) or row.get("epoch") != number:
                raise RunError(f"{path} is damaged: line {number} is not that of epoch {number}")
        return rows

    def environment(self) -> dict[str, Any]:
        """Return the command, commit, versions and machine the run was begun with; empty where that was not kept."""
        return read_json(self.path / "environment.json")

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: dict[str, Any]) -> Path:
        """Save what training needs to resume, and keep only the last two."""
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
            _look_over(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
            _refuse_stretched(state)
        except pickle.UnpicklingError as error:
            raise RunError(
                f"{path} is damaged or holds more than weights and numbers, and was not loaded: delete it to resume "
                "from an older checkpoint"
            ) from error
        except Exception as error:  # zipfile, torch and its unpickler raise a dozen kinds on damaged files
            raise RunError(
                f"{path} cannot be read ({first_line(error)}): delete it to resume from an older checkpoint"
            ) from error
        if not isinstance(state, dict) or "epoch" not in state or "model" not in state:
            raise RunError(f"{path} is not a checkpoint of dropmax: delete it to resume from an older checkpoint")
        return dict(_interned(state))

    # --- the log -------------------------------------------------------------------------------------------------

    def write_log(self, text: str) -> None:
        """Replace the log by what it was at a checkpoint."""
        write_atomically(self.path / "metrics.jsonl", text)

    def append_log(self, line: str) -> None:
        """Add a row to the log."""
        try:
            with open(self.path / "metrics.jsonl", "ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                if file.write(line.encode()) != len(line.encode()):  # all it could; the disk is full
                    file.truncate(before)  # half a row is worse than none
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise CannotWrite(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror or error}") from error

    def remove_leftovers(self) -> None:
        """Delete the temporary files of a process that was killed while writing."""
        for path in self.path.glob(".*.tmp"):
            if path.is_symlink() or not path.is_dir():  # a folder of that name is not ours
                path.unlink(missing_ok=True)

    def _remove_old_run(self) -> None:
        """Delete what a run made; refuse if anything else is there: that is not ours to delete."""
        strangers = [path.name for path in self.path.iterdir() if not _OURS.fullmatch(path.name)]
        if strangers:
            raise RunError(f"{self.path} holds {strangers[0]!r}, which no run made: --force will not delete it")
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else os.unlink(path)


def _interned(x: Any) -> Any:
    """Let equal names be one object again, as where they were saved: a resumed run then saves the same bytes."""
    if type(x) is dict:
        return {sys.intern(k) if isinstance(k, str) else k: _interned(value) for k, value in x.items()}
    return [_interned(value) for value in x] if type(x) is list else x


def _look_over(path: Path) -> None:
    """Raise where a checkpoint is not of the kind that training writes, before it is loaded.

    ``weights_only`` sees to it that nothing is executed; this, that a small file cannot ask for a large memory. Nothing
    in it is packed, and it names nothing but tensors, their storages and dictionaries.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = any(info.compress_type != zipfile.ZIP_STORED for info in members)
        if packed or sum(info.file_size for info in members) > path.stat().st_size:
            raise ValueError("its parts are packed or larger than the file")
        for info in members:
            if info.filename.endswith("data.pkl"):
                for code, argument, _ in pickletools.genops(archive.read(info)):
                    if code.name in _NAMING and not _TENSORS.fullmatch(str(argument)):
                        raise pickle.UnpicklingError(f"it names {argument!r}")


#: The pickle codes that name something to call, and what our checkpoints name.
_NAMING = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "OBJ")
_TENSORS = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")


def _refuse_stretched(value: Any) -> None:
    """Raise where a tensor is larger than its storage: a stride of 0 makes a terabyte out of one number."""
    if isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"it holds a tensor of shape {tuple(value.shape)} without the numbers for it")
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_stretched(item)


# --- the data of a run: where it is, and which rows were held out ----------------------------------------------------


def load_data(
    recipe: Recipe, data_dir: Path | str | None = None, *, run: Path | str | None = None, data: Path | str | None = None
) -> Dataset:
    """Load the data a recipe names, split by its seed.

    Args:
        recipe: of the run.
        data_dir: where data sets known by name are.
        run: the run directory, or its model file: it remembers where its data was, whatever the working directory.
        data: a folder or file to take in place of the one the recipe names.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> len(load_data(load_recipe("mnist-1k")).train)
    1000
    """
    options, known = recipe.data, _remembered(run)
    was = known.get("data_dir")
    if data_dir is None and options.name in NAMES and was and Path(was).is_dir():
        data_dir = was
    same = ("train_size", "image_size", "label_column", "id_column", "backbone", "text_column")
    found = load(
        data_place(recipe, run, data),
        data_dir=data_dir,
        seed=recipe.training.seed,
        validation_size=None if options.validation_size < 0 else options.validation_size,
        test=_find(options.test, known.get("test"), run) if options.test else None,
        **{name: getattr(options, name) or None for name in same},
    )
    mean, std = found.mean, found.std
    if not options.standardise:
        mean, std = (0.0,) * len(mean), (1.0,) * len(mean)
    return dataclasses.replace(found, name=options.name, mean=mean, std=std)


def data_place(recipe: Recipe, run: Path | str | None = None, data: Path | str | None = None) -> str:
    """Return the name or path that :func:`load_data` loads; a path that is gone is an error that names it."""
    return str(data) if data is not None else _find(recipe.data.name, _remembered(run).get("path"), run)


def balanced(recipe: Recipe, data: Dataset) -> Recipe:
    """Return the recipe with ``head.class_weight = "balanced"`` replaced by N / (K N_k) for each class k."""
    if recipe.head.get("class_weight") != "balanced":
        return recipe
    counts = data.train.labels.bincount(minlength=data.num_classes).tolist()
    weights = [round(sum(counts) / (len(counts) * count), 9) for count in counts]
    return recipe.override({"head.class_weight": weights})


def remember_data(run: Path, recipe: Recipe, data_dir: Path | str | None, data: Dataset) -> None:
    """Write ``data.json``: how the data was given, what finds it again, and which rows were held out."""
    options = recipe.data
    found: dict[str, Any] = {"given": options.name}
    if options.name not in NAMES:
        found["path"] = _absolute(options.name)
    elif source_of(options.name) is not None:
        found["data_dir"] = str(data_directory(data_dir).absolute())
    if options.test:
        found["test"] = _absolute(options.test)
    found["held_out"] = {part.part: {"rule": part.rule, "rows": list(part.rows)} for part in data.held_out}
    write_atomically(run / "data.json", json.dumps(found) + "\n")


def move_data(run: Path, path: Path) -> None:
    """Let a run know that its data is at another path now."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    write_atomically(run / "data.json", json.dumps(_remembered(run) | {"path": _absolute(str(path))}) + "\n")


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _remembered(run: Path | str | None) -> dict[str, Any]:
    """Return what a run directory, or the one a model file lies in, remembers of its data."""
    if run is None:
        return {}
    place = Path(run)
    file = (place if place.is_dir() else place.parent) / "data.json"
    found = read_json(file)
    if not all(isinstance(found.get(key, ""), str) for key in ("path", "test", "data_dir")):
        raise RunError(f"{file} is damaged: it does not say where the data is")
    return found


def _find(name: str, path: str | None, run: Path | str | None) -> str:
    """Return where the user's own data is: where it was, or where its name leads from here."""
    if run is None or (name in NAMES and path is None):
        return name
    places = [place for place in (path, name) if place]
    for place in places:
        if Path(place).expanduser().exists():
            return place
    raise DataError(
        f"the data of {run} is not at {places[0]} any more (it was given as {name}): "
        "say where it is with --data PATH (data=...)"
    )
