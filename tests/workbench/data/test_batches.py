from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dropmax.errors import InvalidValue
from dropmax.workbench.data import Batches, Split, crop_and_flip, normalise, statistics


def numbered(count: int, size: int = 6, crop: int | None = None, channels: int = 3) -> Split:
    """Random images whose label is their row."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(1, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(count), crop)


def pixels(batches: Batches) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch with normalisation by (0, 1/255) undone: whole pixel values."""
    return [(x.round().to(torch.uint8), y) for x, y in batches]


PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(0, 40), st.integers(1, 15), st.booleans(), st.integers(0, 9))
def test_every_example_comes_exactly_once(count: int, size: int, shuffle: bool, seed: int) -> None:
    split = numbered(count)
    batches = Batches(split, size, **PLAIN, shuffle=shuffle, generator=generator(seed))
    epoch = pixels(batches)
    assert len(epoch) == len(batches)
    rows = [row for _, labels in epoch for row in labels.tolist()]
    assert len(set(rows)) == len(rows) == count
    assert all(len(labels) == size for _, labels in epoch[:-1])
    if not shuffle:
        assert rows == list(range(len(rows)))
    for images, labels in epoch:
        assert torch.equal(images, split.inputs[labels])


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["none", "crop-flip"]), st.booleans())
def test_the_ranks_together_are_one_process(count: int, world: int, each: int, augment: str, shuffle: bool) -> None:
    def batches() -> Batches:
        draw = generator(5)
        return Batches(numbered(count), each * world, **PLAIN, augment=augment, shuffle=shuffle, generator=draw)

    whole = pixels(batches())
    ranks = [pixels(batches().of_rank(rank, world)) for rank in range(world)]
    assert [len(epoch) for epoch in ranks] == [len(whole)] * world
    for number, (images, labels) in enumerate(whole):
        slices = [epoch[number] for epoch in ranks]
        sizes = [len(y) for _, y in slices]
        assert max(sizes) - min(sizes) <= 1
        joined = torch.cat([y for _, y in slices])
        assert sorted(joined.tolist()) == sorted(labels.tolist())
        place = {int(row): n for n, row in enumerate(labels)}
        for x, y in slices:
            assert torch.equal(x, images[[place[int(row)] for row in y]])


@given(st.integers(0, 10_000), st.sampled_from([(5, 7), (4, 4), (8, 3)]))
def test_crop_and_flip_equals_the_loop(seed: int, window: tuple[int, int]) -> None:
    draw, (height, width) = generator(seed), window
    images = torch.randint(0, 256, (6, 2, 9, 11), dtype=torch.uint8, generator=draw)
    top = torch.randint(0, 9 - height + 1, (6,), generator=draw)
    left = torch.randint(0, 11 - width + 1, (6,), generator=draw)
    flip = torch.rand(6, generator=draw) < 0.5
    crops = [x[:, t : t + height, l : l + width] for x, t, l in zip(images, top, left, strict=True)]
    expected = torch.stack([x.flip(2) if f else x for x, f in zip(crops, flip, strict=True)])
    assert torch.equal(crop_and_flip(images, top, left, flip, height, width), expected)


def windows(image: torch.Tensor, side: int) -> list[torch.Tensor]:
    """Every window of an image, and then every one mirrored."""
    span = image.shape[1] - side + 1
    cut = [image[:, t : t + side, l : l + side] for t in range(span) for l in range(span)]
    return cut + [x.flip(2) for x in cut]


@pytest.mark.parametrize(("augment", "places"), [("crop-flip", 162), ("resize-crop-flip", 18)])
def test_augmented_images_are_windows_and_every_window_comes(augment: str, places: int) -> None:
    split = numbered(1, size=6, crop=4 if augment == "resize-crop-flip" else None)
    many = Split(split.inputs.expand(4000, -1, -1, -1), torch.zeros(4000, dtype=torch.int64), split.crop)
    image = split.inputs[0]
    allowed = windows(F.pad(image, (4, 4, 4, 4)), 6) if augment == "crop-flip" else windows(image, 4)
    assert len(allowed) == places
    index = {x.numpy().tobytes(): n for n, x in enumerate(allowed)}
    ((images, _),) = pixels(Batches(many, 4000, **PLAIN, augment=augment, generator=generator()))
    counts = torch.tensor([index[x.numpy().tobytes()] for x in images]).bincount(minlength=places)
    chi_squared = float(((counts - 4000 / places) ** 2 / (4000 / places)).sum())
    assert chi_squared < places - 1 + 5 * (2 * (places - 1)) ** 0.5  # uniform over places and mirrorings


@pytest.mark.parametrize(("size", "crop", "first"), [(72, 64, 4), (9, 8, 0), (11, 8, 1)])
def test_evaluation_crops_the_centre(size: int, crop: int, first: int) -> None:
    split = numbered(3, size, crop)
    ((images, _),) = pixels(Batches(split, 3, **PLAIN))
    assert torch.equal(images, split.inputs[:, :, first : first + crop, first : first + crop])


def test_crop_flip_of_stored_images_pads_their_centre() -> None:
    split = numbered(200, 11, 8)
    ((images, _),) = pixels(Batches(split, 200, **PLAIN, augment="crop-flip", generator=generator()))
    assert images.shape[2:] == (8, 8)
    padded = F.pad(split.inputs[:, :, 1:9, 1:9], (4, 4, 4, 4))
    for image, source in zip(images[:20], padded[:20], strict=True):
        assert any(torch.equal(image, window) for window in windows(source, 8))


def test_the_state_of_the_generator_decides() -> None:
    split = numbered(50)
    draw = generator(3)
    batches = Batches(split, 8, **PLAIN, augment="crop-flip", shuffle=True, generator=draw)
    state = draw.get_state()
    first, second = pixels(batches), pixels(batches)
    assert not torch.equal(first[0][0], second[0][0])  # another epoch, another order
    draw.set_state(state)
    next(iter(batches))  # an epoch broken off draws as much as a whole one
    again = pixels(batches)
    for (x, y), (same_x, same_y) in zip(second, again, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_normalised_epoch_has_mean_zero_and_variance_one() -> None:
    split = numbered(40)
    x = torch.cat([x for x, _ in Batches(split, 7, *statistics(split.inputs))])
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_normalise_is_the_formula_and_changes_nothing_in_place() -> None:
    images, features = numbered(4).inputs, torch.randn(10, 4) * 3 + 1
    expected = (images.double() / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / 0.5
    torch.testing.assert_close(normalise(images, (0.1, 0.2, 0.3), (0.5,) * 3), expected.float())
    before = features.clone()
    ((batch, _),) = Batches(Split(features, torch.arange(10)), 10, (1.0,) * 4, (3.0,) * 4)
    torch.testing.assert_close(batch, (before - 1) / 3)
    assert torch.equal(features, before)
    with pytest.raises(InvalidValue, match=r"one value per channel or feature, \(3,\), but have \(1,\)"):
        normalise(images, (0.1,), (0.5,))


@pytest.mark.parametrize(
    ("settings", "ranks", "says"),
    [
        ({"augment": "crop-flop"}, (0, 1), "unknown augment 'crop-flop': did you mean 'crop-flip'"),
        ({"batch_size": 0}, (0, 1), "batch_size must be at least 1, not 0"),
        ({"augment": "resize-crop-flip"}, (0, 1), "needs images stored larger than their crop"),
        ({"split": Split(torch.zeros(2, 3), torch.arange(2)), "augment": "crop-flip"}, (0, 1), "features take 'none'"),
        ({"std": (0.0, 1.0, 1.0)}, (0, 1), "std must be positive, not 0.0"),
        ({}, (2, 2), "rank must be 0 to world_size - 1 = 1, not 2"),
        ({}, (0, 3), "batch_size 8 is not a multiple of world_size 3"),
        ({"shuffle": True}, (0, 2), "several ranks need a generator"),
        ({"augment": "crop-flip"}, (0, 2), "several ranks need a generator"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], ranks: tuple[int, int], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        Batches(**{"split": numbered(3), "batch_size": 8, **PLAIN, **settings}).of_rank(*ranks)
