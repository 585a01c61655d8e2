"""Runs on tiny pictures and on features of two and of two hundred classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.figures.small import HOSTILE, make_run, write_data


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    place = tmp_path_factory.mktemp("report")
    spots = write_data(place / "spots.npz", ["zero", HOSTILE, "two", "three"])
    pair = write_data(place / "pair.npz", ["yes", "no"], images=False, each=30)
    many = write_data(place / "many.npz", [f"class number {k}" for k in range(200)], images=False, each=5)
    return {
        "images": [
            make_run(place / f"{head}-{seed}", spots, head, seed=seed)
            for head in ("softmax", "dropmax", "sparsemax")
            for seed in (0, 1)
        ],
        "pair": [make_run(place / "pair", pair, "dropmax")],
        "many": [make_run(place / "many", many, "dropmax", epochs=2)],
    }
