"""The optimiser of a recipe, and the subnormal numbers it leaves behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropmax.classifier import Classifier
from dropmax.workbench.networks import Pretrained
from dropmax.workbench.recipes import Recipe

#: Weights and moments smaller than this change no result, and would soon be subnormal.
SMALLEST = 1e-30


def make_optimizer(model: Classifier, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimiser that ``recipe.training`` asks for, without weight decay on the exempt parameters.

    >>> from dropmax import DropMax
    >>> from dropmax.workbench.recipes import load_recipe
    >>> model = Classifier(torch.nn.Flatten(), DropMax(4, 3))
    >>> type(make_optimizer(model, load_recipe("mnist-1k", "released"))).__name__
    'Adam'
    """
    options = recipe.training
    groups = model.param_groups(options.weight_decay, exempt=options.decay_exempt)
    if not options.decay_biases:
        groups = _without_biases(groups)
    if isinstance(model.net, Pretrained):
        slow = set(model.net.graph.parameters())
        groups = [{**group, "params": [p for p in group["params"] if p not in slow]} for group in groups]
        # Decaying what was learned from a million photographs would only forget it.
        learning = [p for p in model.net.graph.parameters() if p.requires_grad]
        groups.append({"params": learning, "weight_decay": 0.0, "rate": options.pretrained_rate})
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=options.momentum, fused=True)
    kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.learning_rate, fused=True)


def _without_biases(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take weight decay from biases and from the scales and shifts of normalisations: all that is a vector."""
    split = [
        {**group, "params": [p for p in group["params"] if (p.dim() > 1) == matrices]}
        | ({} if matrices else {"weight_decay": 0.0})
        for group in groups
        for matrices in (True, False)
    ]
    return [group for group in split if group["params"]]


def flush_subnormals(optimizer: torch.optim.Optimizer) -> None:
    """Set weights and moments below 1e-30 to zero.

    Weight decay shrinks the weights of dead units until they are subnormal, and a CPU needs some hundred cycles for
    each product with such a number: after 700 epochs of `mnist-1k.paper`, 4 % of a layer's weights made it 25 times
    slower. No result changes: against Adam's epsilon of 1e-8 such moments round away. ``torch.set_flush_denormal``
    would act on one thread only, and on the rest of the user's process.

    >>> weight = torch.nn.Parameter(torch.tensor([1e-40, 0.5]))
    >>> flush_subnormals(torch.optim.Adam([weight]))
    >>> weight.tolist()
    [0.0, 0.5]
    """
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for x in (parameter, *optimizer.state.get(parameter, {}).values()):
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
                    x.masked_fill_(x.abs() < SMALLEST, 0.0)
