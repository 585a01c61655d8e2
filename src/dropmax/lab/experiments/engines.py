"""Where a schedule's jobs are done: processes on this machine, or the tasks of a Ray cluster.

A local worker that is killed costs its run one of two attempts, and the second resumes from the first one's checkpoint.
Ray starts a task whose worker or node died again, from the beginning. Only the driver writes results.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import filelock

from dropmax.errors import RunError, first_line, optional
from dropmax.lab.experiments.plan import Job
from dropmax.lab.experiments.records import RunRecord, failure
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.worker import answer, read_answer

__all__ = ["Cluster", "Local"]

#: Called now and then with the runs under way and, where it can be looked into from here, where each trains.
Show = Callable[[list[tuple[Job, Path | None]]], None]

_ATTEMPTS = 2
_SECONDS_TO_STOP = 20.0
#: How often Ray may start a task again whose worker or node died.
_RETRIES = 3
#: How the names of the tasks' directories begin.
_SCRATCH = "dropmax-task-"


class Local:
    """Processes on this machine, with one thread each; ``workers`` of them, or 0 for one per GPU or else per core."""

    name = "local"

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers

    def size(self) -> int:
        """Return how many runs it does at a time."""
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.workers or torch.cuda.device_count() or cores

    def run(self, schedule: Schedule, show: Show, options: dict[str, Any]) -> None:
        """Do every job of the schedule; ``options`` are those of ``run_job``."""
        answers: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
        crew = [_Worker(index, answers) for index in range(self.size())]
        try:
            while True:
                for worker in crew:
                    if worker.job is None and (job := schedule.next()) is not None:
                        worker.start(job, schedule, options)
                busy = [(worker.job, schedule.store.work(worker.job)) for worker in crew if worker.job is not None]
                if not busy:
                    return
                show([*busy])
                with contextlib.suppress(queue.Empty):
                    worker, line = answers.get(timeout=0.5)
                    _hear(worker, line, schedule, options)
        finally:
            for worker in crew:
                worker.ask_to_stop()
            for worker in crew:
                worker.stop()


def _hear(worker: _Worker, line: str | None, schedule: Schedule, options: dict[str, Any]) -> None:
    """Handle a message of a worker; None means that it died."""
    job = worker.job
    if line is not None:
        result = read_answer(line)
    else:
        how = worker.how_it_ended()
        worker.process = None
        if job is None:
            return
        if worker.attempts < _ATTEMPTS:
            worker.start(job, schedule, options, again=True)
            return
        result = failure(job, f"its process died {_ATTEMPTS} times, {how}")
    if job is not None:
        worker.job = None
        schedule.finished(job, result)


class _Worker:
    """One process and the job it has."""

    def __init__(self, index: int, answers: queue.Queue[tuple[_Worker, str | None]]) -> None:
        self.index, self.answers = index, answers
        self.job: Job | None = None
        self.attempts = 0
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[bytes] | None = None

    def start(self, job: Job, schedule: Schedule, options: dict[str, Any], *, again: bool = False) -> None:
        """Hand over a job, to a new process where there is none."""
        self.job = job
        self.attempts = self.attempts + 1 if again else 1
        if self.process is None:
            self.process = self._launch()
        message = {"job": job.to_dict(), "work": str(schedule.store.work(job)), "options": options}
        with contextlib.suppress(BrokenPipeError):  # it died just now: its end of file is on the way
            print(json.dumps(message), file=self.process.stdin, flush=True)

    def _launch(self) -> subprocess.Popen[str]:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        process = subprocess.Popen(
            [sys.executable, "-m", "dropmax.lab.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"} | _gpu(self.index),
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop the workers
        )
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self.answers.put((self, line))
        self.answers.put((self, None))

    def how_it_ended(self) -> str:
        """Say how the process ended."""
        if self.process is None or self.errors is None:
            return "for an unknown reason"
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return how + (f": {lines[-1]}" if lines and code >= 0 else "")

    def ask_to_stop(self) -> None:
        """Close the pipe, on which the worker saves a checkpoint and ends."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def stop(self) -> None:
        """Wait for the process, up to a limit."""
        if self.process is None:
            return
        try:
            self.process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _gpu(index: int) -> dict[str, str]:
    """Give each worker one GPU where there are any."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[index % count]}


class Cluster:
    """A running Ray cluster, connected to when it is first asked for something; ``workers`` as for :class:`Local`.

    ``address`` is ``auto`` for the cluster this machine belongs to, ``host:port``, or ``ray://host:10001``.
    """

    name = "ray"

    def __init__(self, address: str = "auto", workers: int = 0) -> None:
        self.address, self.workers = address, workers

    @functools.cached_property
    def ray(self) -> Any:
        """The module, connected."""
        ray = optional("ray", "ray", "--engine ray")
        if not ray.is_initialized():
            try:
                host, _, port = self.address.removeprefix("ray://").rpartition(":")
                if host and port.isdigit():  # try the port first: Ray itself waits for minutes if nothing answers
                    socket.create_connection((host, int(port)), timeout=10).close()
                ray.init(address=self.address, log_to_driver=False, logging_level="error")
            except (OSError, ValueError, RuntimeError) as error:
                raise RunError(
                    f"cannot reach a Ray cluster at {self.address!r} ({first_line(error)}): start one with "
                    "`ray start --head`, or name its --address"
                ) from error
        return ray

    def size(self) -> int:
        """Return how many runs it does at a time: one per GPU if it has any, else one per core."""
        resources = self.ray.cluster_resources()
        return self.workers or max(1, int(resources.get("GPU", 0) or resources.get("CPU", 1)))

    def run(self, schedule: Schedule, show: Show, options: dict[str, Any]) -> None:
        """Do every job of the schedule; ``options`` are those of ``run_job``."""
        ray = self.ray
        needs = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        task = ray.remote(max_retries=_RETRIES, **needs)(_task)
        running: dict[Any, Job] = {}
        try:
            while True:
                # The cluster may grow and shrink: ask each time. One job more than fits keeps it from waiting for us.
                limit = self.workers or self.size() + 1
                while len(running) < limit and (job := schedule.next()) is not None:
                    running[task.remote(json.dumps(job.to_dict()), options)] = job
                if not running:
                    return
                show([(job, None) for job in running.values()])
                finished, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
                for reference in finished:
                    job = running.pop(reference)
                    schedule.finished(job, self._result(reference, job))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _result(self, reference: Any, job: Job) -> RunRecord:
        errors = self.ray.exceptions
        died = (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError)
        try:
            return read_answer(self.ray.get(reference))
        except died as error:
            return failure(job, f"its worker or node died {_RETRIES + 1} times: {first_line(error)}")
        except errors.RayTaskError as error:  # the task could not even begin, such as without dropmax on that node
            return failure(job, f"{type(error.cause).__name__}: {error.cause}")


def _task(job: str, options: dict[str, Any]) -> str:
    """Do a job on whatever node this is; JSON in and out, so that nothing is unpickled but strings."""
    from dropmax.workbench.training import Interrupted

    with _scratch() as scratch:
        try:
            return answer(Job.from_dict(json.loads(job)), scratch / "run", options)
        except Interrupted:  # the node is being shut down: die, so that Ray starts the task elsewhere
            os._exit(1)


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
