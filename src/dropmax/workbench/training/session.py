"""A training run in progress: everything that decides its next step, in one object."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.classifier import Classifier
from dropmax.errors import InvalidValue, RunError, first_line
from dropmax.heads import Loss
from dropmax.workbench.data import Batches, Dataset, Split
from dropmax.workbench.networks import Pretrained
from dropmax.workbench.progress import progress
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training.distributed import Ranks
from dropmax.workbench.training.optimizer import make_optimizer
from dropmax.workbench.training.trained import build


class Session:
    """Model, optimiser, batches and random numbers of one run, and how far it has come.

    The seed decides every random number. :meth:`state` is all that the rest of the run depends on: a session that
    loads it, in the middle of an epoch or between two, ends with the same bytes.

    Args:
        recipe: what to train.
        data: what :func:`~dropmax.workbench.training.load_data` returns for it.
        device: ``"cpu"``, ``"cuda"``, ...; a GPU where there is one by default.
        ranks: the processes that train together.

    Attributes:
        model: network and head.
        epoch: epochs done.
        step: steps done in the current epoch.
        names, sums: of the loss terms over the examples of the current epoch so far.
        log: the rows of the epochs done, one line of JSON per epoch.
        best: with ``training.patience``, the epoch with the lowest validation NLL so far, that NLL, and its weights.

    >>> from dropmax.workbench.recipes import load_recipe
    >>> from dropmax.workbench.training import load_data
    >>> recipe = load_recipe("mnist-1k")
    >>> session = Session(recipe, load_data(recipe), device="cpu")
    >>> session.epoch, len(session.batches)
    (0, 10)
    """

    def __init__(self, recipe: Recipe, data: Dataset, *, device: str | None = None, ranks: Ranks | None = None) -> None:
        options, ranks = recipe.training, ranks or Ranks()
        if options.batch_size % ranks.world_size:
            raise InvalidValue(
                f"training.batch_size={options.batch_size} must be a multiple of {ranks.world_size} processes"
            )
        if options.mixup and ranks.world_size > 1:
            raise InvalidValue("training.mixup mixes the rows of one process: train with one, or set it to 0")
        if not len(data.train):
            raise InvalidValue("there is nothing to train on: the training split is empty")
        self.recipe, self.data, self.ranks = recipe, data, ranks
        self.device = _device(device, ranks)
        torch.manual_seed(options.seed)
        self.layout = torch.channels_last if options.channels_last and data.is_images else torch.contiguous_format
        model = build(recipe, data.input_shape, data.num_classes)
        if isinstance(model.net, Pretrained):
            model.net.start()
        self.model: Classifier = model.to(self.device).to(memory_format=self.layout)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(self.model, recipe)
        needs_scaling = options.precision == "float16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=needs_scaling)
        self.order = torch.Generator().manual_seed(options.seed)
        self.batches = Batches(
            data.train, options.batch_size, data.mean, data.std, recipe.data.augment,  # type: ignore[arg-type]
            shuffle=True, generator=self.order, device=self.device,
        ).of_rank(ranks.rank, ranks.world_size)  # fmt: skip
        self.validation = Batches(
            data.validation, max(options.batch_size, 500), data.mean, data.std, device=self.device
        )
        self.epoch = self.step = 0
        self.names: list[str] = []
        self.sums: Tensor | None = None
        self.log = ""
        self.best: dict[str, Any] | None = None
        self._order_of_epoch = self.order.get_state()
        self._forward: nn.Module | None = None

    def remaining_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return what is left of the current epoch: its order is drawn again from the state at its beginning."""
        self.order.set_state(self._order_of_epoch)
        return itertools.islice(self.batches, self.step, None)

    def next_epoch(self) -> None:
        """Count the epoch as done."""
        self.epoch, self.step, self.names, self.sums = self.epoch + 1, 0, [], None
        self._order_of_epoch = self.order.get_state()

    @property
    def steps_done(self) -> int:
        """Steps since the beginning of the run."""
        return self.epoch * len(self.batches) + self.step

    def judge(self, epoch: int, nll: float) -> None:
        """Keep a copy of the weights where the validation NLL is the lowest so far."""
        if self.best is None or nll < self.best["nll"]:
            weights = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.best = {"epoch": epoch, "nll": nll, "model": weights}

    @property
    def has_ended(self) -> bool:
        """Whether all epochs are done, or ``training.patience`` is."""
        options = self.recipe.training
        waited = 0 if self.best is None else self.epoch - self.best["epoch"]
        return self.epoch >= options.epochs or 0 < options.patience <= waited

    @property
    def forward(self) -> nn.Module:
        """The model as training calls it: compiled if the recipe says so, and parallel over the ranks."""
        if self._forward is None:
            wrapped: nn.Module = self.model
            if self.recipe.training.compile:
                wrapped = torch.compile(wrapped)  # type: ignore[assignment]
            if self.ranks.world_size > 1:
                places = [self.device] if self.device.type == "cuda" else None
                wrapped = nn.parallel.DistributedDataParallel(wrapped, device_ids=places)
            self._forward = wrapped
        return self._forward

    def loss(self, x: Tensor, y: Tensor) -> tuple[Loss, float]:
        """Return the loss of a batch, and what to multiply it by so that the ranks' mean is that of the whole batch.

        Every rank draws the noise of the whole batch and takes its own rows: the masks of a single process.
        """
        options, ranks = self.recipe.training, self.ranks
        rows = min(options.batch_size, len(self.data.train) - self.step * options.batch_size)  # over all ranks
        noise = None
        shape = self.model.head.noise_shape(rows) if ranks.world_size > 1 else None
        if shape is not None:
            noise = torch.rand(shape, device=self.device)[..., ranks.rank :: ranks.world_size, :]
        if x.dim() == 4:
            x = x.contiguous(memory_format=self.layout)
        with self._autocast():
            loss: Loss = self._mixed_loss(x, y) if options.mixup else self.forward(x, y, noise=noise)
        return loss, len(y) * ranks.world_size / rows

    def _mixed_loss(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of mixed rows (mixup, Zhang et al., 2018).

        With w from Beta(mixup, mixup) and a random order of the batch, row i becomes ``w x_i + (1 - w) x_j``, and its
        loss ``w loss(y_i) + (1 - w) loss(y_j)``.
        """
        alpha = self.recipe.training.mixup
        weight = float(torch.distributions.Beta(alpha, alpha).sample())
        order = torch.randperm(len(y), device=y.device)
        mixed = torch.lerp(x[order], x, weight)
        first, second = self.forward(mixed, y), self.forward(mixed, y[order])
        terms = {name: weight * first.terms[name] + (1 - weight) * second.terms[name] for name in first.terms}
        return Loss(weight * first.total + (1 - weight) * second.total, terms)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        precision = self.recipe.training.precision
        if precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, precision))

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what :meth:`load` takes; its tensors are those of the session, not copies."""
        found = {
            "epoch": self.epoch,
            "step": self.step,
            "names": self.names,
            "sums": self.sums,
            "log": self.log,
            "recipe": self.recipe.to_toml(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "order": self._order_of_epoch,
            "noise": torch.get_rng_state(),
        }
        if self.best is not None:
            found["best"] = self.best
        if self.device.type == "cuda":
            found["noise_cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def load(self, state: dict[str, Any], source: str) -> None:
        """Continue from a state; ``source`` is named in errors. The recipe may have more epochs than it had then."""
        if not _same_but_epochs(str(state.get("recipe")), self.recipe.to_toml()):
            raise RunError(
                f"{source} was made with another recipe than its recipe.toml: restore that file, or train into a new "
                "directory"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.order.set_state(state["order"])
            torch.set_rng_state(state["noise"])
            if "noise_cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["noise_cuda"])
            self._order_of_epoch = state["order"]
            self.epoch, self.step, self.log = state["epoch"], state.get("step", 0), state["log"]
            self.best = state.get("best")
            self.names, sums = list(state.get("names", [])), state.get("sums")
            self.sums = None if sums is None else sums.to(self.device)
            self._check_progress()
        except Exception as error:  # torch raises a dozen kinds where a state is not that of this model or optimiser
            reason = first_line(error)
            raise RunError(f"{source} does not fit its recipe: {reason}") from error

    def _check_progress(self) -> None:
        lines = len(self.log.splitlines())
        if not 0 <= operator.index(self.epoch) <= self.recipe.training.epochs or lines != self.epoch:
            raise ValueError(f"its log of {lines} epochs does not fit epoch {self.epoch}")
        begun = operator.index(self.step) > 0
        if not 0 <= self.step <= len(self.batches) or begun != (self.sums is not None):
            raise ValueError(f"step {self.step} is not one of an epoch of {len(self.batches)} steps")
        if self.sums is not None and self.sums.shape != (len(self.names),):
            raise ValueError(f"its {len(self.names)} loss terms have sums of shape {tuple(self.sums.shape)}")


def on_features(session: Session, net: Pretrained, *, quiet: bool = False) -> Session:
    """Return a session that trains hidden layers and head like those of ``session`` on features of the frozen network.

    ``net`` is the session's network, which standardises these features from now on. They are trained on as the recipe
    ``own-images.pretrained`` says.
    """
    data, recipe, parts = session.data, session.recipe, []
    batches = Batches(data.train, 64, data.mean, data.std, device=session.device)
    with torch.no_grad(), progress("looking at the images", len(data.train), "images", quiet=quiet) as advance:
        for x, _ in batches:
            parts.append(net.graph.features(x.contiguous(memory_format=session.layout)).cpu())
            advance(len(x))
    features, labels = torch.cat(parts), data.train.labels
    mean, std = net.standardise(features)
    none = Split(features[:0], labels[:0])
    frozen = Dataset(data.name, Split(features, labels), none, none, data.classes, mean, std)
    options = {f"network.{key}": value for key, value in recipe.network.items() if key in ("hidden", "dropout")}
    options |= {f"head.{key}": value for key, value in recipe.head.items()} | {"training.seed": recipe.training.seed}
    plan = load_recipe("own-images.pretrained").override({**options, "training.refit": False})
    return Session(plan, frozen, device=str(session.device))


def _same_but_epochs(first: str, second: str) -> bool:
    return re.sub(r"(?m)^epochs = \d+$", "", first) == re.sub(r"(?m)^epochs = \d+$", "", second)


def _device(name: str | None, ranks: Ranks) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidValue(f"the device {name!r} cannot be used here: {first_line(error)}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    return device
