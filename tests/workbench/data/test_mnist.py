from __future__ import annotations

import gzip
import hashlib
import lzma
import math
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data import load, mnist
from dropmax.workbench.data.mnist import as_mnist, choose_embedded, embedded_digits, find_mnist, read_idx, read_mnist
from tests.workbench.data.layouts import idx_bytes

# Printed by tools/make_embedded_mnist.py.
CONTENT_SHA256 = "ce021b9ec1fdc921439399b00d2d321c9c205dd606f91991b53d4c50052185bd"


def write(folder: Path, **arrays: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, array in arrays.items():
        name = f"{part.replace('_', '-')}-idx{array.ndim}-ubyte.gz"
        (folder / name).write_bytes(gzip.compress(idx_bytes(array), 1))


def test_the_embedded_digits_are_what_was_packed_balanced_distinct_and_quick() -> None:
    packed = resources.files("dropmax.workbench.data").joinpath("embedded/mnist-20k.xz").read_bytes()
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() == CONTENT_SHA256
    assert len(packed) < 3_300_000
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
    for part, dimensions in mnist.FILES.items():
        (tmp_path / folder / spelling.format(part, dimensions)).write_bytes(b"")
    assert find_mnist(tmp_path).keys() == mnist.FILES.keys()


def test_55k_keeps_the_embedded_validation_images_out_of_training(tmp_path: Path) -> None:
    digits = embedded_digits()
    # A training file with the embedded digits at their official rows, and blank fours elsewhere.
    images, labels = np.zeros((60_000, 28, 28), np.uint8), np.full(60_000, 4, np.uint8)
    images[digits.train_rows], labels[digits.train_rows] = digits.train_images, digits.train_labels
    images[digits.validation_rows], labels[digits.validation_rows] = digits.validation_images, digits.validation_labels
    test = {"t10k_images": digits.test_images[:50], "t10k_labels": digits.test_labels[:50]}
    write(tmp_path / "mnist", train_images=images, train_labels=labels, **test)
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
    write(tmp_path, train_images=images, train_labels=labels)
    with pytest.raises(DataError, match=says):
        read_mnist(find_mnist(tmp_path), "train")
    with pytest.raises(DataError, match=r"lacks t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz: run `dropmax"):
        load("mnist", data_dir=tmp_path)


def test_the_rule_on_the_real_files(real: Callable[[str], Path]) -> None:
    files = find_mnist(real("mnist"))
    digits = embedded_digits()
    images, labels = read_mnist(files, "train")
    train, validation = choose_embedded(labels)
    assert np.array_equal(train, digits.train_rows)
    assert np.array_equal(validation, digits.validation_rows)
    assert np.array_equal(images[train], digits.train_images)
    assert np.array_equal(images[validation], digits.validation_images)
    assert np.array_equal(read_idx(files["t10k-images"], 3), digits.test_images)
    data = load("mnist", data_dir=real("mnist"))
    assert [len(data.train), len(data.validation), len(data.test)] == [55_000, 5000, 10_000]
    assert data.mean[0] == pytest.approx(0.1307, abs=0.0005)


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
LABELS = np.array([7, 2, 1], np.uint8)


@pytest.mark.parametrize("array", [IMAGES, LABELS], ids=["images", "labels"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", ["file", "file.gz"])  # a browser may unpack a .gz and keep its name
def test_reads_what_was_written(tmp_path: Path, array: np.ndarray, packed: bool, name: str) -> None:
    content = idx_bytes(array)
    (tmp_path / name).write_bytes(gzip.compress(content, mtime=0) if packed else content)
    read = read_idx(tmp_path / name, array.ndim)
    assert read.dtype == np.uint8
    assert np.array_equal(read, array)
    assert read.flags.writeable


BOMB = idx_bytes(LABELS)[:4] + (2**32 - 1).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("content", "dimensions", "says"),
    [
        (b"", 1, "is empty"),
        (b"\0\0", 1, "too short"),
        (b"<html>not found</html>", 1, "is not an idx file of bytes: it starts with 3c 68 74 6d"),
        (b"\0\0\x0d\x01" + bytes(8), 1, "is not an idx file of bytes"),
        (idx_bytes(LABELS), 3, r"holds labels \(1 dimension\) where images \(3 dimensions\) were expected"),
        (idx_bytes(IMAGES), 1, r"holds images \(3 dimensions\) where labels"),
        (idx_bytes(LABELS)[:6], 1, "is cut short"),
        (idx_bytes(LABELS)[:-1], 1, "fewer bytes than the 3 its header promises"),
        (idx_bytes(LABELS) + b"\0", 1, "more bytes than the 3 its header promises"),
        (idx_bytes(LABELS[:0]), 1, "holds nothing"),
        (BOMB, 1, "promises more bytes than the file can hold"),
        (gzip.compress(BOMB, mtime=0), 1, "promises more bytes than the file can hold"),
        (gzip.compress(idx_bytes(IMAGES), mtime=0)[:-12], 3, "the gzip stream ends early"),
        (gzip.compress(b"something else", mtime=0), 3, "is not an idx file"),
        (b"\x1f\x8bnonsense that follows", 3, "cannot be read as an idx file"),
        (gzip.compress(idx_bytes(LABELS) + bytes(10_000_000), mtime=0), 1, "more bytes than the 3"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, content: bytes, dimensions: int, says: str) -> None:
    path = tmp_path / "culprit-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_idx(path, dimensions)
    assert "culprit-ubyte" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="cannot be read as an idx file"):
        read_idx(tmp_path, dimensions)


@given(st.booleans(), st.integers(0, 60), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 255)), max_size=4))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupted_file_reads_or_is_a_data_error(
    tmp_path: Path, packed: bool, length: int, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(gzip.compress(idx_bytes(IMAGES), mtime=0) if packed else idx_bytes(IMAGES))[:length]
    for place, value in changes:
        if place < len(content):
            content[place] = value
    path = tmp_path / "corrupted"
    path.write_bytes(content)
    try:
        array = read_idx(path, 3)
    except DataError:
        return
    assert array.ndim == 3
    assert array.size <= 1032 * len(content)


def by_loops(ink: np.ndarray) -> list[list[int]]:
    """The definition, pixel by pixel: no matrices, no slices."""
    dark = [(i, j) for i in range(len(ink)) for j in range(len(ink[0])) if ink[i][j] >= 32]
    top, bottom = min(i for i, _ in dark), max(i for i, _ in dark) + 1
    left, right = min(j for _, j in dark), max(j for _, j in dark) + 1
    tall, wide = bottom - top, right - left
    height = max(1, math.floor(20 * tall / max(tall, wide) + 0.5))
    width = max(1, math.floor(20 * wide / max(tall, wide) + 0.5))
    small = [[0.0] * width for _ in range(height)]
    for a in range(height):
        for b in range(width):
            y0, y1 = a * tall / height, (a + 1) * tall / height
            x0, x1 = b * wide / width, (b + 1) * wide / width
            total = 0.0
            for i in range(math.floor(y0), min(tall, math.ceil(y1))):
                for j in range(math.floor(x0), min(wide, math.ceil(x1))):
                    area = max(0.0, min(y1, i + 1) - max(y0, i)) * max(0.0, min(x1, j + 1) - max(x0, j))
                    total += area * float(ink[top + i][left + j])
            small[a][b] = total / ((y1 - y0) * (x1 - x0))
    mass = sum(map(sum, small))
    down = sum(a * v for a, row in enumerate(small) for v in row) / mass
    across = sum(b * v for row in small for b, v in enumerate(row)) / mass
    row0 = min(max(0, math.ceil(13.5 - down - 1e-9)), 28 - height)
    column0 = min(max(0, math.ceil(13.5 - across - 1e-9)), 28 - width)
    digit = [[0] * 28 for _ in range(28)]
    for a in range(height):
        for b in range(width):
            digit[row0 + a][column0 + b] = math.floor(small[a][b] + 0.5)
    return digit


@st.composite
def drawings(draw: st.DrawFn) -> np.ndarray:
    height, width = draw(st.integers(1, 50)), draw(st.integers(1, 50))
    ink = np.zeros((height, width), np.uint8)
    for _ in range(draw(st.integers(1, 4))):
        i, j = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
        ink[i : i + draw(st.integers(1, 30)), j : j + draw(st.integers(1, 30))] = draw(st.integers(0, 255))
    ink[draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))] = draw(st.integers(32, 255))
    return ink


@given(drawings())
def test_it_is_what_the_definition_says(ink: np.ndarray) -> None:
    # One grey level of room: a value of k + 1/2 may be rounded either way.
    assert np.abs(as_mnist(ink).astype(int) - np.array(by_loops(ink))).max() <= 1


def test_real_digits_drawn_ten_times_larger_come_back_as_they_were() -> None:
    digits = load("mnist-1k").test.inputs[:100, 0].numpy()
    compared = 0
    for digit in digits:
        rows, columns = np.flatnonzero(digit.any(1)), np.flatnonzero(digit.any(0))
        solid = (digit >= 32).any(1).sum() == len(rows) == 20 and (digit >= 32).any(0).sum() == len(columns)
        if solid:  # no faint rim that the bounding box would leave out
            compared += 1
            np.testing.assert_array_equal(as_mnist(np.kron(digit, np.ones((10, 10), np.uint8))), digit)
    assert compared > 40
    for shade in (0, 31):
        with pytest.raises(DataError, match="nothing drawn"):
            as_mnist(np.full((280, 280), shade, np.uint8))
