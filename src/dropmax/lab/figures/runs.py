"""Trained runs as figures and reports want them: loaded once, with their answers; and which of them play which part."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

if TYPE_CHECKING:
    from dropmax.lab.figures.recording import Recording

__all__ = ["NotDrawable", "Run", "Subject", "by_data", "data_name", "load_runs", "picture", "slug"]

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

    def __post_init__(self) -> None:
        self.recipe, self.model, self.classes = self.trained.recipe, self.trained.model, self.trained.classes
        self.head: Head = self.model.head
        self.has_masks = isinstance(self.head, MaskedHead)  #: whether its head learns random masks
        self.seed = self.recipe.training.seed  #: it decided splits, weights and noise

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
            then = f"{len(self.classes)} classes of shape {self.trained.input_shape}"
            now = f"{data.num_classes} of shape {data.input_shape}"
            changed = f"{data_name(self.recipe)} has changed since {self.path} was trained"
            raise DataError(f"{changed}: it had {then}, and now has {now}")
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


class NotDrawable(RunError):
    """The runs meet a figure's needs but hold nothing to show; the message says what is missing."""


@dataclass(frozen=True)
class Subject:
    """What a figure is drawn from: runs, and recordings of them where there are any."""

    runs: Sequence[Run]
    recordings: dict[Run, Recording] = field(default_factory=dict)

    @property
    def masked(self) -> Run | None:
        """The run whose masks are shown: of DropMax before its variants, the one with a softmax partner first."""
        chosen = [run for run in self.runs if run.has_masks]
        seeds = {run.seed for run in self.runs if run.head.name == "softmax"}
        # min keeps the order given among equals
        return min(chosen, key=lambda run: (run.head.name != "dropmax", run.seed not in seeds), default=None)

    @property
    def base(self) -> Run | None:
        """The softmax run it is compared with, of the same seed where there is one."""
        masked = self.masked
        chosen = [run for run in self.runs if run.head.name == "softmax"]
        return min(chosen, key=lambda run: masked is not None and run.seed != masked.seed, default=None)

    def with_masks(self) -> Run:
        """Return :attr:`masked`, for figures that need it."""
        if self.masked is None:
            raise RunError("no run here has a head that learns masks")
        return self.masked

    def pair(self) -> tuple[Run, Run]:
        """Return :attr:`base` and :attr:`masked`, likewise."""
        if self.base is None:
            raise RunError("no run here has the head softmax")
        return self.base, self.with_masks()

    def methods(self) -> dict[str, list[Run]]:
        """Return the runs of each method, softmax first, the others as given."""
        found: dict[str, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.head.name != "softmax"):
            found.setdefault(run.label, []).append(run)
        return found

    def looks(self) -> dict[str, int]:
        """Return each method's place in :data:`dropmax.workbench.style.LOOKS`; the first is softmax's own."""
        methods = self.methods()
        first = 0 if any(runs[0].head.name == "softmax" for runs in methods.values()) else 1
        return {label: place for place, label in enumerate(methods, start=first)}

    def recorded_pair(self) -> list[Run]:
        """Return the softmax and dropmax runs whose training is compared: every seed of the two methods."""
        if self.base is None or self.masked is None:
            return []
        labels = (self.base.label, self.masked.label)
        return [run for run in self.runs if run.label in labels]


def load_runs(
    paths: Sequence[Path | str],
    data_dir: Path | str | None = None,
    *,
    data: Path | None = None,
    trust_code: bool = False,
) -> list[Run]:
    """Load trained runs and label them by method; a run twice, or one without a model, is an error.

    ``data`` is where the data of all of them is now, if it has moved.
    """
    runs: list[Run] = []
    shared: dict[tuple[DataOptions, str], Dataset] = {}
    where = Path(data_dir) if data_dir is not None else None
    for path in map(Path, paths):
        if path.resolve() in {run.path.resolve() for run in runs}:
            raise RunError(f"the run {path} is given twice")
        directory = RunDirectory.open(path)
        trained = load_model(path, trust_code=trust_code)
        runs.append(Run(path, trained, directory.metrics(), directory.environment(), where, data, _shared=shared))

    def rival_of(one: Run) -> tuple[str, str]:
        return one.recipe.head["name"], data_name(one.recipe)

    for run in runs:
        run.label = _label(run.recipe, [other.recipe for other in runs if rival_of(other) == rival_of(run)])
    return runs


def by_data(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs on each data set, in the order given."""
    names = dict.fromkeys(run.recipe.data.name for run in runs)
    return {name: [run for run in runs if run.recipe.data.name == name] for name in names}


def data_name(recipe: Recipe) -> str:
    """Return how to call a recipe's data: its name, or the last part of its path."""
    return Path(recipe.data.name).name or recipe.data.name


def slug(text: str) -> str:
    """Return a name as the part of a file name.

    >>> slug("My birds (2).csv")
    'my-birds-2'
    """
    stem = text.lower().rsplit(".", 1)[0] if "." in text.lstrip(".") else text.lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-") or "data"


def picture(split: Split, index: int) -> NDArray[np.uint8]:
    """Return an image as the network sees it, (H, W) or (H, W, 3), before normalisation."""
    image = split.inputs[index]
    if split.crop is not None:
        image = centre_crop(image, split.crop, split.crop)
    found: NDArray[np.uint8] = (image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()
    return found


def _label(recipe: Recipe, rivals: Sequence[Recipe]) -> str:
    mine, *others = (
        {name: value for name, value in flattened(one.to_dict()).items() if name not in _NOT_THE_METHOD}
        for one in (recipe, *rivals)
    )
    missing = object()
    keys = dict.fromkeys(key for settings in (mine, *others) for key in settings)
    differing = [key for key in keys if any(other.get(key, missing) != mine.get(key, missing) for other in others)]
    shown = [f"{key.split('.', 1)[1]}={mine[key]}" for key in differing if key in mine]
    printed = [f"{name}={value}" for name, value in PAPER_OBJECTIVE.items()]
    if set(printed) <= set(shown):  # four settings with one name
        shown = ["as printed", *(text for text in shown if text not in printed)]
    return str(recipe.head["name"]) + (f" ({', '.join(shown)})" if shown else "")
