from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data import load
from dropmax.workbench.data.cifar import read_records
from tests.workbench.data.layouts import write_cifar


def test_cifar10_batches_are_joined_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    pixels = [write_cifar(folder / f"data_batch_{n}.bin", [(k,) for k in range(10)] * 2, n) for n in range(1, 6)]
    test = write_cifar(folder / "test_batch.bin", [(9 - k,) for k in range(10)])
    data = load("cifar-10", data_dir=tmp_path, validation_size=0)
    assert np.array_equal(data.train.inputs.numpy(), np.concatenate(pixels))
    assert data.train.labels.tolist() == list(range(10)) * 10
    assert np.array_equal(data.test.inputs.numpy(), test)
    assert data.test.labels.tolist() == list(range(9, -1, -1))
    assert data.classes[9] == "truck"
    assert "test_batch.bin holds 10 images, not the official 10,000" in data.notes


def test_a_lone_first_batch_will_do_and_is_noted(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data_batch_1.bin", [(k,) for k in range(10)] * 10)
    write_cifar(tmp_path / "test_batch.bin", [(k,) for k in range(10)])
    data = load("cifar-10", data_dir=tmp_path)  # files directly in data_dir
    assert [len(data.train), len(data.validation)] == [90, 10]
    assert data.validation.labels.tolist().count(3) == 1
    assert any("only 100 of the 50,000" in note and "data_batch_5.bin missing" in note for note in data.notes)


def test_the_data_efficient_split_is_the_first_thirty_of_each_class_and_the_next_twenty(tmp_path: Path) -> None:
    labels = np.random.default_rng(3).permutation(np.arange(10).repeat(53))  # a stray order, and three of each too many
    pixels = write_cifar(tmp_path / "data_batch_1.bin", [(int(k),) for k in labels])
    write_cifar(tmp_path / "test_batch.bin", [(k,) for k in range(10)])
    data, whole = (load("deic-cifar-10", data_dir=tmp_path, validation_size=size) for size in (None, 0))
    for k in range(10):
        images = pixels[labels == k]
        for part, expected in ((data.train, images[:30]), (data.validation, images[30:50]), (whole.train, images[:50])):
            assert np.array_equal(part.inputs[part.labels == k].numpy(), expected)
    assert len(whole.validation) == 0
    assert len(load("deic-cifar-10", data_dir=tmp_path, validation_size=50).validation) == 50
    write_cifar(tmp_path / "data_batch_1.bin", [(k,) for k in range(10)] * 49)
    with pytest.raises(DataError, match="deic-cifar-10 needs 50 training images of each class; airplane has 49"):
        load("deic-cifar-10", data_dir=tmp_path)


def hundred(folder: Path) -> None:
    write_cifar(folder / "train.bin", [(k % 20, k) for k in range(100)] * 2)
    write_cifar(folder / "test.bin", [(k % 20, k) for k in range(100)])
    (folder / "fine_label_names.txt").write_text("\n".join(f"fine{k}" for k in range(100)) + "\n\n")
    (folder / "coarse_label_names.txt").write_text("\n".join(f"coarse{k}" for k in range(20)))


def test_cifar100_has_fine_labels_and_superclasses(tmp_path: Path) -> None:
    hundred(tmp_path / "cifar-100-binary")
    data = load("cifar-100", data_dir=tmp_path, validation_size=0)
    assert (data.num_classes, data.classes[42]) == (100, "fine42")
    assert data.coarse is not None
    assert data.coarse_classes is not None
    assert data.coarse_classes[data.coarse[42]] == "coarse2"
    assert data.train.labels.tolist() == list(range(100)) * 2


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path / "test_batch.bin", [(0,)])
    with pytest.raises(DataError, match=r"has no data_batch_1.bin"):
        load("cifar-10", data_dir=tmp_path)
    hundred(tmp_path)
    with pytest.raises(InvalidValue, match="image_size is for image folders"):
        load("cifar-100", data_dir=tmp_path, image_size=64)
    (tmp_path / "fine_label_names.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"fine_label_names.txt holds 2 class names, but there are 100 classes"):
        load("cifar-100", data_dir=tmp_path)
    write_cifar(tmp_path / "test.bin", [((k + 1) % 20, k) for k in range(100)])
    with pytest.raises(DataError, match=r"test.bin puts class 0 in superclass 1 in record 0, and elsewhere in 0"):
        load("cifar-100", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds 0 bytes"),
        (bytes(3073 * 2 - 1), "holds 6,145 bytes, which is not a whole number of records of 3073 bytes"),
        (bytes(3073) + bytes([10]) + bytes(3072), "the label 10 in record 1, but labels are 0 to 9"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_records(path, (10,))
    assert str(path) in str(caught.value)


def test_the_pickled_release_is_refused(tmp_path: Path) -> None:
    for folder, files in (("cifar-10-batches-py", ["batches.meta"]), ("cifar-100-python", ["meta", "train"])):
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).write_bytes(b"\x80\x02.")
    for name in ("cifar-10", "cifar-100"):
        with pytest.raises(DataError, match=f"python release of {name}, made of pickles.*dropmax data fetch {name}"):
            load(name, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "folder", "train"), [("cifar-10", "cifar-10-batches-bin", None), ("cifar-100", "cifar-100-binary", 45_000)]
)
def test_the_real_files(real: Callable[[str], Path], name: str, folder: str, train: int | None) -> None:
    data = load(name, data_dir=real(folder), seed=3)
    assert len(data.test) == 10_000
    assert data.test.labels.bincount().tolist() == [10_000 // data.num_classes] * data.num_classes
    if train is not None:
        assert len(data.train) == train
        assert data.validation.labels.bincount().tolist() == [50] * 100
        assert data.mean[0] == pytest.approx(0.507, abs=0.002)  # the figure everyone uses for CIFAR-100
