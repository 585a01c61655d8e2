"""The Ray engine: the same plan as tasks on a cluster; results come back here, and only this process writes them.

A task whose worker or node dies is started again by Ray, from the beginning: its scratch directory died with the node.
Where only the worker died, the next task on that machine removes what it left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from dropmax.errors import RunError, first_line, optional
from dropmax.lab.experiments.plan import Job
from dropmax.lab.experiments.progress import Progress
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.worker import failure, run_job

__all__ = ["Cluster"]

#: How often Ray may start a task again whose worker or node died.
_RETRIES = 3


class Cluster:
    """A connection to a running Ray cluster.

    Args:
        address: ``auto`` for the cluster this machine belongs to, or ``host:port``, or ``ray://host:10001``.
    """

    def __init__(self, address: str = "auto") -> None:
        self.ray = ray = optional("ray", "ray", "--engine ray")
        if not ray.is_initialized():
            try:
                _check_port(address)
                ray.init(address=address, log_to_driver=False, logging_level="error")
            except (OSError, ValueError, RuntimeError) as error:
                raise RunError(
                    f"cannot reach a Ray cluster at {address!r} ({first_line(error)}): start one with "
                    "`ray start --head`, or name its --address"
                ) from error

    def size(self) -> int:
        """Return how many runs the cluster can do at a time: one per GPU if it has any, else one per core."""
        resources = self.ray.cluster_resources()
        return max(1, int(resources.get("GPU", 0) or resources.get("CPU", 1)))

    def run(self, schedule: Schedule, progress: Progress, *, workers: int, options: dict[str, Any]) -> None:
        """Do every job of the schedule; ``workers`` at a time, or 0 for as many as the cluster takes."""
        ray = self.ray
        needs = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        task = ray.remote(max_retries=_RETRIES, **needs)(_task)
        running: dict[Any, Job] = {}
        try:
            while True:
                # The cluster may grow and shrink: ask each time. One job more than fits keeps it from waiting for us.
                limit = workers or self.size() + 1
                while len(running) < limit and (job := schedule.next()) is not None:
                    running[task.remote(json.dumps(job.to_dict()), options)] = job
                if not running:
                    return
                progress.show_runs(schedule, [(job, None) for job in running.values()])
                finished, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
                for reference in finished:
                    job = running.pop(reference)
                    schedule.finished(job, self._result(reference, job))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _result(self, reference: Any, job: Job) -> RunRecord:
        errors = self.ray.exceptions
        try:
            answer: dict[str, Any] = json.loads(self.ray.get(reference))
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
        ) as error:
            lines = str(error).strip().splitlines()
            reason = f"its worker or node died {_RETRIES + 1} times: {lines[0] if lines else type(error).__name__}"
            return failure(job, reason)
        except errors.RayTaskError as error:  # a bug costs this run, not the others
            return failure(job, f"{type(error.cause).__name__}: {error.cause}")
        if "stop" in answer:
            raise RunError(answer["stop"])
        return RunRecord.model_validate_json(answer["result"])


def _check_port(address: str) -> None:
    """Try the port first: Ray itself waits for minutes if nothing answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _task(job: str, options: dict[str, Any]) -> str:
    """Do a job on whatever node this is; JSON in and out, so that nothing is unpickled but strings."""
    import torch

    from dropmax.errors import DropMaxError
    from dropmax.workbench.training import Interrupted

    torch.set_num_threads(1)
    with _scratch() as scratch:
        parsed = Job.from_dict(json.loads(job))
        try:
            return json.dumps({"result": run_job(parsed, scratch / "run", **options).to_json()})
        except Interrupted:  # the node is being shut down: die, so that Ray starts the task elsewhere
            os._exit(1)
        except DropMaxError as error:
            return json.dumps({"stop": f"{parsed.id}: {error}"})


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Make a directory for a task, and remove those of tasks that were killed: no process holds their lock."""
    for old in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*/.lock"):
        with contextlib.suppress(OSError, filelock.Timeout), filelock.FileLock(old, blocking=False):
            shutil.rmtree(old.parent, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    try:
        with filelock.FileLock(place / ".lock"):
            place.mkdir(exist_ok=True)  # another task may have removed it before it was locked
            yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


#: How the names of the tasks' directories begin.
_SCRATCH = "dropmax-task-"
