"""What may watch a training run: one small interface, and TensorBoard, MLflow and Weights & Biases behind it.

Logging cannot cost a run: a callback that raises is dropped with one warning line, and training continues. Nor can it
change one: whatever random numbers a callback draws, the run ends with the same bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dropmax.checks import check_choice
from dropmax.errors import optional
from dropmax.workbench.recipes import Recipe


class Callback:
    """What training calls; override what you need.

    >>> class Printer(Callback):
    ...     def start(self, run, recipe, environment):
    ...         print("training", recipe.head["name"])
    ...
    ...     def epoch(self, row):
    ...         print("epoch", row["epoch"], "ended with step", row["step"])
    ...
    ...     def end(self, metrics):
    ...         print("done" if metrics else "stopped")
    >>> import tempfile
    >>> from dropmax.workbench.recipes import load_recipe
    >>> from dropmax.workbench.training import train
    >>> recipe = load_recipe("mnist-1k").override({"training.epochs": 1, "data.train_size": 100})
    >>> run = train(recipe, tempfile.mkdtemp() + "/run", quiet=True, callbacks=[Printer()])
    training dropmax
    epoch 1 ended with step 1
    done
    """

    def start(self, run: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Training begins or resumes in the directory ``run``; ``environment`` is its ``environment.json``."""

    def step(self, step: int, terms: dict[str, float]) -> None:
        """The optimiser has made step number ``step``, counted from 1; ``terms`` is the loss before it, by term."""

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch has ended; ``row`` is its line of ``metrics.jsonl``."""

    def end(self, metrics: dict[str, Any] | None) -> None:
        """Training has ended, with ``metrics`` as its last row; None where it was stopped and may be resumed."""


class Callbacks:
    """Several callbacks as one, of which none can stop or change the training."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.active = list(callbacks)

    @property
    def want_steps(self) -> bool:
        """Whether any of them looks at single steps: on a GPU, the loss of every step has to be waited for then."""
        return any(getattr(type(callback), "step", Callback.step) is not Callback.step for callback in self.active)

    def tell(self, event: str, *about: Any) -> None:
        """Call the method ``event`` of :class:`Callback` on each of them."""
        for callback in tuple(self.active):
            problem = _problem(callback, event, about)
            if problem:
                self.active.remove(callback)
                name = type(callback).__name__
                print(f"dropmax: {name} failed and gets no more calls: {problem}", file=sys.stderr, flush=True)


def _problem(callback: Callback, event: str, about: tuple[Any, ...]) -> str:
    """Call one method with copies and random numbers of its own; return what went wrong in a line."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        method = getattr(callback, event, None)  # a class of the user's own may leave some out
        if method is not None:
            with torch.random.fork_rng(gpus):
                method(*copy.deepcopy(about))
    except Exception as error:
        words = " ".join(str(error).split()) or "no message"
        return f"{type(error).__name__}: {words if len(words) <= 200 else words[:200] + '...'}"
    return ""


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of the log by the names all logs give them, such as ``train/total``."""
    found = {"learning_rate": row["learning_rate"]}
    for part in ("train", "validation", "masks"):
        found |= {f"{part}/{name}": value for name, value in row.get(part, {}).items()}
    return found


class TensorBoard(Callback):
    """Curves in ``RUN/tensorboard``, one point per epoch; ``tensorboard --logdir RUN`` shows them."""

    def __init__(self) -> None:
        purpose = "logging to TensorBoard"
        self._writer_of = optional("torch.utils.tensorboard", "tensorboard", purpose, package="tensorboard")
        self._writer: Any = None

    def start(self, run: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Note where to write; the first epoch opens the file, as it tells which old points to drop."""
        self._place = run / "tensorboard"

    def epoch(self, row: dict[str, Any]) -> None:
        """Write a point of every curve."""
        if self._writer is None:
            self._writer = self._writer_of.SummaryWriter(str(self._place), purge_step=row["epoch"])
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["epoch"])

    def end(self, metrics: dict[str, Any] | None) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


class MLflow(Callback):
    """A run of MLflow: the recipe as parameters, one step per epoch. MLflow decides where it is kept.

    Args:
        tracking_uri: of the server or store; if None ``$MLFLOW_TRACKING_URI``, or MLflow's own default, or the folder
            ``mlruns`` where only mlflow-skinny is installed.
        experiment: its name; ``$MLFLOW_EXPERIMENT_NAME`` or "dropmax" if None.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._mlflow = optional("mlflow", "mlflow", "logging to MLflow", package="mlflow-skinny")
        self._uri, self._experiment = tracking_uri, experiment

    def start(self, run: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Continue the run that has this run's tag, or make one."""
        uri = self._uri
        if uri is None and not self._mlflow.is_tracking_uri_set() and find_spec("sqlalchemy") is None:
            # MLflow's own default is SQLite, which mlflow-skinny cannot write; a folder must be allowed explicitly.
            uri = Path("mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dropmax"
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tag = identity(run, recipe, environment)
        known = self._client.search_runs([place], f"tags.`dropmax.run` = '{tag}'", max_results=1)
        self._last = 0
        if known:
            self._run = known[0].info.run_id
            history = self._client.get_metric_history(self._run, "learning_rate")
            self._last = max((point.step for point in history), default=0)
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"dropmax.run": tag, "dropmax.directory": str(run), "dropmax.commit": str(environment.get("commit"))}
        self._run = self._client.create_run(place, run_name=run.name, tags=tags).info.run_id
        for table, values in recipe.to_dict().items():
            for key, value in values.items():
                self._client.log_param(self._run, f"{table}.{key}", value)

    def epoch(self, row: dict[str, Any]) -> None:
        """Log a step, unless the run was killed after logging it: the numbers are the same the second time."""
        if row["epoch"] <= self._last:
            return
        for name, value in scalars(row).items():
            self._client.log_metric(self._run, name, value, step=row["epoch"])

    def end(self, metrics: dict[str, Any] | None) -> None:
        """Close the run."""
        self._client.set_terminated(self._run, status="KILLED" if metrics is None else "FINISHED")


class WandB(Callback):
    """A run of Weights & Biases: the recipe as its config, one step per epoch, its files in ``RUN/wandb``.

    Args:
        project: its name; ``$WANDB_PROJECT`` or "dropmax" if None.
        mode: "online", "offline" or "disabled"; ``$WANDB_MODE`` decides if None.
    """

    def __init__(self, project: str | None = None, mode: str | None = None) -> None:
        self._wandb = optional("wandb", "wandb", "logging to Weights & Biases")
        self._project, self._mode = project, mode

    def start(self, run: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Begin or continue the run that has this run's identity."""
        self._run = self._wandb.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or "dropmax",
            id=identity(run, recipe, environment),
            name=run.name,
            dir=str(run),
            config=recipe.to_dict() | {"commit": environment.get("commit")},
            mode=self._mode,
            resume="allow",
            settings=self._wandb.Settings(silent=True),
        )

    def epoch(self, row: dict[str, Any]) -> None:
        """Log a step; the server leaves out one that it has already."""
        self._run.log(scalars(row), step=row["epoch"])

    def end(self, metrics: dict[str, Any] | None) -> None:
        """Close the run."""
        self._run.finish(exit_code=1 if metrics is None else 0)


#: The logs ``dropmax train --log`` knows.
LOGS: dict[str, Callable[[], Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def make_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make callbacks by their names in :data:`LOGS`; each once, however often it is named."""
    for name in names:
        check_choice("log", name, tuple(LOGS))
    return [LOGS[name]() for name in dict.fromkeys(names)]


def identity(run: Path, recipe: Recipe, environment: dict[str, Any]) -> str:
    """Return a short name for a run that stays when it is resumed, and differs from that of every other run."""
    about = json.dumps([run.resolve().name, recipe.to_dict(), environment], sort_keys=True, default=str)
    return hashlib.sha256(about.encode()).hexdigest()[:16]
