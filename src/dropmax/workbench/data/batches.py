"""Minibatches drawn from memory, augmented and normalised with batched tensor operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from dropmax.errors import InvalidValue, check_choice
from dropmax.workbench.data.dataset import Split
from dropmax.workbench.data.images import centre_crop

Augment = Literal["none", "crop-flip", "resize-crop-flip"]
PADDING = 4


def normalise(
    inputs: torch.Tensor, mean: Sequence[float] | torch.Tensor, std: Sequence[float] | torch.Tensor
) -> torch.Tensor:
    """Return ``(x - mean) / std`` in float32, where x is uint8 pixels divided by 255, or features as they are.

    >>> normalise(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), (0.5,), (0.25,))
    tensor([[[[-2.,  2.]]]])
    """
    shift = torch.as_tensor(mean, dtype=torch.float32, device=inputs.device)
    spread = torch.as_tensor(std, dtype=torch.float32, device=inputs.device)
    if shift.shape != spread.shape or shift.shape != inputs.shape[1:2]:
        raise InvalidValue(
            f"mean and std need one value per channel or feature, {tuple(inputs.shape[1:2])}, "
            f"but have {tuple(shift.shape)} and {tuple(spread.shape)}"
        )
    if inputs.dtype == torch.uint8:
        shift, spread = shift * 255, spread * 255
    shape = (-1,) + (1,) * (inputs.ndim - 2)
    return (inputs - shift.view(shape)).div_(spread.view(shape))


def crop_and_flip(
    images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, flip: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Cut ``x[:, t : t + height, l : l + width]`` from each image, and mirror those of ``flip`` from left to right.

    >>> image = torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3)
    >>> crop_and_flip(image, torch.tensor([1]), torch.tensor([0]), torch.tensor([True]), 2, 2)
    tensor([[[[4, 3],
              [7, 6]]]], dtype=torch.uint8)
    """
    count, channels, rows, columns = images.shape
    row = top[:, None] + torch.arange(height, device=images.device)
    column = left[:, None] + torch.arange(width, device=images.device)
    column = torch.where(flip[:, None], column.flip(1), column)
    flat = (row[:, :, None] * columns + column[:, None, :]).view(count, 1, height * width)
    pixels = images.reshape(count, channels, rows * columns)
    return pixels.gather(2, flat.expand(-1, channels, -1)).view(count, channels, height, width)


class Batches:
    """The minibatches of one epoch, an iterable to go over once per epoch: (float32 inputs, int64 labels).

    All random numbers of an epoch are drawn when its iteration starts, so the batches depend on the state of
    ``generator`` then, and on nothing that happens during the epoch.

    Args:
        split: what to draw from.
        batch_size: rows per batch, over all ranks together.
        mean, std: what :func:`normalise` takes, for example those of the data set.
        augment: "none"; "crop-flip" pads by 4 black pixels, crops at random and mirrors half the images;
            "resize-crop-flip" crops at random from images stored larger than ``split.crop``, and mirrors. Without
            augmentation such images are cropped at their centre.
        shuffle: whether to go in random order.
        generator: where random numbers come from; the global generator of torch by default.
        device: where batches go.

    >>> from dropmax.workbench.data import load
    >>> digits = load("mnist-1k")
    >>> batches = Batches(digits.train, 64, digits.mean, digits.std, shuffle=True)
    >>> len(batches), [tuple(x.shape) for x, y in batches][-1]
    (16, (40, 1, 28, 28))
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment = "none",
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_choice("augment", augment, get_args(Augment))
        if batch_size < 1:
            raise InvalidValue(f"batch_size must be at least 1, not {batch_size}")
        if augment != "none" and not split.is_images:
            raise InvalidValue(f"augment {augment!r} is for images; features take 'none'")
        if augment == "resize-crop-flip" and split.crop is None:
            raise InvalidValue("'resize-crop-flip' needs images stored larger than their crop; use 'crop-flip'")
        if any(not value > 0 for value in std):
            raise InvalidValue(f"std must be positive, not {min(std)}")
        self.split, self.batch_size, self.augment = split, batch_size, augment
        self.shuffle, self.generator, self.device = shuffle, generator, torch.device(device)
        self.rank, self.world_size = 0, 1
        self._mean = torch.tensor(mean, dtype=torch.float32, device=self.device)
        self._std = torch.tensor(std, dtype=torch.float32, device=self.device)

    def of_rank(self, rank: int, world_size: int) -> Batches:
        """Take only the slice of each batch that belongs to one of several processes; returns these batches.

        Every rank draws the same order, so all slices together are the batch of a single process. Those of a last batch
        that is not full differ by at most one row, and can be empty. ``world_size`` must divide the batch size.
        """
        if not 0 <= rank < world_size:
            raise InvalidValue(f"rank must be 0 to world_size - 1 = {world_size - 1}, not {rank}")
        if self.batch_size % world_size:
            raise InvalidValue(f"batch_size {self.batch_size} is not a multiple of world_size {world_size}")
        if world_size > 1 and self.generator is None and (self.shuffle or self.augment != "none"):
            raise InvalidValue("several ranks need a generator, seeded alike on each, to draw the same order")
        self.rank, self.world_size = rank, world_size
        return self

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        count, inputs, labels = len(self.split), self.split.inputs, self.split.labels
        order = torch.randperm(count, generator=self.generator) if self.shuffle else torch.arange(count)
        places = self._places(count)
        for number in range(len(self)):
            start = number * self.batch_size
            mine = slice(start + self.rank, min(start + self.batch_size, count), self.world_size)
            rows = order[mine].to(inputs.device)
            x = self._move(inputs[rows])
            y = self._move(labels[rows.to(labels.device)])
            if x.ndim == 4:
                x = self._window(x, [place[mine] for place in places])
            yield normalise(x, self._mean, self._std), y

    def _places(self, count: int) -> list[torch.Tensor]:
        """Draw every image's window and mirroring for an epoch, in one go and moved to the device in one go."""
        if self.augment == "none":
            return []
        spare = [2 * PADDING, 2 * PADDING]
        if self.augment == "resize-crop-flip" and self.split.crop is not None:
            spare = [side - self.split.crop for side in self.split.inputs.shape[2:]]
        top, left = (torch.randint(most + 1, (count,), generator=self.generator) for most in spare)
        flip = torch.rand(count, generator=self.generator) < 0.5
        return [place.to(self.device) for place in (top, left, flip)]

    def _window(self, images: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        _, height, width = self.split.input_shape
        if self.augment != "resize-crop-flip":
            images = centre_crop(images, height, width)
        if self.augment == "none":
            return images
        if self.augment == "crop-flip":
            images = F.pad(images, (PADDING,) * 4)
        top, left, flip = places
        return crop_and_flip(images, top, left, flip, height, width)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)  # pinned, or the copy waits for the device
        return tensor.to(self.device)
