"""For training loops that say ``loss = criterion(model(x), y)``: a head that returns one tensor, and its criterion.

While training, :class:`PackedHead` returns the outputs of a head's linear maps side by side, and
:class:`DropMaxLoss` is the loss of that head computed from them. In evaluation mode the packed head returns ordinary
logits, so that argmax, softmax and every metric work unchanged, and the criterion is their cross entropy. Parameters
are used inside ``forward`` only: DistributedDataParallel, gradient checkpointing and the like need nothing special.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.checks import check_choice, check_features
from dropmax.errors import InvalidType, InvalidValue
from dropmax.functional import cross_entropy
from dropmax.heads.base import Head
from dropmax.heads.dropmax import DropMax
from dropmax.heads.loss import REDUCTIONS, Loss, RowLosses

__all__ = ["DropMaxLoss", "PackedHead", "features_of"]


class PackedHead(nn.Module):
    """A head whose ``forward`` returns, in training mode, everything its loss needs as one tensor.

    In training mode ``(..., d)`` features give ``(..., 3 K + 1)`` for DropMax: class logits, retain logits and r, side
    by side (a fourth K with ``stop_gradient="parameters"``; 2 K for heads with two maps), and then one NaN. These
    are not logits, and the NaN says so: any other criterion, such as ``nn.CrossEntropyLoss``, returns NaN at the first
    step instead of training 3 K classes in silence. For softmax, whose outputs are logits, it gives just those. In
    evaluation mode it gives the K logits of ``head(features)``.

    Args:
        head: the head to wrap, ``dropmax.DropMax(512, 10)`` or any other. It is the attribute ``head``:
            ``packed.head.retain_probs(features)``.

    >>> from dropmax import DropMax
    >>> model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), PackedHead(DropMax(64, 10)))
    >>> criterion = DropMaxLoss(model)
    >>> images, labels = torch.rand(8, 784), torch.arange(8)
    >>> criterion(model(images), labels).backward()
    >>> model(images).shape, model.eval()(images).shape
    (torch.Size([8, 31]), torch.Size([8, 10]))
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        if not isinstance(head, Head):
            raise InvalidType(f"head must be a dropmax head, got {type(head).__name__}: make one with make_head(...)")
        self.head = _packable(head)

    @property
    def in_features(self) -> int:
        """Size of the feature vector, as ``nn.Linear`` has it."""
        return self.head.in_features

    def forward(self, features: Tensor) -> Tensor:
        """Return what :class:`DropMaxLoss` takes in training mode, and logits ``(..., K)`` in evaluation mode."""
        if not self.training:
            logits: Tensor = self.head(features)
            return logits
        check_features(features, self.head.in_features)
        parts = list(self.head.logits(features).values())
        if _is_marked(self.head):
            parts.append(parts[0].new_full((*features.shape[:-1], 1), math.nan))
        return torch.cat(parts, -1)


class DropMaxLoss(nn.Module):
    """The criterion that goes with a :class:`PackedHead`: ``criterion(model(x), y)``.

    Given the output of training mode it equals ``head.loss(features, y).total``, gradients included. Given the K
    logits of evaluation mode it is their cross entropy, as ``nn.CrossEntropyLoss`` with the head's ``class_weight``,
    ``label_smoothing`` and ``ignore_index``. The width of the tensor says which; where both have K columns, as with
    softmax, sparsemax and focal, it is the head's own loss of them. It has no parameters, and shares the options of the
    head: setting ``packed.head.temperature`` between two epochs is enough.

    Classes are the last dimension: for tokens ``(N, T, ...)`` and labels ``(N, T)``, not torch's ``(N, C, T)``.

    Args:
        head: the packed head, a model that holds exactly one, or a plain head with the same options.
        reduction: ``"mean"`` over the rows that count, ``"sum"`` or ``"none"``.

    >>> from dropmax import DropMax
    >>> packed = PackedHead(DropMax(4, 3, ignore_index=-1))
    >>> criterion = DropMaxLoss(packed)
    >>> features, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, -1, 0])
    >>> noise = torch.rand(5, 3)
    >>> same = packed.head.loss(features, labels, noise=noise).total
    >>> torch.equal(criterion(packed(features), labels, noise=noise), same)
    True
    """

    def __init__(self, head: nn.Module, *, reduction: str = "mean") -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        if not isinstance(head, nn.Module):
            raise InvalidType(f"DropMaxLoss takes a packed head or a model that holds one, got {head!r}")
        # In a tuple, so that the head's parameters do not become the criterion's.
        self._head = (_packable(head) if isinstance(head, Head) else _find_packed(head).head,)
        self.reduction = reduction

    @property
    def head(self) -> Head:
        """The head whose loss this is."""
        return self._head[0]

    def forward(self, output: Tensor, target: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """Return the loss.

        Args:
            output: what the model returned, packed or logits.
            target: class indices, one for each row of ``output``; or soft labels, as for :meth:`dropmax.Head.loss`.
            noise: in place of the global generator's, as for :meth:`dropmax.Head.loss`.
        """
        return self.terms(output, target, noise=noise).total

    def terms(
        self, output: Tensor, target: Tensor, *, noise: Tensor | None = None, reduction: str | None = None
    ) -> Loss:
        """Return the loss together with its terms, for a log.

        >>> from dropmax import DropMaxQP
        >>> packed = PackedHead(DropMaxQP(4, 3))
        >>> sorted(DropMaxLoss(packed).terms(packed(torch.randn(2, 4)), torch.tensor([0, 1])).terms)
        ['cross_entropy', 'entropy', 'kl']
        """
        head = self.head
        reduction = self.reduction if reduction is None else reduction
        check_choice("reduction", reduction, REDUCTIONS)
        packed = self._is_packed(output)
        rows, shape = output.reshape(-1, output.shape[-1]), output.shape[:-1]
        noise = head.check_noise(noise, rows, shape) if packed else None

        def losses(rows: Tensor, labels: Tensor, noise: Tensor | None) -> RowLosses:
            return (
                head.row_losses_of(_split(head, rows), labels, noise)
                if packed
                else _cross_entropies(head, rows, labels)
            )

        loss = head.loss_of(losses, rows, target, noise, shape, reduction)
        if packed and head.stateful:
            head.update(rows, target, shape, _split(head, rows))
        return loss

    def logits(self, output: Tensor) -> Tensor:
        """Return the K logits of the mean prediction from what the model returned in either mode.

        For accuracy on the fly: ``criterion.logits(model(x)).argmax(-1)``.

        >>> from dropmax import DropMax
        >>> packed, features = PackedHead(DropMax(4, 3)), torch.randn(2, 4)
        >>> torch.equal(DropMaxLoss(packed).logits(packed(features)), packed.eval()(features))
        True
        """
        if not self._is_packed(output):
            return output
        return self.head.prediction_logits(_split(self.head, output))

    def compute_loss_func(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss as Hugging Face's ``Trainer(compute_loss_func=criterion.compute_loss_func)`` wants it.

        That is the sum over the rows, divided by the number of labels in all the batches whose gradients are
        accumulated; the mean where that number is not given.

        >>> from types import SimpleNamespace
        >>> from dropmax import Softmax
        >>> criterion, logits = DropMaxLoss(Softmax(4, 2)), torch.zeros(3, 2)
        >>> criterion.compute_loss_func(SimpleNamespace(logits=logits), torch.tensor([0, 1, 1]), num_items_in_batch=6)
        tensor(0.3466)
        """
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        if num_items_in_batch is None:
            return self.terms(logits, labels, reduction="mean").total
        return self.terms(logits, labels, reduction="sum").total / num_items_in_batch

    def extra_repr(self) -> str:
        """Show the head, whose options are those of the loss."""
        return repr(self.head) + (f", reduction={self.reduction!r}" if self.reduction != "mean" else "")

    def _is_packed(self, output: Tensor) -> bool:
        """Tell a packed output from logits by its width, and refuse any other."""
        if not isinstance(output, Tensor):
            raise InvalidType(f"the model's output must be a torch.Tensor, got {type(output).__name__}")
        plain = self.head.num_classes
        packed = plain * len(_packed_names(self.head)) + _is_marked(self.head)
        if output.dim() > 0 and output.shape[-1] in (packed, plain):
            return output.shape[-1] == packed
        hint = ""
        if output.dim() > 2 and output.shape[1] in (packed, plain):
            hint = "; classes are the last dimension here: pass output.movedim(1, -1)"
        raise InvalidValue(
            f"the model's output has shape {tuple(output.shape)}, but the last dimension must be {packed}, what "
            f"PackedHead({self.head.name!r}) returns in training mode, or {plain}, the logits of evaluation mode{hint}"
        )


def features_of(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Run ``model(*args, **kwargs)`` and return the features that went into its packed head.

    With them a foreign model answers what a head can answer: ``head.retain_probs(features)``,
    ``head.predict_proba(features, "exact")``. The model runs as it stands: call ``model.eval()`` before.

    >>> from dropmax import DropMax
    >>> model = nn.Sequential(nn.Flatten(), PackedHead(DropMax(784, 10)))
    >>> features = features_of(model.eval(), torch.rand(2, 1, 28, 28))
    >>> model[-1].head.retain_probs(features).shape
    torch.Size([2, 10])
    """
    caught: list[Tensor] = []
    hook = _find_packed(model).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        model(*args, **kwargs)
    finally:
        hook.remove()
    if not caught:
        raise InvalidValue(f"{type(model).__name__} never called its packed head")
    return caught[-1]


def _find_packed(model: nn.Module) -> PackedHead:
    found = [module for module in model.modules() if isinstance(module, PackedHead)]
    if len(found) == 1:
        return found[0]
    what = f"holds {len(found)} packed heads: pass the one that is meant" if found else "holds no packed head"
    how = "" if found else ": put one in with replace_head(model, packed=True)"
    raise InvalidValue(f"{type(model).__name__} {what}{how}")


def _cross_entropies(head: Head, logits: Tensor, target: Tensor) -> RowLosses:
    """Return the cross entropy of the mean prediction, as ``nn.CrossEntropyLoss`` with the head's options."""
    found = cross_entropy(logits, target, label_smoothing=head.label_smoothing, class_weight=head.class_weight)
    return RowLosses(found, ("cross_entropy",), lambda: {"cross_entropy": found})


def _is_marked(head: Head) -> bool:
    """Say whether what the loss needs differs from the logits of the prediction: then a column of NaN marks it."""
    return len(_packed_names(head)) > 1 or head.noise_shape(1) is not None or head.transforms


def _packed_names(head: Head) -> tuple[str, ...]:
    """Return the names of what :meth:`Head.logits` returns, by asking it about no rows."""
    with torch.no_grad():
        return tuple(head.logits(head.classifier.weight.new_empty(0, head.in_features)))


def _split(head: Head, packed: Tensor) -> dict[str, Tensor]:
    """Undo the concatenation; the mark is left over."""
    size = head.num_classes
    return {name: packed[..., i * size : (i + 1) * size] for i, name in enumerate(_packed_names(head))}


def _packable(head: Head) -> Head:
    """Refuse a head whose loss is not computed from its logits, or whose logits are never there all at once."""
    if not head.packable:
        raise InvalidType(
            f"the loss of {head.name!r} cannot be computed from logits alone, so it cannot be packed: "
            f"{type(head).__name__} has a loss() of its own. Override the hooks logits() and terms() instead, or set "
            "packable = True on the class if its loss() changes no number"
        )
    if isinstance(head, DropMax) and head.chunk_classes:
        raise InvalidValue(
            f"chunk_classes={head.chunk_classes} never holds the logits of all classes, and a packed output is just "
            "those: leave it out, or call head.loss(features, target)"
        )
    return head
