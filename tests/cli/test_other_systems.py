"""macOS and Windows lack some of POSIX: the commands work where dropmax finds none of it.

The modules are hidden from dropmax only, as torch and the standard library bring their own forms for each system; a
``sitecustomize`` does it, so that workers find them missing too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = """
import builtins, os

HIDDEN = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog"}
real_import = builtins.__import__

def hiding(name, globals=None, locals=None, fromlist=(), level=0):
    asked_by = (globals or {}).get("__name__", "")
    if name in HIDDEN and asked_by.split(".")[0] == "dropmax":
        raise ImportError(f"{name} is hidden from {asked_by}")
    return real_import(name, globals, locals, fromlist, level)

builtins.__import__ = hiding
for name in ("fork", "killpg", "mkfifo"):
    delattr(os, name)
"""
NETWORK = ["--set", "network.hidden=[4]", "--epochs", "1"]


@pytest.mark.slow
def test_the_commands_work_without_what_only_posix_has(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    rows = [f"{k % 7},{k % 5},{'ab'[k % 2]}" for k in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y,label", *rows]))
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), source])}
    tiny = ["network.name=mlp", "training.epochs=1", "data.train_size=20", "data.validation_size=20"]
    table = [*(f"--set={one}" for one in tiny), "--heads", "softmax", "--runs", "1", "--no-tune", "--modes", "mean"]
    for command in (
        ["-c", "import dropmax, os; assert not hasattr(os, 'fork'), 'nothing is hidden'; dropmax.DropMax(3, 2)"],
        ["-m", "dropmax", "train", "a.csv", "--out", "run", *NETWORK],
        ["-m", "dropmax", "evaluate", "run"],
        ["-m", "dropmax", "predict", "run", "a.csv", "--format", "csv"],
        ["-m", "dropmax", "reproduce", "mnist-1k", "--engine", "local", "--out", "table", *table],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout[-500:], done.stderr[-1500:])
    assert (tmp_path / "table" / "results.jsonl").read_text().count('"done"') == 1
