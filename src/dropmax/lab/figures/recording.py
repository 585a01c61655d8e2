"""Losses and gradients of a finished run step by step, by training it again.

The log has one row per epoch. So the same loop trains the run's recipe once more, with a callback that draws no random
numbers: the same seed, versions and machine give the same run. What it saw is kept as JSON, and recorded once.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dropmax.classifier import Classifier
from dropmax.errors import RunError
from dropmax.lab.figures.runs import Run, data_name, slug
from dropmax.metrics import NLL_FLOOR
from dropmax.workbench.files import make_directory, parse_json, write_atomically
from dropmax.workbench.provenance import provenance
from dropmax.workbench.recipes import Recipe
from dropmax.workbench.terminal import printable
from dropmax.workbench.training import Callback, Interrupted, RunDirectory, Session, fit, load_data

__all__ = ["Recording", "find_recording", "record", "recording_path"]

#: Points per curve at most; of a training longer than the paper's longest, 110,000 steps, windows are averaged.
_POINTS = 120_000
#: How often the test loss is measured, at most; at least a third of it. It must not take much longer than training.
_TESTS = 120


@dataclass(frozen=True)
class Recording:
    """A run's history; entry i of a training curve is a mean up to ``steps[i]``."""

    recipe: str  #: of the run, as TOML
    same_weights: bool  #: whether the repetition ended with the run's own weights, bit by bit
    steps: list[int]
    train: list[float]  #: cross entropy of the batch with rho in place of the masks, before the step
    train_with_masks: list[float]  #: the same with the masks z that training drew
    gradient_norm: list[float]  #: of the batch loss by the classifier's weights and biases, psi
    test_steps: list[int]
    test: list[float]  #: cross entropy of the test set, with rho
    provenance: dict[str, Any]  #: who recorded this, when and how


def recording_path(run: Run, directory: Path) -> Path:
    """Return where a run's recording is kept: named after its data and head, and a digest of its recipe."""
    digest = hashlib.sha256(run.recipe.to_toml().encode()).hexdigest()[:10]
    name = f"{slug(data_name(run.recipe))}-{slug(run.head.name)}-{run.seed}-{digest}.json"
    return directory / "recordings" / name


def find_recording(run: Run, directory: Path) -> Recording | None:
    """Read a run's recording, or return None where there is none."""
    path = recording_path(run, directory)
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        found = Recording(**{field.name: values[field.name] for field in fields(Recording)})
        if found.recipe != run.recipe.to_toml() or len(found.steps) != len(found.train):
            raise ValueError("it is of another run")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        advice = "delete it and record again with --record"
        raise RunError(f"the recording {path} is damaged ({error}): {advice}") from error


def record(run: Run, directory: Path, *, command: str | None = None, quiet: bool = False) -> Recording:
    """Train a run's recipe again and keep what happened at each step; a recording that is there is only read."""
    found = find_recording(run, directory)
    if found is not None:
        return found
    path = recording_path(run, directory)
    make_directory(path.parent)
    options = run.recipe.training
    if not quiet:
        words = f"recording {run.path}: its {options.epochs} epochs once more, kept in {path}"
        print(printable(words), file=sys.stderr, flush=True)
    # None of these changes a number that training computes.
    recipe = run.recipe.override({"training.validate_every": options.epochs, "training.compile": False})
    session = Session(recipe, load_data(recipe, run.data_dir), device="cpu")
    watcher = _Watcher(run, session)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as scratch:
        try:
            again = RunDirectory.create(Path(scratch) / "run", recipe, {})
            fit(session, again, [watcher], quiet=quiet)
        except Interrupted:
            raise Interrupted(f"stopped: {run.path} will be recorded from its beginning next time") from None
        # Of the file, not of the session: with training.refit the model that is kept is trained by a second one.
        weights, expected = load_file(again.path / "model.safetensors"), run.model.state_dict()
        same = all(torch.equal(weights[name], expected[name].cpu()) for name in expected)
    if session.steps_done != watcher.steps_seen:
        raise RunError(f"{run.path} could not be recorded: only {watcher.steps_seen} of its steps were seen")
    seen: dict[str, Any] = {**watcher.curves, "test_steps": watcher.test_steps, "test": watcher.test_losses}
    origin = provenance(command, seeds=[run.seed])
    found = Recording(run.recipe.to_toml(), same, watcher.steps, provenance=origin, **seen)
    write_atomically(path, json.dumps(asdict(found)) + "\n")
    return found


class _Watcher(Callback):
    """Looks on while a session is trained."""

    def __init__(self, run: Run, session: Session) -> None:
        self.model = session.model
        self.test = run.test
        self.batches = run.trained.batches
        self.total = len(session.batches) * session.recipe.training.epochs
        self.window = math.ceil(self.total / _POINTS)
        trained_on = self.total * session.batch_size
        tests = min(_TESTS, max(_TESTS // 3, trained_on // max(1, len(self.test))))
        self.test_every = math.ceil(self.total / tests)
        self.steps_seen = 0
        self.sums = {"train": 0.0, "train_with_masks": 0.0, "gradient_norm": 0.0}
        self.curves: dict[str, list[float]] = {name: [] for name in self.sums}
        self.steps: list[int] = []
        self.test_steps: list[int] = []
        self.test_losses: list[float] = []
        self._features = torch.empty(0)
        self._square = 0.0  # of the gradient, so far
        # What a step no longer knows: the features its loss was computed from, and the gradient before clipping.
        self.model.net.register_forward_hook(self._after_net)
        self.model.register_forward_hook(self._after_loss)
        for parameter in self.model.head.classifier.parameters():
            parameter.register_post_accumulate_grad_hook(self._after_gradient)  # type: ignore[no-untyped-call]

    def start(self, run: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Measure the test loss before the first step."""
        self._measure()

    def step(self, step: int, terms: dict[str, float]) -> None:
        """Note the numbers of a step; a window of them makes a point of the curves."""
        self.steps_seen = step
        self.sums["train_with_masks"] += terms.get("cross_entropy", terms["total"])
        self.sums["gradient_norm"] += math.sqrt(self._square)
        self._square = 0.0
        size = step % self.window or self.window
        if size == self.window or step == self.total:
            self.steps.append(step)
            for name, value in self.sums.items():
                self.curves[name].append(value / size)
                self.sums[name] = 0.0
        if step % self.test_every == 0 or step == self.total:
            self._measure()

    def _after_net(self, net: nn.Module, inputs: tuple[Any, ...], features: Tensor) -> None:
        self._features = features.detach()

    def _after_loss(self, model: nn.Module, inputs: tuple[Any, ...], loss: Any) -> None:
        with torch.no_grad():
            self.sums["train"] += _cross_entropy(self.model, self._features, inputs[1])

    def _after_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._square += float(parameter.grad.double().square().sum())

    @torch.no_grad()
    def _measure(self) -> None:
        self.model.eval()
        losses = [_cross_entropy(self.model, self.model.net(x), y) * len(y) for x, y in self.batches(self.test)]
        self.model.train()
        self.test_steps.append(self.steps_seen)
        self.test_losses.append(sum(losses) / len(self.test))


def _cross_entropy(model: Classifier, features: Tensor, labels: Tensor) -> float:
    """Return the mean of -log p(y | x, rho(x)), the probability floored as :func:`dropmax.metrics.nll` does."""
    on_truth = model.head.predict_proba(features).gather(-1, labels[:, None])
    return float(-on_truth.clamp(min=NLL_FLOOR).log().mean())
