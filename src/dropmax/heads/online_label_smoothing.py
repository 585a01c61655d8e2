"""Label smoothing whose soft labels are what the model itself predicts for each class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from dropmax.checks import check_count, check_probability
from dropmax.errors import InvalidValue
from dropmax.functional import _wide
from dropmax.heads.base import Head
from dropmax.heads.options import SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: Of these, the soft labels take 1.6 GB.
MOST_CLASSES = 20_000


class OnlineLabelSmoothing(Head):
    """A linear map and a softmax, trained with hard and with soft labels (Zhang et al., 2021).

    The loss of a row with label t is ``(1 - w) (-log p_t) + w sum_k S_tk (-log p_k)``. Row t of S is the mean
    prediction for the examples of class t that were predicted correctly; it starts even, which is label smoothing.

    The paper averages over one epoch and uses the mean in the next. A head does not see where an epoch ends, so here S
    is a moving average: each correct example of class t moves row t by ``1 / memory`` of the way, in training mode only
    and after the loss of its batch. S is a buffer of K x K numbers, part of the state dict. With
    DistributedDataParallel it is that of the first rank, whose buffers the others receive in every step.

    Args:
        soft_weight: w, the weight of the soft labels.
        memory: how many correct examples of a class its average remembers; about those of one epoch is the paper's.

    >>> import torch
    >>> head = OnlineLabelSmoothing(in_features=8, num_classes=3)
    >>> head.soft_labels[0]
    tensor([0.3333, 0.3333, 0.3333])
    >>> sorted(head.loss(torch.randn(5, 8), torch.zeros(5, dtype=torch.long)).terms)
    ['cross_entropy', 'soft_labels']
    """

    name = "online-label-smoothing"
    separable = True

    soft_labels: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        soft_weight: float = 0.5,
        memory: int = 100,
        **shared: Unpack[SharedOptions],
    ) -> None:
        if isinstance(num_classes, int) and num_classes > MOST_CLASSES:
            raise InvalidValue(
                f"{self.name} keeps a soft label per class, {num_classes:,} x {num_classes:,} numbers: it takes at "
                f"most {MOST_CLASSES:,} classes, use label_smoothing of another head"
            )
        super().__init__(in_features, num_classes, **shared)
        check_probability("soft_weight", soft_weight, zero=True, one=True)
        check_count("memory", memory)
        self.soft_weight = soft_weight
        self.memory = memory
        even = _wide(self.classifier.weight.detach()).new_full((num_classes, num_classes), 1 / num_classes)
        self.register_buffer("soft_labels", even)

    def term_weights(self) -> dict[str, float]:
        """Return the weights of the hard and of the soft labels."""
        return {"cross_entropy": 1 - self.soft_weight, "soft_labels": self.soft_weight}

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        """Return the cross entropies of each row with the hard and with the soft labels."""
        log_p = _wide(logits["classifier"]).log_softmax(-1)
        soft = self.soft_labels.to(log_p.dtype)[target]
        hard = self.cross_entropy(logits["classifier"], target)
        return {"cross_entropy": hard, "soft_labels": -(soft * log_p).sum(-1)}

    def observe(self, logits: Mapping[str, Tensor], target: Tensor, counts: Tensor) -> None:
        """Move the averages of the classes towards the predictions that are correct."""
        p = _wide(logits["classifier"]).softmax(-1)
        correct = (counts & (p.argmax(-1) == target)).to(p.dtype)
        number = p.new_zeros(self.num_classes, 1).index_add(0, target, correct.unsqueeze(-1))
        total = p.new_zeros(self.num_classes, self.num_classes).index_add(0, target, p * correct.unsqueeze(-1))
        moved = self.soft_labels.to(p.dtype).lerp(total / number.clamp_min(1), 1 - (1 - 1 / self.memory) ** number)
        self.soft_labels.copy_(moved)
