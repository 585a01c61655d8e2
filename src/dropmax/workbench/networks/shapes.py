"""What an input shape may be, and errors that say which one would work."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import Tensor

from dropmax.errors import InvalidType, InvalidValue

__all__ = ["check_image_shape", "check_input", "check_input_shape", "check_sizes"]


def check_sizes(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return ``values`` as a tuple of positive integers, or say what else they are.

    >>> check_sizes("hidden", [256, 128])
    (256, 128)
    """
    try:
        if isinstance(values, str):
            raise TypeError
        sizes = tuple(operator.index(value) for value in values)
    except TypeError:
        raise InvalidType(f"{name} must be a sequence of integers, got {values!r}") from None
    if not all(size > 0 for size in sizes):
        raise InvalidValue(f"{name} must hold positive integers only, got {sizes}")
    return sizes


def check_input_shape(input_shape: Iterable[int]) -> tuple[int, ...]:
    """Return the shape of one example, without the batch dimension, as a tuple.

    >>> check_input_shape([3, 32, 32])
    (3, 32, 32)
    """
    shape = check_sizes("input_shape", input_shape)
    if not shape:
        raise InvalidValue("input_shape is (): give the shape of one example, such as (3, 32, 32) or (64,)")
    return shape


def check_image_shape(network: str, input_shape: Iterable[int], smallest: int = 1) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``, of which height and width must be at least ``smallest``.

    >>> check_image_shape("LeNet", (1, 8, 8), smallest=16)
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: LeNet cannot take images of shape (1, 8, 8): the smallest that works is (1, 16, 16)
    """
    shape = check_input_shape(input_shape)
    if len(shape) != 3:
        raise InvalidValue(f"{network} takes images of shape (channels, height, width), got input_shape {shape}")
    channels, height, width = shape
    if min(height, width) < smallest:
        raise InvalidValue(
            f"{network} cannot take images of shape {shape}: the smallest that works is "
            f"({channels}, {smallest}, {smallest})"
        )
    return channels, height, width


def check_input(network: str, x: Tensor, input_shape: tuple[int, ...]) -> None:
    """Raise unless ``x`` is a batch of ``input_shape``; for networks whose fully connected layer fixes the image size.

    >>> import torch
    >>> check_input("LeNet", torch.zeros(2, 1, 32, 32), (1, 28, 28))
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: this LeNet was made for a batch of shape (N, 1, 28, 28), got (2, 1, 32, 32)
    """
    if x.shape[1:] != input_shape:
        expected = ", ".join(str(size) for size in input_shape)
        raise InvalidValue(f"this {network} was made for a batch of shape (N, {expected}), got {tuple(x.shape)}")
