"""What the networks share: checks of shapes and sizes, and the initial weights each was published with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from dropmax.errors import InvalidType, InvalidValue, check_choice


def check_sizes(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return ``values`` as a tuple of positive integers, or say what else they are."""
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
    """Return the shape of one example, without the batch dimension, as a tuple."""
    shape = check_sizes("input_shape", input_shape)
    if not shape:
        raise InvalidValue("input_shape is (): give the shape of one example, such as (3, 32, 32) or (64,)")
    return shape


def check_image_shape(network: str, input_shape: Iterable[int], smallest: int = 1) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``, of which height and width must be at least ``smallest``."""
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
    """Raise unless ``x`` is a batch of ``input_shape``; for networks whose fully connected layer fixes the size."""
    if x.shape[1:] != input_shape:
        expected = ", ".join(map(str, input_shape))
        raise InvalidValue(f"this {network} was made for a batch of shape (N, {expected}), got {tuple(x.shape)}")


def glorot(network: nn.Module) -> None:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)), biases zero: the default of ``tf.layers``."""
    _start(network, (nn.Conv2d, nn.Linear), nn.init.xavier_uniform_)


def truncated_normal(network: nn.Module) -> None:
    """Normal of deviation 0.1 cut at 0.2, biases at 0.1, whatever the layer's size."""
    _start(network, (nn.Conv2d, nn.Linear), lambda w: nn.init.trunc_normal_(w, std=0.1, a=-0.2, b=0.2), bias=0.1)


def kaiming(network: nn.Module) -> None:
    """Convolutions normal with variance 2 / fan_out; batch norms start as the identity (PyTorch's default)."""
    _start(network, (nn.Conv2d,), lambda w: nn.init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"))


def _start(
    network: nn.Module, kinds: tuple[type[nn.Module], ...], draw: Callable[[Tensor], object], bias: float = 0.0
) -> None:
    for layer in network.modules():
        if isinstance(layer, kinds):
            draw(layer.weight)  # type: ignore[arg-type]
            if layer.bias is not None:
                nn.init.constant_(layer.bias, bias)  # type: ignore[arg-type]


def initialise_head(head: nn.Module, scheme: str) -> None:
    """Start a head's linear maps as its source does; ``training.head_init`` of a recipe names the scheme.

    ``"default"`` leaves PyTorch's start, uniform on +-1/sqrt(fan_in). ``"glorot"`` is that of the authors' released
    code, and ``"truncated-normal"`` that of the TensorFlow tutorial whose network the paper names.
    """
    schemes = {"default": lambda _: None, "glorot": glorot, "truncated-normal": truncated_normal}
    check_choice("head_init", scheme, schemes)
    schemes[scheme](head)
