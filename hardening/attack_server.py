"""The real explorer as a process of its own, seen from outside, and a witness who asks while others attack."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dropmax.errors import RunError
from hardening import attack_wire as wire
from hardening.attack_requests import picture, request
from hardening.campaign import Outcome

#: What is promised, in numbers: how long others wait at most, and how much the server's memory grows. The latter is
#: 64 MB of uploads, twice over while they become images, and two images of 24 million pixels being decoded.
OTHERS_WAIT = 5.0
MOST_GROWTH_MB = 512
#: Open files the server is given, as many systems do.
OPEN_FILES = 1024


@dataclass
class Server:
    """A running ``dropmax explore``, seen from outside."""

    process: subprocess.Popen[str]
    place: wire.Place
    log: Path
    folder: Path
    at_start: dict[str, float] = field(default_factory=dict)
    kept: str = ""
    log_start: int = 0

    def measure(self) -> dict[str, float]:
        """Return memory now and at its height in MB, threads, and open files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        number = {name: int(value) for name, value in re.findall(r"^(VmRSS|VmHWM|Threads):\s+(\d+)", status, re.M)}
        files = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        rss, peak = number["VmRSS"] / 1024, number["VmHWM"] / 1024
        return {"rss_mb": round(rss, 1), "peak_mb": round(peak, 1), "threads": number["Threads"], "files": files}

    def report(self, outcome: Outcome) -> None:
        """Compare the server with what it was at its start: memory, threads, open files."""
        time.sleep(0.5)
        now = self.measure()
        outcome.details["server"] = {"start": self.at_start, "end": now}
        grown = now["peak_mb"] - self.at_start["rss_mb"]
        if grown > MOST_GROWTH_MB:
            outcome.fail(f"memory: {grown:.0f} MB more at its height, {MOST_GROWTH_MB} were promised")
        if now["files"] > self.at_start["files"] + 8:
            outcome.fail(f"open files: {self.at_start['files']} at the start, {now['files']} at the end")
        if now["threads"] > self.at_start["threads"] + 8:
            outcome.fail(f"threads: {self.at_start['threads']} at the start, {now['threads']} at the end")

    def report_end(self, outcome: Outcome) -> None:
        """Check how the server ended, that it said nothing, and that it wrote nothing."""
        if self.process.returncode != 0:
            outcome.fail(f"the server ended with {self.process.returncode}, 0 was expected after Ctrl-C")
        for line in self.log.read_text(errors="replace")[self.log_start :].splitlines()[-40:]:
            outcome.fail(f"the server said: {line[:200]}")
        if content(self.folder) != self.kept:
            outcome.fail(f"files of the run changed: {sorted(str(path) for path in self.folder.rglob('*'))}")


@contextmanager
def serving(scratch: Path) -> Iterator[Server]:
    """Start the command on a small run of 28 x 28 grey images, and interrupt it at the end as Ctrl-C would."""
    folder = _make_run(scratch)
    log = scratch / "stderr.txt"
    command = [sys.executable, "-m", "dropmax", "explore", str(folder / "run"), "--port", "0", "--threads", "1"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        assert process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        if match is None:
            raise RunError(f"the explorer did not start: {log.read_text()[-500:]}")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        server = Server(process, ("127.0.0.1", int(match[1])), log, folder)
        wire.exchange(server.place, request("POST", "/api/try/image", picture("PNG", "L")))  # all imports are done
        server.at_start, server.kept, server.log_start = server.measure(), content(folder), len(log.read_text())
        yield server
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Witness:
    """An ordinary client that asks a few times a second, whatever else goes on, and notes how long it waits."""

    def __init__(self, place: wire.Place, outcome: Outcome, patience: float = OTHERS_WAIT) -> None:
        self.place, self.outcome, self.patience, self.phase = place, outcome, patience, ""
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Note what is asked from here on under this name."""
        self.phase = phase
        yield

    def report(self) -> None:
        """Stop asking; count, and complain of every answer that was late or wrong."""
        self.__exit__()
        self.outcome.details["others_wait"] = {phase: spread(np.asarray(waits)) for phase, waits in self.waits.items()}
        self.outcome.count("witness: answered", sum(map(len, self.waits.values())) - len(self.wrong))
        if self.wrong:
            self.outcome.count("witness: LATE OR WRONG", len(self.wrong))
        for line in self.wrong:
            self.outcome.fail(line)

    def _ask(self) -> None:
        questions = ["/api/about", "/api/examples/3?noise=0.2", "/api/examples?order=easiest", "/"]
        asked = 0
        while not self._done.wait(0.1):
            phase, path = self.phase, questions[asked % len(questions)]
            start = time.monotonic()
            answers = wire.read_answers(wire.exchange(self.place, request("GET", path)))
            waited = time.monotonic() - start
            self.waits[phase].append(waited)
            statuses = [answer.status for answer in answers]
            if statuses != [200] or waited > self.patience:
                self.wrong.append(f"witness: during {phase}, {path} was answered {statuses} after {waited:.2f} s")
            asked += 1


def _make_run(scratch: Path) -> Path:
    from dropmax.workbench.recipes import Recipe, load_recipe
    from dropmax.workbench.training import build, load_data, save_model

    folder = scratch / "explored"
    (folder / "run").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (600, 1, 28, 28), np.uint8)
    np.savez(folder / "mine.npz", x=pixels, y=np.arange(600) % 3)
    recipe = load_recipe("own-images").override({"data.name": str(folder / "mine.npz"), "data.image_size": 0})
    recipe = Recipe(recipe.data, {"name": "small-cnn", "widths": [4, 8]}, {"name": "dropmax"}, recipe.training)
    (folder / "run/recipe.toml").write_text(recipe.to_toml())
    data = load_data(recipe)
    save_model(folder / "run/model.safetensors", build(recipe, data.input_shape, 3), recipe, data)
    return folder


def content(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def spread(values: np.ndarray[Any, Any]) -> dict[str, float]:
    if not len(values):
        return {"number": 0}
    half, most = np.quantile(values, [0.5, 0.95])
    seconds = {"median": half, "p95": most, "max": values.max()}
    return {"number": len(values), **{name: round(float(value), 4) for name, value in seconds.items()}}
