"""Initial weights. Each scheme is the one its network was published with; biases are part of the scheme."""

from __future__ import annotations

from torch import nn

from dropmax.errors import InvalidValue, did_you_mean

__all__ = ["glorot", "initialise_head", "kaiming", "truncated_normal"]


def glorot(network: nn.Module) -> None:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)), biases zero: the default of ``tf.layers``.

    >>> layer = nn.Linear(3, 3)
    >>> glorot(layer)
    >>> bool(layer.weight.abs().max() <= 1), layer.bias.tolist()
    (True, [0.0, 0.0, 0.0])
    """
    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def truncated_normal(network: nn.Module, std: float = 0.1, bias: float = 0.1) -> None:
    """Normal of standard deviation ``std`` cut at two of them, biases at ``bias``, whatever the layer's size.

    >>> layer = nn.Linear(3, 3)
    >>> truncated_normal(layer)
    >>> bool(layer.weight.abs().max() <= 0.2), bool((layer.bias == 0.1).all())
    (True, True)
    """
    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            if layer.bias is not None:
                nn.init.constant_(layer.bias, bias)


def kaiming(network: nn.Module) -> None:
    """Convolutions normal with variance 2 / fan_out; batch norms start as the identity (PyTorch's default).

    >>> layer = nn.Conv2d(64, 64, 3)
    >>> kaiming(layer)
    >>> round(float(layer.weight.detach().var()) * 64 * 9, 1)
    2.0
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def initialise_head(head: nn.Module, scheme: str) -> None:
    """Start a head's linear maps as its source does; ``training.head_init`` of a recipe names the scheme.

    ``"default"`` leaves PyTorch's start, uniform on +-1/sqrt(fan_in). ``"glorot"`` is that of the authors' released
    code, and ``"truncated-normal"`` that of the TensorFlow tutorial whose network the paper names.

    >>> from dropmax import Softmax
    >>> head = Softmax(in_features=4, num_classes=3)
    >>> initialise_head(head, "truncated-normal")
    >>> head.classifier.bias.tolist()
    [0.10000000149011612, 0.10000000149011612, 0.10000000149011612]
    """
    schemes = {"default": lambda _: None, "glorot": glorot, "truncated-normal": truncated_normal}
    if scheme not in schemes:
        raise InvalidValue(
            f"unknown head_init {scheme!r}:{did_you_mean(scheme, schemes)} It is one of {', '.join(schemes)}"
        )
    schemes[scheme](head)
