"""Shared by the data tests: a cache of their own, and the real data where it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

_REAL = os.environ.get("DROPMAX_DATA")


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's data or cache."""
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DROPMAX_DATA", raising=False)


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not _REAL:
        pytest.skip("needs the real data sets: set DROPMAX_DATA to the directory they are in")
    return Path(_REAL)


@pytest.fixture(scope="session")
def real(real_data: Path) -> Callable[[str], Path]:
    """Give the directory of the real data, or skip where it lacks the entry asked for."""

    def need(entry: str) -> Path:
        if not (real_data / entry).exists():
            pytest.skip(f"needs {entry} in DROPMAX_DATA")
        return real_data

    return need
