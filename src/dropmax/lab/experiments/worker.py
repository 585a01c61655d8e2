"""What a worker does with a job: train in a scratch directory, evaluate, and answer with one record.

The local engine starts it as ``python -m dropmax.lab.experiments.worker``: jobs and results are lines of JSON.
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
from dropmax.lab.experiments.records import RunRecord, about, failure
from dropmax.workbench.data.loading import import_data, is_function
from dropmax.workbench.files import CannotWrite

if TYPE_CHECKING:
    from dropmax.workbench.evaluation import Outputs

__all__ = ["answer", "read_answer", "run_job"]

_SECONDS_TO_WAIT_FOR_LOCK = 60.0
#: Masks drawn for an example in mode mc.
SAMPLES = 100
#: What prediction sets are to cover.
COVERAGE = 0.95


def run_job(
    job: Job,
    work: Path,
    *,
    data_dir: Path | str | None = None,
    modes: Sequence[str] | None = None,
    command: str | None = None,
) -> RunRecord:
    """Train a job in the directory ``work``, going on where a killed attempt stopped, and return its result.

    A tuning job is measured on the validation set only. A run is measured on the test set twice: as predicted, and
    (``nll_scaled``, ...) with a temperature fitted on the validation set, as are its prediction sets of 95 %. A run
    that diverges gives a result with status ``failed``. Wrong data or a wrong recipe raises.
    """
    from dropmax.workbench.provenance import provenance
    from dropmax.workbench.training import Diverged, Interrupted

    if is_function(job.recipe.data.name):
        import_data(job.recipe.data.name)  # permission was given when the plan was made
    result: dict[str, Any] = {**about(job), "status": "done", "resumed": False}
    with _alone_in(work):
        started = time.monotonic()
        try:
            run, result["resumed"] = _train(job, work, data_dir)
            rows = run.metrics()
            result["last_row"] = rows[-1]
            if job.kind == "runs":
                result["curve"] = [row for row in rows if "validation" in row]
            result |= _measure(job, run.path, data_dir, modes)
        except (Interrupted, DataError, MissingDependency, CannotWrite):  # a full disk is no property of the run either
            raise
        except RunError as error:
            # Where a diverged run kept its checkpoint does not matter: that place is about to be deleted.
            result |= {"status": "failed", "reason": error.reason if isinstance(error, Diverged) else str(error)}
        result["seconds"] = round(time.monotonic() - started, 3)
    result["provenance"] = {**provenance(command, [job.seed]), "commit": _commit_at_start()}
    return RunRecord.model_validate(result)


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


@functools.cache
def _commit_at_start() -> str | None:
    """Return the commit of the code this process runs: asked once, early, as the tree may move on."""
    from dropmax.workbench.provenance import commit

    return commit()


def _train(job: Job, work: Path, data_dir: Path | str | None) -> tuple[Any, bool]:
    """Return the finished run directory, and whether it was begun by an earlier attempt."""
    from dropmax.workbench.training import Interrupted, resume, train

    begun = work / "recipe.toml"
    if begun.exists() and begun.read_text(encoding="utf-8") == job.recipe.to_toml():
        try:
            return resume(work, data_dir=data_dir, quiet=True, trust_code=True), True  # the job's own recipe
        except (Interrupted, CannotWrite):
            raise
        except RunError:
            pass  # what is left cannot be used: begin again
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    return train(job.recipe, work, data_dir=data_dir, quiet=True), False


def _measure(job: Job, path: Path, data_dir: Path | str | None, modes: Sequence[str] | None) -> dict[str, Any]:
    """Return what a trained run measures on its validation and test sets, by prediction mode."""
    import torch

    from dropmax import metrics
    from dropmax.heads import MODES
    from dropmax.heads.masked import MaskedHead
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model

    # Trained a moment ago by the job's own recipe, whose network is imported already or is the plan's own word.
    trained = load_model(path, device="cuda" if torch.cuda.is_available() else "cpu", trust_code=True)
    data, model = load_data(job.recipe, data_dir), trained.model
    splits = {"validation": data.validation} | ({"test": data.test} if job.kind == "runs" else {})
    examples = {"train": len(data.train), **{name: len(part) for name, part in splits.items()}}
    found: dict[str, Any] = {"examples": examples, **{name: {} for name in splits}, "temperature": {}}
    for mode in MODES:
        # A head without random masks gives the same answer in every mode.
        if mode != "mean" and (not isinstance(model.head, MaskedHead) or (modes is not None and mode not in modes)):
            continue
        outputs = {}
        for name, split in splits.items():
            if len(split):  # some are trained without a validation part
                generator = torch.Generator(next(model.parameters()).device).manual_seed(job.seed)
                options: dict[str, Any] = {"mode": mode, "samples": SAMPLES, "generator": generator}
                outputs[name] = predict(model, trained.batches(split), **options)
                found[name][mode] = metrics.evaluate(outputs[name].probs, outputs[name].labels)
        if job.kind == "runs" and "validation" in outputs:
            found["temperature"][mode], measured = _calibrated(outputs["validation"], outputs["test"])
            found["test"][mode] |= measured
        if job.kind == "runs" and data.outside is not None:
            outside = trained.answer(data.outside, **options).probs
            doubt = [1 - p.max(-1).values for p in (outputs["test"].probs, outside.cpu())]
            found["test"][mode]["outside_auroc"] = metrics.auroc(*doubt)
    return found


def _calibrated(held_out: Outputs, test: Outputs) -> tuple[float, dict[str, float]]:
    """Return the temperature that held-out rows ask for, the metrics with it, and size and coverage of 95 % sets."""
    from dropmax import metrics
    from dropmax.calibration import apply_temperature, fit_temperature
    from dropmax.sets import PredictionSets, rows_needed

    temperature = fit_temperature(held_out.probs, held_out.labels, from_probs=True)
    scaled = metrics.evaluate(apply_temperature(test.probs, temperature, from_probs=True), test.labels)
    found = {f"{name}_scaled": value for name, value in scaled.items()}
    if len(held_out.labels) >= rows_needed(COVERAGE):
        sets = PredictionSets(COVERAGE).fit(held_out.probs, held_out.labels).predict(test.probs)
        found["set_size"] = float(sets.sum(1).double().mean())
        found["set_coverage"] = float(sets.gather(1, test.labels[:, None]).double().mean())
    return temperature, found


def answer(job: Job, work: Path, options: dict[str, Any]) -> str:
    """Do a job and return what :func:`read_answer` reads; ``options`` are those of :func:`run_job`."""
    import torch

    from dropmax.workbench.training import Interrupted

    torch.set_num_threads(1)
    try:
        return json.dumps({"result": run_job(job, work, **options).to_json()})
    except Interrupted:
        raise
    except DropMaxError as error:
        return json.dumps({"stop": f"{job.id}: {error}"})
    except Exception as error:  # a bug costs this run, not the others
        return json.dumps({"result": failure(job, f"{type(error).__name__}: {error}").to_json()})


def read_answer(text: str) -> RunRecord:
    """Return the record of a job that was done elsewhere; raise what must stop the others too."""
    found = json.loads(text)
    if "stop" in found:
        raise RunError(found["stop"])
    return RunRecord.model_validate_json(found["result"])


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
    from dropmax.workbench.training import Interrupted

    _commit_at_start()
    while True:
        message = json.loads(jobs.get())
        try:
            text = answer(Job.from_dict(message["job"]), Path(message["work"]), message["options"])
        except Interrupted:
            sys.exit(128 + signal.SIGTERM)
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
