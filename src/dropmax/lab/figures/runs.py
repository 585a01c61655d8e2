"""Trained runs as figures and reports want them: loaded once, with what they say about the test set."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropmax.classifier import Classifier
from dropmax.errors import DataError, RunError
from dropmax.functional import _wide
from dropmax.heads import PAPER_OBJECTIVE, Head
from dropmax.heads.masked import MaskedHead
from dropmax.lab.experiments.study import flattened
from dropmax.workbench.data import Dataset, Split
from dropmax.workbench.data.images import centre_crop
from dropmax.workbench.evaluation import Outputs, answer
from dropmax.workbench.recipes import DataOptions, Recipe
from dropmax.workbench.terminal import progress
from dropmax.workbench.training import RunDirectory, TrainedModel, load_data, load_model
from dropmax.workbench.training.rundir import data_place

__all__ = ["Run", "by_data", "data_name", "load_runs", "picture", "slug"]

#: What may differ between two runs of one method.
_NOT_THE_METHOD = ("training.seed", "training.checkpoint_seconds", "training.validate_every", "training.calibrate")


@dataclass(eq=False)
class Run:
    """One trained run: its model, its log, and, computed when first asked for, its answers on the test set.

    ``label`` names the method: the head, and, where runs of one head were trained differently, what differs.
    """

    path: Path
    trained: TrainedModel
    log: list[dict[str, Any]]
    environment: dict[str, Any]
    data_dir: Path | None = None
    moved: Path | None = None  #: where its data is now, if it is not where the run left it
    label: str = ""
    _shared: dict[tuple[DataOptions, str], Dataset] = field(default_factory=dict, repr=False)
    _features: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe it was trained by."""
        return self.trained.recipe

    @property
    def seed(self) -> int:
        """The seed that decided splits, weights and noise."""
        return self.recipe.training.seed

    @property
    def model(self) -> Classifier:
        """Network and head."""
        return self.trained.model

    @property
    def head(self) -> Head:
        """The head alone."""
        return self.trained.model.head

    @property
    def has_masks(self) -> bool:
        """Whether its head learns random masks."""
        return isinstance(self.head, MaskedHead)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.trained.classes

    @property
    def data(self) -> Dataset:
        """The data set. Runs on the same data share it, so its training part may be that of another seed."""
        key = (self.recipe.data, data_place(self.recipe, self.path, self.moved))
        if key not in self._shared:
            self._shared[key] = self._load()
        return self._shared[key]

    @property
    def test(self) -> Split:
        """The test set, which no seed decides."""
        if not len(self.data.test):
            raise DataError(f"{data_name(self.recipe)} has no test examples, so {self.path} has nothing to be shown on")
        return self.data.test

    @cached_property
    def train(self) -> Split:
        """What it was trained on, which its seed chose."""
        return self._load().train

    @cached_property
    def validation(self) -> Split:
        """What was held out while it trained, which its seed chose."""
        return self._load().validation

    def _load(self) -> Dataset:
        data = load_data(self.recipe, self.data_dir, run=self.path, data=self.moved)
        if data.classes != self.classes or data.input_shape != self.trained.input_shape:
            raise DataError(
                f"{data_name(self.recipe)} has changed since {self.path} was trained: it had {len(self.classes)} "
                f"classes of shape {self.trained.input_shape}, and now has {data.num_classes} of shape "
                f"{data.input_shape}"
            )
        return data

    def features(self, part: str = "test") -> Tensor:
        """Return the last feature vectors h of a split, in evaluation mode."""
        if part not in self._features:
            split: Split = getattr(self, part)
            rows = []
            with torch.no_grad(), progress(f"{self.label} looks at the {part} set", len(split), "examples") as advance:
                for x, y in self.trained.batches(split):
                    rows.append(_wide(self.model.net(x)).cpu())
                    advance(len(y))
            self._features[part] = torch.cat(rows)
        return self._features[part]

    @cached_property
    def outputs(self) -> Outputs:
        """Mean predictions, retain probabilities and labels of the test set."""
        return dataclasses.replace(answer(self.head, self.features()), labels=self.test.labels)

    @cached_property
    def on_truth(self) -> Tensor:
        """The predicted probability of each test example's truth."""
        return self.outputs.probs.gather(-1, self.outputs.labels[:, None]).squeeze(-1)

    @cached_property
    def wrong(self) -> Tensor:
        """Whether each test example is answered wrongly."""
        return self.outputs.predicted != self.outputs.labels

    def logits(self, part: str = "test", rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """Return class logits o and retain logits a of a split in float64; only for heads with masks."""
        if not isinstance(self.head, MaskedHead):
            raise RunError(f"{self.path} has the head {self.head.name!r}, which learns no masks")
        with torch.no_grad():
            h = self.features(part)[rows]
            return self.head.classifier(h).double(), self.head.retain(h).double()


def load_runs(
    paths: Sequence[Path | str],
    data_dir: Path | str | None = None,
    *,
    data: Path | None = None,
    trust_code: bool = False,
) -> list[Run]:
    """Load trained runs and label them by method; a run twice, or one without a model, is an error.

    ``data`` is where the data of all of them is now, if it has moved.
    ``trust_code`` is that of :func:`~dropmax.workbench.training.load_model`.

    >>> load_runs([])
    []
    """
    runs: list[Run] = []
    shared: dict[tuple[DataOptions, str], Dataset] = {}
    for path in map(Path, paths):
        if path.resolve() in {run.path.resolve() for run in runs}:
            raise RunError(f"the run {path} is given twice")
        directory = RunDirectory.open(path)
        trained = load_model(path, trust_code=trust_code)
        where = Path(data_dir) if data_dir is not None else None
        runs.append(Run(path, trained, directory.metrics(), directory.environment(), where, data, _shared=shared))
    for run in runs:
        rivals = [
            other.recipe
            for other in runs
            if other.recipe.head["name"] == run.recipe.head["name"] and data_name(other.recipe) == data_name(run.recipe)
        ]
        run.label = _label(run.recipe, rivals)
    return runs


def by_data(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs on each data set, in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.recipe.data.name, []).append(run)
    return groups


def data_name(recipe: Recipe) -> str:
    """Return how to call a recipe's data: its name, or the last part of its path.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> data_name(load_recipe("mnist-1k")), data_name(load_recipe("mnist-1k").override({"data.name": "my/birds.csv"}))
    ('mnist-1k', 'birds.csv')
    """
    return Path(recipe.data.name).name or recipe.data.name


def slug(text: str) -> str:
    """Return a name as the part of a file name.

    >>> slug("My birds (2).csv")
    'my-birds-2'
    """
    stem = text.lower().rsplit(".", 1)[0] if "." in text.lstrip(".") else text.lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-") or "data"


def picture(split: Split, index: int) -> NDArray[np.uint8]:
    """Return an image as the network sees it, (H, W) or (H, W, 3), before normalisation.

    >>> picture(Split(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([0]), crop=4), 0).shape
    (4, 4, 3)
    """
    image = split.inputs[index]
    if split.crop is not None:
        image = centre_crop(image, split.crop, split.crop)
    found: NDArray[np.uint8] = (image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()
    return found


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in flattened(recipe.to_dict()).items() if name not in _NOT_THE_METHOD}


def _label(recipe: Recipe, rivals: Sequence[Recipe]) -> str:
    mine, others = _flat(recipe), [_flat(rival) for rival in rivals]
    missing = object()
    keys = dict.fromkeys(key for settings in (mine, *others) for key in settings)
    differing = [key for key in keys if any(other.get(key, missing) != mine.get(key, missing) for other in others)]
    shown = [f"{key.split('.', 1)[1]}={mine[key]}" for key in differing if key in mine]
    printed = [f"{name}={value}" for name, value in PAPER_OBJECTIVE.items()]
    if set(printed) <= set(shown):  # four settings with one name
        shown = ["as printed", *(text for text in shown if text not in printed)]
    return str(recipe.head["name"]) + (f" ({', '.join(shown)})" if shown else "")
