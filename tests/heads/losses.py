"""The loss of a head as a function of its parameters, which torch.func can differentiate and map."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dropmax import Head


class _LossOf(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, target: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.head.loss(features, target, noise=noise).total


def loss_at(head: Head, parameters: Mapping[str, Tensor], *arguments: Tensor) -> Tensor:
    """Return the loss of features, target and perhaps noise with these parameters in place of the head's own."""
    replaced = {f"head.{name}": value for name, value in parameters.items()}
    return torch.func.functional_call(_LossOf(head), replaced, arguments)
