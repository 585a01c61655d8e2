from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropmax.errors import DataError
from dropmax.workbench.data.mnist import read_idx
from tests.workbench.data.layouts import idx_bytes

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


def test_a_directory_or_nothing_is_said_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match="cannot be read as an idx file"):
            read_idx(path, 1)


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
