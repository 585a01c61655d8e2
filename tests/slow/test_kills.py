"""``kill -9`` at random moments of everything that writes; go on; the end has the bytes of an undisturbed run.

Work that was killed is started again as a user would (``train --resume``, the same ``reproduce`` or ``report``), and
killed again, until it finishes. After each kill no file may be half-written, and at the end no temporary file may be
left. The same holds on a disk that is full. A fork costs milliseconds where a new Python with torch costs seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dropmax.errors import DropMaxError
from dropmax.lab.experiments import Local, Plan, plan_table, reproduce
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import resume, train
from tests.command import ROUNDS

resource = pytest.importorskip("resource", reason="needs POSIX limits and fork")

SECONDS_AT_MOST = 300.0  #: work that takes longer hangs

#: What differs between two runs that are the same: when, for how long, by which attempt.
_VOLATILE = ("seconds", "provenance", "resumed", "sha256")
_COMMIT = re.compile(rb"[0-9a-f]{40}(-dirty)?( \| [0-9a-f]{40}(-dirty)?)*")  # the tree may move on while we work


def live(work: Callable[[], None], *, kill_after: float | None = None, file_size: int | None = None) -> str:
    """Do some work in a forked process; return "done", "killed", or the error it ended in.

    ``kill_after`` seconds it is killed. ``file_size`` limits each file it writes, which fails as on a full disk.
    """
    with tempfile.TemporaryFile() as message:
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(work, message.fileno(), file_size)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() - start > (SECONDS_AT_MOST if kill_after is None else kill_after):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "killed" if kill_after is not None else "it hangs"
            time.sleep(0.002)
        message.seek(0)
        return message.read().decode() or f"it died with status {os.waitstatus_to_exitcode(ended[1])}"


def _child(work: Callable[[], None], message: int, file_size: int | None) -> None:
    """Do the work, say how it went, and leave without any of the parent's business at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        try:
            if file_size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
            work()
            said = "done"
        except BaseException as error:
            said = f"{'refused' if isinstance(error, DropMaxError) else 'error'}: {type(error).__name__}: {error}"
        os.write(message, said.encode())
    finally:
        os._exit(0)


def contents(place: Path) -> dict[str, bytes]:
    """Return every file by name, without what may differ."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "environment.json":
                data = b"when and where"
            elif path.name == "results.jsonl":
                rows = [json.loads(line) for line in data.splitlines()]  # in the order in which the runs ended
                kept = [json.dumps({k: v for k, v in row.items() if k not in _VOLATILE}) for row in rows]
                data = "\n".join(sorted(kept)).encode()
            elif path.name == "runs.csv":
                data = b"as results.jsonl"
            elif path.suffix == ".md":
                data = _COMMIT.sub(b"COMMIT", data)
            found[str(path.relative_to(place))] = data
    return found


def check_whole(place: Path) -> None:
    """Fail where a file is there by half; those that begin with a dot are temporary and not looked at."""
    for path in sorted(place.rglob("[!.]*")):
        with contextlib.suppress(FileNotFoundError):  # a worker that outlived its driver for a moment has moved it
            _read(path)


def _read(path: Path) -> None:
    if path.suffix == ".json":
        json.loads(path.read_bytes())
    elif path.suffix == ".jsonl":  # the last line of results.jsonl may be cut: the next writer removes it
        lines = path.read_bytes().split(b"\n")
        [json.loads(line) for line in (lines[:-1] if path.name == "results.jsonl" else filter(None, lines))]
    elif path.suffix == ".safetensors":
        safetensors.torch.load(path.read_bytes())
    elif path.suffix == ".pt":
        torch.load(path, weights_only=True)
    elif path.suffix == ".toml":
        load_recipe(path)
    elif path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>")


# --- the work --------------------------------------------------------------------------------------------------


TINY: dict[str, Any] = {
    "network.name": "mlp",
    "training.batch_size": 50,
    "training.validate_every": 4,
    "training.checkpoint_seconds": 0.0,
    "data.validation_size": 50,
}


def tiny_recipe(epochs: int, train_size: int = 100) -> Recipe:
    """Return a recipe of a fraction of a second that saves a checkpoint after every epoch."""
    return load_recipe("mnist-1k").override(TINY | {"training.epochs": epochs, "data.train_size": train_size})


def _train(recipe: Recipe, place: Path) -> None:
    """``dropmax train --resume``, or ``--force`` where not even the recipe had been written."""
    if (place / "recipe.toml").exists():
        resume(place, quiet=True)
    else:
        train(recipe, place, quiet=True, force=True)


def _reproduce(plan: Plan, place: Path) -> None:
    sys.argv = ["dropmax", "reproduce"]
    reproduce(plan, place, engine=Local(workers=1), quiet=True, modes=["mean"])


def _report(trained: Path, place: Path) -> None:
    from dropmax.cli.report import report

    place.mkdir(exist_ok=True)
    os.chdir(place)  # so that the command, which the page quotes, is the same everywhere
    sys.argv = ["dropmax", "report", "the-run", "--out", "report.html"]
    report([trained], out=Path("report.html"), force=True, threads=1)


Work = Callable[[Path], None]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Work, int]]:
    """What is killed, and how often in the short form."""
    torch.set_num_threads(1)  # a fork takes no other threads along
    trained = train(tiny_recipe(epochs=2), tmp_path_factory.mktemp("trained") / "run", quiet=True).path
    overrides = TINY | {"training.epochs": 10, "data.train_size": 100, "training.weight_decay": 1e-4}
    table = plan_table(["mnist-1k"], heads=["softmax", "dropmax"], runs=2, tune=False, overrides=overrides)
    return {
        "training": (functools.partial(_train, tiny_recipe(epochs=12)), 3),
        "checkpointing": (functools.partial(_train, tiny_recipe(epochs=40, train_size=10)), 2),
        "report": (functools.partial(_report, trained), 1),
        "reproduce": (functools.partial(_reproduce, table), 1 if ROUNDS > 1 else 0),
    }


@pytest.mark.parametrize("name", ["training", "checkpointing", "report", "reproduce"])
def test_killed_work_goes_on_and_ends_in_the_same_bytes(
    name: str, targets: dict[str, tuple[Work, int]], tmp_path: Path
) -> None:
    work, kills = targets[name]
    kills *= ROUNDS
    if not kills:
        pytest.skip("only with DROPMAX_ROUNDS above 1: it takes minutes")
    rng = random.Random(name)
    start = time.monotonic()
    assert live(functools.partial(work, tmp_path / "reference")) == "done"
    seconds, expected = time.monotonic() - start, contents(tmp_path / "reference")
    run = 0
    while kills > 0:
        place = tmp_path / f"run{run}"
        while (became := live(functools.partial(work, place), kill_after=rng.uniform(0, seconds))) == "killed":
            kills -= 1
            check_whole(place)
            if kills <= 0:
                became = live(functools.partial(work, place))
                break
        assert became == "done"
        assert contents(place) == expected
        run += 1


def test_a_full_disk_ends_in_one_sentence_and_costs_nothing(
    targets: dict[str, tuple[Work, int]], tmp_path: Path
) -> None:
    work, _ = targets["training"]
    assert live(functools.partial(work, tmp_path / "reference")) == "done"
    expected = contents(tmp_path / "reference")
    largest = max(path.stat().st_size for path in (tmp_path / "reference").rglob("*") if path.is_file())
    rng = random.Random(0)
    for number in range(2 * ROUNDS):
        run = tmp_path / f"run{number}"
        became = live(functools.partial(work, run), file_size=int(largest * rng.uniform(0.02, 0.98)))
        assert became.startswith("refused: "), became
        check_whole(run)
        assert not list(run.rglob(".*.tmp"))
        assert live(functools.partial(work, run)) == "done"
        assert contents(run) == expected
