"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.checks import NotFinite
from dropmax.classifier import Classifier
from dropmax.errors import InvalidValue, RunError
from dropmax.workbench.data import Batches, Dataset, load
from dropmax.workbench.evaluation import measure
from dropmax.workbench.networks import check_import
from dropmax.workbench.provenance import provenance
from dropmax.workbench.recipes import Recipe
from dropmax.workbench.training.callbacks import Callback, Callbacks, make_callbacks
from dropmax.workbench.training.distributed import Ranks, process_group
from dropmax.workbench.training.optimizer import forget_what_vanished, make_optimizer
from dropmax.workbench.training.progress import Progress
from dropmax.workbench.training.rundir import RunDirectory
from dropmax.workbench.training.trained import build, save_model

__all__ = ["Interrupted", "load_data", "resume", "train"]

#: Look for a loss that is not finite every step where that is free, and now and then where it stalls the device.
_CHECK_EVERY = {"cpu": 1}


class Interrupted(RunError):
    """Training was stopped by the user; the message says how to go on.

    >>> issubclass(Interrupted, RunError)
    True
    """


def train(
    recipe: Recipe,
    out: Path | str,
    *,
    data_dir: Path | str | None = None,
    device: str | None = None,
    force: bool = False,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> RunDirectory:
    """Train what the recipe says into a new run directory.

    Args:
        recipe: what to train.
        out: the run directory.
        data_dir: where data sets are.
        device: ``"cpu"``, ``"cuda"``, ...; a GPU where there is one by default.
        force: whether an old run in ``out`` may be replaced.
        tensorboard: short for one more callback, :class:`~dropmax.workbench.training.TensorBoard`.
        callbacks: told of every epoch (:class:`Callback`); one that fails is dropped with a warning.
        quiet: whether to show no progress.

    >>> import tempfile
    >>> from dropmax.workbench.recipes import load_recipe
    >>> recipe = load_recipe("mnist-1k").override({"training.epochs": 1, "data.train_size": 100})
    >>> run = train(recipe, tempfile.mkdtemp() + "/run", quiet=True)
    >>> sorted(run.metrics()[0])
    ['epoch', 'learning_rate', 'masks', 'step', 'train', 'validation']
    """
    logs = [*callbacks, *make_callbacks(["tensorboard"] * tensorboard)]  # what is missing is said before the work
    with process_group() as ranks:
        place = _device(device, ranks)
        data = load_data(recipe, data_dir)
        build(recipe, data.input_shape, data.num_classes)  # a mistake in the recipe leaves no directory behind
        run = RunDirectory(out)
        if ranks.is_first:
            run = RunDirectory.create(out, recipe, provenance(seeds=[recipe.training.seed]), force=force)
        ranks.wait()
        _train(run, recipe, data, ranks, place, logs, quiet)
    return run


def resume(
    out: Path | str,
    *,
    data_dir: Path | str | None = None,
    device: str | None = None,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    trust_network: bool = False,
) -> RunDirectory:
    """Go on with a run that was stopped or killed; it ends with the bytes it would have had anyway.

    Callbacks are passed anew; the logs that come with dropmax go on where they stopped. A run directory may come from
    somebody else, so a network that its recipe imports needs ``trust_network``, as for
    :func:`~dropmax.workbench.training.load_model`.
    """
    logs = [*callbacks, *make_callbacks(["tensorboard"] * tensorboard)]
    with process_group() as ranks:
        run = RunDirectory.open(out)
        recipe = run.recipe()
        check_import(recipe.network["name"], str(run.path / "recipe.toml"), trust_network)
        if ranks.is_first:
            run.remove_leftovers()
        if not (run.path / "model.safetensors").exists():
            _train(run, recipe, load_data(recipe, data_dir), ranks, _device(device, ranks), logs, quiet)
    return run


def load_data(recipe: Recipe, data_dir: Path | str | None = None) -> Dataset:
    """Load the data a recipe names, split by its seed.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> len(load_data(load_recipe("mnist-1k")).train)
    1000
    """
    options = recipe.data
    data = load(
        options.name,
        data_dir=data_dir,
        seed=recipe.training.seed,
        train_size=options.train_size or None,
        validation_size=options.validation_size or None,
        image_size=options.image_size or None,
        label_column=options.label_column or None,
    )
    if options.standardise:
        return data
    channels = len(data.mean)
    return dataclasses.replace(data, mean=(0.0,) * channels, std=(1.0,) * channels)


def _train(
    run: RunDirectory,
    recipe: Recipe,
    data: Dataset,
    ranks: Ranks,
    device: torch.device,
    logs: Sequence[Callback],
    quiet: bool,
) -> None:
    options = recipe.training
    if options.batch_size % ranks.world_size:
        raise InvalidValue(
            f"training.batch_size={options.batch_size} must be a multiple of {ranks.world_size} processes"
        )

    # --- model, optimiser, batches: all random numbers follow from the seed --------------------------------------
    torch.manual_seed(options.seed)
    model = build(recipe, data.input_shape, data.num_classes).to(device)
    layout = torch.channels_last if options.channels_last and data.is_images else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = make_optimizer(model, recipe)
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "float16" and device.type == "cuda")
    order = torch.Generator().manual_seed(options.seed)
    batches = Batches(
        data.train, options.batch_size, data.mean, data.std, recipe.data.augment,  # type: ignore[arg-type]
        shuffle=True, generator=order, device=device, rank=ranks.rank, world_size=ranks.world_size,
    )  # fmt: skip
    validation = Batches(data.validation, max(options.batch_size, 500), data.mean, data.std, device=device)

    # --- where to begin ------------------------------------------------------------------------------------------
    log = ""
    first_epoch = 0
    checkpoint = run.load_checkpoint()
    if checkpoint is not None:
        first_epoch, log = _restore(checkpoint, model, optimizer, scaler, order, recipe, run)
    if ranks.is_first:
        run.write_log(log)

    trained: nn.Module = model
    if options.compile:
        trained = torch.compile(trained)  # type: ignore[assignment]
    if ranks.world_size > 1:
        trained = nn.parallel.DistributedDataParallel(trained, device_ids=[device] if device.type == "cuda" else None)

    def state(epoch: int) -> dict[str, Any]:
        """What training needs to go on after ``epoch`` epochs."""
        found = {
            "epoch": epoch,
            "log": log,
            "recipe": recipe.to_toml(),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "order": order.get_state(),
            "noise": torch.get_rng_state(),
        }
        if device.type == "cuda":
            found["noise_cuda"] = torch.cuda.get_rng_state(device)
        copied: dict[str, Any] = _copied(found)
        return copied

    # --- epochs --------------------------------------------------------------------------------------------------
    progress = Progress(recipe, len(batches), first_epoch, quiet=quiet or not ranks.is_first)
    callbacks = Callbacks(logs if ranks.is_first else ())
    final = None  # the last row, once training has ended
    saved_at = time.monotonic()
    with progress, _terminated_as_interrupted():
        before = state(first_epoch)  # the last state to go on from, whenever somebody interrupts
        try:
            callbacks.start(run.path, recipe, run.environment())
            for epoch in range(first_epoch, options.epochs):
                before = state(epoch)
                row = _epoch(
                    epoch,
                    trained,
                    model,
                    batches,
                    optimizer,
                    scaler,
                    recipe,
                    ranks,
                    device,
                    layout,
                    progress,
                    validation,
                )
                line = json.dumps(row) + "\n"
                log += line
                if ranks.is_first:
                    run.append_log(line)
                callbacks.epoch(row)
                is_last = epoch + 1 == options.epochs
                if ranks.is_first and (is_last or time.monotonic() - saved_at >= options.checkpoint_seconds):
                    run.save_checkpoint(state(epoch + 1))
                    saved_at = time.monotonic()
            final = json.loads(log.splitlines()[-1])
        except KeyboardInterrupt:
            if ranks.is_first:
                run.save_checkpoint(before)
            raise Interrupted(
                f"stopped after {before['epoch']} of {options.epochs} epochs; go on with: "
                f"dropmax train --resume {run.path}{' --trust-network' * (':' in recipe.network['name'])}"
            ) from None
        except FloatingPointError as error:
            if ranks.is_first:
                run.save_checkpoint(before)
            raise RunError(f"{error}; the state before epoch {before['epoch'] + 1} is kept in {run.path}") from None
        finally:
            callbacks.end(final)
    if ranks.is_first:
        save_model(run.path / "model.safetensors", model, recipe, data)
    ranks.wait()


def _epoch(
    epoch: int,
    trained: nn.Module,
    model: Classifier,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    recipe: Recipe,
    ranks: Ranks,
    device: torch.device,
    layout: torch.memory_format,
    progress: Progress,
    validation: Batches,
) -> dict[str, Any]:
    """Train for one epoch and return its row of the log."""
    options = recipe.training
    learning_rate = options.learning_rate_at(epoch)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    trained.train()
    count = len(batches.split)
    sums: Tensor | None = None
    names: list[str] = []
    for step, (x, y) in enumerate(batches):
        rows = min(options.batch_size, count - step * options.batch_size)  # over all ranks
        if x.dim() == 4:
            x = x.contiguous(memory_format=layout)
        with _autocast(options.precision, device):
            try:
                total, terms = trained(x, y, noise=_my_noise(model, rows, ranks, device))
            except NotFinite as error:
                at = epoch * len(batches) + step + 1
                raise FloatingPointError(f"{error} (step {at}); {_advice(options.learning_rate)}") from None
        # Each rank averages over its own rows, and gradients are averaged over ranks: make that the batch's mean.
        weight = len(y) * ranks.world_size / rows
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(total * weight if weight != 1 else total).backward()
        if options.clip_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        scaler.step(optimizer)
        scaler.update()

        with torch.no_grad():
            names = ["total", *terms]
            values = torch.stack([total, *terms.values()]).detach()
            sums = values * len(y) if sums is None else sums.add_(values, alpha=len(y))
        if (step + 1) % _CHECK_EVERY.get(device.type, 50) == 0 or step + 1 == len(batches):
            _refuse_non_finite(names, sums, epoch * len(batches) + step + 1, options.learning_rate)
            progress.step(epoch, step, dict(zip(names, values.tolist(), strict=True)))

    if sums is None:
        raise InvalidValue("there is nothing to train on: the training split is empty")
    forget_what_vanished(optimizer)
    means = (ranks.sum(sums) / count).tolist()
    row: dict[str, Any] = {
        "epoch": epoch + 1,
        "step": (epoch + 1) * len(batches),
        "learning_rate": learning_rate,
        "train": dict(zip(names, means, strict=True)),
    }
    due = (epoch + 1) % options.validate_every == 0 or epoch + 1 == options.epochs
    if due and ranks.is_first and len(validation.split):
        found = measure(model, validation, seed=options.seed)
        row["validation"] = found.loss | found.metrics
        row["masks"] = found.masks
    progress.epoch(row)
    return row


def _my_noise(model: Classifier, rows: int, ranks: Ranks, device: torch.device) -> Tensor | None:
    """Let every rank draw the noise of the whole batch and take its rows: the same masks as in a single process."""
    if ranks.world_size == 1:
        return None
    shape = model.head.noise_shape(rows)
    return None if shape is None else torch.rand(shape, device=device)[..., ranks.rank :: ranks.world_size, :]


def _refuse_non_finite(names: list[str], sums: Tensor, step: int, learning_rate: float) -> None:
    values = dict(zip(names, sums.tolist(), strict=True))
    for name, value in reversed(values.items()):  # the total last: name the term that did it
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss term {name!r} is no longer finite at step {step}: {_advice(learning_rate)}"
            )


def _advice(learning_rate: float) -> str:
    return (
        f"try a lower learning rate than {learning_rate:g} (--set training.learning_rate=...) or training.clip_norm=1.0"
    )


def _restore(
    checkpoint: dict[str, Any],
    model: Classifier,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    order: torch.Generator,
    recipe: Recipe,
    run: RunDirectory,
) -> tuple[int, str]:
    """Put a checkpoint back; return the epochs done and the log so far."""
    if checkpoint.get("recipe") != recipe.to_toml():
        raise RunError(
            f"the newest checkpoint in {run.path} was made with another recipe than its recipe.toml: restore that "
            "file, or train into a new directory"
        )
    try:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        order.set_state(checkpoint["order"])
        torch.set_rng_state(checkpoint["noise"])
        if "noise_cuda" in checkpoint and torch.cuda.is_available():
            torch.cuda.set_rng_state(checkpoint["noise_cuda"])
        epoch, log = checkpoint["epoch"], checkpoint["log"]
        if not 0 <= operator.index(epoch) <= recipe.training.epochs or len(log.splitlines()) != epoch:
            raise ValueError(f"its log of {len(log.splitlines())} epochs does not fit epoch {epoch}")
        return epoch, log
    except Exception as error:  # torch raises a dozen kinds where a state is not that of this model or optimiser
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RunError(f"the newest checkpoint in {run.path} does not fit its recipe: {reason}") from error


def _copied(value: Any) -> Any:
    """Copy a state to memory that training will not touch."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _device(name: str | None, ranks: Ranks) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidValue(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    return device


def _autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat a polite kill (SIGTERM) like Ctrl-C: end with a checkpoint."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals cannot be handled
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
