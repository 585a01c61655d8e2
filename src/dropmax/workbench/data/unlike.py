"""Inputs that look unlike what a model was trained on: inverted pictures, features in other units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Unlike"]

#: An image counts as unlike where its mean pixel is this many deviations of the training pixels from their mean:
#: MNIST (0.13, deviation 0.31) turned dark on light is 2.4 off, and no photograph on white paper is.
_BRIGHTNESS = 2.0
#: A row of features, where they are on average this many deviations from the training means.
_FEATURES = 10.0


class Unlike:
    """Counts the inputs that look unlike the training data.

    Args:
        brightness: mean and deviation of the training images' pixels in [0, 1]; None if they were not recorded.
        mean: of the features in training.
        std: their deviation.

    >>> unlike = Unlike((0.13, 0.31), (0.13,), (0.31,))
    >>> unlike.look(torch.full((2, 1, 28, 28), 230, dtype=torch.uint8))
    >>> print(unlike.warning)
    2 of 2 images are far lighter than those the model was trained on (mean 0.90 against 0.13): ...
    """

    def __init__(self, brightness: tuple[float, float] | None, mean: Sequence[float], std: Sequence[float]) -> None:
        self.brightness = brightness
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)
        self.images = self.rows = self.lighter = self.darker = self.far = 0
        self.total = 0.0

    def look(self, inputs: Tensor) -> None:
        """Look at raw inputs: uint8 images or float32 features."""
        if inputs.ndim == 4:
            if self.brightness is not None:
                mean, std = self.brightness
                means = inputs.float().mean((1, 2, 3)) / 255
                self.images += len(means)
                self.lighter += int((means > mean + _BRIGHTNESS * std).sum())
                self.darker += int((means < mean - _BRIGHTNESS * std).sum())
                self.total += float(means.sum())
            return
        self.rows += len(inputs)
        self.far += int((((inputs - self.mean) / self.std).abs().mean(-1) > _FEATURES).sum())

    @property
    def warning(self) -> str:
        """What to tell the user, or nothing."""
        if self.far:
            return (
                f"{self.far:,} of {self.rows:,} rows are far from those the model was trained on "
                f"(on average more than {_FEATURES:.0f} standard deviations per feature): are they in the same units?"
            )
        if not (self.lighter or self.darker) or self.brightness is None:
            return ""
        count, how = max((self.lighter, "lighter"), (self.darker, "darker"))
        other = "dark on light" if how == "lighter" else "light on dark"
        return (
            f"{count:,} of {self.images:,} images are far {how} than those the model was trained on (mean "
            f"{self.total / self.images:.2f} against {self.brightness[0]:.2f}): if they are {other}, invert them first"
        )
