from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmax.errors import DataError, InvalidType
from dropmax.workbench.data import Split, statistics


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_image_statistics_are_those_of_the_definition(seed: int, channels: int, count: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (count, channels, 5, 4), np.uint8)
    scaled = images.astype(np.float64) / 255
    mean, std = statistics(torch.from_numpy(images))
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-10)


def test_statistics_cover_every_block() -> None:
    images = torch.zeros(2500, 1, 2, 2, dtype=torch.uint8)
    images[1024:] = 255  # blocks are 1024 long
    mean, _ = statistics(images)
    assert mean[0] == pytest.approx(1476 / 2500, rel=1e-12)


def test_feature_statistics() -> None:
    features = torch.randn(50, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5
    mean, std = statistics(features)
    wide = features.double().numpy()
    np.testing.assert_allclose(mean, wide.mean(0))
    np.testing.assert_allclose(std[:2], wide.std(0)[:2])
    assert std[2] == 1.0


@pytest.mark.parametrize(
    ("inputs", "labels", "error", "says"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), InvalidType, "inputs must be uint8 images"),
        (torch.zeros(2, 3), torch.zeros(2), InvalidType, "labels must be int64"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), DataError, "has 2 and 3"),
    ],
)
def test_a_split_refuses_what_it_cannot_hold(
    inputs: torch.Tensor, labels: torch.Tensor, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Split(inputs, labels)
