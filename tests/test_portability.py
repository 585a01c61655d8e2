"""What only POSIX has is not needed: the tool works without fcntl, resource, pwd, termios, fork and SIGKILL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dropmax.workbench.data import load

#: Python imports this at its start, in every process we start and in those they start.
HIDE = """
import importlib.abc
import os
import signal
import sys

GONE = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "crypt", "spwd")


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
for name in GONE:
    sys.modules.pop(name, None)
for name in ("fork", "forkpty", "getuid", "geteuid", "sched_getaffinity", "killpg", "setsid", "getpgid", "nice",
             "O_NOFOLLOW"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT", "SIGPIPE", "SIGCHLD", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python lacks what only POSIX has."""
    place = tmp_path_factory.mktemp("hidden")
    (place / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def call(environment: dict[str, str], place: Path, *arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_modules_are_hidden(elsewhere: dict[str, str], tmp_path: Path) -> None:
    code = "import importlib.util, os\ntry:\n import fcntl\nexcept ImportError: print(hasattr(os, 'fork'))"
    assert call(elsewhere, tmp_path, "-c", code).strip() == "False"


def test_it_works_without_what_only_posix_has(elsewhere: dict[str, str], tmp_path: Path) -> None:
    call(elsewhere, tmp_path, "-c", "import dropmax; dropmax.DropMax(4, 3)")
    small = ("--set", "training.epochs=1", "--set", "data.train_size=50", "--set", "data.validation_size=50")
    call(elsewhere, tmp_path, "-m", "dropmax", "train", "mnist-1k", *small, "--out", "run")
    found = json.loads(call(elsewhere, tmp_path, "-m", "dropmax", "evaluate", "run", "--json"))
    assert found["examples"] == 10_000
    Image.fromarray(load("mnist-1k").test.inputs[0, 0].numpy()).save(tmp_path / "digit.png")
    rows = json.loads(call(elsewhere, tmp_path, "-m", "dropmax", "predict", "run", "digit.png", "--format", "json"))
    assert rows[0]["class_1"] in map(str, range(10))
    plan = ("--heads", "softmax", "--runs", 1, "--no-tune", "--engine", "local", "--workers", 1, "--json")
    tables = json.loads(call(elsewhere, tmp_path, "-m", "dropmax", "reproduce", "mnist-1k", *small, *plan))
    assert not tables["failed"]
    np.savez(tmp_path / "rows.npz", x=np.zeros((2, 1, 28, 28), np.uint8))
