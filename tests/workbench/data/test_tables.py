from __future__ import annotations

import contextlib
import io
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropmax.errors import DataError, InvalidValue, MissingDependency
from dropmax.workbench.data import load
from dropmax.workbench.data.npz import read_npz
from dropmax.workbench.data.tables import read_table

X = np.arange(24, dtype=np.float64).reshape(8, 3)
Y = np.array([0, 1] * 4)


def test_npz_with_all_parts(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        x_train=X, y_train=Y, x_val=X[:2], y_val=Y[:2], x_test=X[:3] + 1, y_test=Y[:3], classes=["no", "yes"],
    )  # fmt: skip
    data = load(tmp_path / "a.npz")
    assert [len(data.train), len(data.validation), len(data.test)] == [8, 2, 3]
    assert data.classes == ("no", "yes")
    assert data.input_shape == (3,)
    assert not data.is_images
    np.testing.assert_array_equal(data.test.inputs.numpy(), X[:3] + 1)
    np.testing.assert_allclose(data.mean, X.mean(0))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 5, 6), (1, 5, 6)), ((8, 5, 6, 3), (3, 5, 6)), ((8, 3, 5, 6), (3, 5, 6)), ((8, 5, 6, 1), (1, 5, 6))],
)
def test_npz_images_in_every_order(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.savez_compressed(tmp_path / "a.npz", X=images, Y=Y)  # capitals too
    parts = read_npz(tmp_path / "a.npz")
    assert parts.train.inputs.shape == (8, *expected)
    moved = images[:, None] if images.ndim == 3 else images if shape[1] == 3 else np.moveaxis(images, 3, 1)
    assert np.array_equal(parts.train.inputs, moved)


@pytest.mark.parametrize(
    ("labels", "classes", "encoded"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        ([30, -7, 30], ("-7", "30"), [1, 0, 1]),
        ([2.0, 10.0, 2.0], ("2", "10"), [0, 1, 0]),
        ([True, False, True], ("0", "1"), [1, 0, 1]),
    ],
)
def test_labels_are_numbered_in_sorted_order(
    tmp_path: Path, labels: list[Any], classes: tuple[str, ...], encoded: list[int]
) -> None:
    np.savez(tmp_path / "a.npz", x=X[:3], y=labels)
    parts = read_npz(tmp_path / "a.npz")
    assert parts.classes == classes
    assert parts.train.labels.tolist() == encoded


def with_nan() -> np.ndarray:
    values = X.copy()
    values[2, 1] = np.nan
    return values


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"data": X}, "has the arrays data, but x and y, or x_train and y_train, are needed"),
        ({"x": X}, "has the array 'x' but not 'y'"),
        ({"x": X, "y": Y, "z": Y}, "array 'z', which is not one of backbone, classes, names, split, text, x, y"),
        ({"x": X, "y": Y[:5]}, "x has 8 rows, but y has 5"),
        ({"x": with_nan(), "y": Y}, "x row 2, column 1 is nan, which is not finite"),
        ({"x": X * 1e300, "y": Y}, "which is not finite"),
        ({"x": X[:0], "y": Y[:0]}, "x is empty"),
        ({"x": X.reshape(8, 3, 1), "y": Y}, "store features as numbers"),
        ({"x": np.zeros((8, 5, 5, 7), np.uint8), "y": Y}, "neither one nor three channels"),
        ({"x": X.astype(str), "y": Y}, "x must hold numbers"),
        ({"x": X, "y": Y + 0.5}, "y holds 0.5; labels are whole numbers or names"),
        ({"x": X, "y": Y[:, None]}, "y must be one label per row"),
        ({"x": X, "y": np.zeros(8, int)}, "has the one class '0'"),
        ({"x": X, "y": Y.astype(object)}, "y.npy holds Python objects"),
        ({"x": X, "y": Y, "classes": ["only"]}, "the label 1 of y is not among the 1 classes"),
        ({"x": X, "y": -Y, "classes": ["a", "b"]}, "the label -1 of y is not among"),
        ({"x": X, "y": Y, "classes": ["a", "a"]}, "classes must be distinct strings"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1}, "the label 2 of y_test is not among the training"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "the rows of its parts differ in shape"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y.astype(str)}, "mixes whole numbers and strings"),
    ],
)
def test_npz_files_that_cannot_be_used(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "culprit.npz", **arrays)
    with pytest.raises(DataError, match=says) as caught:
        load(tmp_path / "culprit.npz")
    assert "culprit.npz" in str(caught.value)


def test_an_npz_header_that_lies_allocates_nothing(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f8", "fortran_order": False, "shape": (10**12, 3)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content.getvalue() + bytes(24))
    with pytest.raises(DataError, match=r"the header of x.npy does not fit its size"):
        read_npz(tmp_path / "a.npz")


@given(st.integers(0, 700), st.lists(st.tuples(st.integers(0, 699), st.integers(0, 255)), max_size=5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupted_npz_reads_or_is_a_data_error(tmp_path: Path, cut: int, changes: list[tuple[int, int]]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, x=X, y=Y)
    content = bytearray(buffer.getvalue())
    for place, value in changes:
        content[place] = value
    (tmp_path / "a.npz").write_bytes(content[: len(content) - (cut if cut > 600 else 0)])
    with contextlib.suppress(DataError):
        part = read_npz(tmp_path / "a.npz").train
        assert len(part.inputs) == len(part.labels)
        assert np.isfinite(part.inputs).all()


def test_csv(tmp_path: Path) -> None:
    rows = "".join(f"{k},{'b' if k % 2 else 'a'},{-k}e-1\n" for k in range(20))
    (tmp_path / "a.csv").write_text("\ufefflength,kind,width\n" + rows + "\n")
    data = load(tmp_path / "a.csv", label_column="kind")
    assert data.classes == ("a", "b")
    assert [len(data.train), len(data.validation), len(data.test)] == [14, 2, 4]
    for split in (data.train, data.validation, data.test):
        for row, label in zip(split.inputs, split.labels, strict=True):
            assert int(row[0]) % 2 == int(label)
            assert float(row[1]) == pytest.approx(-float(row[0]) / 10)
    (tmp_path / "a.csv").write_text("x,label\n1,10\n2,9\n")
    assert read_table(tmp_path / "a.csv").classes == ("9", "10"), "numbers sort as numbers"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("x,label\n", "has a header and no rows"),
        ("x,lable\n1,2\n", "no column 'label' for the labels: did you mean 'lable'"),
        ("x,x,label\n1,1,2\n", "has the column 'x' twice"),
        ("label\n1\n", "has no columns of features"),
        ("x,label\n1,a\n2\n", "line 3: 1 cells, but the header has 2 columns"),
        ("x,w,label\n1,2,a\n1,wide,b\n", "line 3, column 'w': 'wide' is not a number"),
        ("x,label\n1,a\n,b\n", "line 3, column 'x': '' is not a number"),
        ("x,label\nnan,a\n1,b\n", "line 2, column 'x': 'nan' is not finite"),
        ("x,label\n1,a\n1e99,b\n", "line 3, column 'x': '1e99' is not finite"),
        ("x,label\n1,a\n1,\n", "line 3: the label is empty"),
        ("x,label\n1,a\n2,a\n", "has the one class 'a'"),
        (b"x,label\n\xff\xfe,a\n", "is not UTF-8 text"),
    ],
)
def test_csv_tables_that_cannot_be_used(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "culprit.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=says) as caught:
        load(path)
    assert "culprit.csv" in str(caught.value)


def write_parquet(path: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("labels", [["b", "a"] * 10, [1, 0] * 10, pyarrow.array(["b", "a"] * 10).dictionary_encode()])
def test_parquet(tmp_path: Path, labels: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", x=list(range(20)), w=[0.5] * 20, on=[True] * 20, label=labels)
    parts = read_table(path)
    assert parts.train.labels.tolist() == [1, 0] * 10
    assert parts.train.inputs.shape == (20, 3)
    assert parts.train.inputs[:, 0].tolist() == list(range(20))
    assert parts.train.inputs.dtype == np.float32


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"x": [1, 2]}, "no column 'label'"),
        ({"x": ["a", "b"], "label": [0, 1]}, "column 'x': features must be numbers, not string"),
        ({"x": [1, None], "label": [0, 1]}, "row 1, column 'x': the cell is empty"),
        ({"x": [1.0, float("inf")], "label": [0, 1]}, "row 1, column 'x': inf is not finite"),
        ({"x": [1, 2], "label": [0.5, 1.0]}, "label holds 0.5"),
        ({"x": pyarrow.array([], "float32"), "label": pyarrow.array([], "int64")}, "has no rows"),
        (None, r"a.parquet cannot be read as a Parquet table"),
    ],
)
def test_parquet_tables_that_cannot_be_used(
    tmp_path: Path, columns: dict[str, Any] | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", **(columns or {}))
    if columns is None:
        path.write_text("x,label\n")
    with pytest.raises(DataError, match=says) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingDependency, match=r"reading a.parquet needs pyarrow.*dropmax\[parquet\]"):
        read_table(path)


def test_options_are_for_what_they_are_for(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    with pytest.raises(InvalidValue, match=r"label_column is for .csv and .parquet tables"):
        load(tmp_path / "a.npz", label_column="kind")
    with pytest.raises(InvalidValue, match="image_size is for image folders"):
        load(tmp_path / "a.npz", image_size=64)
