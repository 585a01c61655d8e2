from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dropmax.cli.data import app
from dropmax.errors import DataError
from tests.workbench.data.layouts import write_cifar, write_cub

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DROPMAX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "data").mkdir()


def test_list_shows_every_set_and_where_it_is(tmp_path: Path) -> None:
    write_cub(tmp_path / "data" / "CUB_200_2011")
    (tmp_path / "data" / "CUB_200_2011" / "classes.txt").unlink()
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert "inside the package" in lines["mnist-1k"]
    assert lines["mnist-55k"].split()[1:] == ["10", "55,000", "5,000", "10,000", "no"]
    assert "CUB_200_2011 (without classes.txt)" in lines["cub"]
    assert str(tmp_path / "data") in lines["Looked"]


def test_list_as_json(tmp_path: Path) -> None:
    held = json.loads(runner.invoke(app, ["list", "--json", "--data-dir", str(tmp_path)]).output)
    sizes = {"classes": 10, "train": 1000, "validation": 5000, "test": 10000}
    about = {"about": "handwritten digits, 100 per class to train on", "found": "inside the package", "missing": []}
    assert held[0] == {"name": "mnist-1k", **sizes, **about}


def test_check_looks_at_what_is_there_and_fails_on_damage(tmp_path: Path) -> None:
    root = write_cub(tmp_path / "data" / "CUB_200_2011")
    result = runner.invoke(app, ["check"])
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.output.splitlines()] == ["mnist-1k", "cub"]
    images = sorted((root / "images").rglob("*.jpg"))
    images[0].unlink()
    result = runner.invoke(app, ["check", "cub"])
    assert (result.exit_code, result.output.count("missing")) == (1, 1)
    images[1].write_text("no image")
    result = runner.invoke(app, ["check", "cub", "--json"])
    assert result.exit_code == 1
    assert [finding["status"] for finding in json.loads(result.output)["cub"]] == ["missing", "damaged"]


def test_a_cifar_of_one_batch_passes_and_what_is_absent_is_said(tmp_path: Path) -> None:
    for name in ("data_batch_1.bin", "test_batch.bin"):
        write_cifar(tmp_path / "data" / name, [(k % 10,) for k in range(10_000)])
    result = runner.invoke(app, ["check", "cifar-10"])
    assert result.exit_code == 0
    assert result.output.count("cifar-10: absent: ") == 5
    assert result.output.count("cifar-10: ok: ") == 2


def test_check_fails_for_a_named_set_that_is_not_there() -> None:
    result = runner.invoke(app, ["check", "awa2"])
    assert result.exit_code == 1
    assert "run `dropmax data fetch awa2`" in result.output
    result = runner.invoke(app, ["check", "cifar10"])
    assert isinstance(result.exception, DataError)
    assert "did you mean 'cifar-10'" in str(result.exception)


def test_fetch_says_where_it_is_or_why_not(tmp_path: Path) -> None:
    write_cub(tmp_path / "data" / "CUB_200_2011")
    result = runner.invoke(app, ["fetch", "cub"])
    assert result.exit_code == 0
    assert result.output.strip() == f"cub is in {tmp_path / 'data' / 'CUB_200_2011'}"
    result = runner.invoke(app, ["fetch", "mnist-1k"])
    assert "inside the package: there is nothing to fetch" in str(result.exception)
