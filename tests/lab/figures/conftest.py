"""Runs of two heads and two seeds on one set of tiny pictures, and of one head on features."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.figures.small import HOSTILE, make_run, write_data

CLASSES = ["zero", HOSTILE, "two", "three", "four", "five", "six"]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="session")
def image_runs(place: Path) -> list[Path]:
    """softmax 0, dropmax 0, softmax 1, dropmax 1."""
    data = write_data(place / "spots.npz", CLASSES)
    return [
        make_run(place / f"{head}-{seed}", data, head, seed=seed) for seed in (0, 1) for head in ("softmax", "dropmax")
    ]


@pytest.fixture(scope="session")
def feature_run(place: Path) -> Path:
    data = write_data(place / "numbers.npz", ["yes", "no"], images=False, each=40)
    return make_run(place / "features", data, "dropmax")
