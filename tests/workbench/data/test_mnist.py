from __future__ import annotations

import gzip
import hashlib
import lzma
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data import load
from dropmax.workbench.data.mnist import FILES, choose_embedded, embedded_digits, find_mnist, read_idx, read_mnist
from tests.workbench.data.layouts import idx_bytes

# Printed by tools/make_embedded_mnist.py.
CONTENT_SHA256 = "ce021b9ec1fdc921439399b00d2d321c9c205dd606f91991b53d4c50052185bd"


def write(folder: Path, **arrays: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, array in arrays.items():
        name = f"{part.replace('_', '-')}-idx{array.ndim}-ubyte.gz"
        (folder / name).write_bytes(gzip.compress(idx_bytes(array), 1))


def test_the_embedded_content_is_what_was_packed() -> None:
    packed = resources.files("dropmax.workbench.data").joinpath("embedded/mnist-20k.xz").read_bytes()
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() == CONTENT_SHA256
    assert len(packed) < 3_300_000


def test_the_embedded_digits_are_balanced_distinct_and_quick() -> None:
    embedded_digits.cache_clear()
    start = time.process_time()
    digits = embedded_digits()
    assert time.process_time() - start < 3  # a fifth of a second
    for labels in (digits.train_labels, digits.validation_labels):
        assert np.bincount(labels).tolist() == [500] * 10
    rows = np.concatenate([digits.train_rows, digits.validation_rows])
    assert len(np.unique(rows)) == 10_000
    assert rows.max() < 60_000
    assert digits.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]  # the official order


@pytest.mark.parametrize(("name", "train"), [("mnist-1k", 1000), ("mnist-5k", 5000)])
def test_the_small_sets_come_from_the_package_alone(tmp_path: Path, name: str, train: int) -> None:
    write(tmp_path, train_images=np.zeros((3, 28, 28), np.uint8))  # must not be looked at
    data = load(name, data_dir=tmp_path)
    assert [len(data.train), len(data.validation), len(data.test)] == [train, 5000, 10_000]
    assert data.train.labels.bincount().tolist() == [train // 10] * 10
    assert data.train.inputs.dtype == torch.uint8
    assert data.mean[0] == pytest.approx(0.1307, abs=0.005)  # all of MNIST: 0.1307, 0.3081
    assert data.std[0] == pytest.approx(0.3081, abs=0.005)
    assert data.notes == ()


def test_the_seed_chooses_the_thousand_and_nothing_else() -> None:
    first, again, other = load("mnist-1k", seed=0), load("mnist-1k", seed=0), load("mnist-1k", seed=1)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert torch.equal(first.validation.inputs, other.validation.inputs)
    assert torch.equal(first.test.inputs, other.test.inputs)


def test_sizes_can_be_asked_for() -> None:
    data = load("mnist-5k", train_size=205, validation_size=1000)
    assert len(data.train) == 205
    assert set(data.train.labels.bincount().tolist()) == {20, 21}
    assert data.validation.labels.bincount().tolist() == [100] * 10
    assert len(load("mnist-1k", validation_size=0).validation) == 0
    with pytest.raises(InvalidValue, match="train_size must be 0 to 5,000 for mnist-5k, not 6,000"):
        load("mnist-5k", train_size=6000)
    with pytest.raises(InvalidValue, match="train_size must be at least 10"):
        load("mnist-5k", train_size=9)


@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("spelling", ["{}-idx{}-ubyte", "{}.idx{}-ubyte", "{}-idx{}-ubyte.gz"])
def test_files_are_found_in_every_usual_place(tmp_path: Path, folder: str, spelling: str) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for part, dimensions in FILES.items():
        (tmp_path / folder / spelling.format(part, dimensions)).write_bytes(b"")
    assert find_mnist(tmp_path).keys() == FILES.keys()


def official_like() -> tuple[np.ndarray, np.ndarray]:
    """A training file with the embedded digits at their official rows, and blank fours elsewhere."""
    digits = embedded_digits()
    images, labels = np.zeros((60_000, 28, 28), np.uint8), np.full(60_000, 4, np.uint8)
    images[digits.train_rows], labels[digits.train_rows] = digits.train_images, digits.train_labels
    images[digits.validation_rows], labels[digits.validation_rows] = digits.validation_images, digits.validation_labels
    return images, labels


def test_55k_keeps_the_embedded_validation_images_out_of_training(tmp_path: Path) -> None:
    images, labels = official_like()
    digits = embedded_digits()
    write(
        tmp_path / "mnist",
        train_images=images,
        train_labels=labels,
        t10k_images=digits.test_images[:50],
        t10k_labels=digits.test_labels[:50],
    )
    data = load("mnist-55k", data_dir=tmp_path)
    assert [len(data.train), len(data.validation), len(data.test)] == [55_000, 5000, 50]
    assert np.array_equal(data.validation.inputs[:, 0].numpy(), digits.validation_images)
    # The 5,000 embedded training images are all in there; the 50,000 others are blank.
    assert int((data.train.inputs.amax((1, 2, 3)) > 0).sum()) == 5000

    write(tmp_path / "mnist", train_images=np.roll(images, 1, 0))
    with pytest.raises(DataError, match="is not the official MNIST training file"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (np.zeros((2, 28, 28)), np.zeros(3), "holds 2 images, but .* holds 3 labels"),
        (np.zeros((2, 32, 32)), np.zeros(2), "images of 32x32, but MNIST's are 28x28"),
        (np.zeros((2, 28, 28)), np.array([3, 11]), "the label 11 at row 1"),
    ],
)
def test_halves_that_do_not_fit(tmp_path: Path, images: np.ndarray, labels: np.ndarray, says: str) -> None:
    write(tmp_path, train_images=images.astype(np.uint8), train_labels=labels.astype(np.uint8))
    with pytest.raises(DataError, match=says):
        read_mnist(find_mnist(tmp_path), "train")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mnist-55k was not found in .*run `dropmax data fetch mnist`"):
        load("mnist-55k", data_dir=tmp_path)
    write(tmp_path, train_images=np.zeros((2, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"lacks train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels"):
        load("mnist", data_dir=tmp_path)


def test_the_rule_on_the_real_files(real: Callable[[str], Path]) -> None:
    files = find_mnist(real("mnist"))
    digits = embedded_digits()
    images, labels = read_mnist(files, "train")
    for chosen, rows, embedded in zip(
        choose_embedded(labels),
        (digits.train_rows, digits.validation_rows),
        (digits.train_images, digits.validation_images),
        strict=True,
    ):
        assert np.array_equal(chosen, rows)
        assert np.array_equal(images[rows], embedded)
    assert np.array_equal(read_idx(files["t10k-images"], 3), digits.test_images)
    data = load("mnist", data_dir=real("mnist"))
    assert [len(data.train), len(data.validation), len(data.test)] == [55_000, 5000, 10_000]
    assert data.mean[0] == pytest.approx(0.1307, abs=0.0005)
