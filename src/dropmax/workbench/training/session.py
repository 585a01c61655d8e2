"""A training run in progress: everything that decides its next step, its optimiser and its processes."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dropmax.classifier import Classifier
from dropmax.errors import InvalidValue, RunError, first_line
from dropmax.heads import Loss
from dropmax.workbench.data import Batches, Dataset, Split
from dropmax.workbench.networks import Pretrained
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.terminal import progress
from dropmax.workbench.training.trained import build

#: Weights and moments smaller than this change no result, and would soon be subnormal.
SMALLEST = 1e-30


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process logs and writes files."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Add a tensor up over the processes."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the processes torchrun started, if it did: NCCL where there are GPUs, gloo elsewhere."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks(dist.get_rank(), world_size, int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        dist.destroy_process_group()


class Session:
    """Model, optimiser, batches and random numbers of one run, and how far it has come.

    The seed decides every random number. :meth:`state` is all that the rest of the run depends on: a session that
    loads it, in the middle of an epoch or between two, ends with the same bytes.

    Args:
        recipe: what to train.
        data: what :func:`~dropmax.workbench.training.load_data` returns for it.
        device: ``"cpu"``, ``"cuda"``, ...; a GPU where there is one by default.
        ranks: the processes that train together.

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
        self.batch_size = options.rows_per_step(len(data.train), ranks.world_size)
        self.batches = Batches(
            data.train, self.batch_size, data.mean, data.std, recipe.data.augment,  # type: ignore[arg-type]
            shuffle=True, generator=self.order, device=self.device,
        ).of_rank(ranks.rank, ranks.world_size)  # fmt: skip
        self.validation = Batches(
            data.validation, max(options.batch_size, 500), data.mean, data.std, device=self.device
        )
        self.epoch = self.step = 0  #: epochs done, and steps done in the current one
        self.names: list[str] = []  #: of the loss terms
        self.sums: Tensor | None = None  #: of the loss terms over the examples of the current epoch so far
        self.log = ""  #: the rows of the epochs done, one line of JSON per epoch
        #: with ``training.patience``: the epoch with the lowest validation NLL so far, that NLL, and its weights
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
        rows = min(self.batch_size, len(self.data.train) - self.step * self.batch_size)  # over all ranks
        noise, shape = None, self.model.head.noise_shape(rows) if ranks.world_size > 1 else None
        if shape is not None:
            noise = torch.rand(shape, device=self.device)[..., ranks.rank :: ranks.world_size, :]
        if x.dim() == 4:
            x = x.contiguous(memory_format=self.layout)
        lower = options.precision != "float32"
        with torch.autocast(self.device.type, getattr(torch, options.precision)) if lower else contextlib.nullcontext():
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
        recipes = [re.sub(r"(?m)^epochs = \d+$", "", str(one)) for one in (state.get("recipe"), self.recipe.to_toml())]
        if recipes[0] != recipes[1]:
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
            raise RunError(f"{source} does not fit its recipe: {first_line(error)}") from error

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
    """Return a session that trains such hidden layers and head on features of the frozen network ``net``.

    The network standardises these features from now on. They are trained on as ``own-images.pretrained`` says.
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


def make_optimizer(model: Classifier, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimiser that ``recipe.training`` asks for, without weight decay on the exempt parameters."""
    options = recipe.training
    groups = model.param_groups(options.weight_decay, exempt=options.decay_exempt)
    if not options.decay_biases:  # nor of the scales and shifts of normalisations: of nothing that is a vector
        split = [
            {**group, "params": [p for p in group["params"] if (p.dim() > 1) == is_matrix]}
            | ({} if is_matrix else {"weight_decay": 0.0})
            for group in groups
            for is_matrix in (True, False)
        ]
        groups = [group for group in split if group["params"]]
    if isinstance(model.net, Pretrained):
        slow = set(model.net.graph.parameters())
        groups = [{**group, "params": [p for p in group["params"] if p not in slow]} for group in groups]
        # Decaying what was learned from a million photographs would only forget it.
        learning = [p for p in model.net.graph.parameters() if p.requires_grad]
        groups.append({"params": learning, "weight_decay": 0.0, "rate": options.pretrained_rate})
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=options.momentum, fused=True)
    kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.learning_rate, fused=True)


def flush_subnormals(optimizer: torch.optim.Optimizer) -> None:
    """Set weights and moments below 1e-30 to zero.

    Weight decay shrinks the weights of dead units until they are subnormal, and a CPU needs some hundred cycles for
    each product with such a number: after 700 epochs of `mnist-1k.paper`, 4 % of a layer's weights made it 25 times
    slower. No result changes: against Adam's epsilon of 1e-8 such moments round away. ``torch.set_flush_denormal``
    would act on one thread only, and on the rest of the user's process.
    """
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for x in (parameter, *optimizer.state.get(parameter, {}).values()):
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    x.masked_fill_(x.abs() < SMALLEST, 0.0)
