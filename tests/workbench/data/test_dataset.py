from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmax.errors import DataError, InvalidType, InvalidValue
from dropmax.workbench.data import Split, statistics
from dropmax.workbench.data.dataset import balanced_subset, hold_out


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_image_statistics_are_those_of_the_definition(seed: int, channels: int, count: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (count, channels, 5, 4), np.uint8)
    scaled = images.astype(np.float64) / 255
    mean, std = statistics(torch.from_numpy(images))
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-10)


def test_feature_statistics_and_every_block_of_images() -> None:
    features = torch.randn(50, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5
    mean, std = statistics(features)
    wide = features.double().numpy()
    np.testing.assert_allclose(mean, wide.mean(0))
    np.testing.assert_allclose(std[:2], wide.std(0)[:2])
    assert std[2] == 1.0
    images = torch.zeros(2500, 1, 2, 2, dtype=torch.uint8)
    images[1024:] = 255  # blocks are 1024 long
    assert statistics(images)[0][0] == pytest.approx(1476 / 2500, rel=1e-12)


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


label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=60)


@given(label_lists, st.data())
@settings(max_examples=80, deadline=None)
def test_a_balanced_subset_is_as_even_as_it_can_be(labels: list[int], data: st.DataObject) -> None:
    array = np.array(labels)
    size, seed = data.draw(st.integers(0, len(labels))), data.draw(st.integers(0, 5))
    rows = balanced_subset(array, size, seed)
    assert len(rows) == size == len(set(rows.tolist()))
    assert rows.tolist() == sorted(rows.tolist())
    taken, there = np.bincount(array[rows], minlength=6), np.bincount(array, minlength=6)
    # Nobody has more than one above a class that still had members to give.
    for k in range(6):
        if taken[k] < there[k]:
            assert taken.max() <= taken[k] + 1


@given(label_lists, st.data())
@settings(max_examples=80, deadline=None)
def test_a_hold_out_takes_from_each_class_its_share(labels: list[int], data: st.DataObject) -> None:
    array = np.array(labels)
    counts = np.bincount(array, minlength=6)
    most = int((counts - 1).clip(min=0).sum())
    size, seed = data.draw(st.integers(0, most)), data.draw(st.integers(0, 5))
    kept, held = hold_out(array, size, seed)
    assert len(held) == size
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(labels)))
    assert ((np.bincount(array[kept], minlength=6) > 0) == (counts > 0)).all()


def test_shares_are_proportional() -> None:
    labels = np.repeat([0, 1, 2], [1000, 100, 10])
    _, held = hold_out(labels, 111, seed=4)
    assert np.bincount(labels[held]).tolist() == [100, 10, 1]


def test_draws_never_change() -> None:
    """Written down once: another answer here makes every published seed mean other data."""
    labels = np.arange(20) % 2
    assert balanced_subset(labels, 6, 0).tolist() == [2, 3, 8, 11, 13, 18]
    assert hold_out(labels, 4, 7)[1].tolist() == [3, 6, 11, 12]
    assert not np.array_equal(balanced_subset(labels, 6, 0), balanced_subset(labels, 6, 1))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="at most 2 can be held out"):
        hold_out(np.array([0, 0, 1, 1]), 3, 0)
    with pytest.raises(InvalidValue, match="seed must not be negative"):
        balanced_subset(np.array([0, 1]), 1, -1)
