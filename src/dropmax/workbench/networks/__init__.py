"""Feature extractors: networks that end in the last feature vector h. The head on top is separate.

Each is an ``nn.Module`` whose ``out_features`` is the length of h. There are those of this package by name, and any
class of yours as ``package.module:Class`` or ``file.py:Class``.

>>> from dropmax.workbench.networks import make_network
>>> make_network("small-cnn", (3, 32, 32)).out_features
256
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dropmax.errors import InvalidType, InvalidValue, first_line, unknown
from dropmax.imports import import_class
from dropmax.workbench.backbones import LITE_SIZES
from dropmax.workbench.networks.common import check_input_shape
from dropmax.workbench.networks.pretrained import Pretrained
from dropmax.workbench.networks.resnet import BasicBlock, CifarResNet, ResNet, WideResNet
from dropmax.workbench.networks.small import MLP, LeNet, SmallCNN, TutorialCNN

__all__ = [
    "MLP", "NETWORKS", "BasicBlock", "CifarResNet", "LeNet", "NetworkSpec", "Pretrained", "ResNet", "SmallCNN",
    "TutorialCNN", "WideResNet", "feature_size", "make_network",
]  # fmt: skip


@dataclass(frozen=True)
class NetworkSpec:
    """What a name stands for: a class, and the options that the name settles."""

    cls: type[nn.Module]
    settled: Mapping[str, Any] = field(default_factory=dict)


NETWORKS: dict[str, NetworkSpec] = {
    "tutorial-cnn": NetworkSpec(TutorialCNN),
    "lenet": NetworkSpec(LeNet),
    "cifar-resnet": NetworkSpec(CifarResNet),
    "resnet18": NetworkSpec(ResNet, {"depth": 18, "stem": "7x7"}),
    "resnet34": NetworkSpec(ResNet, {"depth": 34, "stem": "7x7"}),
    "resnet18-cifar": NetworkSpec(ResNet, {"depth": 18, "stem": "3x3"}),
    "resnet34-cifar": NetworkSpec(ResNet, {"depth": 34, "stem": "3x3"}),
    "wide-resnet": NetworkSpec(WideResNet),
    "small-cnn": NetworkSpec(SmallCNN),
    "mlp": NetworkSpec(MLP),
    **{name: NetworkSpec(Pretrained, {"backbone": name}) for name in LITE_SIZES},
}


def make_network(name: str, input_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build the network called ``name`` for examples of shape ``input_shape`` (without the batch dimension).

    ``name`` is a key of :data:`NETWORKS`, or ``package.module:ClassName`` or ``path/to/file.py:ClassName`` for an
    ``nn.Module`` of your own. It is called with ``input_shape=`` if its constructor takes that, and with ``options``.
    Its ``out_features`` says how long its feature vectors are; where it has none, a forward pass of zeros tells. A name
    with a colon imports that module, which runs its code: take such names only from people you trust.

    >>> net = make_network("lenet", (1, 28, 28))
    >>> net.out_features
    500
    >>> make_network("lenett", (1, 28, 28))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dropmax.errors.InvalidValue: unknown network 'lenett': did you mean 'lenet'? Valid are tutorial-cnn, ...
    """
    if not isinstance(name, str):
        raise InvalidType(f"a network is named by a string, such as 'lenet', got {name!r}")
    shape = check_input_shape(input_shape)
    if ":" in name:
        network = _construct(name, NetworkSpec(import_class("network", name, nn.Module)), shape, options)
        network.out_features = feature_size(network, shape)  # type: ignore[assignment]  # a plain int attribute
        return network
    if name not in NETWORKS:
        raise InvalidValue(unknown("network", name, NETWORKS, "your own is package.module:Class or ./file.py:Class"))
    return _construct(name, NETWORKS[name], shape, options)


def feature_size(network: nn.Module, input_shape: Sequence[int]) -> int:
    """Return ``network.out_features``, or, where there is none, what a forward pass of zeros gives.

    >>> feature_size(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
    3
    """
    size, name = getattr(network, "out_features", None), type(network).__name__
    if size is None:
        return _size_by_forward(network, check_input_shape(input_shape))
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidType(f"{name}.out_features must be an integer, got {size!r}")
    if size < 1:
        raise InvalidValue(f"{name}.out_features must be positive, got {size}")
    return size


def _size_by_forward(network: nn.Module, input_shape: tuple[int, ...]) -> int:
    name = type(network).__name__
    parameter = next(network.parameters(), torch.empty(0))
    zeros = torch.zeros(1, *input_shape, device=parameter.device)
    # Evaluation mode keeps the zeros out of batch-norm statistics and lets a batch of one pass.
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            features = network(zeros)
    except Exception as error:
        raise InvalidValue(
            f"{name} has no out_features, and finding it by a forward pass of zeros of shape {tuple(zeros.shape)} "
            f"failed ({type(error).__name__}: {first_line(error)}): set self.out_features in its constructor"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(features, torch.Tensor) or features.ndim != 2:
        got = f"shape {tuple(features.shape)}" if isinstance(features, torch.Tensor) else type(features).__name__
        raise InvalidValue(f"{name} must return one feature vector per example, a tensor of shape (N, F), got {got}")
    return features.shape[1]


def _construct(name: str, spec: NetworkSpec, input_shape: tuple[int, ...], options: Mapping[str, Any]) -> nn.Module:
    """Call the class with its settled options, the shape and the user's options, having checked their names."""
    # A class without a constructor has that of nn.Module, whose signature says *args, **kwargs and which takes none.
    bare = spec.cls.__init__ is nn.Module.__init__
    parameters = {} if bare else dict(inspect.signature(spec.cls).parameters)
    arguments = dict(spec.settled)
    if spec.cls is MLP:
        arguments["in_features"] = math.prod(input_shape)  # an MLP flattens whatever it is given
    elif "input_shape" in parameters:
        arguments["input_shape"] = input_shape
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    free = [key for key, parameter in parameters.items() if parameter.kind in by_keyword and key not in arguments]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option in arguments:
            raise InvalidValue(f"network {name!r} settles {option} at {arguments[option]!r}; leave the option out")
        if option not in free and not takes_any:
            raise InvalidValue(unknown(f"option of network {name!r}", option, free))
    needed = [key for key in free if parameters[key].default is inspect.Parameter.empty and key not in options]
    if needed:
        raise InvalidValue(f"network {name!r} needs the option{'s' * (len(needed) > 1)} {', '.join(needed)}")
    return spec.cls(**arguments, **options)
