from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dropmax.workbench.data import check, inventory
from tests.workbench.data.layouts import idx_bytes, image_folder, write_cifar, write_cub


def statuses(name: str, data_dir: Path) -> dict[str, str]:
    return {Path(finding.what).name: finding.status for finding in check(name, data_dir)}


def test_the_inventory_finds_without_reading(tmp_path: Path) -> None:
    write_cub(tmp_path / "CUB_200_2011", a_class=2)
    write_cifar(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", [(1,)])
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels.idx1-ubyte").write_bytes(b"")
    held = {line.name: line for line in inventory(tmp_path)}
    assert held["mnist-1k"].found == "inside the package"
    assert (held["cub"].found, held["cub"].missing) == (str(tmp_path / "CUB_200_2011"), ())
    assert held["cifar-10"].missing[0] == "data_batch_2.bin"
    assert held["mnist"].missing[-1] == "t10k-images-idx3-ubyte.gz"
    assert held["awa2"].found is held["awa"].found is None


def test_mnist_that_is_sound_but_not_official(tmp_path: Path) -> None:
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.arange(10))))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"rubbish")
    found = statuses("mnist", tmp_path)
    assert found["t10k-labels-idx1-ubyte.gz"] == found["t10k-images-idx3-ubyte"] == "damaged"
    assert found["train-images-idx3-ubyte.gz"] == "missing"


@pytest.mark.parametrize(
    ("labels", "status", "detail"),
    [
        ([(k % 10,) for k in range(10_000)], "ok", "10,000 images, labels in range"),
        ([(k % 10,) for k in range(9_990)], "damaged", "9,990 images, but the official file has 10,000"),
        ([(k % 9,) for k in range(10_000)], "damaged", "not equally many"),
    ],
)
def test_cifar_counts(tmp_path: Path, labels: list[tuple[int]], status: str, detail: str) -> None:
    write_cifar(tmp_path / "test_batch.bin", labels)
    finding = check("cifar-10", tmp_path)[-1]
    assert finding.status == status
    assert detail in finding.detail


def test_cub_images_that_are_missing_or_damaged(tmp_path: Path) -> None:
    write_cub(tmp_path)
    assert [finding.status for finding in check("cub", tmp_path)] == ["ok"]
    images = sorted((tmp_path / "images").rglob("*.jpg"))
    images[0].unlink()
    images[5].write_text("no image")
    findings = {finding.what: finding.status for finding in check("cub", tmp_path)}
    assert findings == {str(images[0]): "missing", str(images[5]): "damaged"}
    (tmp_path / "train_test_split.txt").write_text("1 1\n")
    assert [finding.status for finding in check("cub", tmp_path)] == ["damaged"]


def test_your_own_data_is_checked_by_loading_it(tmp_path: Path) -> None:
    image_folder(tmp_path / "pets", {"cat": 10, "dog": 10})
    (finding,) = check(tmp_path / "pets")
    assert finding.status == "ok"
    assert finding.detail.startswith("2 classes, 14 + 2 + 4 rows")
    (tmp_path / "pets" / "cat" / "005.png").write_text("no image")
    (finding,) = check(tmp_path / "pets")
    assert finding.status == "damaged"
    assert "005.png" in finding.detail


@pytest.mark.parametrize(
    ("name", "entry"), [("mnist", "mnist"), ("cifar-100", "cifar-100-binary"), ("cub", "CUB_200_2011")]
)
def test_the_real_files_are_sound(real: Callable[[str], Path], name: str, entry: str) -> None:
    assert {finding.status for finding in check(name, real(entry))} == {"ok"}
