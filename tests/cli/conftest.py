"""One small trained run for all command-line tests, and a way to call the tool as a user does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def dropmax() -> Run:
    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dropmax", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=200,
            **options,  # type: ignore[call-overload]
        )

    return call


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dropmax.recipes import load_recipe
    from dropmax.training import train

    path = tmp_path_factory.mktemp("cli") / "run"
    values = {"training.epochs": 10, "data.validation_size": 100}
    train(load_recipe("mnist-1k").override(values), path, quiet=True)
    return path
