"""One small trained run for all command-line tests, and a way to call the tool as a user does."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def dropmax() -> Run:
    """``dropmax ARGUMENTS``, through the entry point but inside this process: importing torch takes seconds."""

    def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        from dropmax.cli import main

        out, err = io.StringIO(), io.StringIO()
        code: int | str | None = 0
        before = os.getcwd()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "argv", ["dropmax", *map(str, arguments)])
            try:
                os.chdir(cwd or before)
                main()
            except SystemExit as stop:
                code = stop.code
            finally:
                os.chdir(before)
        return subprocess.CompletedProcess(arguments, int(code or 0), out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dropmax.workbench.recipes import load_recipe
    from dropmax.workbench.training import train

    path = tmp_path_factory.mktemp("cli") / "run"
    values = {"training.epochs": 10, "data.validation_size": 100}
    train(load_recipe("mnist-1k").override(values), path, quiet=True)
    return path
