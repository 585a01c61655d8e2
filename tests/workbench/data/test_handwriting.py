"""Drawings become digits as MNIST's were made: against plain loops, and against MNIST itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropmax.errors import DataError
from dropmax.workbench.data import load
from dropmax.workbench.data.handwriting import as_mnist


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


@given(drawings())
def test_a_digit_fills_twenty_pixels_about_its_centre_of_mass(ink: np.ndarray) -> None:
    digit = as_mnist(ink).astype(float)
    assert digit.shape == (28, 28)
    for axis in (0, 1):
        mass = digit.sum(axis)
        filled = np.flatnonzero(mass)
        assert filled[-1] - filled[0] < 20
        centre = mass @ np.arange(28) / mass.sum()
        # In [13.5, 14.5) but for the rounding of grey levels, unless the shape met the edge.
        assert 13.25 <= centre <= 14.75 or filled[0] == 0 or filled[-1] == 27


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


@pytest.mark.parametrize("shade", [0, 31])
def test_no_ink_is_refused(shade: int) -> None:
    with pytest.raises(DataError, match="nothing drawn"):
        as_mnist(np.full((280, 280), shade, np.uint8))
