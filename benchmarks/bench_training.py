"""An epoch of our training loop against the shortest loop one would write by hand, with the same model and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness
from benchmarks.bench_scale import _row
from dropmax.classifier import Classifier
from dropmax.workbench.data import Dataset, normalise
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.terminal import TrainingProgress
from dropmax.workbench.training import Session, build, load_data, loop
from dropmax.workbench.training.callbacks import Callbacks
from dropmax.workbench.training.session import make_optimizer

AIM = 1.05
CASES = (("mnist-1k", "released"), ("mnist-1k", "paper"))


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure an epoch of 1,000 digits with LeNet and with the tutorial's CNN, DropMax on top."""
    rows = []
    for data_name, variant in CASES[:1] if quick else CASES:
        recipe = load_recipe(data_name, variant).override({"data.train_size": 100 if quick else 1000})
        data = load_data(recipe)
        timing = harness.measure(
            {"by hand": _by_hand(recipe, data), "dropmax": _ours(recipe, data)},
            baseline="by hand",
            budget=0.2 if quick else 40.0,
            warm_up=1,
        )["dropmax"]
        what = f"an epoch of {data_name}.{variant}, {recipe.network['name']}: our loop / a loop by hand"
        rows.append(_row(what, timing, AIM))
    return rows


def _model(recipe: Recipe, data: Dataset) -> tuple[Classifier, torch.optim.Optimizer, torch.memory_format]:
    torch.manual_seed(0)
    layout = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
    model = build(recipe, data.input_shape, data.num_classes).to(memory_format=layout)  # type: ignore[call-overload]
    return model, make_optimizer(model, recipe), layout


def _by_hand(recipe: Recipe, data: Dataset) -> Callable[[], None]:
    model, optimizer, layout = _model(recipe, data)
    inputs = normalise(data.train.inputs, data.mean, data.std).contiguous(memory_format=layout)
    labels = data.train.labels

    def epoch() -> None:
        for rows in torch.split(torch.randperm(len(labels)), recipe.training.batch_size):
            optimizer.zero_grad()
            model.head.loss(model.net(inputs[rows]), labels[rows]).total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return epoch


def _ours(recipe: Recipe, data: Dataset) -> Callable[[], None]:
    session = Session(recipe, data, device="cpu")

    def epoch() -> None:
        # Epoch 0 of 200: validation, which the loop by hand does not have either, is not due.
        with TrainingProgress("", recipe.training.epochs, len(session.batches), quiet=True) as progress:
            loop._epoch(session, Callbacks(()), progress, loop._Stop())
        session.step, session.sums = 0, None

    return epoch
