"""One step of :class:`dropmax.sklearn.DropMaxClassifier`: the loss of a batch, and its gradients.

A step on a small batch spends most of its time in autograd's bookkeeping and in checks of arguments that ``fit`` has
checked already. For the usual model, a perceptron with a DropMax head, :func:`by_hand` does the same arithmetic without
them. Everything else goes through :func:`by_autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from dropmax.classifier import Classifier
from dropmax.heads import DropMax
from dropmax.objective import Block, block
from dropmax.workbench.networks import MLP

__all__ = ["Step", "by_autograd", "by_hand", "choose_step"]

#: Puts the gradients of the weighted mean loss of a batch into ``.grad``, and returns the loss. Its arguments are the
#: model, inputs (N, n_features), labels (N,), and weights (N,), where None means that all are 1.
Step = Callable[[Classifier, Tensor, Tensor, Tensor | None], Tensor]


def choose_step(model: Classifier, num_rows: int) -> Step:
    """Return :func:`by_hand` where it can do what :func:`by_autograd` does for batches of at most ``num_rows`` rows."""
    head = model.head
    usual = (
        type(model.net) is MLP
        and type(head) is DropMax
        and head.stop_gradient == "logits"
        and head.rank is None
        and head.class_weight is None
        and not head.needs_all_classes()
        and not head.chunk_classes
        and head.samples * num_rows * head.num_classes <= 2**16  # more would not fit into the cache
        and all(parameter.requires_grad for parameter in model.parameters())
    )
    return by_hand if usual else by_autograd


def by_autograd(model: Classifier, x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Do a :data:`Step` for any network and head."""
    model.zero_grad()
    losses = model.head.loss(model.net(x), target, reduction="none").total
    loss = losses.mean() if weight is None else (weight * losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@torch.no_grad()
def by_hand(model: Classifier, x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Do a :data:`Step` for a perceptron with a DropMax head: the chain rule, layer by layer."""
    net, head = model.net, model.head
    assert isinstance(net, MLP)
    assert isinstance(head, DropMax)
    hidden = [layer for layer in net.layers if isinstance(layer, nn.Linear)]
    dropout = next((layer.p for layer in net.layers if isinstance(layer, nn.Dropout)), 0.0)
    seen = [x]  # by each layer
    for layer in hidden:
        h = torch.addmm(layer.bias, seen[-1], layer.weight.t()).relu_()
        if dropout:  # as nn.Dropout, whose bernoulli_() takes four times as long as rand
            h.mul_(torch.rand_like(h).ge_(dropout)).mul_(1 / (1 - dropout))
        seen.append(h)

    maps = cast("list[nn.Linear]", [head.classifier, head.retain, head.correction])  # of full rank
    o, a, r = (torch.addmm(layer.bias, seen[-1], layer.weight.t()) for layer in maps)
    noise = cast(Tensor, head.draw_noise(None, o))
    options = head.objective()
    sums, found = block(Block(o, a, r, target.unsqueeze(-1), noise=(noise,)), options)
    losses = sums.total(sums.cross_entropy(options), options)

    share = 1 / len(x) if weight is None else (weight / len(x)).unsqueeze(-1)
    back = torch.zeros_like(seen[-1])
    for layer, gradient in zip(maps, cast("tuple[Tensor, ...]", found[:3]), strict=True):
        _learn(layer, seen[-1], gradient.mul_(share))
        back.addmm_(gradient, layer.weight)
    for layer, inputs, outputs in zip(hidden[::-1], seen[-2::-1], seen[:0:-1], strict=True):
        back = torch.ops.aten.threshold_backward(back, outputs, 0)  # 0 where the relu cut off, or dropout
        if dropout:
            back.mul_(1 / (1 - dropout))
        _learn(layer, inputs, back)
        if layer is not hidden[0]:
            back = torch.mm(back, layer.weight)
    return losses.mean() if weight is None else (weight * losses).mean()


def _learn(layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> None:
    """Set the gradients of a layer, given that of its outputs."""
    layer.weight.grad = torch.mm(gradient.t(), inputs)
    layer.bias.grad = gradient.sum(0)
