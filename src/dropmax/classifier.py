"""A network and a head joined, and the swap of a model's last layer for a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from dropmax.checks import check_flag
from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import Head, Loss, make_head
from dropmax.packed import PackedHead

#: Where models keep their last layer, by convention of the libraries people use.
_USUAL_NAMES = ("fc", "classifier", "head", "heads")

_Model = TypeVar("_Model", bound=nn.Module)


class Classifier(nn.Module):
    """A network that ends in a feature vector, followed by a head.

    ``classifier(x)`` returns logits; ``classifier(x, y)`` returns the :class:`~dropmax.Loss`, computed inside
    ``forward``, which is what DistributedDataParallel needs to synchronise gradients.

    >>> from dropmax import DropMax
    >>> model = Classifier(nn.Flatten(), DropMax(in_features=784, num_classes=10))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.tensor([3, 1, 4, 1])
    >>> model(images).shape
    torch.Size([4, 10])
    >>> model(images, labels).total.backward()
    """

    def __init__(self, net: nn.Module, head: Head) -> None:
        super().__init__()
        if not isinstance(head, Head):
            raise InvalidType(f"head must be a dropmax head, got {type(head).__name__}: make one with make_head(...)")
        self.net = net
        self.head = head

    def forward(self, x: Tensor, y: Tensor | None = None, *, noise: Tensor | None = None) -> Tensor | Loss:
        """Return logits, or, given labels, the loss and its terms; ``noise`` is passed to :meth:`Head.loss`."""
        features = self.net(x)
        if y is None:
            logits: Tensor = self.head(features)
            return logits
        return self.head.loss(features, y, noise=noise)

    def predict_proba(self, x: Tensor, mode: str | None = None, **options: Any) -> Tensor:
        """Return class probabilities, see :meth:`dropmax.Head.predict_proba`."""
        return self.head.predict_proba(self.net(x), mode, **options)

    def param_groups(self, weight_decay: float = 0.0, *, exempt: Iterable[str] = ("theta",)) -> list[dict[str, Any]]:
        """Return parameter groups for an optimiser: the network's first, then :meth:`dropmax.Head.param_groups`."""
        groups = [{"params": list(self.net.parameters()), "weight_decay": weight_decay}]
        return [group for group in groups if group["params"]] + self.head.param_groups(weight_decay, exempt=exempt)


@overload
def replace_head(
    model: nn.Module,
    head: str | type[Head] | Head = "dropmax",
    *,
    packed: Literal[False] = False,
    name: str | None = None,
    num_classes: int | None = None,
    **options: Any,
) -> Classifier: ...


@overload
def replace_head(
    model: _Model,
    head: str | type[Head] | Head = "dropmax",
    *,
    packed: Literal[True],
    name: str | None = None,
    num_classes: int | None = None,
    **options: Any,
) -> _Model: ...


def replace_head(
    model: nn.Module,
    head: str | type[Head] | Head = "dropmax",
    *,
    packed: bool = False,
    name: str | None = None,
    num_classes: int | None = None,
    **options: Any,
) -> nn.Module:
    """Replace the last ``nn.Linear`` of a model by a head.

    The linear layer is looked for under the usual names (``fc``, ``classifier``, ``head``, ``heads``, or what
    ``get_classifier()`` returns, or the last linear layer inside such a block); ``name`` says which where that is
    ambiguous. It is replaced by ``nn.Identity`` in ``model`` itself, so that ``model`` now returns features. The new
    head keeps its in_features, device and dtype, and with an unchanged number of classes also its trained weights. A
    dropmax head that is there already is replaced in the same way, keeping its class logits: so
    ``replace_head(model, "softmax")`` is the way back.

    Args:
        model: ends in the linear layer, with nothing after it.
        head: a name (:func:`dropmax.heads.find_head`), a class, or a head that is made already, which goes in as it is.
        packed: for a loop that says ``criterion(model(x), y)``: put a :class:`~dropmax.PackedHead` where the layer was
            and return ``model`` itself. The criterion is then ``DropMaxLoss(model)``.
        name: dotted name of the layer, as in ``model.named_modules()``.
        num_classes: of the new head; as many as the old layer had by default.
        options: of the head.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    >>> model.fc = nn.Linear(16, 5)
    >>> model = replace_head(model, "dropmax")
    >>> model.head
    DropMax(in_features=16, num_classes=5)
    >>> loss = model(torch.randn(3, 8), torch.tensor([0, 1, 2])).total
    """
    check_flag("packed", packed)
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}")
    place = _place_of_head(model) if name is None else None
    name = place or name or _find_last_layer(model)
    old = _last_map(model.get_submodule(name)) if place else _linear_named(model, name)
    new = (
        _fitting(head, old, num_classes, options) if isinstance(head, Head) else _made(head, old, num_classes, options)
    )
    if isinstance(model, Classifier) and name == "head" and not packed:
        return Classifier(model.net, new)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, PackedHead(new).train(old.training) if packed else nn.Identity())
    return model if packed else Classifier(model, new)


def _place_of_head(model: nn.Module) -> str | None:
    """Return the dotted name of the dropmax head, or packed head, that a model holds; None where there is none."""
    heads = [name for name, module in model.named_modules() if isinstance(module, (Head, PackedHead)) and name]
    outer = [name for name in heads if name.rpartition(".")[0] not in heads]
    if len(outer) > 1:
        raise InvalidValue(
            f"{type(model).__name__} holds {len(outer)} dropmax heads ({', '.join(outer)}): replace the one that is "
            "meant in the module that holds it"
        )
    return outer[0] if outer else None


def _last_map(module: nn.Module) -> nn.Linear:
    return (module.head if isinstance(module, PackedHead) else cast(Head, module)).classifier


def _made(head: str | type[Head], old: nn.Linear, num_classes: int | None, options: dict[str, Any]) -> Head:
    """Make a head in place of a layer, with its weights if it has as many classes."""
    options = {"device": old.weight.device, "dtype": old.weight.dtype, **options}
    new = make_head(head, old.in_features, num_classes or old.out_features, **options)
    if new.num_classes == old.out_features:
        with torch.no_grad():
            new.classifier.weight.copy_(old.weight)
            if old.bias is None:
                new.classifier.bias.zero_()
            else:
                new.classifier.bias.copy_(old.bias)
    return new


def _fitting(head: Head, old: nn.Linear, num_classes: int | None, options: dict[str, Any]) -> Head:
    """Return a finished head, if it fits in place of a layer."""
    if options or num_classes not in (None, head.num_classes):
        given = ", ".join([*options, *["num_classes"] * (num_classes is not None)])
        raise InvalidValue(f"{head!r} is made already: leave out {given}, or pass its class")
    if head.in_features != old.in_features:
        raise InvalidValue(f"{head!r} does not fit: the layer it would replace takes {old.in_features} features")
    return head


def _find_last_layer(model: nn.Module) -> str:
    """Return the dotted name of the only layer that can be the last."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        layer = get_classifier()
        if isinstance(layer, nn.Linear) and id(layer) in names:
            return names[id(layer)]
    found = []
    for usual in _USUAL_NAMES:
        block = getattr(model, usual, None)
        if isinstance(block, nn.Module):
            linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
            found += [names[id(linear[-1])]] if linear else []
    if len(found) == 1:
        return found[0]
    problem = f"has several candidates for the last layer ({', '.join(found)})" if found else "has none of the usual"
    usual = "" if found else f" last layers ({', '.join(_USUAL_NAMES)}, get_classifier())"
    raise InvalidValue(f"{type(model).__name__} {problem}{usual}: pass name=, one of {_linear_layers(model)}")


def _linear_named(model: nn.Module, name: str) -> nn.Linear:
    module = dict(model.named_modules()).get(name)
    if not name or not isinstance(module, nn.Linear):
        what = "has no layer" if module is None else f"has a {type(module).__name__}, not an nn.Linear, as"
        raise InvalidValue(f"{type(model).__name__} {what} {name!r}: name must be one of {_linear_layers(model)}")
    owners = [model.get_submodule(name[:end]) for end, letter in enumerate(name) if letter == "."]
    for owner in (model, *owners):
        if isinstance(owner, Head):
            raise InvalidValue(f"{type(model).__name__} ends in a dropmax head already: {name!r} is part of {owner!r}")
    return module


def _linear_layers(model: nn.Module) -> str:
    layers = [
        f"{name} ({module.in_features} -> {module.out_features})"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name
    ]
    return ", ".join(layers) or "(it has no nn.Linear at all)"
