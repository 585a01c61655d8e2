from __future__ import annotations

from pathlib import Path

import pytest

from dropmax.errors import DataError
from dropmax.workbench.data import NAMES, cache_directory, data_directory, load
from tests.workbench.data.layouts import image_folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cifar10", "unknown data set 'cifar10': did you mean 'cifar-10'"),
        ("MNIST-1K", "unknown data set 'MNIST-1K': did you mean 'mnist-1k'"),
        ("qqqq", "unknown data set 'qqqq': Valid are mnist-1k, .*path of an image folder or a .npz"),
        ("some/where", "some/where does not exist: give the path of an image folder"),
        ("table.csv", "table.csv does not exist"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load(name)


@pytest.mark.parametrize("name", [name for name, known in NAMES.items() if known.source])
def test_a_set_that_is_not_there_says_what_to_do(tmp_path: Path, name: str) -> None:
    says = f"{name} was not found in .*run `dropmax data fetch .*DROPMAX_DATA"
    if name == "awa":  # nobody can fetch it any more
        says = "the images of awa are no longer distributed .* put JPEGImages in"
    with pytest.raises(DataError, match=says):
        load(name, data_dir=tmp_path)


def test_a_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_folder(tmp_path / "mnist-1k", {"cat": 10, "dog": 10})
    monkeypatch.chdir(tmp_path)
    assert load("mnist-1k").num_classes == 10
    assert load("./mnist-1k", image_size=8).num_classes == 2


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02.")
    with pytest.raises(DataError, match=r"of a kind that cannot be read: give an image folder or a .npz, .csv"):
        load(tmp_path / "a.pkl")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, whom no permission stops
    with pytest.raises(DataError, match=r"the data directory .* cannot be read: check its permissions"):
        load("cub", data_dir=tmp_path)


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == tmp_path / "cache"
    assert data_directory() == tmp_path / "cache" / "data"
    monkeypatch.setenv("DROPMAX_DATA", str(tmp_path / "data"))
    assert data_directory() == tmp_path / "data"
    assert data_directory(tmp_path / "mine") == tmp_path / "mine"
