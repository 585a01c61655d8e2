"""How long a run will take, from a few real training steps with one thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dropmax.lab.experiments.plan import Plan
from dropmax.workbench.data import Batches, Dataset
from dropmax.workbench.recipes import DataOptions, Recipe

__all__ = ["estimate_seconds"]

_SECONDS_TO_MEASURE = 0.4
#: A forward pass without gradients, against a whole training step.
_SHARE_OF_FORWARD = 0.35


def estimate_seconds(
    plan: Plan, data_dir: Path | str | None = None, groups: set[str] | None = None
) -> dict[str, float]:
    """Return the expected seconds of a run of each group (or of those named), by its key.

    >>> from dropmax.lab.experiments.plan import plan_table
    >>> plan = plan_table(["mnist-1k"], heads=["softmax"], overrides={"training.epochs": 1})
    >>> list(estimate_seconds(plan))
    ['mnist-1k.released.softmax']
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded: dict[DataOptions, Dataset] = {}
    found = {}
    try:
        for group in plan.groups:
            if groups is not None and group.key not in groups:
                continue
            if group.recipe.data not in loaded:
                from dropmax.workbench.training import load_data

                loaded[group.recipe.data] = load_data(group.recipe, data_dir)
            found[group.key] = _seconds_of_a_run(group.recipe, loaded[group.recipe.data])
    finally:
        torch.set_num_threads(threads)
    return found


def _seconds_of_a_run(recipe: Recipe, data: Dataset) -> float:
    import torch

    from dropmax.workbench.training import build

    options = recipe.training
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(recipe, data.input_shape, data.num_classes).to(device).train()
    layout = torch.channels_last if options.channels_last and data.is_images else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)  # a rate of 0: only the time is of interest
    augment: Any = recipe.data.augment
    batches = Batches(data.train, options.batch_size, data.mean, data.std, augment, shuffle=True, device=device)
    step, started, steps, end = 0, 0.0, 0, 0.0
    while step < 3 or (end - started < _SECONDS_TO_MEASURE and step < 100):
        for x, y in batches:
            total, _ = model(x.contiguous(memory_format=layout) if x.dim() == 4 else x, y)
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            optimizer.step()
            float(total.detach())  # wait for the device
            step, end = step + 1, time.perf_counter()
            if step == 1:  # the first step allocates and plans
                started = end
            if step >= 3 and end - started >= _SECONDS_TO_MEASURE:
                break
    steps = step - 1
    seconds_a_step = (end - started) / steps
    seconds_a_row = seconds_a_step / min(options.batch_size, len(data.train))
    validations = -(-options.epochs // options.validate_every) + 1
    forward_rows = validations * len(data.validation) + len(data.test)
    return options.epochs * len(batches) * seconds_a_step + _SHARE_OF_FORWARD * forward_rows * seconds_a_row
