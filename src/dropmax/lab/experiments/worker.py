"""What a worker does with a job: train in a scratch directory, evaluate, and answer with one dictionary.

``python -m dropmax.lab.experiments.worker`` is the process the local engine starts: jobs come in as lines of JSON,
results go out the same way. It imports torch once and then works through many jobs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from dropmax.errors import DataError, DropMaxError, MissingDependency, RunError
from dropmax.lab.experiments.plan import Job
from dropmax.lab.experiments.records import RunRecord
from dropmax.workbench.data.functions import import_data, is_function
from dropmax.workbench.files import CannotWrite

if TYPE_CHECKING:
    from torch import Tensor

    Answers = tuple[Tensor, Tensor]  # probabilities and labels

__all__ = ["failure", "run_job"]

_SECONDS_TO_WAIT_FOR_LOCK = 60.0

#: Masks drawn for an example in mode mc.
SAMPLES = 100


def run_job(
    job: Job,
    work: Path,
    *,
    data_dir: Path | str | None = None,
    modes: Sequence[str] | None = None,
    command: str | None = None,
    device: str | None = None,
) -> RunRecord:
    """Train a job in the directory ``work``, going on where a killed attempt stopped, and return its result.

    A tuning job is measured on the validation set only. A run is measured on the test set twice: as predicted, and
    (``nll_scaled``, ...) with a temperature that was fitted on the validation set, one per prediction mode. Its
    ``set_size`` is that of prediction sets of 95 %, calibrated on the validation set. A run that
    diverges gives a result with status ``failed``.
    Wrong data or a wrong recipe is not a property of the run, and raises.

    >>> import tempfile
    >>> from dropmax.lab.experiments.plan import plan_table
    >>> tiny = {"training.epochs": 1, "data.train_size": 50, "data.validation_size": 50}
    >>> job = plan_table(["mnist-1k"], heads=["softmax"], tune=False, overrides=tiny).groups[0].run_jobs({}, 1)[0]
    >>> result = run_job(job, Path(tempfile.mkdtemp()) / "work")
    >>> result.status, [name for name in result.test["mean"] if name.startswith("nll")]
    ('done', ['nll', 'nll_scaled'])
    """
    if is_function(job.recipe.data.name):
        import_data(job.recipe.data.name)  # permission was given when the plan was made
    with _alone_in(work):
        return _run(job, work, data_dir, modes, command, device)


@contextlib.contextmanager
def _alone_in(work: Path) -> Iterator[None]:
    """Wait for a worker whose driver was killed: before it ends, it saves a checkpoint in this directory."""
    lock = work.with_name(work.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(lock, timeout=_SECONDS_TO_WAIT_FOR_LOCK):
            yield
    except filelock.Timeout as error:
        raise RunError(f"another process is training in {work}: wait for it, or end it") from error
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()


def _run(
    job: Job,
    work: Path,
    data_dir: Path | str | None,
    modes: Sequence[str] | None,
    command: str | None,
    device: str | None,
) -> RunRecord:
    from dropmax.workbench.provenance import provenance
    from dropmax.workbench.training import Diverged, Interrupted

    started = time.monotonic()
    result: dict[str, Any] = {**_about(job), "status": "done", "resumed": False}
    try:
        run, result["resumed"] = _train(job, work, data_dir, device)
        result["last_row"] = run.metrics()[-1]
        if job.kind == "runs":
            result["curve"] = [row for row in run.metrics() if "validation" in row]
        result |= _measure(job, run.path, data_dir, modes, device)
    except (Interrupted, DataError, MissingDependency, CannotWrite):  # a full disk is no property of the run either
        raise
    except RunError as error:
        # Where a diverged run kept its checkpoint does not matter: that place is about to be deleted.
        result |= {"status": "failed", "reason": error.reason if isinstance(error, Diverged) else str(error)}
    result["seconds"] = round(time.monotonic() - started, 3)
    result["provenance"] = {**provenance(command, [job.seed]), "commit": commit_at_start()}
    return RunRecord.model_validate(result)


def failure(job: Job, reason: str) -> RunRecord:
    """Return the record of a job that could not be done.

    >>> from dropmax.lab.experiments.plan import plan_table
    >>> job = plan_table(["mnist-1k"], heads=["softmax"]).groups[0].run_jobs({}, 1)[0]
    >>> failure(job, "its process died").status
    'failed'
    """
    return RunRecord(**_about(job), status="failed", reason=reason)


def _about(job: Job) -> dict[str, Any]:
    return {**json.loads(json.dumps(job.to_dict())), "job": job.id, "seed": job.seed}


@functools.cache
def commit_at_start() -> str | None:
    """Return the commit of the code this process runs: asked once, early, as the tree may move on."""
    from dropmax.workbench.provenance import commit

    return commit()


def _train(job: Job, work: Path, data_dir: Path | str | None, device: str | None) -> tuple[Any, bool]:
    """Return the finished run directory, and whether it was begun by an earlier attempt."""
    from dropmax.workbench.training import Interrupted, resume, train

    begun = work / "recipe.toml"
    if begun.exists() and begun.read_text(encoding="utf-8") == job.recipe.to_toml():
        try:
            return resume(
                work, data_dir=data_dir, device=device, quiet=True, trust_code=True
            ), True  # the job's own recipe
        except (Interrupted, CannotWrite):
            raise
        except RunError:
            pass  # what is left cannot be used: begin again
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    return train(job.recipe, work, data_dir=data_dir, device=device, quiet=True), False


def _measure(
    job: Job, path: Path, data_dir: Path | str | None, modes: Sequence[str] | None, device: str | None
) -> dict[str, Any]:
    import torch

    from dropmax import metrics
    from dropmax.calibration import apply_temperature, fit_temperature
    from dropmax.heads import MODES
    from dropmax.heads.masked import MaskedHead
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model

    # Trained a moment ago by the job's own recipe, whose network is imported already or is the plan's own word.
    trained = load_model(path, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), trust_code=True)
    data = load_data(job.recipe, data_dir)
    # A head without random masks gives the same answer in every mode.
    wanted = [mode for mode in MODES if mode == "mean" or modes is None or mode in modes]
    supported = wanted if isinstance(trained.model.head, MaskedHead) else ["mean"]
    splits = (
        {"validation": data.validation} if job.kind == "tune" else {"validation": data.validation, "test": data.test}
    )
    found: dict[str, Any] = {
        "examples": {"train": len(data.train), **{name: len(part) for name, part in splits.items()}},
        **{name: {} for name in splits},
        "temperature": {},
    }
    for mode in supported:
        answers = {}
        for name, split in splits.items():
            if not len(split):  # trained without a validation part
                continue
            generator = torch.Generator(next(trained.model.parameters()).device).manual_seed(job.seed)
            outputs = predict(trained.model, trained.batches(split), mode=mode, samples=SAMPLES, generator=generator)
            answers[name] = outputs.probs, outputs.labels
            found[name][mode] = metrics.evaluate(*answers[name])
        if job.kind == "runs" and "validation" in answers:
            temperature = fit_temperature(*answers["validation"], from_probs=True)
            probs, labels = answers["test"]
            scaled = metrics.evaluate(apply_temperature(probs, temperature, from_probs=True), labels)
            found["test"][mode] |= {f"{name}_scaled": value for name, value in scaled.items()}
            found["temperature"][mode] = temperature
            found["test"][mode] |= _set_size(answers["validation"], answers["test"])
        if job.kind == "runs" and data.outside is not None:
            outside = trained.answer(data.outside, mode=mode, samples=SAMPLES, generator=generator).probs
            doubt = [1 - p.max(-1).values for p in (answers["test"][0], outside.cpu())]
            found["test"][mode]["outside_auroc"] = metrics.auroc(*doubt)
    return found


def _set_size(held_out: Answers, test: Answers) -> dict[str, float]:
    """Return the mean size of sets that are to hold the true class of 95 % of the rows, and how many they do hold."""
    from dropmax.sets import PredictionSets, rows_needed

    if len(held_out[1]) < rows_needed(0.95):
        return {}
    sets = PredictionSets(0.95).fit(*held_out).predict(test[0])
    covered = sets.gather(1, test[1][:, None]).double().mean()
    return {"set_size": float(sets.sum(1).double().mean()), "set_coverage": float(covered)}


def main() -> None:
    """Work through the jobs that come in, until the other side closes the pipe or dies."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints must not get between the answers
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        signal.raise_signal(signal.SIGTERM)  # the driver is gone: in training this saves a checkpoint first

    threading.Thread(target=listen, daemon=True).start()
    import torch

    from dropmax.workbench.training import Interrupted

    torch.set_num_threads(1)
    commit_at_start()
    while True:
        message = json.loads(jobs.get())
        job = Job.from_dict(message["job"])
        options = message["options"]
        try:
            answer: dict[str, Any] = {"result": run_job(job, Path(message["work"]), **options).to_json()}
        except Interrupted:
            sys.exit(128 + signal.SIGTERM)
        except DropMaxError as error:
            answer = {"stop": f"{job.id}: {error}"}
        except Exception as error:  # a bug costs this run, not the others
            answer = {"result": failure(job, f"{type(error).__name__}: {error}").to_json()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
