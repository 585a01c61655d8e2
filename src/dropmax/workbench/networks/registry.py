"""Networks by name: those of this package, and any class of yours as ``package.module:Class`` or ``file.py:Class``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dropmax.errors import InvalidType, InvalidValue, RunError, did_you_mean, unknown
from dropmax.workbench.networks.lenet import LeNet
from dropmax.workbench.networks.mlp import MLP
from dropmax.workbench.networks.resnet import CifarResNet, ResNet
from dropmax.workbench.networks.shapes import check_input_shape
from dropmax.workbench.networks.small_cnn import SmallCNN
from dropmax.workbench.networks.tutorial_cnn import TutorialCNN

__all__ = ["NETWORKS", "NetworkSpec", "check_import", "feature_size", "make_network"]


@dataclass(frozen=True)
class NetworkSpec:
    """What a name stands for: a class, and the options that the name settles.

    >>> NETWORKS["resnet34-cifar"].settled
    {'depth': 34, 'stem': '3x3'}
    """

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
    "small-cnn": NetworkSpec(SmallCNN),
    "mlp": NetworkSpec(MLP),
}


def make_network(name: str, input_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build the network called ``name`` for examples of shape ``input_shape`` (without the batch dimension).

    ``name`` is a key of :data:`NETWORKS`, or ``package.module:ClassName`` or ``path/to/file.py:ClassName`` for a class
    of your own that derives from ``nn.Module``. Your class is called with ``input_shape=`` if its constructor takes
    that, and with ``options``. Its ``out_features`` says how long its feature vectors are; where it has none, one
    forward pass of zeros tells. A name with a colon imports that module, which runs its code: take such names only
    from people you trust.

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
        network = _construct(name, NetworkSpec(_import_class(name)), shape, options)
        network.out_features = feature_size(network, shape)  # type: ignore[assignment]  # a plain int attribute
        return network
    if name not in NETWORKS:
        raise InvalidValue(unknown("network", name, NETWORKS, "your own is package.module:Class or ./file.py:Class"))
    return _construct(name, NETWORKS[name], shape, options)


def check_import(name: str, source: str, trust_network: bool) -> None:
    """Raise where building the network ``name`` would import a module only because the file ``source`` says so.

    A model file or a run directory may come from anybody, and importing a module runs it. So a network named by an
    import path passes only if its module is imported already (then the file chooses among classes the program uses
    anyway), or if the caller trusts it. Names in :data:`NETWORKS` always pass.

    >>> check_import("lenet", "model.safetensors", trust_network=False)
    >>> check_import("stranger:Net", "model.safetensors", trust_network=False)
    Traceback (most recent call last):
    dropmax.errors.RunError: model.safetensors would import the network 'stranger:Net', which is not part of ...
    """
    module = _module_name(name.rpartition(":")[0])
    if ":" in name and not trust_network and sys.modules.get(module) is None:
        raise RunError(
            f"{source} would import the network {name!r}, which is not part of dropmax: if you trust that module, "
            "pass trust_network=True (on the command line --trust-network), or import it first"
        )


def feature_size(network: nn.Module, input_shape: Sequence[int]) -> int:
    """Return ``network.out_features``, or, where there is none, what a forward pass of zeros gives.

    >>> feature_size(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
    3
    """
    size = getattr(network, "out_features", None)
    if size is None:
        return _size_by_forward(network, check_input_shape(input_shape))
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidType(f"{type(network).__name__}.out_features must be an integer, got {size!r}")
    if size < 1:
        raise InvalidValue(f"{type(network).__name__}.out_features must be positive, got {size}")
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
            f"failed ({type(error).__name__}: {_first_line(error)}): set self.out_features in its constructor"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(features, torch.Tensor) or features.ndim != 2:
        got = f"shape {tuple(features.shape)}" if isinstance(features, torch.Tensor) else type(features).__name__
        raise InvalidValue(f"{name} must give one feature vector an example, a tensor of shape (N, F), got {got}")
    return features.shape[1]


def _import_class(name: str) -> type[nn.Module]:
    """Import ``package.module:ClassName`` or ``file.py:ClassName``; only classes deriving from nn.Module pass."""
    module_name, _, class_name = name.rpartition(":")
    is_file = module_name.endswith(".py")
    parts = [class_name] if is_file else [*module_name.split("."), class_name]
    if not all(part.isidentifier() for part in parts):
        raise InvalidValue(
            f"cannot read network {name!r}: name your own as package.module:ClassName or file.py:ClassName"
        )
    try:
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except FileNotFoundError:
        raise InvalidValue(f"network {name!r}: there is no file {module_name}") from None
    except ModuleNotFoundError as error:
        # The module itself or a package above it is missing, or else something that it imports.
        missing = error.name or module_name
        itself = module_name == missing or module_name.startswith(missing + ".")
        file = f"{module_name.replace('.', '/')}.py"
        near = f" Its file is here: name it ./{file}:{class_name}" if Path(file).is_file() else ""
        advice = (
            f"is it installed, or its folder on PYTHONPATH?{near}"
            if itself
            else f"{module_name} imports it: install it"
        )
        raise InvalidValue(f"network {name!r}: there is no module {missing!r}; {advice}") from error
    except Exception as error:
        raise InvalidValue(
            f"network {name!r}: importing {module_name} failed ({type(error).__name__}: {_first_line(error)})"
        ) from error
    if not hasattr(module, class_name):
        hint = did_you_mean(class_name, vars(module))
        raise InvalidValue(
            f"network {name!r}: module {module_name!r} has no {class_name!r};{hint or ' check the name'}"
        )
    cls = getattr(module, class_name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InvalidType(f"network {name!r} must be a class deriving from torch.nn.Module, got {cls!r}")
    return cls


def _module_name(module: str) -> str:
    """Return the name a module has in ``sys.modules``; that of a file follows from its path."""
    if not module.endswith(".py"):
        return module
    path = Path(module).expanduser().resolve()
    return f"dropmax_network_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module of its own, once; what lies beside it can be imported by it."""
    name, path = _module_name(str(path)), path.expanduser().resolve()
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")
