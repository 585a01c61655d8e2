from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data import check, fetch, load
from dropmax.workbench.data import folders as folders_module
from dropmax.workbench.data.folders import list_cub, list_folder
from tests.workbench.data.layouts import image_folder, picture, write_cub


def test_a_plain_folder_is_split_for_you(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "pets", {"cat": 20, "dog": 30})
    first, other = load(root, seed=0, image_size=16), load(root, seed=1, image_size=16)
    assert first.classes == ("cat", "dog")
    assert first.input_shape == (3, 16, 16)
    assert first.train.inputs.shape[1:] == (3, 18, 18)
    assert first.test.labels.bincount().tolist() == [4, 6]
    assert [len(first.train), len(first.validation)] == [36, 4]
    test, validation = first.held_out
    assert str(test) == "test: 10 of 50 rows held out (20 % of each class, the same rows for every seed)"
    assert str(validation).startswith("validation: 4 of 50 rows held out (10 % of what is left, each class giving")
    assert other.held_out[0] == test
    assert sum(name.startswith("cat/") for name in test.rows) == 4  # type: ignore[union-attr]
    assert not set(test.rows) & set(validation.rows)
    assert all((root / str(name)).is_file() for name in (*test.rows, *validation.rows))
    assert torch.equal(first.test.inputs, other.test.inputs)
    assert not torch.equal(first.validation.inputs, other.validation.inputs)
    # Red tells the class, green the number: every picture is in exactly one split, with its own label.
    seen = [
        (int(image[0, 9, 9]), int(image[1, 9, 9]))
        for split in (first.train, first.validation, first.test)
        for image, label in zip(split.inputs, split.labels, strict=True)
        if int(image[0, 9, 9]) == 40 * int(label)
    ]
    assert len(seen) == len(set(seen)) == 50


@pytest.mark.parametrize("validation", ["val", "validation", None])
def test_given_parts_are_kept(tmp_path: Path, validation: str | None) -> None:
    image_folder(tmp_path / "train", {"cat": 10, "dog": 10})
    image_folder(tmp_path / "test", {"cat": 3, "dog": 2})
    if validation:
        image_folder(tmp_path / validation, {"cat": 1, "dog": 4})
    data = load(tmp_path, image_size=8)
    assert data.test.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.validation.labels.tolist() == ([0, 1, 1, 1, 1] if validation else [0, 1])
    assert data.notes == ()


def test_files_that_are_no_images_are_noted_and_hidden_ones_ignored(tmp_path: Path) -> None:
    image_folder(tmp_path, {"cat": 5, "dog": 5})
    picture(tmp_path / "cat" / "deeper" / "UPPER.JPG")
    (tmp_path / "cat" / "README.txt").write_text("hello")
    (tmp_path / "cat" / ".DS_Store").write_text("hello")
    (tmp_path / ".git").mkdir()
    listing = list_folder(tmp_path)
    assert len(listing.files["train"]) == 11
    assert listing.notes == ["1 files are not images by their suffix and were left out: cat/README.txt"]


@pytest.mark.parametrize(
    ("classes", "size", "says"),
    [
        ({}, 8, "has no folders in it"),
        ({"cat": 3}, 8, "has the one class 'cat'"),
        ({"cat": 3, "dog": 3, "fox": 0}, 8, "fox has no images in it"),
        ({"train/cat": 3, "train/dog": 3, "test/cat": 3, "test/fox": 3}, 8, "test/fox is a class that is not in train"),
        ({"cat": 1, "dog": 1}, 8, "at most 0 can be held out"),
        ({"cat": 5, "dog": 5}, 3, "image_size must be 8 to 2048 pixels, not 3"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, classes: dict[str, int], size: int, says: str) -> None:
    for name in classes:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises((DataError, InvalidValue), match=says) as caught:
        load(image_folder(tmp_path, classes), image_size=size)
    assert "\n" not in str(caught.value)


def test_an_unreadable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_folder(tmp_path, {"cat": 3, "dog": 3})

    def denied(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)  # the tests may run as root, whom no permission stops
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        list_folder(tmp_path)


def test_cub_follows_its_tables(tmp_path: Path) -> None:
    write_cub(tmp_path / "CUB_200_2011", classes=3, a_class=8)
    data = load("cub", data_dir=tmp_path, validation_size=3)
    assert data.classes == ("Bird number 0", "Bird number 1", "Bird number 2")
    assert data.input_shape == (3, 64, 64)
    assert data.train.crop == 64
    assert [len(data.train), len(data.validation), len(data.test)] == [9, 3, 12]
    assert data.validation.labels.tolist() == [0, 1, 2]
    for split, parity in ((data.train, 0), (data.test, 1)):
        for image, label in zip(split.inputs, split.labels, strict=True):
            assert abs(int(image[0].float().mean()) - 60 * int(label)) < 6
            assert round(float(image[1].float().mean()) / 30) % 2 == parity


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("images.txt", "bird_0.jpg", "../../../etc/passwd", r"names '001.*passwd', which is outside its images folder"),
        ("images.txt", "1 001", "1 /etc/001", "which is outside its images folder"),
        ("images.txt", "bird_0.jpg", "..\\..\\..\\passwd", "which is outside its images folder"),
        ("images.txt", "bird_0.jpg", "a\0b", "which is outside its images folder"),
        ("images.txt", "1 001", "1  extra 001", "images.txt, line 1: expected a number and a value"),
        ("images.txt", "2 001", "1 001", "line 2: 1 is listed twice"),
        ("images.txt", "bird_3.jpg", "gone.jpg", "gone.jpg is listed but cannot be read"),
        ("image_class_labels.txt", "1 1\n", "1 9\n", "gives image 1 the unknown class 9"),
        ("image_class_labels.txt", "12 3\n", "", "do not list the same images: 12 is in one only"),
        ("train_test_split.txt", "1 1\n", "1 2\n", "gives image 1 '2', not 0 or 1"),
        ("classes.txt", None, "", "classes.txt is empty"),
    ],
)
def test_damaged_tables_of_cub(tmp_path: Path, file: str, old: str | None, new: str, says: str) -> None:
    write_cub(tmp_path)
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(new if old is None else text.replace(old, new, 1))
    with pytest.raises(DataError, match=says):
        load("cub", data_dir=tmp_path)


def write_awa(root: Path, first: str, *counts: int) -> Path:
    """Write so many pictures of two animals, numbered from ``first`` with its digits."""
    for name, count in zip(("antelope", "grizzly+bear"), counts, strict=True):
        for n in range(count):
            picture(root / "JPEGImages" / name / f"{name}_{int(first) + n:0{len(first)}}.jpg", (0, 10 * n, 0))
    return root


def test_awa2_tests_on_fifty_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module, "AWA_TEST_A_CLASS", 5)
    root = write_awa(tmp_path / "Animals_with_Attributes2", "10001", 12, 22)
    first, other = load("awa2", data_dir=tmp_path, image_size=8), load("awa2", data_dir=tmp_path, image_size=8, seed=1)
    assert first.classes == ("antelope", "grizzly bear")
    assert first.test.labels.bincount().tolist() == [5, 5]
    assert torch.equal(first.test.inputs, other.test.inputs)
    assert len(first.train) + len(first.validation) == 24
    for path in sorted((root / "JPEGImages" / "antelope").iterdir())[:8]:
        path.unlink()
    with pytest.raises(DataError, match="antelope has 4 images, but 5 per class are for testing"):
        load("awa2", data_dir=tmp_path)


def test_awa_is_read_from_its_own_folder_and_never_from_awa2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module, "AWA_TEST_A_CLASS", 5)
    gone = r"awa are no longer distributed .* put JPEGImages in .*Animals_with_Attributes;"
    for call in (lambda: load("awa", data_dir=tmp_path), lambda: fetch("awa", tmp_path)):
        with pytest.raises(DataError, match=gone):
            call()
    own = write_awa(tmp_path / "Animals_with_Attributes", "0001", 12, 12)
    second = write_awa(tmp_path / "Animals_with_Attributes2", "10001", 12, 12)
    data = load("awa", data_dir=tmp_path, image_size=8)
    assert data.test.labels.bincount().tolist() == [5, 5]
    assert data.notes == ("AWA has 30,475 images, and 24 were found",)
    assert {finding.status for finding in check("awa", tmp_path)} == {"ok"}
    own.rename(tmp_path / "away")
    second.rename(own)
    with pytest.raises(DataError, match=r"antelope_10001\.jpg is an image of AWA2, not of AWA: load it as awa2"):
        load("awa", data_dir=tmp_path, image_size=8)


def test_the_real_cub(real: Callable[[str], Path]) -> None:
    data_dir = real("CUB_200_2011")
    listing = list_cub(data_dir / "CUB_200_2011")
    assert [len(listing.files["train"]), len(listing.files["test"])] == [5994, 5794]
    load("cub", data_dir=data_dir)  # fills the cache
    start = time.process_time()  # not the clock on the wall, which counts what other processes do
    data = load("cub", data_dir=data_dir, seed=2)
    assert time.process_time() - start < 5  # about a second
    assert [len(data.train), len(data.validation), len(data.test)] == [5395, 599, 5794]
    assert data.num_classes == 200
    assert data.train.inputs.shape[1:] == (3, 72, 72)
    assert np.bincount(data.validation.labels.numpy()).min() >= 2
