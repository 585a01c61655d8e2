from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.data.splits import balanced_subset, hold_out

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


def test_seeds_choose_differently_and_repeat() -> None:
    labels = np.arange(1000) % 10
    first = balanced_subset(labels, 100, 0)
    assert np.array_equal(first, balanced_subset(labels, 100, 0))
    assert not np.array_equal(first, balanced_subset(labels, 100, 1))


def test_draws_never_change() -> None:
    """Written down once: another answer here makes every published seed mean other data."""
    labels = np.arange(20) % 2
    assert balanced_subset(labels, 6, 0).tolist() == [2, 3, 8, 11, 13, 18]
    assert hold_out(labels, 4, 7)[1].tolist() == [3, 6, 11, 12]


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="at most 2 can be held out"):
        hold_out(np.array([0, 0, 1, 1]), 3, 0)
    with pytest.raises(InvalidValue, match="seed must not be negative"):
        balanced_subset(np.array([0, 1]), 1, -1)
