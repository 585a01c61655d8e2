"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.checks import NotFinite
from dropmax.errors import InvalidValue, RunError
from dropmax.workbench.data import Dataset
from dropmax.workbench.evaluation import calibrate, measure
from dropmax.workbench.networks import Pretrained
from dropmax.workbench.provenance import provenance
from dropmax.workbench.recipes import Recipe
from dropmax.workbench.terminal import TrainingProgress
from dropmax.workbench.training.callbacks import Callback, Callbacks, make_callbacks
from dropmax.workbench.training.rundir import RunDirectory, balanced, load_data, remember_data
from dropmax.workbench.training.session import Ranks, Session, flush_subnormals, on_features, process_group
from dropmax.workbench.training.trained import check_imports, save_model

#: Look for a loss that is not finite every step where that is free, and now and then where it stalls the device.
_CHECK_EVERY = {"cpu": 1}
_UNVALIDATED = "there is no validation part: nothing is measured on the way, and the model after the last epoch is kept"


class Interrupted(RunError):
    """Training was stopped by the user; the message says how to resume."""


class Diverged(RunError):
    """Training met a number that is not finite; ``reason`` is the message without the place of the checkpoint."""

    def __init__(self, reason: str, place: Path) -> None:
        super().__init__(f"{reason}; the last checkpoint is kept in {place}")
        self.reason = reason


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
        callbacks: told of every step and epoch (:class:`Callback`); one that fails is dropped with a warning.
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
        data = load_data(recipe, data_dir)
        if ranks.is_first and not quiet:
            lines = [*data.notes, *map(str, data.held_out)]
            if not len(data.validation):
                lines.append(_UNVALIDATED)
            for line in lines:
                print(line, file=sys.stderr, flush=True)
        recipe = balanced(recipe, data).findable()
        # The session comes first: a mistake in the recipe leaves no directory behind.
        session = _begin(recipe, data, device, ranks, quiet=quiet)
        run = RunDirectory(out)
        if ranks.is_first:
            run = RunDirectory.create(out, recipe, provenance(seeds=[recipe.training.seed]), force=force)
            remember_data(run.path, recipe, data_dir, data)
            run.save_checkpoint(session.state())
        ranks.wait()
        fit(session, run, logs, quiet=quiet)
    return run


def resume(
    out: Path | str,
    *,
    epochs: int | None = None,
    data_dir: Path | str | None = None,
    device: str | None = None,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    trust_code: bool = False,
) -> RunDirectory:
    """Resume a run that was stopped or killed; it ends with the bytes of an uninterrupted run.

    With ``epochs``, train to that many epochs in all, also where the run had ended: from here on, the learning rate
    follows the schedule for the new number, and ``recipe.toml`` says so. Pass callbacks again; the logs that come with
    dropmax continue where they stopped. A network or head that the recipe imports needs ``trust_code``, as for
    :func:`~dropmax.workbench.training.load_model`.
    """
    logs = [*callbacks, *make_callbacks(["tensorboard"] * tensorboard)]
    with process_group() as ranks:
        run = RunDirectory.open(out)
        recipe = run.recipe() if epochs is None else run.recipe().override({"training.epochs": epochs})
        check_imports(recipe, str(run.path / "recipe.toml"), trust_code)
        if ranks.is_first:
            run.remove_leftovers()
        if run.has_ended(recipe):
            return run
        checkpoint = run.load_checkpoint()
        if checkpoint is None and run.has_model:
            raise RunError(f"{run.path} has no checkpoint to resume from: train into a new directory")
        done = 0 if checkpoint is None else checkpoint["epoch"]
        if epochs is not None and isinstance(done, int) and epochs < done:
            raise InvalidValue(
                f"{run.path} has been trained for {done} epochs already: give more than that, not {epochs}"
            )
        data = load_data(recipe, data_dir, run=run.path)
        if checkpoint is None:
            session = _begin(recipe, data, device, ranks, quiet=quiet)
        else:
            session = Session(recipe, data, device=device, ranks=ranks)
            session.load(checkpoint, f"the newest checkpoint in {run.path}")
        if ranks.is_first and epochs is not None:
            run.write_recipe(recipe)
        fit(session, run, logs, quiet=quiet)
    return run


def fit(session: Session, run: RunDirectory, callbacks: Sequence[Callback] = (), *, quiet: bool = False) -> None:
    """Train what is left of a session's epochs, with checkpoints on the way, and write the model at the end."""
    options, is_first = session.recipe.training, session.ranks.is_first
    watchers = Callbacks(callbacks if is_first else ())
    saved_at, final = time.monotonic(), None
    if is_first:
        run.write_log(session.log)
    name = f"{session.recipe.head['name']} on {session.recipe.data.name}"
    quiet = quiet or not is_first
    with TrainingProgress(name, options.epochs, len(session.batches), session.steps_done, quiet=quiet) as progress:
        try:
            watchers.tell("start", run.path, session.recipe, run.environment())
            with _signals() as stop:
                if isinstance(session.model.net, Pretrained) and session.best is None:
                    _judge(session, 0, {})
                while not session.has_ended:
                    row = _epoch(session, watchers, progress, stop)
                    line = json.dumps(row) + "\n"
                    session.log += line
                    session.next_epoch()
                    if is_first:
                        run.append_log(line)
                    watchers.tell("epoch", row)
                    due = time.monotonic() - saved_at >= options.checkpoint_seconds
                    if is_first and (due or session.has_ended):
                        run.save_checkpoint(session.state())
                        saved_at = time.monotonic()
                    stop.check()
            final = json.loads(session.log.splitlines()[-1])
            if session.best is not None:
                session.model.load_state_dict(session.best["model"])
            if is_first and options.calibrate:
                source = f"held-out rows of {Path(session.recipe.data.name).name}"
                calibrate(session.model, session.validation, source=source)
            if options.refit and len(session.data.validation):
                session = _refit(session, quiet=quiet)
        except KeyboardInterrupt as error:
            # Between two steps the state is whole. Ranks do not stop at the same step, so several keep what they have.
            if not isinstance(error, _AtOnce) and session.ranks.world_size == 1:
                run.save_checkpoint(session.state())
            raise Interrupted(
                f"stopped after {session.epoch} of {options.epochs} epochs; resume with: dropmax train --resume "
                f"{run.path}{' --trust-code' * session.recipe.imports_code}"
            ) from None
        except NotFinite as error:
            raise Diverged(
                f"{error} (step {session.steps_done + 1}); try a lower learning rate than {options.learning_rate:g} "
                "(--set training.learning_rate=...) or training.clip_norm=1.0",
                run.path,
            ) from None
        finally:
            watchers.tell("end", final)
    if is_first:
        save_model(run.path / "model.safetensors", session.model, session.recipe, session.data)
    session.ranks.wait()


def _refit(session: Session, *, quiet: bool) -> Session:
    """Train again on all rows but the test part; the calibration stays that of the held-out rows.

    It has no checkpoints of its own: a run that is stopped here resumes from its last epoch and starts this fit over.
    """
    data, ranks = session.data.with_validation_trained_on(), session.ranks
    again = _begin(session.recipe, data, str(session.device), ranks, quiet=quiet)
    again.model.head.calibration = session.model.head.calibration
    epochs = session.epoch if session.best is None else session.best["epoch"]
    _run(again, f"all {len(data.train):,} rows of {again.recipe.data.name}", epochs, quiet=quiet)
    return again


def _begin(recipe: Recipe, data: Dataset, device: str | None, ranks: Ranks, *, quiet: bool) -> Session:
    """Return a new session; behind a pretrained network, hidden layers and head have learned from its features."""
    session = Session(recipe, data, device=device, ranks=ranks)
    if isinstance(session.model.net, Pretrained):
        first = on_features(session, session.model.net, quiet=quiet)
        _run(first, f"{recipe.head['name']} on features", first.recipe.training.epochs, quiet=quiet)
        session.model.net.layers.load_state_dict(first.model.net.state_dict())
        session.model.head.load_state_dict(first.model.head.state_dict())
    return session


def _run(session: Session, name: str, epochs: int, *, quiet: bool) -> None:
    """Train for so many epochs without checkpoints."""
    with TrainingProgress(name, epochs, len(session.batches), quiet=quiet) as progress, _signals() as stop:
        while session.epoch < epochs:
            _epoch(session, Callbacks(()), progress, stop)
            session.next_epoch()


def _epoch(session: Session, watchers: Callbacks, progress: TrainingProgress, stop: _Stop) -> dict[str, Any]:
    """Train for what is left of the epoch and return its row of the log."""
    options, optimizer, scaler = session.recipe.training, session.optimizer, session.scaler
    steps = len(session.batches)
    learning_rate = options.learning_rate_at(session.epoch)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("rate", 1.0)
    session.forward.train()
    for x, y in session.remaining_batches():
        loss, weight = session.loss(x, y)
        optimizer.zero_grad(set_to_none=True)
        total = scaler.scale(loss.total * weight if weight != 1 else loss.total)
        total.backward()  # type: ignore[no-untyped-call]
        if options.clip_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(session.model.parameters(), options.clip_norm)
        scaler.step(optimizer)
        scaler.update()

        session.names = ["total", *loss.terms]
        values = torch.stack([loss.total.detach(), *(term.detach() for term in loss.terms.values())])
        session.sums = values * len(y) if session.sums is None else session.sums.add_(values, alpha=len(y))
        look = watchers.want_steps or session.step % _CHECK_EVERY.get(session.device.type, 50) == 0
        if look:
            _check_finite(session.names, session.sums)
        session.step += 1  # from here on the state is that of the next step
        if look:
            terms = dict(zip(session.names, values.tolist(), strict=True))
            progress.step(session.epoch, session.steps_done, terms)
            if watchers.want_steps:
                watchers.tell("step", session.steps_done, terms)
        stop.check()

    assert session.sums is not None
    _check_finite(session.names, session.sums)
    flush_subnormals(optimizer)
    means = (session.ranks.sum(session.sums) / len(session.data.train)).tolist()
    row: dict[str, Any] = {
        "epoch": session.epoch + 1,
        "step": (session.epoch + 1) * steps,
        "learning_rate": learning_rate,
        "train": dict(zip(session.names, means, strict=True)),
    }
    if (session.epoch + 1) % options.validate_every == 0 or session.epoch + 1 == options.epochs:
        _judge(session, session.epoch + 1, row)
    progress.epoch(row)
    return row


def _judge(session: Session, epoch: int, row: dict[str, Any]) -> None:
    """Measure the model on the validation rows, for the row of the log; with patience, keep the best weights."""
    options = session.recipe.training
    if not len(session.validation.split):
        return
    if session.ranks.is_first:
        found = measure(session.model, session.validation, seed=options.seed)
        row["validation"] = found.loss | found.metrics
        row["masks"] = found.masks
    if options.patience:  # every process decides by what the first one measured
        nll = torch.tensor(row["validation"]["nll"] if session.ranks.is_first else 0.0, device=session.device)
        session.judge(epoch, float(session.ranks.sum(nll)))
        assert session.best is not None
        row["kept"] = session.best["epoch"]


def _check_finite(names: Sequence[str], sums: Tensor) -> None:
    for name, value in reversed(list(zip(names, sums.tolist(), strict=True))):  # the total last: name the culprit
        if not math.isfinite(value):
            raise NotFinite(f"the loss term {name!r} is {value}")


# --- stopping ----------------------------------------------------------------------------------------------------


class _AtOnce(KeyboardInterrupt):
    """Raised by the second signal, wherever training is."""


class _Stop:
    asked = False

    def check(self) -> None:
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    """Let Ctrl-C and a polite kill (SIGTERM) end the current step first, and a second one end training at once."""
    stop = _Stop()

    def handle(*_: object) -> None:
        if stop.asked:
            raise _AtOnce
        stop.asked = True
        # Not print: a handler must not write to a stream that the interrupted code may be writing to.
        os.write(2, b"dropmax: stopping after this step; press Ctrl-C again to stop at once\n")

    try:
        previous = {name: signal.signal(name, handle) for name in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be handled
        yield stop
        return
    try:
        yield stop
    finally:
        for name, handler in previous.items():
            signal.signal(name, signal.SIG_DFL if handler is None else handler)
