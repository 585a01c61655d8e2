"""The local engine: processes with one thread each, which work through the plan side by side.

On small networks two processes with one thread beat one process with two. A worker that is killed costs its run one
of two attempts, and the second goes on from the first one's checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from dropmax.errors import RunError
from dropmax.lab.experiments.plan import Job
from dropmax.lab.experiments.progress import Progress
from dropmax.lab.experiments.records import RunRecord
from dropmax.lab.experiments.schedule import Schedule
from dropmax.lab.experiments.worker import failure

__all__ = ["run_locally"]

_ATTEMPTS = 2
_SECONDS_TO_STOP = 20.0


def run_locally(
    schedule: Schedule,
    progress: Progress,
    *,
    workers: int,
    options: dict[str, Any],
) -> None:
    """Do every job of the schedule with ``workers`` processes; ``options`` are those of ``run_job``."""
    answers: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
    crew = [_Worker(index, answers) for index in range(workers)]
    try:
        while True:
            for worker in crew:
                if worker.job is None and (job := schedule.next()) is not None:
                    worker.start(job, schedule, options)
            busy = [(worker.job, schedule.store.work(worker.job)) for worker in crew if worker.job is not None]
            if not busy:
                return
            progress.show_runs(schedule, busy)
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
    if line is None:
        how = worker.how_it_ended()
        worker.process = None
        if job is None:
            return
        if worker.attempts < _ATTEMPTS:
            worker.start(job, schedule, options, again=True)
            return
        worker.job = None
        schedule.finished(job, failure(job, f"its process died {_ATTEMPTS} times, {how}"))
        return
    answer = json.loads(line)
    if "stop" in answer:
        raise RunError(answer["stop"])
    if job is not None:
        worker.job = None
        schedule.finished(job, RunRecord.model_validate_json(answer["result"]))


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
            self._launch()
        message = {"job": job.to_dict(), "work": str(schedule.store.work(job)), "options": options}
        process = self.process
        if process is None or process.stdin is None:
            raise RunError("cannot start a worker process")
        with contextlib.suppress(BrokenPipeError):  # it died just now: its end of file is on the way
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _launch(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | _gpu(self.index)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dropmax.lab.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop the workers
        )
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            for line in process.stdout:
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


def default_workers() -> int:
    """Return as many workers as there are GPUs, or else cores this process may use."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.cuda.device_count() or cores
